"""The prefix cache: finds the blocks that already hold the K/V of a prompt's beginning.

A full block is identified by (key of the block before it, its own ids). Keys are serial numbers that are never reused,
so a key stands for the whole prefix that ends with its block. The dictionary compares the ids themselves, so two
prefixes cannot be confused. Requests that compute one prefix at the same time each have blocks of it; all are known, so
that the prefix is found until the last of them is reused. The groups decide how much of a hit can be used
(cache/groups.py).
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


Ids = Callable[[int, int], Sequence[int]]  # those at positions [start, stop), as `Request.ids`


class PrefixCache:
    def __init__(self, pool: BlockPool, block_size: int, enabled: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        # -> (key, its blocks, the one to be found first)
        self._entries: dict[tuple[int, tuple[int, ...]], tuple[int, list[int]]] = {}
        self._name_of: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> its name in _entries
        self._next_key = ROOT + 1
        # The hit of the request that waits to be admitted, which follows every change, and the place of its blocks.
        self._waits: object = None
        self._hit = Hit([], [])
        self._place_of: dict[int, int] = {}
        # whether a block is better to find than another with the same rows
        self.prefers: Callable[[int, int], bool] = lambda block, other: False
        pool.on_reuse = self._forget

    def lookup(self, ids: Sequence[int]) -> Hit:
        """The longest remembered prefix of 'ids' in whole blocks. Changes nothing: the caller retains what it uses.

        The last id is never covered: its logits are needed.
        """
        hit = Hit([], [])
        self._extend(hit, lambda start, stop: ids[start:stop], len(ids))
        return hit

    def lookup_waiting(self, request: object, ids: Ids, num_ids: int) -> Hit:
        """The same for a request that asks in every step until it is admitted: each block is looked up once. The hit
        belongs to the cache and changes with it; another request's question ends it."""
        if self._waits is not request:
            self._waits = request
            self._drop_hit()
        known = len(self._hit.blocks)
        self._extend(self._hit, ids, num_ids)
        self._place_of.update((block, known + i) for i, block in enumerate(self._hit.blocks[known:]))
        return self._hit

    def insert(self, parent: int, ids: Sequence[int], block: int) -> int:
        """Remembers one full block of committed tokens; returns its key.

        If a block with the same prefix is known already, the new one gets the same key, and lookups find the first of
        the two, unless `prefers` chooses the new one.
        """
        name = (parent, tuple(ids))
        entry = self._entries.get(name)
        if entry is not None:
            key, blocks = entry
            first = blocks[0]
            is_better = self.prefers(block, first)
            blocks.insert(0 if is_better else len(blocks), block)
            self._name_of[block] = name
            if is_better:
                self._replace(first, block)
            return key
        key, self._next_key = self._next_key, self._next_key + 1
        if self.enabled:
            self._entries[name] = (key, [block])
            self._name_of[block] = name
        return key

    def clear(self) -> None:
        """Forgets every block."""
        self._entries.clear()
        self._name_of.clear()
        self._drop_hit()

    def _extend(self, hit: Hit, ids: Ids, num_ids: int) -> None:
        """Adds the remembered blocks that follow a hit."""
        if not self.enabled:
            return
        key, size = hit.keys[-1] if hit.keys else ROOT, self.block_size
        for start in range(len(hit.blocks) * size, (num_ids - 1) // size * size, size):
            entry = self._entries.get((key, tuple(ids(start, start + size))))
            if entry is None:
                return
            key = entry[0]
            hit.blocks.append(entry[1][0])
            hit.keys.append(key)

    def _forget(self, block: int) -> None:
        name = self._name_of.pop(block, None)
        if name is None:
            return
        blocks = self._entries[name][1]
        blocks.remove(block)
        if not blocks:
            del self._entries[name]
        self._replace(block, blocks[0] if blocks else None)

    def _replace(self, block: int, other: int | None) -> None:
        """Puts another block in a block's place in the hit that is kept; None: the hit ends before it."""
        place, hit = self._place_of.pop(block, None), self._hit
        if place is None or place >= len(hit.blocks) or hit.blocks[place] != block:
            return
        if other is None:
            del hit.blocks[place:], hit.keys[place:]
        else:
            hit.blocks[place] = other
            self._place_of[other] = place

    def _drop_hit(self) -> None:
        del self._hit.blocks[:], self._hit.keys[:]
        self._place_of.clear()
