"""Prompt chunks beside decoding requests: small enough that a step keeps to its target, and the prompt gets through.

Machines are invented here: a step takes a given time per decode row and per prompt row. Nothing waits for a real clock.
"""

from __future__ import annotations

import pytest

from sparkdraft.core import SamplingParams
from sparkdraft.engine.pace import FRESH, LEAST_ROWS, PromptPace
from tests.fakes import FakeRunner, fake_engine


def steps_of(pace: PromptPace, prompt: int, decode: float, row: float, growth: float = 0.0) -> list[float]:
    """Seconds of each step that a prompt takes; rows get dearer by 'growth' seconds per row before them."""
    seconds, done = [], 0
    while done < prompt:
        rows = min(pace.most_rows(4), prompt - done)
        seconds.append(decode + rows * (row + growth * done))
        pace.learn(4, rows, seconds[-1])
        done += rows
    return seconds


@pytest.mark.parametrize(
    ("target", "max_step_tokens", "decode", "row"),
    [
        (0.2, 512, 0.024, 0.0022),  # two CPU cores and a small model: 8 streams
        (0.2, 512, 0.008, 0.0022),  # 1 stream
        (0.05, 8192, 0.006, 30e-6),  # a large GPU, 8 billion parameters
        (0.05, 8192, 0.030, 300e-6),  # a small GPU, the same model
    ],
)
def test_steps_keep_to_the_target_and_the_prompt_takes_little_longer_than_alone(
    target: float, max_step_tokens: int, decode: float, row: float
) -> None:
    prompt = 40 * max_step_tokens
    seconds = steps_of(PromptPace(target, max_step_tokens), prompt, decode, row)
    allowed = max(target, 5 * decode)
    assert max(seconds) <= 1.05 * allowed
    assert sum(seconds) <= 1.3 * prompt * row


@pytest.mark.parametrize(("belief", "decode"), [(0.01, 0.15), (0.01, 0.2), (0.5, 0.005)])
def test_what_was_measured_long_ago_or_in_another_batch_is_measured_again(belief: float, decode: float) -> None:
    """The cost of decoding changes over time, and every step has a prompt."""
    pace, prompt, row = PromptPace(0.2, 512), 20_000, 0.002
    for num_decoding in (1, 4):
        pace.learn(num_decoding, 0, belief)
    for _ in range(FRESH):
        pace.learn(4, 64, belief + 64 * row)
    seconds = steps_of(pace, prompt, decode, row)
    assert max(seconds) <= 1.1 * max(0.2, 5 * decode)
    assert sum(seconds) <= 1.3 * prompt * row


def test_a_batch_of_a_new_size_is_measured_before_a_prompt_joins_it() -> None:
    pace = PromptPace(0.2, 512)
    assert pace.most_rows(16) == 0
    pace.learn(16, 0, 0.03)
    assert pace.most_rows(16) >= LEAST_ROWS and pace.most_rows(2) == 0


def test_prompts_may_be_seen_before_decode_rows_alone() -> None:
    """As in a benchmark, which removes the pace from the scheduler but not from the engine."""
    pace = PromptPace(0.05, 8192)
    pace.learn(4, 8192, 0.3)
    pace.learn(4, 0, 0.01)
    assert pace.most_rows(4) >= LEAST_ROWS


def test_chunks_shrink_as_rows_get_dearer_with_the_context() -> None:
    seconds = steps_of(PromptPace(0.2, 512), 8000, 0.02, 0.002, growth=5e-7)
    assert max(seconds) <= 1.1 * 0.2


def test_a_late_step_does_not_stop_the_prompt() -> None:
    """A kernel that is compiled within a step makes it seconds long: later chunks come back to their size."""
    pace = PromptPace(0.05, 8192)
    pace.learn(1, 0, 0.005)
    pace.learn(1, pace.most_rows(1), 30.0)
    assert pace.most_rows(1) == LEAST_ROWS
    for _ in range(12):
        rows = pace.most_rows(1)
        pace.learn(1, rows, 0.005 + rows * 30e-6)
    assert pace.most_rows(1) > 1000


