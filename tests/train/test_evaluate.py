"""The evaluation of drafters, over the fake model: one group per temperature, no n-grams, everything ready for JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdraft.cli import train
from sparkdraft.cli.main import main
from tests.fakes import FakeBlock, fake_engine


def fake_llm(block: FakeBlock | None, **options: Any) -> Any:
    engine = fake_engine(block, num_blocks=400, max_step_tokens=64, **options)
    return SimpleNamespace(engine=engine, chat_ids=lambda messages: list(messages[0]["content"].encode()))


@pytest.mark.parametrize(
    ("flags", "words"),
    [("--per-class -1", "--per-class is -1; it must be at least 0"), ("--output-len 0", "--output-len is 0")],
)
def test_what_cannot_be_measured_is_refused_first(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "eval", *flags.split()]) == 1
    assert capsys.readouterr().err.startswith(f"sparkdraft: {words}")


def test_a_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train, "load_llm", lambda args, **options: fake_llm(FakeBlock(0.7), **options))
    assert main(["train", "eval", "--per-class", "1", "--output-len", "40"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert report["depth"] == 7 and report["output_len"] == 40
    greedy, sampled = report["groups"]
    assert (greedy["temperature"], sampled["temperature"]) == (0, 0.7)
    for group in report["groups"]:
        assert len(group["classes"]) == 7 == group["all"]["prompts"] and set(group["all"]["sources"]) == {"fake"}
    assert greedy["all"]["mean_acceptance_length"] > sampled["all"]["mean_acceptance_length"]  # of greedy drafts
    assert [line for line in lines if line.startswith("temperature")] == ["temperature 0", "temperature 0.7"]
    row = greedy["all"]
    assert f"{row['mean_acceptance_length']:.2f}" in next(line for line in lines if line.startswith("all"))
    positions = next(line for line in lines if line.startswith("by position")).split()[2:]
    assert len(positions) == 7 and positions[0] == f"{row['per_position'][0]:.3f}"


def test_without_a_drafter_there_is_nothing_to_evaluate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "load_llm", lambda args, **options: fake_llm(None))
    assert main(["train", "eval"]) == 1 and "no drafter" in capsys.readouterr().err
