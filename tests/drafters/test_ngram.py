"""Finds a place where the text ended as it ends now, whenever a search through the text finds one, at little cost."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdraft.drafters import ngram
from sparkdraft.drafters.ngram import FOLLOWED_IDS, PROMPT_IDS, NgramIndex


def texts(alphabet: int, most: int = 64) -> st.SearchStrategy[list[int]]:
    """A few random pieces, repeated in any order: purely random ids hardly ever repeat."""
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


def match_ends(ids: list[int], size: int) -> list[int]:
    """After each id, where the match that is followed ended: the definition, one id after the other."""
    ends: dict[tuple[int, ...], int] = {}
    matches, end = [], -1
    for position, token in enumerate(ids):
        if position >= size - 1:
            run = tuple(ids[position - size + 1 : position + 1])
            end = end + 1 if end >= 0 and ids[end + 1] == token else ends.get(run, -1)
            ends[run] = position
        matches.append(end)
    return matches


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


@given(st.one_of(texts(2, 200), texts(3, 200), texts(50, 200)), st.integers(1, 8), st.booleans())
def test_it_follows_the_match_that_the_definition_follows(ids: list[int], min_match: int, collide: bool) -> None:
    """Asked once or after every id; also if all runs are in one bucket, and each is compared."""
    links = len(ids) if collide else ngram.MOST_LINKS
    with patch.multiple(ngram, FACTOR=0 if collide else ngram.FACTOR, MOST_LINKS=links):
        once, each, expected = indexed(ids, min_match), NgramIndex(min_match), match_ends(ids, min_match)
        for i, end in enumerate(expected):
            each.extend(ids[i : i + 1])
            assert each.propose(12) == (copy_on(ids[: i + 1], end, 12) if end >= 0 else [])
        assert once.propose(12) == each.propose(12)


@given(texts(3, most=200), st.integers(1, 5))
def test_a_long_match_is_not_left_for_a_short_one(ids: list[int], min_match: int) -> None:
    """While the text continues as after the match that is followed, every draft was right."""
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
    """Few frequent ids, many rare ones, and from time to time a copy of an earlier passage."""
    rng, ids = random.Random(0), [0]
    while len(ids) < count:
        start = rng.randrange(len(ids))
        ids += ids[start : start + rng.randrange(5, 80)] if rng.random() < 0.2 else []
        ids += [min(int(rng.paretovariate(0.8)), 50_000) for _ in range(20)]
    return ids[:count]


@pytest.mark.parametrize("ids", [english_like(50_000), [3] * 50_000], ids=["text", "loop"])
def test_a_long_prompt_is_indexed_in_bounded_pieces_and_little_memory(ids: list[int]) -> None:
    index = indexed(ids, 8)
    while len(index._waiting):
        before, drafts = len(index._waiting), index.propose(4)
        assert 0 < before - len(index._waiting) <= PROMPT_IDS + FOLLOWED_IDS
        assert not (drafts and len(index._waiting)), "it says nothing until it knows the whole prompt"
    assert index.nbytes <= 24 * len(ids)


@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_that_comes_at_once_matches_where_the_definition_does(seed: int) -> None:
    ids = english_like(10_000 + 1000 * seed)
    begin = random.Random(seed).randrange(len(ids) - 500)
    prompt = ids + ids[begin : begin + 300]  # it ends with a quotation of itself
    text = [*prompt, *ids[begin + 300 : begin + 330], 7, 7, 7, *ids[50:80]]
    index, expected = indexed(prompt, 8), match_ends(text, 8)
    while len(index._waiting):
        index.propose(20)
    for stop in range(len(prompt), len(text)):
        drafts = index.propose(20)
        assert index.matches == (expected[stop - 1] >= 0)
        ends = [
            e for e in range(7, stop - 1) if text[e] == text[stop - 1] and text[e - 7 : e] == text[stop - 8 : stop - 1]
        ]
        assert not drafts or drafts in [copy_on(text[:stop], e, 20) for e in ends]
        index.extend([text[stop]])


def test_a_table_that_grows_keeps_what_it_knows() -> None:
    """One id at a time past several sizes of the table: matches are the definition's."""
    ids = english_like(6_000)
    index, expected = NgramIndex(), match_ends(ids, 8)
    for i, token in enumerate(ids):
        index.extend([token])
        assert index.matches == (expected[i] >= 0), i
        assert index.propose(4) == (copy_on(ids[: i + 1], expected[i], 4) if expected[i] >= 0 else [])


@pytest.mark.parametrize("length", range(250, 271))
def test_a_prompt_of_any_length_near_the_border_matches_where_the_definition_does(length: int) -> None:
    """Ids before the first whole run must not be lost if a prompt is a little longer than the followed part."""
    ids = english_like(length)
    text = [*ids, *ids[20:60]]
    index, expected = indexed(text[:length], 8), match_ends(text, 8)
    for stop in range(length, len(text)):
        assert index.matches == (expected[stop - 1] >= 0), stop
        index.extend([text[stop]])
