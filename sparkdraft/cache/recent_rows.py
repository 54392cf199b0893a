"""The pages that each request holds: of its first positions, of the recent ones, and of those to be written.

Two caches keep such rows in pages (pages.py): a TurboQuant cache, which reads them uncoded, and layers with a sliding
window, which read no others. A block must have its page for as long as a later row may read it. As a request grows,
pages fall behind and are given back. A prefix is used only as far as the pages at its end still exist. This is a
`Holding` (cache/holdings.py). Integers only.

    blocks of a request    | first | ........ no page ........ | recent | to be written |
    pages held             | held  |                           |  held  |     held      |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sparkdraft.cache.pages import PagePool, usable_blocks
from sparkdraft.cache.prefix import Hit
from sparkdraft.core import Request

LEAST_CHUNK = 16  # blocks: a prompt begins with a chunk of at least so many, or of all its rows, while others run

Tell = Callable[[list[tuple[int, int]]], None]  # (block, its page or -1) of each block that got or lost a page


class RecentRows:
    def __init__(self, pages: PagePool, block_size: int, first: int, recent: int, most_ahead: int, tell: Tell) -> None:
        """most_ahead: rows past its computed ones for which a decoding request may need blocks. tell: updates the
        device."""
        self.pages, self.block_size, self.first, self.recent = pages, block_size, first, recent
        self.most_ahead, self.need = most_ahead, pages_of_a_request(block_size, first, recent, most_ahead)
        self._tell = tell
        self._held: dict[Request, dict[int, int]] = {}  # request -> index among its blocks -> block, in order

    @property
    def num_free(self) -> int:
        return self.pages.num_free

    def usable(self, hit: Hit) -> int:
        return usable_blocks(self.pages, hit.blocks, self.block_size, self.first, self.recent)

    def adopt(self, request: Request, found: int) -> None:
        held = {i: block for i, block in enumerate(request.blocks) if self._is_read(i, request.num_computed)}
        for block in held.values():
            self.pages.retain(block)
        self._held[request] = held

    def cut(self, request: Request, rows: int, running: Iterable[Request]) -> int:
        """A chunk takes no pages that other requests need to continue decoding."""
        blocks = len(request.blocks) + max(self._free_for(request, running), 0)
        return max(min(rows, blocks * self.block_size - request.num_computed), 1)

    def admits(self, request: Request, rows: int, running: Iterable[Request]) -> bool:
        """One that never fills a window begins when there are pages for all of it: it would soon be preempted."""
        most, free = self._most_pages(request), self._free_for(request, running)
        if most < self.need:
            return free >= most - len(self._held.get(request, ()))
        return free >= min(-(-rows // self.block_size), LEAST_CHUNK)

    def can_grow(self, request: Request, num_blocks: int) -> bool:
        return num_blocks <= self.num_free

    def grow(self, request: Request, num_blocks: int) -> None:
        held, end = self._held.setdefault(request, {}), len(request.blocks)
        for index in range(end - num_blocks, end):
            self.pages.cover(request.blocks[index])
            held[index] = request.blocks[index]

    def shrink(self, request: Request, num_blocks: int) -> None:
        held, end = self._held[request], len(request.blocks)
        for index in reversed(range(end - num_blocks, end)):
            self.pages.release(held.pop(index))

    def remember(self, request: Request, index: int) -> None:
        """Does nothing: a page belongs to its block, and is found with it."""

    def advance(self, request: Request) -> None:
        held = self._held[request]
        for index in [i for i in held if not self._is_read(i, request.num_computed)]:
            self.pages.release(held.pop(index))

    def drop(self, request: Request) -> None:
        for block in reversed(self._held.pop(request, {}).values()):
            self.pages.release(block)

    def prefers(self, block: int, other: int) -> bool:
        return self.pages.has(block) and not self.pages.has(other)

    def send(self) -> None:
        self._tell(self.pages.changes())
        self.pages.sent()

    def _free_for(self, request: Request, running: Iterable[Request]) -> int:
        """Pages that no other request needs to continue decoding."""
        owed = sum(max(self._most_pages(r) - len(self._held.get(r, ())), 0) for r in running if r is not request)
        return self.num_free - owed

    def _most_pages(self, request: Request) -> int:
        """That the request will hold while it decodes. One that ends before it fills a window never needs all."""
        rows = request.num_prompt + request.max_output + self.most_ahead
        return min(self.need, -(-rows // self.block_size))

    def _is_read(self, index: int, computed: int) -> bool:
        """Whether a row at position 'computed' or later reads the block's page."""
        return index * self.block_size < self.first or (index + 1) * self.block_size > computed - self.recent + 1


def pages_of_a_request(block_size: int, first: int, recent: int, most_ahead: int) -> int:
    """Pages of a decoding request at most: for its first rows, for the recent rows, which may start within a block, and
    for what it may write."""
    return -(-first // block_size) + -(-(recent + most_ahead) // block_size) + 1
