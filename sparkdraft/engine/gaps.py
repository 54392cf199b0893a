"""Picks drafts and says how sure each is: how far the score of the id that is taken stands above the others.

For greedy rows it is the logit of the largest probability: its logit less the logarithm of the sum of the others'
exponentials, of those that come within WIDEST of it. For rows that draw it is the gap between the two best scores,
which are logits over temperature with the target's dice. The ids are those of `sampler.pick`, and the gap is found in
the same logits, without another pass over the head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparkdraft.engine.sampler import Draws, allowed, ids_of
from sparkdraft.kernels.noise import gumbel
from sparkdraft.kernels.ops import WIDEST, Ops


class Sure(NamedTuple):
    ids: Tensor  # int64 [rows]
    gaps: Tensor  # float32 [rows]


def pick_sure(ops: Ops, logits: Tensor, draws: Draws | None, ids: Tensor | None = None) -> Sure:
    """As `sampler.pick`, with the gaps."""
    if ops.sampler:
        floats, integers = (None, None) if draws is None else (draws.floats, draws.integers)
        columns, gaps = ops.sampler.sample_sure(logits, floats, integers, ids, WIDEST)
        return Sure(ids_of(columns, ids), gaps)
    columns, gaps = ops.largest_gap(logits, WIDEST)
    if draws is not None:
        drawn, drawn_gaps = ops.best_gap(drawn_scores(logits, draws, ids), WIDEST)
        is_greedy = draws.floats.view(3, -1)[0] == 0
        columns, gaps = columns.where(is_greedy, drawn), gaps.where(is_greedy, drawn_gaps)
    return Sure(ids_of(columns, ids), gaps)


def drawn_scores(logits: Tensor, draws: Draws, ids: Tensor | None = None) -> Tensor:
    """Logits over temperature with the dice, of what the filters leave."""
    _, seeds, positions = draws.integers.view(3, -1).unsqueeze(2)
    columns = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
    return allowed(logits, draws) + gumbel(seeds, positions, columns)
