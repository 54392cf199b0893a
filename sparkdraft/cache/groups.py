"""Resources that a request holds beside its K/V blocks, behind one interface for the scheduler.

A cache may need pages of uncoded tokens or of sliding windows (cache/pages.py), or the state of recurrent layers
(cache/states.py). Each such resource is scarce and belongs to a request or to a prefix. A `CacheGroup` does its
bookkeeping; `CacheGroups` combines all of them. Integers only: the tensors belong to the cache, and `send` updates the
device.

The life of a request, as a group sees it (its blocks, chain and num_computed are up to date in every call):

    usable -> adopt             it is admitted, with the part of a prefix hit that all groups can continue from
    cut -> can_grow -> grow     before every step: how many tokens it runs, and the blocks that they need
    send                        before every step, once: what the device must know
    remember, advance           after every step: blocks that became full, tokens that are committed
    shrink                      blocks that were reserved for drafts are given back
    drop                        it has ended, or is preempted and will be admitted again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from sparkdraft.cache.prefix import Hit
from sparkdraft.core import Request

if TYPE_CHECKING:
    from torch import Tensor


class CacheGroup:
    """One resource beside the blocks. A single request must always be able to run alone.

    A group that a question or an event does not concern keeps the answer or the method from here.
    """

    @property
    def num_free(self) -> int:
        """Units that can be handed out. A request that was refused waits until this or another number has grown."""
        raise NotImplementedError

    def usable(self, hit: Hit) -> int:
        """The largest number of the hit's blocks after which a request could continue; 0 is always possible."""
        raise NotImplementedError

    def adopt(self, request: Request, found: int) -> None:
        """Admits a request with a usable hit, which may be empty. found: blocks of the hit before groups shortened
        it."""

    def cut(self, request: Request, rows: int, running: Iterable[Request]) -> int:
        """Return how many of the next 'rows' tokens (at least 2) it may run in one step: at least 1.

        A group shortens a prompt chunk so that other requests keep what they need, or to end it where a state is saved.
        """
        raise NotImplementedError

    def admits(self, request: Request, rows: int, running: Iterable[Request]) -> bool:
        """Whether to begin with a request, which wants so many tokens, while others run: not if it would run token by
        token and be preempted soon."""
        return True

    def can_grow(self, request: Request, num_blocks: int) -> bool:
        """Return whether the request could get what goes with this many more blocks (at least 1)."""
        return True

    def grow(self, request: Request, num_blocks: int) -> None:
        """The request has this many new blocks, its last ones. What belonged to them before is no longer valid."""

    def shrink(self, request: Request, num_blocks: int) -> None:
        """The request is about to give its last blocks back; none of their tokens is computed."""

    def remember(self, request: Request, index: int) -> None:
        """A block is full and in the prefix cache as chain[index]; requests may continue from its end.

        What is kept for a prefix belongs to its key: if another request computed the same prefix at the same time, the
        key is the same but the block differs.
        """

    def advance(self, request: Request) -> None:
        """Tokens were committed: release what no later token reads."""

    def drop(self, request: Request) -> None:
        """Releases everything the request holds. What was remembered stays until it is handed out again."""

    def prefers(self, block: int, other: int) -> bool:
        """Return whether the first of two blocks with the same tokens is the better one to find."""
        return False

    def send(self) -> None:
        """Sends changes to the device; those that were not sent because a call raised go with the next call."""


def send_map(kept: Tensor, changes: Sequence[tuple[int, int]]) -> None:
    """Writes (place, value) of each change into a map on the device, before the next step."""
    import torch

    if changes:
        both = torch.tensor(changes, dtype=torch.int32, pin_memory=kept.is_cuda)
        places, values = both.to(kept.device, non_blocking=True).t()
        kept[places.long()] = values


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

        A group answers a number with the largest one up to it that it allows, which another may not allow; so all are
        asked again until none lowers it.
        """
        while (least := min((answer(part, most) for part in self.parts), default=most)) < most:
            most = least
        return most
