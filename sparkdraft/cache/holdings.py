"""What a request holds beside its K/V blocks, as one interface that the scheduler knows nothing more of.

A cache may need more than blocks: pages of uncoded rows or of sliding windows (cache/recent_rows.py), later the state
of recurrent layers. Each such resource is scarce, belongs to a request or to a prefix, and limits what can be
scheduled. A `Holding` keeps its books; the scheduler tells it what happens to requests and asks it what is possible.
`Holdings` is all of them together. Integers only: the tensors are the format's, and `send` tells the device.

The life of a request, as a holding sees it (its blocks, chain and num_computed are up to date in every call):

    usable -> adopt             it is let in, with the part of a prefix hit that all holdings can go on from
    cut -> can_grow -> grow     before every step: how many rows it runs, and the blocks that they need
    send                        before every step, once: what the device must know
    remember, advance           after every step: blocks that became full, rows that are committed
    shrink                      blocks that were reserved for drafts are given back
    drop                        it has ended, or is preempted and will be let in anew
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from sparkdraft.cache.prefix import Hit
from sparkdraft.core import Request


class Holding(Protocol):
    """One resource beside the blocks. One request alone must always be able to run: else nothing ever could."""

    @property
    def num_free(self) -> int:
        """Units that could be handed out. A request that was refused waits until this, or another number, has grown."""

    def usable(self, hit: Hit) -> int:
        """The largest number of the hit's blocks after which a request could go on; 0 is always possible."""

    def adopt(self, request: Request) -> None:
        """The request is let in with a usable hit, perhaps an empty one: hold what its next row reads of that."""

    def cut(self, request: Request, rows: int, running: Iterable[Request]) -> int:
        """Of the next rows, those that it may run in one step: at least 1, at most 'rows', which is at least 2.

        A holding cuts a prompt chunk so that the others keep what they need, or so that it ends where a state is saved.
        """

    def can_grow(self, request: Request, num_blocks: int) -> bool:
        """Whether it could get what goes with this many more blocks, which is at least 1."""

    def grow(self, request: Request, num_blocks: int) -> None:
        """It has this many new blocks, the last ones; what belonged to them in an earlier life is not theirs now."""

    def shrink(self, request: Request, num_blocks: int) -> None:
        """It is about to give its last blocks back; no row of them counts as computed."""

    def remember(self, request: Request, index: int) -> None:
        """A block is full of computed rows and in the prefix cache as chain[index]; its end is a place to go on from.

        Rows after it may be computed already. What is kept for a prefix belongs to its key, which is never reused: if
        another request computed the same prefix at the same time, the key is the same and the block is another.
        """

    def advance(self, request: Request) -> None:
        """Rows were committed: what no later row reads can be let go."""

    def drop(self, request: Request) -> None:
        """Let all go that it holds, if it holds anything. What was remembered stays, until it is handed out."""

    def prefers(self, block: int, other: int) -> bool:
        """Whether of two blocks with the same rows the first is better to be found by others."""

    def send(self) -> None:
        """Tell the device what has changed. What could not be told because this raised is told by the next call."""


class Holdings:
    """All holdings of an engine: what is possible is what is possible for each."""

    def __init__(self, parts: Sequence[Holding] = ()) -> None:
        self.parts = tuple(parts)

    @property
    def num_free(self) -> tuple[int, ...]:
        return tuple(part.num_free for part in self.parts)

    def usable(self, hit: Hit) -> int:
        return self._agreed(len(hit.blocks), lambda part, count: part.usable(hit.first(count)))

    def cut(self, request: Request, rows: int, running: Iterable[Request]) -> int:
        if rows <= 1:  # the one row that it is sure of, or none
            return rows
        return self._agreed(rows, lambda part, count: part.cut(request, count, running))

    def can_grow(self, request: Request, num_blocks: int) -> bool:
        return all(part.can_grow(request, num_blocks) for part in self.parts)

    def prefers(self, block: int, other: int) -> bool:
        """Where holdings disagree, the block that was first stays."""
        better = any(part.prefers(block, other) for part in self.parts)
        return better and not any(part.prefers(other, block) for part in self.parts)

    def adopt(self, request: Request) -> None:
        for part in self.parts:
            part.adopt(request)

    def grow(self, request: Request, num_blocks: int) -> None:
        for part in self.parts:
            part.grow(request, num_blocks)

    def shrink(self, request: Request, num_blocks: int) -> None:
        for part in self.parts:
            part.shrink(request, num_blocks)

    def remember(self, request: Request, index: int) -> None:
        for part in self.parts:
            part.remember(request, index)

    def advance(self, request: Request) -> None:
        for part in self.parts:
            part.advance(request)

    def drop(self, request: Request) -> None:
        for part in self.parts:
            part.drop(request)

    def send(self) -> None:
        for part in self.parts:
            part.send()

    def _agreed(self, most: int, answer: Callable[[Holding, int], int]) -> int:
        """The largest number up to 'most' that is possible for each.

        A holding answers a number with the largest one up to it that is possible for itself. One that is possible for
        all is never skipped by that, but what one cuts to may not be possible for another: all are asked again until
        none cuts.
        """
        while (least := min((answer(part, most) for part in self.parts), default=most)) < most:
            most = least
        return most
