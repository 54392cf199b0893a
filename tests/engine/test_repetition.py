"""A text that repeats itself ends: by its definition, at the same token however it was written, and only if asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparkdraft.core import REPETITION, FinishReason, GrammarSpec, Repetition, Request, SamplingParams, UserError
from sparkdraft.engine.output import Output
from sparkdraft.text.repetition import interval, repeats
from tests.engine.test_constrained import drain, engine_of, ids_of
from tests.fakes import ByteTokenizer, FakeBlock

ENDED = SamplingParams(max_tokens=2000, repetition_limit=200)


def by_definition(ids: list[int], rule: Repetition) -> bool:
    for size in range(max(rule.min_pattern_size, 1), rule.max_pattern_size + 1):
        needed = max(rule.min_tokens, (rule.min_count - 1) * size)
        if len(ids) >= needed + size and all(ids[-i] == ids[-i - size] for i in range(1, needed + 1)):
            return True
    return False


RULES = st.builds(Repetition, st.integers(5, 20), st.integers(0, 5), st.integers(2, 5), st.sampled_from([0, 7, 30]))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=20),
    st.lists(st.integers(0, 2), min_size=1, max_size=22),
    st.integers(1, 9),
    RULES,
)
@example([], [0], 9, Repetition(5, 0, 4))
def test_it_is_found_by_its_definition(before: list[int], pattern: list[int], count: int, rule: Repetition) -> None:
    ids = before + pattern * count
    assert repeats(ids, rule) == by_definition(ids, rule)


def written(text: list[int], sizes: list[int], params: SamplingParams = ENDED) -> tuple[int, Request]:
    """How many ids of a text are committed, in steps of these sizes."""
    request = Request("r", 0, [1], params, 0, params.max_tokens)
    output, at, i = Output(request, ByteTokenizer()), 0, 0
    while at < len(text) and not request.finish:
        step = text[at : at + sizes[i % len(sizes)]]
        at, i = at + len(step), i + 1
        output.push(step)
    return len(request.output_ids), request


@pytest.mark.parametrize("pattern", [[5], [1, 2], [*range(40)], [*range(100)], [*range(250)], [7] * 30 + [8]])
def test_it_ends_at_the_same_token_whatever_a_step_commits(pattern: list[int]) -> None:
    text = [9, 9, 8] + pattern * 2000
    count, request = written(text, [1])
    needed = max(200, 3 * len(pattern))
    assert needed + len(pattern) <= count <= 3 + needed + len(pattern) + interval(Repetition(min_tokens=200))
    assert (request.finish, request.stop_reason) == (FinishReason.STOP, REPETITION)
    for sizes in ([2], [7], [16], [3, 1, 15], [64]):
        assert written(text, sizes)[0] == count
    assert written(text[:2000], [4], replace(ENDED, repetition_limit=0))[1].stop_reason is None


def test_texts_that_only_look_alike_go_on() -> None:
    rows = [i for row in range(120) for i in (*b"| 0 | 0 |", row, 10)]  # a table with numbered rows
    listed = [i for n in range(300) for i in (*str(n).encode(), 44)]
    thrice = [*range(100)] * 3 + [0, 0]
    zeros = [48, 44] * 99 + [93]  # a list of 99 zeros
    for text in (rows, listed, thrice, zeros):
        count, request = written(text, [3])
        assert count == len(text) and request.finish is None


@pytest.mark.parametrize("block", [None, FakeBlock(1.0), FakeBlock(0.5)], ids=["plain", "drafted", "half drafted"])
def test_the_engine_ends_it_drafted_or_not(block: FakeBlock | None) -> None:
    engine = engine_of(block, ngram=block is not None, max_model_len=1500)
    params = replace(ENDED, logit_bias={5: 100.0}, ignore_eos=True)
    engine.add([1, 2, 3], params, "ended")
    engine.add([1, 2, 3], replace(params, repetition_limit=0, max_tokens=400), "free")
    engine.add([1, 2, 3], replace(params, grammar=GrammarSpec("regex", "\x05*a")), "held")
    engine.add([1, 2, 3], replace(params, min_tokens=300), "later")
    pieces = drain(engine)
    last = {piece.request_id: piece for piece in pieces if piece.finish}
    counts = {name: len(ids_of(pieces, name)) for name in last}
    assert counts == {"ended": 208, "free": 400, "held": 208, "later": 304}
    reasons = {name: (piece.finish, piece.stop_reason) for name, piece in last.items()}
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert reasons == {
        "ended": (stop, REPETITION),
        "free": (length, None),
        "held": (length, REPETITION),  # the grammar wants another letter: the text is not complete
        "later": (stop, REPETITION),
    }
    assert not engine._outputs


def test_a_wrong_rule_is_refused_in_one_sentence() -> None:
    with pytest.raises(UserError, match="min_count is 1; it must be at least 2"):
        Repetition(4, 1, 1)
    with pytest.raises(UserError, match="max_pattern_size is 4; it must be at least min_pattern_size"):
        Repetition(4, 5, 3)
    with pytest.raises(UserError, match="repetition_limit is -1"):
        SamplingParams(repetition_limit=-1)
