"""`bench accept` and `demo` as people type them: counts that agree with each other, one sentence where
there is nothing to measure. The embedded model runs; what speculation decides is tested in engine/ and spec/."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdraft.cli.demo import _compare
from sparkdraft.cli.main import main
from sparkdraft.core import SamplingParams
from sparkdraft.operate.bench.accept import Trace, measure, traced_step
from sparkdraft.speculation.stats import SpecStats
from sparkdraft.util.this_machine import OtherPrograms, usable_cores
from tests.cli.said import in_process, said
from tests.drafters.tiny_mtp import write_target
from tests.fakes import FakeBlock, fake_engine
from tests.models.tiny import write_tiny
from tests.patience import PATIENT

SUMS = ("prompts", "prompt_tokens", "tokens", "num_plain_steps", "num_spec_steps", "num_draft_tokens")
SUMS += ("num_spec_steps_no_loops",)
LISTS = ("acceptance_histogram", "per_position_accepted", "per_position_drafted", "per_position_reached")
QUICK = ("--per-class", "1", "--output-len", "24")


def sparkdraft(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sparkdraft.cli.main", *args]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=PATIENT, env=env)


@pytest.fixture(scope="module")
def measured(smollm2_path: Path) -> Iterator[tuple[Any, str]]:
    """The JSON, and all that was printed, of one run that uses every flag."""
    more = ("--temperature", "0,0.8", "--context", "40")
    result = sparkdraft("bench", "accept", *QUICK, *more)
    assert result.returncode == 0, result.stderr
    yield json.loads(result.stdout.splitlines()[-1]), result.stdout


@pytest.mark.slow
def test_counts_agree(measured: tuple[Any, str]) -> None:
    report = measured[0]
    assert [(g["temperature"], g["context"]) for g in report["groups"]] == [(0, 40), (0.8, 40)]
    for group in report["groups"]:
        for row in [*group["classes"].values(), group["all"]]:
            histogram, accepted = row["acceptance_histogram"], row["num_accepted_draft_tokens"]
            assert sum(histogram) == row["num_spec_steps"]
            assert sum(i * steps for i, steps in enumerate(histogram)) == accepted == sum(row["per_position_accepted"])
            assert row["tokens"] == row["prompts"] + row["num_plain_steps"] + row["num_spec_steps"] + accepted
            assert row["mean_acceptance_length"] == pytest.approx(1 + accepted / row["num_spec_steps"])
            assert row["per_position_reached"][0] == row["num_spec_steps"]
            assert row["num_spec_steps_no_loops"] <= row["num_spec_steps"]
            assert row["mean_acceptance_length_no_loops"] == row["mean_acceptance_length"]  # 24 ids are no loop
            assert len(row["per_position"]) == report["depth"] and set(row["sources"]) == {"dflash"}


@pytest.mark.slow
def test_all_is_the_sum_of_the_classes(measured: tuple[Any, str]) -> None:
    for group in measured[0]["groups"]:
        rows = list(group["classes"].values())
        assert len(rows) == 7 and all(row["prompt_tokens"] > 40 for row in rows)
        for name in SUMS:
            assert group["all"][name] == sum(row[name] for row in rows), name
        for name in LISTS:
            lists = zip_longest(*(row[name] for row in rows), fillvalue=0)
            assert group["all"][name] == [sum(each) for each in lists], name


@pytest.mark.slow
def test_the_table(measured: tuple[Any, str]) -> None:
    report, printed = measured
    for words in ("temperature 0, 40 tokens of added context", "temperature 0.8", "by position", "no loops"):
        assert words in printed
    for name in (*report["groups"][0]["classes"], "all"):
        assert sum(line.startswith(f"{name} ") for line in printed.splitlines()) == 2  # groups


@pytest.mark.parametrize("depth", [None, 4])
@pytest.mark.parametrize("num_blocks", [400, 24])  # with 24, requests are preempted and come back
def test_traces_add_up_to_what_the_engine_counted(depth: int | None, num_blocks: int) -> None:
    engine = fake_engine(FakeBlock(0.8), ngram=True, num_blocks=num_blocks, max_step_tokens=40, max_seqs=3)
    params = SamplingParams(40, num_draft=depth)
    traces = {engine.add([i, 7, 7], params): Trace() for i in range(6)}
    pieces = []
    while engine.has_work:
        pieces += traced_step(engine, traces)
    counted = SpecStats()
    for name, trace in traces.items():
        mine = [piece for piece in pieces if piece.request_id == name]
        assert trace.ids == [i for piece in mine for i in piece.ids]
        bursts = {anchor: accepted for anchor, _, _, accepted in trace.steps}
        starts = [sum(len(p.ids) for p in mine[:i]) for i in range(len(mine))]
        for start, piece in zip(starts, mine, strict=True):  # one that ends among its drafts has no sample after
            own = len(piece.ids) - bursts.get(start - 1, 0)
            assert own == 1 or (own == 0 and piece.finish)
        trace.count(counted, before=len(trace.ids))
    total = engine.drafting.total
    assert counted.steps == total.steps and counted.num_spec_steps > (20 if depth else 0)  # or as it pays
    assert counted.num_accepted_draft_tokens == total.num_accepted_draft_tokens


def test_steps_inside_a_loop_are_left_out() -> None:
    llm: Any = SimpleNamespace(engine=fake_engine(FakeBlock(0.5), num_blocks=400, max_step_tokens=64))
    always = SamplingParams(80, num_draft=3, logit_bias={65: 100})  # writes 65 for ever: a loop from the second id on
    row = measure(llm, always, [[1], [2], [3]], lambda more: None)
    assert row.tokens == 240 and row.stats.num_spec_steps > 100
    assert row.no_loops.num_spec_steps == 3  # of each response the step whose anchor is the first id
    free = measure(llm, SamplingParams(80, num_draft=3), [[1], [2], [3]], lambda more: None)
    assert free.no_loops.steps == free.stats.steps and free.stats.num_spec_steps > 50


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "has no drafter to measure"),
        (["--depth", "deep"], "--depth is 'deep'"),
        (["--context", "0,-1"], "--context is '0,-1'"),
        (["--temperature", "warm"], "--temperature is 'warm'"),
    ],
)
def test_refusals(args: list[str], words: str, tiny: Path) -> None:
    result = in_process("bench", "accept", "--model", str(tiny), *args)
    errors = result.stderr.decode()
    assert result.returncode == 1 and result.stdout == b""
    assert words in errors and len(said(errors)) == 1, errors


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--depth", "7"], "--depth is 7; this drafter drafts at most 6 per step"),
        (["--context", "0,4000"], "--context is 0,4000: a prompt of 4000 tokens and 128 of output do not fit into"),
        (["--context", "60", "--output-len", "8"], "--context is 60: a prompt of .* tokens and 8 of output do not fit"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_measured(
    args: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = write_target(tmp_path, "qwen3_next")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    flags = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "100", "--per-class", "1"]
    assert main(["bench", "accept", "--model", str(folder), *flags, *args]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert re.search(words, err) and "measuring" not in err


@pytest.mark.slow
def test_the_demo_writes_the_same_text_twice(smollm2_path: Path) -> None:
    result = sparkdraft("demo", "--max-tokens", "24")
    assert result.returncode == 0, result.stderr
    assert "The two texts are the same, all 24 tokens." in result.stdout
    assert result.stdout.count("tok/s") == 3 and "acceptance length" in result.stdout


def test_the_demo_refuses_and_helps() -> None:
    assert b"--spec is off" in in_process("demo", "--spec", "off").stderr
    assert b"prompt is empty" in in_process("demo", "--prompt", "").stderr
    assert b"examples:\n  sparkdraft demo" in in_process("demo", "--help").stdout


def test_the_demo_fails_where_the_texts_differ(capsys: pytest.CaptureFixture[str]) -> None:
    before = {"text": "", "reasoning": "a", "tok_s": 50.0, "num_output": 1, "speculative_decoding": None}
    assert _compare(before, before | {"tok_s": 100.0}, exact=True) == 0
    assert "2.00 times as fast" in capsys.readouterr().out
    for other in ({"text": "b"}, {"reasoning": "b"}):  # thoughts may take all tokens, and then the text is empty
        assert _compare(before, before | other, exact=True) == 1
        assert "the two texts differ" in capsys.readouterr().err


def test_the_demo_compares_no_speeds_on_a_busy_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path, "llama")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    command = ["demo", "--model", str(folder), "--device", "cpu", "--prompt", "Count.", "--max-tokens", "8"]
    said = "The machine is busy: other programs took 100 % of the "
    for taken, is_busy in ((0.0, False), (usable_cores(), True)):
        monkeypatch.setattr(OtherPrograms, "taken", taken)
        assert main(command) == 0
        out = capsys.readouterr().out
        assert (said in out, "times as fast" in out) == (is_busy, not is_busy) and out.count(" tok/s") == 3


def test_the_demo_explains_where_float32_may_differ(capsys: pytest.CaptureFixture[str]) -> None:
    before = {"tok_s": 50.0, "text": "a", "reasoning": None, "num_output": 3, "speculative_decoding": None}
    assert _compare(before, before | {"text": "b"}, exact=False) == 0
    assert "last bit depends on the others" in capsys.readouterr().out
