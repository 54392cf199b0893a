"""Resources that a request holds beside its K/V blocks, behind one interface for the scheduler.

A cache may need more than blocks: pages of uncoded rows or of sliding windows (cache/pages.py), or the state of
recurrent layers (cache/states.py). Each such resource is scarce, belongs to a request or to a prefix, and limits
what can be scheduled. A `CacheGroup` does its bookkeeping; the scheduler tells it what happens to requests and asks it
what is possible. `CacheGroups` combines all of them. Integers only: the tensors belong to the KV format, and `send`
updates the device.

The life of a request, as a group sees it (its blocks, chain and num_computed are up to date in every call):

    usable -> adopt             it is admitted, with the part of a prefix hit that all groups can continue from
    cut -> can_grow -> grow     before every step: how many rows it runs, and the blocks that they need
    send                        before every step, once: what the device must know
    remember, advance           after every step: blocks that became full, rows that are committed
    shrink                      blocks that were reserved for drafts are given back
    drop                        it has ended, or is preempted and will be admitted again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from sparkdraft.cache.prefix import Hit
from sparkdraft.core import Request


class CacheGroup(Protocol):
    """One resource beside the blocks. A single request must always be able to run alone, or the engine would stop."""

    @property
    def num_free(self) -> int:
        """Units that can be handed out. A request that was refused waits until this or another number has grown."""

    def usable(self, hit: Hit) -> int:
        """The largest number of the hit's blocks after which a request could continue; 0 is always possible."""

    def adopt(self, request: Request, found: int) -> None:
        """Admit a request with a usable hit, which may be empty: hold what its next row reads of the hit.

        found: blocks of the hit before groups shortened it.
        """

    def cut(self, request: Request, rows: int, running: Iterable[Request]) -> int:
        """How many of the next 'rows' rows it may run in one step: at least 1, at most 'rows', which is at least 2.

        A group shortens a prompt chunk so that other requests keep what they need, or so that the chunk ends where a
        state is saved.
        """

    def admits(self, request: Request, rows: int, running: Iterable[Request]) -> bool:
        """Whether to begin with a request, which wants so many rows, while others run.

        Not if what the others need leaves it so little that it would run row by row and be preempted soon.
        """

    def can_grow(self, request: Request, num_blocks: int) -> bool:
        """Whether the request could get what goes with this many more blocks (at least 1)."""

    def grow(self, request: Request, num_blocks: int) -> None:
        """The request has this many new blocks, its last ones. Whatever belonged to these blocks before is no longer
        valid."""

    def shrink(self, request: Request, num_blocks: int) -> None:
        """The request is about to give its last blocks back; none of their rows counts as computed."""

    def remember(self, request: Request, index: int) -> None:
        """A block is full of computed rows and is in the prefix cache as chain[index]; requests may continue from its
        end.

        Rows after it may be computed already. What is kept for a prefix belongs to its key, which is never reused: if
        another request computed the same prefix at the same time, the key is the same but the block differs.
        """

    def advance(self, request: Request) -> None:
        """Rows were committed: release what no later row reads."""

    def drop(self, request: Request) -> None:
        """Release everything the request holds, if anything. What was remembered stays until it is handed out again."""

    def prefers(self, block: int, other: int) -> bool:
        """Whether the first of two blocks with the same rows is the better one for others to find."""

    def send(self) -> None:
        """Send changes to the device. Changes that were not sent because a call raised are sent by the next call."""


class CacheGroups:
    """All groups of an engine together: a thing is possible if every group allows it."""

    def __init__(self, parts: Sequence[CacheGroup] = ()) -> None:
        self.parts = tuple(parts)

    @property
    def num_free(self) -> tuple[int, ...]:
        return tuple(part.num_free for part in self.parts)

    def usable(self, hit: Hit) -> int:
        return self._agreed(len(hit.blocks), lambda part, count: part.usable(hit.first(count)))

    def cut(self, request: Request, rows: int, running: Iterable[Request]) -> int:
        if rows <= 1:  # the one row that every request gets, or none
            return rows
        return self._agreed(rows, lambda part, count: part.cut(request, count, running))

    def admits(self, request: Request, rows: int, running: Iterable[Request]) -> bool:
        return all(part.admits(request, rows, running) for part in self.parts)

    def can_grow(self, request: Request, num_blocks: int) -> bool:
        return all(part.can_grow(request, num_blocks) for part in self.parts)

    def prefers(self, block: int, other: int) -> bool:
        """Where groups disagree, the earlier block stays."""
        better = any(part.prefers(block, other) for part in self.parts)
        return better and not any(part.prefers(other, block) for part in self.parts)

    def adopt(self, request: Request, found: int) -> None:
        for part in self.parts:
            part.adopt(request, found)

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

    def _agreed(self, most: int, answer: Callable[[CacheGroup, int], int]) -> int:
        """The largest number up to 'most' that every group allows.

        A group answers a number with the largest one up to it that it allows itself. This never skips a number that
        all allow, but the answer of one may not be allowed by another, so all are asked again until none lowers it.
        """
        while (least := min((answer(part, most) for part in self.parts), default=most)) < most:
            most = least
        return most
