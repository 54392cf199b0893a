"""The prefix cache: finds the blocks that already hold the K/V of a prompt's beginning.

A full block is known by (key of the block before it, its own ids); keys are serial numbers that are never reused, so a
chain of keys stands for a whole prefix. The dictionary compares the ids themselves, not only their hash: two prefixes
can not be taken for one another. Blocks are remembered when their rows are committed and forgotten when the pool hands
them out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparkdraft.cache.blocks import BlockPool

ROOT = 0  # the key before the first block


class PrefixCache:
    def __init__(self, pool: BlockPool, block_size: int, enabled: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self._entries: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # -> (key, block)
        self._name_of: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> its name in _entries
        self._next_key = ROOT + 1
        self.prefers: Callable[[int, int], bool] = lambda block, other: False  # whether a twin is the better to find
        pool.on_reuse = self._forget

    def lookup(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Longest remembered prefix of 'ids' in whole blocks: (blocks, keys). Changes nothing: retain what is used.

        The last id is never covered: its row must run, since its logits are wanted.
        """
        blocks: list[int] = []
        keys: list[int] = []
        if not self.enabled:
            return blocks, keys
        key, size = ROOT, self.block_size
        for start in range(0, (len(ids) - 1) // size * size, size):
            entry = self._entries.get((key, tuple(ids[start : start + size])))
            if entry is None:
                break
            key, block = entry
            blocks.append(block)
            keys.append(key)
        return blocks, keys

    def insert(self, parent: int, ids: Sequence[int], block: int) -> int:
        """Remember one full block of committed rows; returns its key. A twin computed at the same time keeps the first
        block's name, and its own block stays private, unless it is preferred: then the first's does."""
        name = (parent, tuple(ids))
        entry = self._entries.get(name)
        if entry is not None:
            key, first = entry
            if self.prefers(block, first):
                del self._name_of[first]
                self._entries[name], self._name_of[block] = (key, block), name
            return key
        key, self._next_key = self._next_key, self._next_key + 1
        if self.enabled:
            self._entries[name] = (key, block)
            self._name_of[block] = name
        return key

    def clear(self) -> None:
        """Forget every block: no lookup finds anything that was inserted before."""
        self._entries.clear()
        self._name_of.clear()

    def _forget(self, block: int) -> None:
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._entries[name]
