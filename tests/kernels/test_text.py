"""Drafts from a request's own text: the reference against brute force over texts that repeat themselves."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdraft.drafters.ngram import NgramIndex
from sparkdraft.kernels import reference
from sparkdraft.kernels.ops import MOST_MATCH
from tests.kernels.text_cases import TEXTS, best_match

KEPT = 77  # stands where nothing may be written


def rows_of(texts: list[list[int]], room: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([text + [KEPT] * (room - len(text)) for text in texts], dtype=torch.int32)
    return ids, torch.tensor([len(text) for text in texts], dtype=torch.int32)


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 20), st.integers(0, 3))
def test_the_longest_and_newest_match_is_drafted(
    texts: list[list[int]], min_match: int, depth: int, spare: int
) -> None:
    ids, length = rows_of(texts, max(map(len, texts)) + spare)
    drafts = torch.full((len(texts), depth), KEPT)
    matched = reference.match_text(ids, length, min_match, drafts)
    assert matched.dtype == torch.int32
    for seq, text in enumerate(texts):
        run, wanted = best_match(text, min_match, depth)
        assert int(matched[seq]) == run
        assert drafts[seq].tolist() == (wanted or [KEPT] * depth)


def drafts_of(text: list[int], min_match: int, depth: int) -> tuple[int, list[int]]:
    ids, length = rows_of([text], len(text))
    drafts = torch.zeros(1, depth, dtype=torch.int32)
    return int(reference.match_text(ids, length, min_match, drafts)), drafts[0].tolist()


def test_a_loop_is_drafted_to_any_length() -> None:
    assert drafts_of([1, 2, 3, 1, 2, 3, 1, 2], 2, 7) == (5, [3, 1, 2, 3, 1, 2, 3])
    assert drafts_of([5, 5], 1, 3) == (1, [5, 5, 5])
    run, drafts = drafts_of([4, 9] * 100, 8, 5)
    assert (run, drafts) == (MOST_MATCH, [4, 9, 4, 9, 4])


def test_a_text_longer_than_its_row_reads_nothing_else() -> None:
    ids, length = rows_of([[1, 2, 3, 1, 2]], 5)
    drafts = torch.zeros(1, 2, dtype=torch.int32)
    assert reference.match_text(ids, length + 3, 2, drafts).tolist() == [2] and drafts.tolist() == [[3, 1]]


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.integers(1, 8))
def test_it_matches_where_the_index_of_the_host_does(text: list[int], min_match: int) -> None:
    """The host follows the match that it has, so what both draft may differ in which of several matches it follows."""
    index = NgramIndex(min_match)
    index.extend(text)
    run, drafts = drafts_of(text, min_match, 4) if text else (0, [])
    assert index.matches == (run > 0)
    if run:
        assert len(index.propose(4)) == len(drafts)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_samples_are_appended_inside_the_room(data: st.DataObject) -> None:
    seqs, room, width = (data.draw(st.integers(1, most)) for most in (4, 12, 6))
    length = data.draw(st.lists(st.integers(0, room + 2), min_size=seqs, max_size=seqs))
    count = data.draw(st.lists(st.integers(0, width), min_size=seqs, max_size=seqs))
    samples = torch.arange(seqs * width).view(seqs, width) + 100
    ids = torch.full((seqs, room), KEPT, dtype=torch.int32)
    wanted = ids.tolist()
    for seq in range(seqs):
        for k in range(count[seq]):
            if length[seq] and length[seq] + k < room:
                wanted[seq][length[seq] + k] = int(samples[seq, k])
    reference.append_text(ids, torch.tensor(length).int(), samples, torch.tensor(count))
    assert ids.tolist() == wanted
