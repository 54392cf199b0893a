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
