"""The calls between the engine and a drafter that reads the target's hidden states.

A drafter keeps its own K/V in the same blocks as the target's: `observe` writes them for committed rows, in order, and
`propose` reads them. A row's K/V depend on the committed text up to the id after the row, so the prefix cache,
preemption and abort handle them without special cases. (One exception: the last row of a shared block may have been
observed with another next id than the one in the request that found the block. Its drafts may be worse, its text cannot
be.)

`propose` makes as many passes as the drafter wants. The engine picks every id, with the request's own parameters and
dice. The engine may record a pass, so a pass is a function that the drafter hands over (`Score`), not a call that it
makes. Drafters that read only the text (drafters/ngram.py) need none of this.

    committed ids         ... | p | p + 1 | anchor |
    committed rows        ... | p | p + 1 |                    hidden states are known; the anchor follows the last
    a draft of depth 3                    | anchor | d1 | d2 | d3 |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from sparkdraft.cache.formats import KVCache
from sparkdraft.drafters.caps import DrafterCaps
from sparkdraft.weights.linear import Linear

# One pass of a drafter. score(False) returns float32 logits [seqs * each, columns], the rows of a sequence together.
# score(True) returns int64 [seqs * each], the column of each row's largest logit, which a kernel may find without
# logits. A pass reads only memory whose address is fixed (the anchors', the drafter's own), and two passes with the
# same numbers of sequences and rows make the same launches: the engine records one and replays it for the other.
Score = Callable[[bool], Tensor]


class Pick(Protocol):
    def __call__(self, score: Score, each: int, drafted: int = 0, ids: Tensor | None = None) -> Tensor:
        """integers [seqs, each]: ids of the target that follow the first 'drafted' ids of each sequence's draft.

        each: rows of logits per sequence. ids: int64 [columns], the id of each column of the logits; None if a column's
        number is its id.
        """


@dataclass(frozen=True, slots=True)
class CommittedRows:
    hidden: Tensor  # [rows, len(caps.taps), hidden]
    positions: Tensor  # int32 [rows]
    slots: Tensor  # int32 [rows]: where each row's K/V go; negative: nowhere, the row is padding
    next_ids: Tensor | None = None  # int32 [rows]: the id that follows each row; for a chain drafter


@dataclass(frozen=True, slots=True)
class Anchors:
    """Where drafts begin: the last committed id of each sequence, whose own row has not run yet."""

    ids: Tensor  # int32 [seqs]
    length: Tensor  # int32 [seqs]: ids in the tables' blocks, including the anchor; 0: an empty sequence
    tables: Tensor  # int32 [seqs, max_blocks]
    block_size: int
    max_context: int  # upper bound on 'length' plus the drafts
    positions: Tensor | None = None  # int32 [seqs]: of the anchors, where tables leave out blocks; None: length - 1
    hidden: Tensor | None = None  # [seqs, len(caps.taps), hidden]: of the row before the anchor, for a chain drafter


class DraftBytes(NamedTuple):
    """The bytes that one step of a drafter reads, at least."""

    propose: int  # of weights
    observe: int
    kv_per_token: int  # of its K/V, per token of context


class Drafter(Protocol):
    caps: DrafterCaps

    def observe(self, rows: CommittedRows) -> None:
        """Write the drafter's K/V of committed rows. The host does not ask a drafter that keeps none."""

    def propose(self, anchors: Anchors, depth: int, pick: Pick) -> Tensor:
        """integers [seqs, depth]: the ids that it expects after each anchor. It may write K/V past the committed rows
        only; these are overwritten when rows are committed there."""

    def reach(self, depth: int) -> int:
        """Positions from the anchor on that `propose` writes K/V to; at most 1 + caps.max_depth."""

    def reads(self, depth: int) -> DraftBytes: ...

    @property
    def matrices(self) -> Sequence[Linear]:
        """All that it multiplies with."""


@runtime_checkable
class ReadsTarget(Protocol):
    """A drafter that reads the target's keys and values as well (DrafterCaps.borrowed)."""

    def read_from(self, kv: KVCache) -> None:
        """Called once, before the first draft. kv: the target's cache, which is built after the drafter."""
