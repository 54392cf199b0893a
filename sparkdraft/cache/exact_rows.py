"""The exact pages that each request holds: of its first positions, the recent ones, and those it is about to write.

A row reads the first positions and the recent ones before it exactly (kernels/turboquant/store.py), so their blocks
must have pages (cache/exact.py) for as long as a row to come may read them. Pages fall behind as a request grows and
are given back then; a prefix is used only as far as the pages of its end are still there. Integers only.

    blocks of a request    | head | ....... codes alone ....... | recent | about to be written |
    pages held             | held |                             |  held  |        held         |
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from sparkdraft.cache.exact import ExactPages, usable_blocks


class ExactRows:
    def __init__(self, pages: ExactPages, block_size: int, first: int, recent: int, most_ahead: int) -> None:
        """most_ahead: rows past its computed ones that a decoding request may need blocks for."""
        self.pages, self.block_size, self.first, self.recent = pages, block_size, first, recent
        self.need = pages_of_a_request(block_size, first, recent, most_ahead)
        self._held: dict[Hashable, dict[int, int]] = {}  # owner -> index among its blocks -> block, in order

    def usable(self, hit: Sequence[int]) -> int:
        """Blocks of a prefix hit after which a request can go on."""
        return usable_blocks(self.pages, hit, self.block_size, self.first, self.recent)

    def adopt(self, owner: Hashable, blocks: Sequence[int]) -> None:
        """The owner starts with these blocks, a hit cut to what is usable."""
        computed = len(blocks) * self.block_size
        held = {i: block for i, block in enumerate(blocks) if self._is_read(i, computed)}
        for block in held.values():
            self.pages.retain(block)
        self._held[owner] = held

    def room(self, owner: Hashable, others: Iterable[Hashable]) -> int:
        """Further blocks that an owner may cover without taking what others need to go on."""
        owed = sum(max(self.need - len(self._held.get(other, ())), 0) for other in others if other is not owner)
        return max(self.pages.num_free - owed, 0)

    def cover(self, owner: Hashable, index: int, block: int) -> None:
        self.pages.cover(block)
        self._held.setdefault(owner, {})[index] = block

    def uncover(self, owner: Hashable, index: int) -> None:
        """The owner gives its last block back, before anything was written there."""
        held = self._held.get(owner, {})
        if index in held:
            self.pages.release(held.pop(index))

    def advance(self, owner: Hashable, computed: int) -> None:
        """So many positions are computed: no row to come reads those that fell behind."""
        held = self._held.get(owner, {})
        for index in [i for i in held if not self._is_read(i, computed)]:
            self.pages.release(held.pop(index))

    def drop(self, owner: Hashable) -> None:
        for block in reversed(self._held.pop(owner, {}).values()):
            self.pages.release(block)

    def _is_read(self, index: int, computed: int) -> bool:
        """Whether a row from position 'computed' on reads the block exactly."""
        return index * self.block_size < self.first or (index + 1) * self.block_size > computed - self.recent + 1


def pages_of_a_request(block_size: int, first: int, recent: int, most_ahead: int) -> int:
    """The most that a decoding request holds: its head, the recent rows cut across blocks, and what it may write."""
    return -(-first // block_size) + -(-(recent + most_ahead) // block_size) + 1
