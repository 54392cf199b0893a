"""The prefix cache: finds the blocks that already hold the K/V of a prompt's beginning.

A full block is identified by (key of the block before it, its own ids). Keys are serial numbers that are never reused,
so a key stands for the whole prefix that ends with its block. The dictionary compares the ids themselves, so two
prefixes cannot be confused. The groups decide how much of a hit can be used (cache/groups.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sparkdraft.cache.blocks import BlockPool

ROOT = 0  # the key before the first block


class Hit(NamedTuple):
    """A remembered prefix: its blocks, and for each block the key of the prefix that ends with it."""

    blocks: list[int]
    keys: list[int]

    def first(self, count: int) -> Hit:
        return Hit(self.blocks[:count], self.keys[:count])


class PrefixCache:
    def __init__(self, pool: BlockPool, block_size: int, enabled: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self._entries: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # -> (key, block)
        self._name_of: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> its name in _entries
        self._next_key = ROOT + 1
        # whether a block is better to find than another with the same rows
        self.prefers: Callable[[int, int], bool] = lambda block, other: False
        pool.on_reuse = self._forget

    def lookup(self, ids: Sequence[int]) -> Hit:
        """The longest remembered prefix of 'ids' in whole blocks. Changes nothing: the caller retains what it uses.

        The last id is never covered: its logits are needed.
        """
        hit = Hit([], [])
        if not self.enabled:
            return hit
        key, size = ROOT, self.block_size
        for start in range(0, (len(ids) - 1) // size * size, size):
            entry = self._entries.get((key, tuple(ids[start : start + size])))
            if entry is None:
                break
            key, block = entry
            hit.blocks.append(block)
            hit.keys.append(key)
        return hit

    def insert(self, parent: int, ids: Sequence[int], block: int) -> int:
        """Remembers one full block of committed tokens; returns its key.

        If a block with the same prefix is known already, the new one gets the same key, and lookups find the first of
        the two, unless `prefers` chooses the new one.
        """
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
        """Forgets every block."""
        self._entries.clear()
        self._name_of.clear()

    def _forget(self, block: int) -> None:
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._entries[name]
