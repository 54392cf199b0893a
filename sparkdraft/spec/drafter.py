"""What the engine asks of a drafter that reads the target's hidden states, and what such a drafter says of itself.

A drafter keeps K/V of its own in the same blocks as the target's: `observe` writes them for committed rows, in order,
and `propose` reads them. They are a function of the committed text alone, so prefix cache, preemption and abort carry
them without knowing. Drafters that read only the text (spec/ngram.py) need none of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sparkdraft.kernels.view import AttentionView


@dataclass(frozen=True, slots=True)
class DrafterCaps:
    name: str  # as statistics call it: "dflash"
    taps: tuple[int, ...]  # target blocks whose residual it reads, in the order of its input
    block_size: int  # rows of its block, the anchor included: it drafts at most one less
    mask_id: int  # the id that stands for what is to be drafted


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """Rows of one draft: for each sequence an anchor and masks, 'width' rows from the anchor's position on.

    context_len of the view counts the block itself: its rows see the observed context and each other.
    """

    token_ids: Tensor  # int32 [seqs * width]: anchor, mask, mask, ...
    positions: Tensor  # int32 [seqs * width]
    slots: Tensor  # int32 [seqs * width], where the block's own K/V go; overwritten by the next observe
    view: AttentionView
    draft_rows: Tensor  # int32 [seqs * depth]: the rows whose ids are wanted, 1 .. depth of each block


class Drafter(Protocol):
    caps: DrafterCaps

    def observe(self, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write the K/V of committed rows. taps [rows, len(caps.taps), hidden], positions and slots int32 [rows]."""

    def propose(self, block: DraftBlock) -> Tensor:
        """Logits of the draft rows, [seqs * depth, draft vocabulary]. Changes only the block's own K/V."""

    def likeliest(self, block: DraftBlock) -> Tensor:
        """int64 [seqs * depth]: the argmax of what `propose` gives."""

    def to_target(self, ids: Tensor) -> Tensor:
        """Ids of the draft vocabulary as ids of the target's."""
