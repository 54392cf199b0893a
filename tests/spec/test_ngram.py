"""A place where the text ended as it does now, found wherever a search through the whole text finds one, and fast."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdraft.spec.ngram import NgramIndex
from tests.fakes.counting import lines_run


def texts(alphabet: int, most: int = 64) -> st.SearchStrategy[list[int]]:
    """A few random pieces, again and again in any order: plainly random ids hardly ever repeat themselves."""
    pieces = st.lists(st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=6), min_size=1, max_size=4)
    order = st.lists(st.integers(0, 3), max_size=16)
    return st.builds(lambda p, o: [i for k in o for i in p[k % len(p)]][:most], pieces, order)


def search(ids: list[int]) -> tuple[int, int]:
    """(length of the longest suffix that ends before the end, where it last ended)."""
    best = (0, -1)
    for end in range(len(ids) - 1):
        length = 0
        while length <= end and ids[end - length] == ids[len(ids) - 1 - length]:
            length += 1
        best = max(best, (length, end))
    return best


def copy_on(ids: list[int], end: int, most: int) -> list[int]:
    """Copy one id at a time from behind 'end', the copied ones in their turn."""
    text = list(ids)
    for k in range(most):
        text.append(text[end + 1 + k])
    return text[len(ids) :]


def indexed(ids: list[int], min_match: int) -> NgramIndex:
    index = NgramIndex(min_match)
    index.extend(ids)
    return index


@given(st.one_of(texts(2), texts(3), texts(50)), st.integers(1, 5), st.integers(1, 20))
def test_agrees_with_a_search(ids: list[int], min_match: int, most: int) -> None:
    """It matches where a search does, and copies on from a place where the text ended the same way."""
    index = NgramIndex(min_match)
    for stop in range(1, len(ids) + 1):
        index.extend(ids[stop - 1 : stop])
        text = ids[:stop]
        ends = [e for e in range(min_match - 1, stop - 1) if text[e - min_match + 1 : e + 1] == text[-min_match:]]
        assert index.matches == bool(ends) == (search(text)[0] >= min_match)
        drafts = index.propose(most)
        assert drafts in [copy_on(text, end, most) for end in ends] if ends else drafts == []


@given(texts(3, most=200), st.integers(1, 5))
def test_a_long_match_is_not_left_for_a_short_one(ids: list[int], min_match: int) -> None:
    """While the text goes on as the place that is followed does, every draft of it was right."""
    index = NgramIndex(min_match)
    index.extend(ids)
    expected = index.propose(3)
    for token in expected:
        assert index.propose(1) == [token]
        index.extend([token])


@given(texts(3, most=200), st.lists(st.tuples(st.integers(0, 30), st.booleans())))
def test_any_chunking_gives_the_same(ids: list[int], chunks: list[tuple[int, bool]]) -> None:
    index, start = NgramIndex(2), 0
    for size, asks in chunks:
        index.extend(ids[start : start + size])
        start += size
        if asks:
            index.propose(3)
    index.extend(ids[start:])
    whole = indexed(ids, 2)
    assert len(index) == len(whole) == len(ids)
    assert (index.matches, index.propose(9)) == (whole.matches, whole.propose(9))


@pytest.mark.parametrize("period", [1, 2, 7, 30])
def test_a_loop_is_drafted_to_any_length(period: int) -> None:
    loop = list(range(period))
    index = indexed([99, 98, *loop * 40], 8)
    assert index.matches
    assert index.propose(100) == (loop * 100)[:100]


def test_the_most_recent_occurrence_is_copied() -> None:
    phrase = list(range(8))
    index = indexed([*phrase, 50, 51, *phrase, 60, 61, *phrase], 8)
    assert index.propose(2) == [60, 61]


def test_a_short_match_drafts_nothing() -> None:
    phrase = list(range(7))
    index = indexed([*phrase, 50, *phrase], 8)
    assert (index.matches, index.propose(4)) == (False, [])
    assert indexed([*phrase, 50, *phrase], 7).propose(4) == [50, *phrase[:3]]


def test_nothing_to_match() -> None:
    assert (len(NgramIndex()), NgramIndex().matches, NgramIndex().propose(4)) == (0, False, [])
    assert indexed([5], 1).propose(4) == []
    assert indexed(list(range(100)), 1).propose(4) == []
    assert indexed([1] * 20, 8).propose(0) == []


def english_like(count: int) -> list[int]:
    """Few frequent ids, many rare ones, and now and then a copy of an earlier passage."""
    rng, ids = random.Random(0), [0]
    while len(ids) < count:
        start = rng.randrange(len(ids))
        ids += ids[start : start + rng.randrange(5, 80)] if rng.random() < 0.2 else []
        ids += [min(int(rng.paretovariate(0.8)), 50_000) for _ in range(20)]
    return ids[:count]


@pytest.mark.parametrize("ids", [english_like(100_000), [3] * 100_000], ids=["text", "loop"])
def test_an_id_of_a_long_prompt_costs_a_few_lines_however_long_it_is(ids: list[int]) -> None:
    index, lines = NgramIndex(), []
    assert lines_run(lambda: NgramIndex().extend(ids)) < 20, "extend only records"
    for start in range(0, len(ids), 5_000):
        index.extend(ids[start : start + 5_000])
        lines.append(lines_run(lambda: index.propose(8)))
    assert max(lines) < 10 * 5_000
    assert max(lines[-5:]) < 1.1 * min(lines[1:6]), "the cost of an id grows with the text"
