"""Blocks never leak, are never handed out twice, and a remembered prefix is the prefix it says it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdraft.cache.blocks import BlockPool
from sparkdraft.cache.prefix import ROOT, PrefixCache


@given(st.lists(st.tuples(st.sampled_from("arsx"), st.integers(0, 10)), max_size=80))
def test_any_interleaving_keeps_the_sum(actions: list[tuple[str, int]]) -> None:
    pool, held = BlockPool(8), []
    for action, pick in actions:
        if action == "a" and pool.num_free:
            block = pool.allocate()
            assert block not in held
            held.append(block)
        elif action == "r" and held:
            pool.release([held.pop(pick % len(held))])
        elif action == "s" and held:
            block = held[pick % len(held)]
            pool.retain(block)
            held.append(block)
        assert pool.num_free == 8 - len(set(held))
        assert all(pool.readers(b) == held.count(b) for b in range(8))


def test_releasing_twice_is_a_bug_that_is_caught() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block])


def remember(cache: PrefixCache, ids: list[int]) -> list[int]:
    parent, blocks = ROOT, []
    for start in range(0, len(ids) // cache.block_size * cache.block_size, cache.block_size):
        blocks.append(cache.pool.allocate())
        parent = cache.insert(parent, ids[start : start + cache.block_size], blocks[-1])
    return blocks


def test_lookup_finds_whole_blocks_and_leaves_the_last_id() -> None:
    cache = PrefixCache(BlockPool(8), block_size=4)
    blocks = remember(cache, list(range(12)))
    assert cache.lookup(list(range(12)))[0] == blocks[:2]  # the 12th id must run: its logits are wanted
    assert cache.lookup(list(range(13)))[0] == blocks
    assert cache.lookup([9, *range(1, 13)])[0] == []
    assert cache.lookup([*range(4), 9, 9, 9, 9, 9])[0] == blocks[:1]


def test_equal_blocks_after_different_beginnings_are_different() -> None:
    cache = PrefixCache(BlockPool(8), block_size=2)
    first = remember(cache, [1, 1, 7, 7])
    second = remember(cache, [2, 2, 7, 7])
    assert cache.lookup([1, 1, 7, 7, 0])[0] == first
    assert cache.lookup([2, 2, 7, 7, 0])[0] == second


def test_a_block_is_forgotten_when_it_is_handed_out_again() -> None:
    pool = BlockPool(3)
    cache = PrefixCache(pool, block_size=2)
    blocks = remember(cache, [1, 2, 3, 4])
    pool.release(reversed(blocks))
    assert cache.lookup([1, 2, 3, 4, 5])[0] == blocks  # free, and still known
    pool.allocate()  # the third block, never used
    assert pool.allocate() == blocks[1]  # the tail goes first
    assert cache.lookup([1, 2, 3, 4, 5])[0] == blocks[:1]


def test_a_twin_keeps_the_first_name() -> None:
    cache = PrefixCache(BlockPool(4), block_size=2)
    first = remember(cache, [1, 2])
    remember(cache, [1, 2])
    assert cache.lookup([1, 2, 3])[0] == first


def test_the_prefix_of_twins_is_known_until_the_last_of_them_is_handed_out_again() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, block_size=2)
    first, second = remember(cache, [1, 2, 3, 4]), remember(cache, [1, 2, 3, 4])
    pool.release(reversed(first))
    pool.allocate()
    assert cache.lookup([1, 2, 3, 4, 5])[0] == [first[0], second[1]]
    pool.allocate()
    assert cache.lookup([1, 2, 3, 4, 5])[0] == second
    pool.release(reversed(second))
    pool.allocate()
    assert cache.lookup([1, 2, 3, 4, 5])[0] == second[:1]


@given(st.lists(st.tuples(st.sampled_from("airwp"), st.integers(0, 7)), max_size=60))
def test_a_hit_that_is_kept_is_the_hit_that_would_be_found(actions: list[tuple[str, int]]) -> None:
    """Texts of a few ids, so that many are twins; blocks come and go while one request waits."""
    pool, held = BlockPool(6), []
    cache, waiting = PrefixCache(pool, block_size=1), Waiting([0, 1, 0, 0, 1])
    for action, pick in actions:
        if action in "ai" and pool.num_free >= 3:
            held.append(remember(cache, [pick >> i & 1 for i in range(3)]))
        elif action == "r" and held:
            pool.release(reversed(held.pop(pick % len(held))))
        elif action == "p":
            cache.prefers = lambda block, other, odd=pick % 2: block % 2 == odd  # type: ignore[misc]
        elif action == "w":
            assert cache.lookup_waiting(waiting, waiting.read, 5) == cache.lookup(waiting.ids)
    assert cache.lookup_waiting(waiting, waiting.read, 5) == cache.lookup(waiting.ids)


class Waiting:
    def __init__(self, ids: list[int]) -> None:
        self.ids, self.num_read = ids, 0

    def read(self, start: int, stop: int) -> list[int]:
        self.num_read += 1
        return self.ids[start:stop]


def test_a_request_that_waits_is_looked_up_once_however_often_it_asks() -> None:
    pool = BlockPool(1200)
    cache, waiting = PrefixCache(pool, block_size=4), Waiting([*range(4001)])
    blocks = remember(cache, waiting.ids)
    pool.release(reversed(blocks))
    for _ in range(50):
        assert cache.lookup_waiting(waiting, waiting.read, 4001).blocks == blocks
    assert waiting.num_read == 1000
    for step in range(1, 51):  # a stream beside it takes a block of the tail in each step
        while pool.allocate() != blocks[-step]:
            pass
        assert cache.lookup_waiting(waiting, waiting.read, 4001).blocks == blocks[:-step]
    assert waiting.num_read == 1050, "the block behind the hit is looked for again"
    cache.clear()
    assert cache.lookup_waiting(waiting, waiting.read, 4001) == ([], [])
