"""`bench check-speed`: what it says of invented measurements, and that real ones come out of real engines.

Speeds themselves mean nothing here: nothing asserts a measured ratio. What is asserted is how ratios are made, compared
and told, and that every line is measured by something."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sparkdraft.cli.main import main
from sparkdraft.core import SamplingParams, UserError
from sparkdraft.llm import LLM
from sparkdraft.models.common.config import uniform_config
from sparkdraft.operate.bench import long_prompt, random_model
from sparkdraft.operate.bench.check_speed import cpu, cuda
from sparkdraft.operate.bench.check_speed.check import (
    DEVICES,
    Group,
    Judged,
    Line,
    Names,
    Skipped,
    Verdict,
    check,
    conclusion,
    judge,
    read_lines,
    select,
    status,
)
from sparkdraft.operate.bench.check_speed.sides import whole_requests
from sparkdraft.operate.bench.long_prompt import Beside, Gaps, LongPrompt, summary
from sparkdraft.operate.bench.offline import Load, throughput
from sparkdraft.operate.bench.ratios import Metrics, Progress, Sample, against, in_turn, joined
from sparkdraft.operate.bench.traffic import Lengths
from sparkdraft.operate.forecast import rates
from tests.models.tiny import write_tiny

SPEED = Line("speed", "a speed", 1.0, 0.02, "invented")
LATENCY = Line("latency", "a time", 1.0, 0.1, "invented", lower_is_better=True)
QUIET, NOISY = [1.001, 0.999, 1.0], [1.2, 0.85, 1.1]
TOY = uniform_config("qwen3", 6, 32, 64, 2, 1, 16, 96, 1024, tie_embeddings=True, qk_norm=True)


def ignore(done: int, total: int) -> None: ...


@contextmanager
def no_bar(label: str) -> Iterator[Progress]:
    yield ignore


def sample(ratio: float, controls: list[float] = QUIET) -> Sample:
    return Sample([ratio] * 3, controls)


class Script:
    """A group whose measurements are given, one list of them for each line."""

    def __init__(self, **measurements: list[Sample]) -> None:
        self.left, self.asked = measurements, list[Names]()

    def __call__(self, wanted: Names, progress: Progress) -> dict[str, Sample]:
        self.asked.append(wanted)
        progress(1, 1)
        return {name: self.left[name].pop(0) for name in wanted}

    def judged(self) -> list[Judged]:
        lines = {"speed": SPEED, "latency": LATENCY}
        return list(check([Group(tuple(self.left), self)], lines, frozenset(self.left), no_bar))


# ---- verdicts


def test_a_line_that_fell_twice_is_named_and_the_status_says_so() -> None:
    script = Script(speed=[sample(0.9), sample(0.91)], latency=[sample(1.05)])
    judged = script.judged()
    assert [each.verdict for each in judged] == [Verdict.FELL, Verdict.HOLDS]
    assert script.asked == [{"speed", "latency"}, {"speed"}]  # what held is not measured again
    assert status(judged) == 1 and conclusion(judged) == "1 of 2 lines hold; FELL: speed"
    assert "0.910" in judged[0].row() and "FELL (first 0.900, FELL)" in judged[0].row()


def test_a_line_that_fell_once_and_then_held_holds() -> None:
    judged = Script(speed=[sample(0.9), sample(0.99)]).judged()
    assert judged[0].verdict is Verdict.HOLDS and judged[0].note == "first 0.900, FELL" and status(judged) == 0


def test_noise_that_covers_the_limit_is_neither_held_nor_fallen() -> None:
    judged = Script(speed=[sample(0.9, NOISY), sample(1.0, NOISY)]).judged()
    assert judged[0].verdict is Verdict.UNSURE and status(judged) == 2
    assert "cannot tell: speed" in conclusion(judged) and "too noisy" in conclusion(judged)


@pytest.mark.parametrize(("ratio", "verdict"), [(0.4, Verdict.FELL), (1.9, Verdict.HOLDS)])
def test_noise_does_not_hide_what_is_far_from_the_limit(ratio: float, verdict: Verdict) -> None:
    assert judge(SPEED, sample(ratio, NOISY)).verdict is verdict


@pytest.mark.parametrize(
    ("line", "ratio", "verdict"),
    [
        (SPEED, 0.981, Verdict.HOLDS),
        (SPEED, 0.979, Verdict.FELL),
        (SPEED, 1.5, Verdict.HOLDS),
        (LATENCY, 1.099, Verdict.HOLDS),
        (LATENCY, 1.101, Verdict.FELL),
        (LATENCY, 0.5, Verdict.HOLDS),
    ],
)
def test_the_limit_is_on_the_worse_side(line: Line, ratio: float, verdict: Verdict) -> None:
    assert judge(line, sample(ratio)).verdict is verdict


def test_a_line_that_is_both_fallen_and_beside_an_unsure_one_is_fallen() -> None:
    judged = Script(speed=[sample(0.5)] * 2, latency=[sample(1.1, NOISY)] * 2).judged()
    assert status(judged) == 1 and conclusion(judged).startswith("0 of 2 lines hold; FELL: speed; cannot tell: latency")


def test_what_can_not_be_measured_is_skipped_with_its_reason() -> None:
    def measure(wanted: Names, progress: Progress) -> dict[str, Sample]:
        raise Skipped("there is no such machine")

    judged = list(check([Group(("speed",), measure)], {"speed": SPEED}, frozenset({"speed"}), no_bar))
    assert judged[0].verdict is Verdict.SKIPPED and status(judged) == 2, "nothing was measured"
    assert "skipped (there is no such machine)" in judged[0].row() and "skipped: speed" in conclusion(judged)


# ---- ratios


def drifting(speed: float, clock: list[int], calls: list[str], name: str) -> Callable[[], Metrics]:
    """A side on a machine that becomes 5 % slower with each measurement."""

    def measure() -> Metrics:
        calls.append(name)
        clock[0] += 1
        return {"tok_s": speed * 0.95 ** clock[0]}

    return measure


def test_sides_are_measured_in_turn_and_a_steady_drift_cancels() -> None:
    clock, calls = [0], list[str]()
    sides = drifting(100.0, clock, calls, "a"), drifting(80.0, clock, calls, "b")
    found = in_turn(*sides, rounds=3, progress=ignore)["tok_s"]
    assert "".join(calls) == "abba" * 3
    assert found.ratios == pytest.approx([0.8] * 3) and found.controls == pytest.approx([0.95**3] * 3)
    assert found.ratio == pytest.approx(0.8) and found.noise > 0.1  # the drift is told as noise


def test_noise_falls_with_rounds_and_is_none_where_a_equals_a() -> None:
    assert sample(1.0, [1.0, 1.0]).noise == 0.0
    one, four = Sample([1.0], [1.1]), Sample([1.0] * 4, [1.1] * 4)
    assert four.noise == pytest.approx(one.noise / 2)
    both = joined([one, four])
    assert len(both.ratios) == len(both.controls) == 5


def test_measurements_against_a_given_value() -> None:
    found = against(0.2, [0.3, 0.36])
    assert found.ratio == pytest.approx(1.65) and found.controls == pytest.approx([1.2])
    assert against(0.2, [0.3]).noise == 0.0


# ---- the lines


@pytest.mark.parametrize("device", DEVICES)
def test_every_line_is_expected_and_measured_by_one_group(device: str) -> None:
    groups = cpu.GROUPS if device == "cpu" else cuda.groups(cuda.Setup())
    assert sorted(read_lines(device)) == sorted(name for group in groups for name in group.names)
    for name, line in read_lines(device).items():
        assert line.expected > 0 and line.tolerance > 0 and line.source and line.what, name


def test_lines_can_be_chosen_by_name() -> None:
    assert select(("speed", "latency"), "") == {"speed", "latency"} and select(("speed", "latency"), " speed,") == {
        "speed"
    }
    with pytest.raises(UserError, match="unknown line 'sped'; did you mean speed"):
        select(("speed", "latency"), "sped")


# ---- the command


@pytest.mark.parametrize(("ratio", "code"), [(1.0, 0), (0.55, 1)])
def test_the_command_prints_a_table_a_conclusion_and_json(
    ratio: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measurements = {"paused-drafter": [sample(ratio)] * 2}
    monkeypatch.setattr(cpu, "GROUPS", (Group(("paused-drafter",), Script(**measurements)),))
    assert main(["bench", "check-speed", "--only", "paused-drafter"]) == code
    out, err = capsys.readouterr()
    *table, said, last = out.splitlines()
    assert len(table) == 2 and table[1].startswith("paused-drafter") and f"{ratio:.3f}" in table[1]
    assert "measuring paused-drafter" in err and ("once more" in err) == (code == 1)
    assert ("FELL: paused-drafter" in said) == (code == 1)
    found = json.loads(last)
    assert found["status"] == code and found["lines"][0]["measured"] == ratio and found["lines"][0]["ratios"]


def test_the_list_says_what_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "check-speed", "--list", "--device", "cuda"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(read_lines("cuda"))


def test_mistakes_are_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for args, words in (
        (["check-speed", "--only", "drafted-cod"], "did you mean drafted-code"),
        (["check-speed", "--device", "cuda"], "no CUDA GPU"),
        (["long-prompt", "--streams", "0"], "--streams is 0; it must be at least 1"),
        (["long-prompt", "--streams", "4", "--max-seqs", "4"], "--max-seqs lets 4 requests run at once, the prompt"),
    ):
        assert main(["bench", *args]) == 1
        assert words in capsys.readouterr().err


# ---- real measurements, as small as they can be


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> cuda.Setup:
    monkeypatch.setitem(random_model.SHAPES, "toy", TOY)
    monkeypatch.setitem(rates.SIZE, "cpu", 1 << 20)
    monkeypatch.setattr(cuda, "ROUNDS", 1)
    sizes = {"prompt_len": 20, "output_len": 8, "drafted_len": 16, "context": 160, "context_streams": 2}
    return cuda.Setup("cpu", "float32", "toy", "dflash-3x", context_len=8, **sizes)


def test_the_lines_of_a_gpu_run_on_a_toy(toy: cuda.Setup) -> None:
    names = frozenset({"floor-1-stream", "paused-4-streams", "drafted-1-stream"})
    found = cuda.short_contexts(toy, names, ignore)
    assert found.keys() == names and all(each.ratio > 0 for each in found.values())
    names = frozenset({"floor-32000-tokens", "turboquant-32000-tokens", "turboquant-prompt"})
    assert cuda.long_contexts(toy, names, ignore).keys() == names


@pytest.mark.slow
def test_a_served_shape_is_measured_beside_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SERVED", {2: 4}), ("SERVED_PROMPT", Lengths(8, 16)), ("SERVED_OUTPUT", Lengths(4, 8))):
        monkeypatch.setattr(cuda, name, value)
    names = frozenset({"server-2-streams", "server-first-token-2-streams"})
    found = cuda.server(cuda.Setup("cpu", "float32", "tiny"), names, ignore)
    assert found.keys() == names and all(each.ratio > 0 for each in found.values())


def test_the_embedded_model_is_not_fetched_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkdraft.weights.hub.cached_path", lambda name: None)
    with pytest.raises(Skipped, match="smollm2 is not in"):
        cuda.embedded(frozenset(), ignore)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return cpu.load("auto")


def test_a_paused_drafter_is_measured_in_plain_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FRESH_ENGINES", 1), ("PAUSED_ROUNDS", 1), ("PLAIN_STEPS", 10), ("WARM_STEPS", 2)):
        monkeypatch.setattr(cpu, name, value)
    before = llm.engine.drafting.total.num_spec_steps
    found = cpu.paused_drafter(frozenset(), ignore, lambda spec: llm)
    assert len(found["paused-drafter"].ratios) == 1
    assert llm.engine.drafting.total.num_spec_steps == before  # nothing was drafted


def test_a_load_tells_tokens_and_first_tokens(llm: LLM) -> None:
    requests = [([1, 2, 3 + i], SamplingParams(4, ignore_eos=True)) for i in range(3)]
    result = throughput(llm.engine, requests, 2)
    assert result.requests == len(result.first) == 3 and result.tokens == 12
    assert all(0 < first < result.seconds for first in result.first)
    assert whole_requests(llm, 2, 4, SamplingParams(8)).keys() == {"tok_s", "first_s"}


def test_sampled_steps_are_compared_with_greedy_ones(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOAD_ROUNDS", 1), ("OUTPUT_LEN", 4), ("SAMPLING_STREAMS", 2)):
        monkeypatch.setattr(cpu, name, value)
    names = frozenset(cpu.SAMPLINGS)
    found = cpu.sampling(names, ignore, lambda spec: llm)
    assert found.keys() == names and all(each.ratio > 0 for each in found.values())


def test_the_embedded_model_at_several_streams_of_a_gpu(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rates.SIZE, "cpu", 1 << 20)
    for name, value in (("ROUNDS", 1), ("EMBEDDED_LEN", 4), ("EMBEDDED_TURNS", 1), ("EMBEDDED_STREAMS", (2,))):
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(cuda, "EMBEDDED_LOADS", {2: Load(2, 8, 4)})
    names = frozenset({"embedded-floor-2-streams", "embedded-auto-2-streams"})
    found = cuda.embedded_streams(names, ignore, lambda **options: llm)
    assert found.keys() == names and all(each.ratio > 0 for each in found.values())


def test_a_coded_cache_is_compared_with_an_exact_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CODED_ROUNDS", 1)
    monkeypatch.setattr(cpu, "CODED_LEN", 4)
    names = frozenset({"turboquant-20-tokens"})
    found = cpu.smallest_cache(names, ignore, lambda spec, kv: llm, [20, 30])
    assert found.keys() == names and found["turboquant-20-tokens"].ratio > 0


@pytest.mark.slow
def test_a_long_prompt_beside_streams(llm: LLM) -> None:
    free = llm.engine.pool.num_free
    test = LongPrompt(llm, streams=2, prompt_len=700)
    alone, beside = test.alone(), test.beside()
    chunks = -(-len(test.prompt) // llm.plan.max_step_tokens)
    assert len(beside.before.seconds) == 2 * 24 and len(beside.during.seconds) >= 2 * chunks
    assert not llm.engine.has_work and llm.engine.pool.num_free == free
    assert alone > 0 and beside.first >= beside.during.largest > 0


def test_as_many_streams_run_beside_a_prompt_as_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 24 prompts, and 26 streams; where they cannot run on beside the prompt, they are refused."""
    monkeypatch.setattr(long_prompt, "SETTLE", 2)
    monkeypatch.setattr(long_prompt, "BEFORE", 4)
    folder = write_tiny(tmp_path, "llama", shards="1GB", num_hidden_layers=1, max_position_embeddings=2048)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "spec": "off", "profile": "none"}
    llm = LLM(str(folder), max_seqs=27, prefix_cache=False, **options)
    test = LongPrompt(llm, streams=26, prompt_len=40)
    assert len(test.others) == 26 and len(test.beside().before.seconds) == 26 * 4
    with pytest.raises(UserError, match="27 streams and the prompt do not run at once; 27 requests do"):
        LongPrompt(llm, streams=27, prompt_len=40)
    longest = max(map(len, test.others))
    for room in ({"kv_tokens": 3 * longest}, {"max_model_len": longest + 4}):
        small = LLM(str(folder), max_seqs=5, prefix_cache=False, **options, **room)
        with pytest.raises(UserError, match="not all streams ran on until the prompt was read"):
            LongPrompt(small, streams=4, prompt_len=20).beside()


