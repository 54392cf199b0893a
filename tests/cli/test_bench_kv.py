"""`bench kv` on tiny random weights: divergences that can be worked out by hand, more bits that err less, tables and
JSON that agree, and one sentence where there is nothing to measure. What the formats are worth docs/numbers has."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft.cli import bench_formats
from sparkdraft.cli.main import main
from sparkdraft.core import UserError
from sparkdraft.engine import machine
from sparkdraft.llm import LLM
from sparkdraft.models.common.config import uniform_config
from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.models.registry import read_config
from sparkdraft.operate.bench.formats import (
    KINDS,
    Comparison,
    Format,
    Reading,
    divergence,
    parse_kv_formats,
    prompt_rows_shown,
    read_texts,
    rise_of_all,
)
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.memory import rope_bytes
from sparkdraft.text.tokenizer import Tokenizer
from sparkdraft.weights.checkpoint import open_checkpoint
from tests.cli.said import said
from tests.models.tiny import TinyOf

TOY = uniform_config("qwen3", 2, 32, 64, 2, 1, 32, 96, 1024, tie_embeddings=True, qk_norm=True)
QUICK = ("--device", "cpu", "--dtype", "float32", "--threads", "1")


@pytest.fixture(scope="module")
def tiny(tiny_of: TinyOf) -> Path:
    return tiny_of("qwen3", head_dim=64, num_hidden_layers=2)


def load(tiny: Path, fmt: Format) -> LLM:
    small: dict[str, Any] = {"max_seqs": 1, "max_step_tokens": 120, "max_model_len": 256, "threads": 1}
    return LLM(str(tiny), device="cpu", dtype="float32", spec="off", prefix_cache=False, **small, **fmt.options)


@pytest.fixture(scope="module")
def readings(tiny: Path) -> Iterator[dict[str, dict[str, Reading]]]:
    """By format; 'again' is the exact cache a second time."""
    formats = parse_kv_formats("exact,fp8,k2v2,k5v5,k2v2-full,k2v2-full-uncentred")
    comparison = Comparison(read_texts(Tokenizer.of(open_checkpoint(str(tiny))), 200))
    told: list[tuple[int, int]] = []
    found = {}
    for fmt in formats:
        found[fmt.name] = comparison.read(load(tiny, fmt), lambda *progress: told.append(progress))
        assert told[-1] == (3 * 199, 3 * 199)
    found["again"] = comparison.read(load(tiny, formats[0]), lambda done, total: None)
    yield found


# ---- nearness


def test_a_divergence_worked_out_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]]), torch.tensor([[0.25, 0.25, 0.5], [0.9, 0.05, 0.05]])
    found = divergence(p.log() + 3, q.log() - 1)  # logits are probabilities up to a constant
    assert found.tolist() == pytest.approx([0.5 * math.log(2) - 0.25 * math.log(2), 0.0], abs=1e-6)
    assert divergence(p, p).abs().max() == 0


def test_rises_are_averaged_as_ratios() -> None:
    one, half, double = (Reading(torch.full((4,), math.log(x)).double(), torch.zeros(4)) for x in (0.1, 0.05, 0.2))
    assert one.perplexity == pytest.approx(10) and half.rise(one) == pytest.approx(1) and one.rise(one) == 0
    assert rise_of_all({"a": half, "b": double}, {"a": one, "b": one}) == pytest.approx(0)
    assert rise_of_all({"a": half, "b": one}, {"a": one, "b": one}) == pytest.approx(math.sqrt(2) - 1)


def test_the_exact_cache_is_itself(readings: dict[str, dict[str, Reading]]) -> None:
    for kind in KINDS:
        first, again = readings["exact"][kind], readings["again"][kind]
        assert first.kl.abs().max() == 0 and again.kl.abs().max() < 1e-6
        assert again.perplexity == pytest.approx(first.perplexity, rel=1e-5) and len(first.kl) == 199


def test_fewer_bits_err_more(readings: dict[str, dict[str, Reading]]) -> None:
    for kind in KINDS:
        kl = {name: texts[kind].mean_kl for name, texts in readings.items()}
        assert 0 < kl["fp8"] < kl["k2v2"] < kl["k2v2-full"] and 0 < kl["k5v5"] < kl["k2v2"]
        assert kl["k2v2-full"] != kl["k2v2-full-uncentred"]


def test_what_lies_near_is_exact_in_a_hybrid(readings: dict[str, dict[str, Reading]]) -> None:
    for kind in KINDS:
        near, far = readings["k2v2"][kind].kl[:128], readings["k2v2"][kind].kl[140:]
        assert near.abs().max() < 1e-5 < far.mean() and readings["k2v2-full"][kind].kl[:128].mean() > 1e-5


def test_looking_at_prompt_rows_leaves_the_engine_as_it_was(tiny: Path) -> None:
    engine = load(tiny, parse_kv_formats("exact")[0]).engine
    with prompt_rows_shown(engine, lambda residual, logits: None):
        assert "prompt_logprobs" in vars(engine.runner)
    assert "prompt_logprobs" not in vars(engine.runner) and "logits" not in vars(engine.runner.model)


def test_the_texts_are_long_enough_and_repeat_nothing(smollm2_path: Path) -> None:
    for kind, ids in read_texts(Tokenizer.of(open_checkpoint("smollm2")), 1 << 20).items():
        assert len(ids) >= 2200, kind
        stretches = [tuple(ids[i : i + 20]) for i in range(len(ids) - 20)]
        assert len(set(stretches)) == len(stretches), kind


# ---- formats and memory


def test_the_notation() -> None:
    names = [fmt.name for fmt in parse_kv_formats("k4v3, fp8,k4v3,k5v2-full-uncentred")]
    assert names == ["exact", "k4v3", "fp8", "k5v2-full-uncentred"]
    last = parse_kv_formats(names[-1])[-1].options
    assert last == {
        "kv": "turboquant", "tq_key_bits": 5, "tq_value_bits": 2, "tq_mode": "full_tq", "tq_centre": False,
    }  # fmt: skip
    for wrong in ("k6v3", "k4", "fp16", "", "k4v3-uncentred-full"):
        with pytest.raises(UserError, match="a format is exact, fp8 or k<key bits>v<value bits>"):
            parse_kv_formats(wrong)


def test_plans_count_weights_as_they_are_stored(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, which keeps a file's codes as codes where nobody has measured that bfloat16 is faster."""
    gpu = Hardware("cuda", "a GPU", 8, 8 << 30, (9, 0))
    monkeypatch.setattr(machine, "detect", lambda config: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checkpoint = open_checkpoint("smollm2")
    model, stored = read_config(checkpoint.config), checkpoint.stored_bytes()
    flags = Namespace(device="cuda", dtype="auto", model="smollm2", uses_profile=False, weights="auto")
    plans = bench_formats._kv_plans(flags, parse_kv_formats("fp8"), model, checkpoint)
    expected = stored.kept(2) + rope_bytes(model, plans["exact"].max_model_len)
    assert [plan.memory.weights for plan in plans.values()] == [expected] * 2
    assert stored.kept(2) < 0.9 * 2 * model_sizes(model).held


# ---- the command


def test_the_command(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    formats = ["exact", "k5v5", "k4v3-full-uncentred"]
    args = ("--formats", ",".join(formats), "--tokens", "60", "--max-model-len", "256")
    assert main(["bench", "kv", "--model", str(tiny), *QUICK, *args]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    report: dict[str, Any] = json.loads(last)
    assert report["bench"] == "kv" and report["device"] == "cpu"
    assert [row["format"] for row in report["formats"]] == formats
    sizes = [row["bytes_per_token"] for row in report["formats"]]
    assert sizes[0] > 3 * sizes[1] > 0 and sizes[1] > sizes[2]
    for row in report["formats"]:
        assert sum(line.startswith(f"{row['format']} ") for line in lines) == 2  # memory, texts
        assert set(row["texts"]) == set(KINDS) and {text["tokens"] for text in row["texts"].values()} == {59}
        assert row["all"]["kl"] == pytest.approx(sum(text["kl"] for text in row["texts"].values()) / 3, abs=1e-7)
        ratios = [1 + text["rise"] for text in row["texts"].values()]
        assert 1 + row["all"]["rise"] == pytest.approx(math.prod(ratios) ** (1 / 3), abs=1e-5)
    assert report["formats"][0]["all"] == {"rise": 0, "kl": 0} and report["formats"][2]["all"]["kl"] > 0


def test_float32_is_chosen_on_a_cpu(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--device", "cpu", "--threads", "1", "--formats", "fp8", "--tokens", "40")
    assert main(["bench", "kv", "--model", str(tiny), *args]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["dtype"] == "float32"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--formats", "exact,k9v3"], "--formats names 'k9v3'; a format is exact, fp8 or k<key bits"),
        (["--formats", "fp8", "--dtype", "quantised"], "does not run on the CPU kernels"),
        (["--tokens", "3"], "--tokens is 3"),
        (["--tokens", "4000"], "--tokens is 4000; the context holds 512"),
        (["--kv", "fp8"], "--kv is given; here --formats says"),
        (["--spec", "auto"], "--spec is auto"),
    ],
)
def test_what_can_not_be_measured(args: list[str], words: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kv", "--model", str(tiny), *QUICK, *args]) == 1
    printed = capsys.readouterr()
    assert words in printed.err and printed.out == "" and len(said(printed.err)) == 1, printed.err
