"""Which blocks have a page, and how many requests read each page.

A page holds rows of a block that only later rows near them read: uncoded rows of a TurboQuant cache, or the keys and
values of layers with a sliding window. Few blocks need a page at a time, so there are few pages. A page belongs to a
block, as K/V do: requests that share blocks share pages. A page without readers keeps its content until it is handed
out again, oldest release first, so that a later request may find it. Integers only: the tensors and the map on the
device belong to the KV format, and recent_rows.py decides for which blocks a request must hold pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparkdraft.cache.blocks import BlockPool


class PagePool:
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
        """Whether all rows that were written to the block are in a page too, with or without readers."""
        return block in self._page_of

    def cover(self, block: int) -> int:
        """Give a page, with one reader, to a block that was just handed out. The caller has checked num_free.

        If the block still has a page from before, it keeps that one. Otherwise it gets the page released longest ago,
        and the block that loses it is among the changes.
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
        """Add a reader to a page that exists."""
        self._pool.retain(self._page_of[block])

    def release(self, block: int) -> None:
        """Remove one reader. A request that ends releases its last block first, so that its tail is lost before its
        head."""
        self._pool.release([self._page_of[block]])

    def changes(self) -> list[tuple[int, int]]:
        """(block, its page or -1) of each block that got or lost a page since `sent` was last called."""
        return [(block, self._page_of.get(block, -1)) for block in self._changed]

    def sent(self) -> None:
        """The changes have reached the device. Changes of a step that failed before this are sent with the next."""
        self._changed.clear()

    def _take(self, page: int) -> None:
        block = self._block_of.pop(page, None)
        if block is not None:
            del self._page_of[block]
            self._changed[block] = None


def usable_blocks(pages: PagePool, hit: Sequence[int], block_size: int, first: int, recent: int) -> int:
    """How many blocks of a prefix hit can be used so that the row after them finds the pages that it reads.

    These are the pages of the first positions, and of the recent ones before that row. Using less of a hit costs time
    and changes no text.
    """
    head, tail = -(-first // block_size), -(-recent // block_size)
    usable = run = 0  # run: the number of consecutive blocks with pages that end here
    for count, block in enumerate(hit, 1):
        run = run + 1 if pages.has(block) else 0
        if count <= head and run < count:
            break
        if run >= min(tail, count):
            usable = count
    return usable