def test_the_figures_of_a_long_prompt() -> None:
    beside = [Beside(3.0, Gaps([0.02, 0.02]), Gaps([0.1, 0.3])), Beside(5.0, Gaps([0.04]), Gaps([0.2]))]
    found = summary([2.0, 2.0], beside, 0.2, 700)
    assert found["first_token_ratio"] == 2.0 and found["gaps_before"]["median_ms"] == pytest.approx(20)
    assert found["gaps_during"] == pytest.approx({"median_ms": 200, "largest_ms": 300, "count": 3})
    assert found["largest_gap_of_target"] == pytest.approx(1.5) and found["median_gap_of_target"] == pytest.approx(1.0)


def test_a_prompt_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "FRESH_LEN", 8)
    found = cpu._fresh("Count to ten.", "off")
    assert found["tok_s"] > 0 and found["start_ms"] > 0 and found["steps_ms"] == pytest.approx(1e6 / found["tok_s"])
    with pytest.raises(UserError, match=r"`sparkdraft generate` failed with status 1: .*spec is 'deep'"):
        cpu._generate("Count to ten.", "deep")


@pytest.mark.slow
def test_the_server_is_measured_beside_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SERVER_ROUNDS", 1), ("SERVER_REQUESTS", 4), ("SERVER_LEN", 8)):
        monkeypatch.setattr(cpu, name, value)
    found = cpu.server(frozenset({"server-4-streams"}), ignore)
    assert found.keys() == {"server-4-streams"} and found["server-4-streams"].ratio > 0
