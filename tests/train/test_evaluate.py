"""The evaluation of drafters, over the fake model: one group per temperature, no n-grams, everything ready for JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdraft.cli.main import main
from sparkdraft.core import UserError
from sparkdraft.train.evaluate import evaluate, table
from tests.fakes import FakeBlock, fake_engine

PROMPTS = {"code": ["one", "two"], "prose": ["three"]}


def fake_llm(block: FakeBlock | None, **options: Any) -> Any:
    engine = fake_engine(block, num_blocks=400, max_step_tokens=64, **options)
    return SimpleNamespace(engine=engine, chat_ids=lambda messages: list(messages[0]["content"].encode()))


@pytest.mark.parametrize(
    ("flags", "words"),
    [("--per-class -1", "--per-class is -1; it must be 0 (all) or positive"), ("--output-len 0", "--output-len is 0")],
)
def test_what_cannot_be_measured_is_refused_first(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "eval", *flags.split()]) == 1
    assert capsys.readouterr().err.startswith(f"sparkdraft: {words}")


def test_a_report() -> None:
    llm, told = fake_llm(FakeBlock(0.7), ngram=True), []
    report = evaluate(llm, PROMPTS, 40, (0, 0.7), lambda done, total: told.append((done, total)))
    assert json.loads(json.dumps(report)) == report and report["depth"] == 7
    assert told == sorted(told) and told[-1] == (6, 6)
    assert llm.engine.drafting.ngram  # as it was
    greedy, sampled = report["groups"]
    assert (greedy["temperature"], sampled["temperature"]) == (0, 0.7)
    for group in report["groups"]:
        assert list(group["classes"]) == ["code", "prose"] and group["all"]["prompts"] == 3
        assert set(group["all"]["sources"]) == {"fake"}
    assert greedy["all"]["mean_acceptance_length"] > sampled["all"]["mean_acceptance_length"]  # of greedy drafts


def test_the_table() -> None:
    report = evaluate(fake_llm(FakeBlock(0.7)), PROMPTS, 40)
    text = table(report).splitlines()
    assert [line for line in text if line.startswith("temperature")] == ["temperature 0", "temperature 0.7"]
    row = report["groups"][0]["all"]
    assert f"{row['mean_acceptance_length']:.2f}" in next(line for line in text if line.startswith("all"))
    positions = next(line for line in text if line.startswith("by position")).split()[2:]
    assert len(positions) == 7 and positions[0] == f"{row['per_position'][0]:.3f}"


def test_without_a_drafter_there_is_nothing_to_evaluate() -> None:
    with pytest.raises(UserError, match="no drafter"):
        evaluate(fake_llm(None), PROMPTS)
