"""The calls between the engine and a drafter that reads the target's hidden states.

A drafter keeps K/V of its own in the same blocks as the target's: `observe` writes them for committed rows, in order,
and `propose` reads them. A row's K/V depend on the committed text up to the id after the row, so prefix cache,
preemption and abort carry them without knowing. (Only the last row of a shared block may have seen another id follow
it than the one in a request that found the block: a draft may be worse for it, the text cannot be.)

`propose` makes as many passes as the drafter wants and has every id picked by the engine, which samples it with the
request's own parameters and dice. Around a pass the engine may put a recording, so a pass is a function that the
drafter hands over (`Score`) and not a call that it makes. Drafters that read only the text (spec/ngram.py) need none of
this.

    committed ids         ... | p | p + 1 | anchor |
    committed rows        ... | p | p + 1 |                    hidden states are known; the anchor follows the last
    a draft of depth 3                    | anchor | d1 | d2 | d3 |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from sparkdraft.spec.caps import DrafterCaps

# One pass of a drafter. score(False): float32 logits [seqs * each, columns], the rows of a sequence together.
# score(True): int64 [seqs * each], the column of each row's largest logit, for which a kernel may need no logits.
# It reads only memory that stays where it is between steps (the anchors', the drafter's own), and two passes with the
# same numbers of sequences and rows are the same launches: the engine records one and replays it for the other.
Score = Callable[[bool], Tensor]


class Pick(Protocol):
    def __call__(self, score: Score, each: int, drafted: int = 0, ids: Tensor | None = None) -> Tensor:
        """integers [seqs, each]: ids of the target that follow the first 'drafted' ones of each sequence's draft.

        each: rows of logits per sequence. ids: int64 [columns], what the columns of the logits stand for; None:
        themselves.
        """


@dataclass(frozen=True, slots=True)
class CommittedRows:
    hidden: Tensor  # [rows, len(caps.taps), hidden]
    positions: Tensor  # int32 [rows]
    slots: Tensor  # int32 [rows], where each row's K/V goes; negative: nowhere, the row is nobody's
    next_ids: Tensor | None = None  # int32 [rows]: the id that follows each row; for a chain drafter


@dataclass(frozen=True, slots=True)
class Anchors:
    """Where drafts begin: the last committed id of each sequence, whose own row has not run yet."""

    ids: Tensor  # int32 [seqs]
    length: Tensor  # int32 [seqs]: ids in the tables' blocks, the anchor included; 0: nobody is there
    tables: Tensor  # int32 [seqs, max_blocks]
    block_size: int
    max_context: int  # upper bound on 'length' and what is drafted
    positions: Tensor | None = None  # int32 [seqs], of the anchors, where tables leave blocks out; None: length - 1
    hidden: Tensor | None = None  # [seqs, len(caps.taps), hidden], of the row before; for a chain drafter


class DraftBytes(NamedTuple):
    """What one step of a drafter reads of memory, at least."""

    propose: int  # bytes of weights
    observe: int
    kv_per_token: int  # bytes of its K/V, for each token of context


class Drafter(Protocol):
    caps: DrafterCaps

    def observe(self, rows: CommittedRows) -> None:
        """Write the K/V of committed rows."""

    def propose(self, anchors: Anchors, depth: int, pick: Pick) -> Tensor:
        """integers [seqs, depth]: the ids that it expects after each anchor. Writes K/V past the committed rows only,
        which are overwritten when rows are committed there."""

    def reach(self, depth: int) -> int:
        """Positions from the anchor on that `propose` writes K/V to; 1 + caps.max_depth at most."""

    def reads(self, depth: int) -> DraftBytes: ...
