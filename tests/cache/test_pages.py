"""A page belongs to one block at a time, no page that is read is lost, and a hit is used exactly as far as its pages
reach."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdraft.cache.pages import PagePool, usable_blocks

NUM_PAGES, NUM_BLOCKS = 3, 5


class Model:
    """Pages as a plain list in the order of their release; everything else is searched for."""

    def __init__(self) -> None:
        self.free: list[tuple[int, int | None]] = [(page, None) for page in range(NUM_PAGES)]  # and whose it was
        self.held: dict[int, tuple[int, int]] = {}  # block -> its page, readers

    def cover(self, block: int) -> int:
        own = [entry for entry in self.free if entry[1] == block]
        page = (own or self.free)[0]
        self.free.remove(page)
        self.held[block] = (page[0], 1)
        return page[0]

    def retain(self, block: int) -> None:
        if block in self.held:
            page, readers = self.held[block]
            self.held[block] = (page, readers + 1)
        else:
            self.cover(block)

    def release(self, block: int) -> None:
        page, readers = self.held.pop(block)
        if readers > 1:
            self.held[block] = (page, readers - 1)
        else:
            self.free.append((page, block))

    def pages(self) -> dict[int, int]:
        """The pages of all blocks that have one."""
        kept = {block: page for page, block in self.free if block is not None}
        return kept | {block: page for block, (page, _) in self.held.items()}


def usable(has: set[int], hit: list[int], block_size: int, first: int, recent: int) -> int:
    """The definition, position by position."""
    for count in range(len(hit), 0, -1):
        end = count * block_size
        wanted = [*range(min(first, end)), *range(max(end - recent, 0), end)]
        if all(hit[p // block_size] in has for p in wanted):
            return count
    return 0


ACTIONS = st.sampled_from(["cover", "retain", "release", "hit", "changes"])


@given(st.lists(st.tuples(ACTIONS, st.integers(0, NUM_BLOCKS - 1)), min_size=20, max_size=80))
def test_any_interleaving_is_what_a_plain_list_does(actions: list[tuple[str, int]]) -> None:
    pages, model = PagePool(NUM_PAGES), Model()
    on_device: dict[int, int] = {}
    for action, pick in actions:
        held = sorted(model.held)
        block = held[pick % len(held)] if action == "release" and held else pick
        if action == "cover" and block not in model.held and model.free:
            assert pages.cover(block) == model.cover(block)
        elif action == "retain" and block in model.pages():
            pages.retain(block)
            model.retain(block)
        elif action == "release" and held:
            pages.release(block)
            model.release(block)
        elif action == "hit":  # a request comes that knows blocks 0 .. block, and holds the pages that it will read
            count = usable_blocks(pages, range(block + 1), 4, 1, 8)
            assert count == usable(set(model.pages()), list(range(block + 1)), 4, 1, 8)
            for used in {*range(min(count, 1)), *range(max(count - 2, 0), count)}:
                pages.retain(used)
                model.retain(used)
        elif action == "changes":
            changes = pages.changes()
            assert len(changes) == len(dict(changes))  # one entry a block, so that their order is nothing
            on_device.update(changes)
            pages.sent()
            assert {b: p for b, p in on_device.items() if p >= 0} == model.pages()
            assert pages.changes() == []
        there = model.pages()
        assert pages.num_free == len(model.free)
        assert {b for b in range(NUM_BLOCKS) if pages.has(b)} == set(there)
        assert len(there) == len(set(there.values()))


@given(st.lists(st.booleans(), max_size=14), st.sampled_from([1, 3, 4]), st.integers(0, 6), st.integers(0, 20))
def test_a_hit_is_used_as_far_as_the_definition_says(
    present: list[bool], block_size: int, first: int, recent: int
) -> None:
    hit = [7 * i % 15 for i in range(len(present))]
    has = {block for block, there in zip(hit, present, strict=True) if there}
    pages = PagePool(14)
    for block in has:
        pages.cover(block)
    assert usable_blocks(pages, hit, block_size, first, recent) == usable(has, hit, block_size, first, recent)


def test_a_hit_at_the_usual_borders() -> None:
    """The last 128 positions are 8 blocks of 16, and the first 4 are in block 0."""
    pages, hit = PagePool(12), list(range(20))
    for block in (0, *range(9, 20)):
        pages.cover(block)
    assert usable_blocks(pages, hit, 16, 4, 128) == 20
    assert usable_blocks(pages, hit[:17], 16, 4, 128) == 17  # blocks 9 .. 16
    assert usable_blocks(pages, hit[:16], 16, 4, 128) == 1  # block 8 is missing, and block 0 is all of its own context
    assert usable_blocks(pages, hit[1:], 16, 4, 128) == 0
    assert usable_blocks(pages, hit, 16, 0, 0) == 20


def test_mistakes_are_caught() -> None:
    pages = PagePool(2)
    pages.cover(3)
    with pytest.raises(AssertionError, match="block 3 has a page that is read"):
        pages.cover(3)
    pages.release(3)
    with pytest.raises(AssertionError, match="released twice"):
        pages.release(3)
    with pytest.raises(KeyError):
        pages.retain(4)
