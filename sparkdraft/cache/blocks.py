"""The paged cache's bookkeeping: which physical blocks are free, and how many sequences read each of the others.

A block without readers may still hold K/V worth finding again (cache/prefix.py). It stays findable until it is handed
out again, oldest release first. Integers only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._readers = [0] * num_blocks
        self._num_used = 0  # blocks from here on were never handed out: the first time they go in order
        self._held: list[int] = []
        # set by the prefix cache, which then forgets the block
        self.on_reuse: Callable[[int], None] = lambda block: None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def hold(self, keep: int) -> None:
        """Hands out no block that was never used, except for the first 'keep' blocks: on a CPU a block takes memory
        when it is first written."""
        self.give_back()
        self._held = list(range(max(self._num_used, keep), self.num_blocks))
        for block in self._held:
            del self._free[block]

    def give_back(self) -> None:
        """Ends what `hold` began."""
        for block in reversed(self._held):
            self._free[block] = None
            self._free.move_to_end(block, last=False)
        self._held = []

    def readers(self, block: int) -> int:
        return self._readers[block]

    def allocate(self) -> int:
        """Hands out the block that was released longest ago. The caller has checked num_free."""
        block, _ = self._free.popitem(last=False)
        self.on_reuse(block)
        self._readers[block] = 1
        self._num_used = max(self._num_used, block + 1)
        return block

    def retain(self, block: int) -> None:
        """Adds a reader to a block that is in use, or free and still remembered."""
        if self._readers[block] == 0:
            del self._free[block]
        self._readers[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Removes one reader from each block. Pass a sequence's blocks last to first, so that its tail is reused
        first."""
        for block in blocks:
            assert self._readers[block] > 0, f"block {block} released twice"
            self._readers[block] -= 1
            if self._readers[block] == 0:
                self._free[block] = None
