"""The counts agree with one another and with a plain replay of the steps, however they were put together."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdraft.speculation.stats import SpecStats

Step = tuple[int, int, str]  # drafted, accepted, source

step = st.integers(0, 9).flatmap(
    lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted), st.sampled_from(["dflash", "ngram"]))
)
steps = st.lists(step, max_size=40)


def recorded(done: list[Step]) -> SpecStats:
    stats = SpecStats()
    for drafted, accepted, source in done:
        stats.record(drafted, accepted, source)
    return stats


@given(steps)
def test_the_sums_that_readers_check(done: list[Step]) -> None:
    stats = recorded(done)
    histogram = stats.acceptance_histogram
    assert sum(histogram) == stats.num_spec_steps == sum(d > 0 for d, _, _ in done)
    assert sum(a * n for a, n in enumerate(histogram)) == stats.num_accepted_draft_tokens == sum(a for _, a, _ in done)
    assert sum(stats.per_position_drafted) == stats.num_draft_tokens == sum(d for d, _, _ in done)
    assert sum(stats.per_position_accepted) == stats.num_accepted_draft_tokens
    assert stats.num_plain_steps + stats.num_spec_steps == len(done)
    assert [sum(column) for column in zip(*stats.sources.values(), strict=True)] == (
        [stats.num_draft_tokens, stats.num_accepted_draft_tokens] if stats.sources else []
    )


@given(steps)
def test_positions_are_conditional_on_the_ones_before(done: list[Step]) -> None:
    stats = recorded(done)
    deepest = max((d for d, _, _ in done), default=0)
    assert len(stats.per_position()) == deepest
    for k in range(1, deepest + 1):
        reached = [a for d, a, _ in done if d >= k and a >= k - 1]
        expected = sum(a >= k for a in reached) / len(reached) if reached else None
        assert stats.per_position()[k - 1] == expected
        assert stats.per_position_drafted[k - 1] == sum(d >= k for d, _, _ in done)
        assert stats.per_position_accepted[k - 1] == sum(a >= k for _, a, _ in done)


@given(st.lists(steps, max_size=4))
def test_a_total_is_the_merge_of_its_parts(requests: list[list[Step]]) -> None:
    total, parts = SpecStats(), [recorded(done) for done in requests]
    before = [part.as_dict() for part in parts]
    for part in parts:
        total.merge(part)
    assert total == recorded([one for done in requests for one in done])
    assert [part.as_dict() for part in parts] == before
    total.record(3, 1, "ngram")
    assert [part.as_dict() for part in parts] == before  # nothing is shared


def test_an_example_by_hand() -> None:
    stats = recorded([(3, 3, "dflash"), (3, 0, "dflash"), (0, 0, "dflash"), (5, 1, "ngram")])
    stats.add_time(draft=0.25, verify=1.0)
    stats.add_time(draft=0.25, verify=0.5)
    assert stats.num_plain_steps == 1
    assert stats.per_position() == [2 / 3, 1 / 2, 1.0, None, None]  # the third step never got as far as its fourth
    assert json.loads(json.dumps(stats.as_dict())) == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 4 / 11,
        "acceptance_histogram": [1, 1, 0, 1, 0, 0],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 11,
        "num_spec_tokens": None,  # the depth varied
        "per_position_drafted": [3, 3, 3, 1, 1],
        "per_position_accepted": [2, 1, 1, 0, 0],
        "draft_ms": 500.0,
        "verify_ms": 1500.0,
        "sources": {"dflash": [6, 3], "ngram": [5, 1]},
    }


def test_vllms_own_example() -> None:
    """A response that vLLM gave (mostlygeek/llama-swap#1032), from its steps."""
    stats = recorded([(3, 0, "mtp")] * 39 + [(3, 1, "mtp")] + [(3, 3, "mtp")] * 3)
    sent = stats.as_dict()
    assert sent["mean_acceptance_length"] == pytest.approx(1.2325581395348837)
    assert sent["draft_acceptance_rate"] == pytest.approx(0.07751937984496124)
    assert sent["acceptance_histogram"] == [39, 1, 0, 3]
    assert (sent["num_spec_steps"], sent["num_draft_tokens"], sent["num_spec_tokens"]) == (43, 129, 3)


def test_without_drafts_there_is_no_rate() -> None:
    stats = recorded([(0, 0, "")])
    assert (stats.mean_acceptance_length, stats.draft_acceptance_rate, stats.num_spec_tokens) == (None, None, None)
    assert (stats.acceptance_histogram, stats.per_position(), stats.sources) == ([], [], {})


@pytest.mark.parametrize(("drafted", "accepted"), [(2, 3), (0, 1), (3, -1)])
def test_more_accepted_than_drafted_is_a_bug_that_is_caught(drafted: int, accepted: int) -> None:
    with pytest.raises(AssertionError, match=f"{accepted} accepted of {drafted} drafted"):
        SpecStats().record(drafted, accepted, "ngram")
