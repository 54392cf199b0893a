"""`bench weights` on tiny random weights: what is quantised is what is asked for, formats of more bits err less; table
and JSON agree. What the formats are worth docs/numbers has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft.cli.main import main
from sparkdraft.core import UserError
from sparkdraft.drafters.find import default_drafter
from sparkdraft.llm import LLM
from sparkdraft.operate.bench.formats import KINDS, FloatCheckpoint, format_bytes, parse_weight_formats
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.quant.stored import as_float
from tests.cli.said import said
from tests.models.tiny import TinyOf

QUICK = ("--device", "cpu", "--threads", "1", "--tokens", "40", "--max-model-len", "256")


@pytest.fixture(scope="module")
def tiny(tiny_of: TinyOf) -> Path:
    return tiny_of("qwen3", head_dim=64, num_hidden_layers=2)


def test_bytes_per_weight_of_each_format() -> None:
    assert format_bytes("floats", 512, 2) == 2
    assert format_bytes("fp8", 512, 2) == 1 + 4 / 512  # a float32 scale per row
    assert format_bytes("int4", 512, 2) == 0.5 + 2 / 32
    assert format_bytes("nvfp4", 512, 2) == 0.5 + 1 / 16 + 4 / 512


def test_floats_come_first_and_others_are_named() -> None:
    assert parse_weight_formats("int4, fp8,int4") == ["floats", "int4", "fp8"]
    with pytest.raises(UserError, match="--formats names 'q4'; a format is floats, fp8, int4, nvfp4"):
        parse_weight_formats("q4")


def test_a_quantised_file_becomes_floats_and_then_the_format(smollm2_path: Path) -> None:
    stored = open_checkpoint("smollm2")
    floats, name = FloatCheckpoint(stored), "model.layers.0.self_attn.o_proj.weight"
    assert not isinstance(stored.read(name), torch.Tensor)
    assert torch.equal(torch.as_tensor(floats.read(name)), as_float(stored.read(name)))
    assert floats.names() == stored.names()
    drafter = open_checkpoint(str(default_drafter("smollm2")))
    assert torch.as_tensor(FloatCheckpoint(drafter).read("d2t")).dtype == torch.int64, "ids are no weights"
    with pytest.raises(UserError, match="no matrix of floats"):  # what the wrapper is for
        LLM("smollm2", dtype="float32", weights="fp8", spec="off", max_seqs=1, max_step_tokens=16)


def test_the_command(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "weights", "--model", str(tiny), *QUICK]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    report: dict[str, Any] = json.loads(last)
    rows = {row["format"]: row for row in report["formats"]}
    assert list(rows) == ["floats", "fp8", "int4", "nvfp4"]
    assert report["read_in"] == "float32"
    for name, row in rows.items():
        assert sum(line.startswith(f"{name} ") for line in lines) == 2  # texts, sizes
        assert {text["tokens"] for text in row["texts"].values()} == {39} and set(row["texts"]) == set(KINDS)
    kl = {name: row["all"]["kl"] for name, row in rows.items()}
    assert kl["floats"] == 0 < kl["fp8"] < min(kl["int4"], kl["nvfp4"])
    assert rows["int4"]["bytes_per_weight"] == 0.5625


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--formats", "int5"], "--formats names 'int5'; a format is floats, fp8, int4, nvfp4"),
        (["--tokens", "3"], "--tokens is 3"),
        (["--tokens", "4000"], "--tokens is 4000; the context holds"),
        (["--spec", "auto"], "--spec is auto"),
    ],
)
def test_what_can_not_be_measured(args: list[str], words: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "weights", "--model", str(tiny), *QUICK, *args]) == 1
    printed = capsys.readouterr()
    assert words in printed.err and printed.out == "" and len(said(printed.err)) == 1, printed.err
