"""A drafter's head over some of its target's ids: rows of the target's own head, so that no file need hold them.

Which ids these are, a drafter's file says (d2t), or the user (drafters/id_files.py). Other ids are never drafted; the
target writes them as always.
"""

from __future__ import annotations

from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.models.common.blocks import Decoder
from sparkdraft.weights.linear import Linear
from sparkdraft.weights.loader import Loader
from sparkdraft.weights.quant.stored import take_rows


def rows_of_head(load: Loader, target: Decoder, ids: Tensor, head: Linear | None = None) -> Linear:
    """ids: int64, ascending. head: the drafter's own, if it has a whole one."""
    rows = (head or target.head).rows(ids)
    if rows is None and head is None and target.config.tie_embeddings:
        rows = take_rows(target.embedding, ids)
    if rows is None:
        raise UserError(
            f"{load.source.path} shall draft among {len(ids)} ids, and rows of the model's head cannot be taken out of "
            "its format: leave draft_vocab out, or choose another drafter"
        )
    return load.head_of(rows)