def test_a_long_prompt_shares_its_steps_with_all_who_decode_and_takes_whole_steps_alone() -> None:
    engine = fake_engine(num_blocks=256, max_seqs=4, max_step_tokens=128)
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    engine.add([9] * 300, SamplingParams(max_tokens=1), "alone")
    engine.step()
    assert runner.steps[-1] == [("alone", 128)]
    engine.abort("alone")
    for name in "abc":
        engine.add([ord(name)], SamplingParams(max_tokens=100, ignore_eos=True), name)
    engine.step()
    engine.step()  # what the three cost alone is known now
    engine.add([7] * 300, SamplingParams(max_tokens=1), "long")
    limit = engine.pace.most_rows(3)
    engine.step()
    assert limit < 125 and runner.steps[-1] == [("a", 1), ("b", 1), ("c", 1), ("long", limit)]
    while "long" in engine._by_id:
        engine.step()
        assert [(name, 1) for name in "abc"] == runner.steps[-1][:3], "nobody misses a step"
    long_rows = [rows for step in runner.steps for name, rows in step if name == "long"]
    assert sum(long_rows) == 300


def test_two_prompts_share_one_limit() -> None:
    engine = fake_engine(num_blocks=256, max_seqs=4, max_step_tokens=128)
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    engine.add([1], SamplingParams(max_tokens=200, ignore_eos=True), "a")
    engine.step()
    for name in ("first", "second"):
        engine.add([ord(name[0])] * 200, SamplingParams(max_tokens=1), name)
    while engine.scheduler.waiting or not engine.scheduler.only_decoding:
        limit = engine.pace.most_rows(len(engine.scheduler.decoding()))
        engine.step()
        assert sum(rows for name, rows in runner.steps[-1] if name != "a") <= limit


def test_one_late_step_does_not_make_the_next_steps_longer() -> None:
    """Decode rows are measured again every FRESH steps. With a single measurement, one late step would count for
    all."""
    pace = PromptPace(0.2, 512)
    for _ in range(4):
        pace.learn(8, 0, 0.018)
    for _ in range(FRESH):
        pace.learn(8, 48, 0.018 + 48 * 0.003)
    usual = pace._decode_seconds.copy()
    assert pace.most_rows(8) == 0, "out of date"
    pace.learn(8, 0, 0.060)
    assert pace.most_rows(8) == 0, "one measurement is not believed"
    pace.learn(8, 0, 0.018)
    assert pace._decode_seconds == usual and 0.018 + pace.most_rows(8) * 0.003 <= 0.2


@pytest.mark.parametrize(("row", "most"), [(0.0005, 512), (0.0019, 128), (0.004, 64), (0.02, LEAST_ROWS)])
def test_where_nobody_decodes_the_next_to_come_waits_little_longer_than_for_a_step_with_others(
    row: float, most: int
) -> None:
    free, limited = PromptPace(0.2, 512), PromptPace(0.2, 512, limits_alone=True)
    for pace in (free, limited):
        assert pace.most_rows(0) == 512, "nothing is known yet"
        pace.learn(0, 512, 512 * row)
    slow = PromptPace(0.2, 512, limits_alone=True)
    slow.learn(0, 16, 70.0)
    assert slow.most_rows(0) == LEAST_ROWS, "however long a row took"
    assert free.most_rows(0) == 512 and limited.most_rows(0) == most
    limited.learn(1, 0, 0.2)
    assert limited.most_rows(0) >= 2 * most or most == 512, "where reading the weights takes long, steps are longer"
    limited.learn(0, 16, 70.0)
    assert limited.most_rows(0) >= LEAST_ROWS
    assert limited.most_rows(4) == 0, "what decoding costs beside others is measured as before"
