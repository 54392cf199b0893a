"""Pages: room for what is kept of a few blocks only, and which blocks have one.

A TurboQuant cache keeps uncoded positions in pages, and layers with a sliding window keep all that they read there. A
page belongs to a block: requests that share blocks share pages. A block must have its page for as long as a later token
may read it. As a request grows, pages fall behind and are given back; a page without readers keeps its content until it
is handed out again, oldest release first. Integers only.

    blocks of a request    | first | ........ no page ........ | recent | to be written |
    pages held             | held  |                           |  held  |     held      |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from sparkdraft.cache.blocks import BlockPool
from sparkdraft.cache.groups import CacheGroup
from sparkdraft.cache.prefix import Hit
from sparkdraft.core import Request

LEAST_CHUNK = 16  # blocks: a prompt begins with a chunk of at least so many, or of all its tokens, while others run

Tell = Callable[[list[tuple[int, int]]], None]  # (block, its page or -1) of each block that got or lost a page


class PagePool:
    """Which blocks have a page, and how many requests read each page."""

    def __init__(self, num_pages: int) -> None:
        self._pool = BlockPool(num_pages)  # pages are handed out and kept in the same way as blocks
        self._pool.on_reuse = self._take
        self._page_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self._changed: dict[int, None] = {}  # blocks, in the order in which they changed

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def has(self, block: int) -> bool:
        return block in self._page_of

    def cover(self, block: int) -> int:
        """Gives a page, with one reader, to a block that was just handed out. The caller has checked num_free.

        A block that still has a page keeps it. Otherwise it gets the page released longest ago, and the block that
        loses it is among the changes.
        """
        if block in self._page_of:
            page = self._page_of[block]
            assert self._pool.readers(page) == 0, f"block {block} has a page that is read: retain it"
            self._pool.retain(page)
            return page
        page = self._pool.allocate()
        self._page_of[block], self._block_of[page] = page, block
        self._changed[block] = None
        return page

    def retain(self, block: int) -> None:
        """Adds a reader to a page that exists."""
        self._pool.retain(self._page_of[block])

    def release(self, block: int) -> None:
        """Removes one reader. A request that ends releases its last block first, so that its tail is lost first."""
        self._pool.release([self._page_of[block]])

    def changes(self) -> list[tuple[int, int]]:
        """(block, its page or -1) of each block that got or lost a page since `sent` was last called."""
        return [(block, self._page_of.get(block, -1)) for block in self._changed]

    def sent(self) -> None:
        """The changes have reached the device. Those of a step that failed before this are sent with the next."""
        self._changed.clear()

    def _take(self, page: int) -> None:
        block = self._block_of.pop(page, None)
        if block is not None:
            del self._page_of[block]
            self._changed[block] = None


def usable_blocks(pages: PagePool, hit: Sequence[int], block_size: int, first: int, recent: int) -> int:
    """How many blocks of a prefix hit can be used so that the token after them finds the pages that it reads: those of
    the first positions, and of the recent ones."""
    head, tail = -(-first // block_size), -(-recent // block_size)
    usable = run = 0  # run: the number of consecutive blocks with pages that end here
    for count, block in enumerate(hit, 1):
        run = run + 1 if pages.has(block) else 0
        if count <= head and run < count:
            break
        if run >= min(tail, count):
            usable = count
    return usable


class RecentRows(CacheGroup):
    """The cache group of pages: each request holds those of its first positions, of the recent ones, and of those to be
    written. A prefix is used only as far as the pages at its end still exist."""

    def __init__(self, pages: PagePool, block_size: int, first: int, recent: int, most_ahead: int, tell: Tell) -> None:
        """most_ahead: tokens past its computed ones for which a decoding request may need blocks. tell: updates the
        device."""
        self.pages, self.block_size, self.first, self.recent = pages, block_size, first, recent
        self.most_ahead, self.need = most_ahead, pages_of_a_request(block_size, first, recent, most_ahead)
        self._head = -(-first // block_size)  # blocks of the first positions
        self._tell = tell
        self._held: dict[Request, dict[int, int]] = {}  # request -> index among its blocks -> block, in order

    @property
    def num_free(self) -> int:
        return self.pages.num_free

    def usable(self, hit: Hit) -> int:
        return usable_blocks(self.pages, hit.blocks, self.block_size, self.first, self.recent)

    def adopt(self, request: Request, found: int) -> None:
        count, recent = len(request.blocks), self._first_recent(request.num_computed)
        read = (*range(min(self._head, count)), *range(recent, count))
        held = {index: request.blocks[index] for index in read}
        for block in held.values():
            self.pages.retain(block)
        self._held[request] = held

    def cut(self, request: Request, rows: int, running: Iterable[Request]) -> int:
        """A chunk takes no pages that other requests need to continue decoding."""
        blocks = len(request.blocks) + max(self._free_for(request, running), 0)
        return max(min(rows, blocks * self.block_size - request.num_computed), 1)

    def admits(self, request: Request, rows: int, running: Iterable[Request]) -> bool:
        """A request that never fills a window begins only if there are pages for all of it."""
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

    def advance(self, request: Request) -> None:
        """Goes backwards from the first page that is still read, so only pages that are released cost time."""
        held, end = self._held[request], self._first_recent(request.num_computed)
        behind = takewhile(held.__contains__, range(end - 1, self._head - 1, -1))
        for index in reversed([*behind]):
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
        """Pages that the request will hold while it decodes: fewer if it ends before it fills a window."""
        rows = request.num_prompt + request.max_output + self.most_ahead
        return min(self.need, -(-rows // self.block_size))

    def _first_recent(self, computed: int) -> int:
        """The first block, behind those of the first positions, whose page a token at position 'computed' or later
        reads."""
        return max((computed - self.recent + 1) // self.block_size, self._head)


def pages_of_a_request(block_size: int, first: int, recent: int, most_ahead: int) -> int:
    """The most pages of a decoding request: for its first positions, for the recent ones, which may start within a
    block, and for what it may write."""
    return -(-first // block_size) + -(-(recent + most_ahead) // block_size) + 1
