"""Which blocks of a coded cache also have a page of exact keys and values, and who still reads it.

Coded positions are few bytes, so most blocks have codes alone; rows near a request's end, and its first, are read
exactly and need pages, of which there are few. A page belongs to a block, as K/V does, so what shares blocks shares
pages. One that nobody reads keeps its content until its turn to be handed out comes, oldest release first: a later
request may find it there. Integers only: the tensors are the format's, the map on the device is whoever's runs steps,
and which blocks a request must hold pages of is left to the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparkdraft.cache.blocks import BlockPool


class ExactPages:
    def __init__(self, num_pages: int) -> None:
        self._pool = BlockPool(num_pages)  # of pages: they are handed out and kept just as blocks are
        self._pool.on_reuse = self._take
        self._page_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self._changed: dict[int, None] = {}  # blocks, in the order of their change

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def has(self, block: int) -> bool:
        """Whether all that is written to the block is in a page too, read by somebody or not."""
        return block in self._page_of

    def cover(self, block: int) -> int:
        """A page for a block that was just handed out, with one reader. The caller has checked num_free.

        What the block had in an earlier life serves again; else it is the page released longest ago, and the block that
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
        """One more reader of a page that is there."""
        self._pool.retain(self._page_of[block])

    def release(self, block: int) -> None:
        """One reader less. Of a request that ends, last block to first: its tail is then lost before its head."""
        self._pool.release([self._page_of[block]])

    def changes(self) -> list[tuple[int, int]]:
        """(block, its page or -1) of each block that got or lost one since `sent` was last called."""
        return [(block, self._page_of.get(block, -1)) for block in self._changed]

    def sent(self) -> None:
        """The changes have reached the device; those of a step that failed before that stay to be sent."""
        self._changed.clear()

    def _take(self, page: int) -> None:
        block = self._block_of.pop(page, None)
        if block is not None:
            del self._page_of[block]
            self._changed[block] = None


def usable_blocks(pages: ExactPages, hit: Sequence[int], block_size: int, first: int, recent: int) -> int:
    """How many blocks of a prefix hit can be used, so that the row after them finds what it reads exactly.

    These are the blocks of the first positions, and of the recent ones before that row. Less of a hit costs time and
    changes no text.
    """
    head, tail = -(-first // block_size), -(-recent // block_size)
    usable = run = 0  # run: the blocks with pages, without a gap, that end here
    for count, block in enumerate(hit, 1):
        run = run + 1 if pages.has(block) else 0
        if count <= head and run < count:
            break
        if run >= min(tail, count):
            usable = count
    return usable
