"""`bench offline` on tiny random weights: a given acceptance comes out as given, and what can not be
measured is refused in one sentence. Speeds themselves mean nothing here; docs/numbers has those."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sparkdraft.cli.main import main
from sparkdraft.config import EngineConfig
from sparkdraft.core import Request, SamplingParams, UserError
from sparkdraft.drafters.find import DraftSource
from sparkdraft.engine.build import build_engine
from sparkdraft.engine.device_steps import DeviceSteps
from sparkdraft.engine.machine import plan_here
from sparkdraft.engine.sampler import SampleRow
from sparkdraft.models.common.config import uniform_config
from sparkdraft.operate.bench import random_model
from sparkdraft.operate.bench.offline import Bench, Ceilings, Load
from sparkdraft.operate.bench.random_model import FORMS
from sparkdraft.operate.bench.synthetic import Acceptance, Outcomes, SyntheticSampler, spans
from sparkdraft.operate.forecast import rates
from sparkdraft.speculation.costs import GRID
from sparkdraft.speculation.survival import Confidence, Kind
from sparkdraft.weights.planes import pack
from sparkdraft.weights.quant.stored import Coded
from tests.cli.said import said
from tests.speculation.machines import price
from tests.speculation.varied import VariedAcceptance

TOY = uniform_config("qwen3", 6, 32, 64, 2, 1, 16, 96, 1024, tie_embeddings=True, qk_norm=True)
SMALL = ("--shape", "toy", "--dtype", "float32", "--threads", "1", "--prompt-len", "20")
DRAFTED = (*SMALL, "--drafter-shape", "dflash-3x", "--synthetic-acceptance", "6.5")

Run = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(random_model.SHAPES, "toy", TOY)
    monkeypatch.setitem(rates.SIZE, "cpu", 1 << 20)


@pytest.fixture
def offline(capsys: pytest.CaptureFixture[str]) -> Run:
    """What the command printed, and its JSON."""

    def run(*args: str) -> tuple[str, dict[str, Any]]:
        assert main(["bench", "offline", *args]) == 0, capsys.readouterr().err
        out = capsys.readouterr().out
        return out, json.loads(out.splitlines()[-1])

    return run


def toy_bench(acceptance: Acceptance | None, overlaps: bool = False, spec: str = "15") -> Bench:
    config = EngineConfig(device="cpu", dtype="float32", threads=1, spec=spec, ngram=False, kv_tokens=2048, max_seqs=2)
    draft = random_model.drafter_shape("dflash-3x", TOY)
    source = DraftSource(draft, random_model.RandomCheckpoint(draft.tensor_shapes(), "cpu"))
    target = random_model.RandomCheckpoint(TOY, "cpu")
    plan = plan_here(config, TOY, source.caps)
    engine = build_engine(plan, config, TOY, target, random_model.SilentTokenizer(), source)
    if overlaps:
        engine.steps = DeviceSteps(engine.runner, engine.sampler, engine.drafting)
    return Bench(engine, TOY, Ceilings(1e9, None), acceptance)


# ---- the process


@pytest.mark.parametrize(("length", "depth"), [(6.5, 15), (1.0, 15), (16.0, 15), (2.5, 3), (1.7, 1)])
def test_the_chance_gives_the_length(length: float, depth: int) -> None:
    process = Acceptance(length, depth)
    assert sum(process.p**k for k in range(depth + 1)) == pytest.approx(length, abs=1e-9)
    table = process.table(500, 4)
    assert table.dtype == np.int32 and table.shape == (500, 4) and table.min() >= 0 and table.max() <= depth
    assert 1 + table.mean() == pytest.approx(length, rel=0.002)
    for k in range(table.max()):  # one chance at every position that is reached
        reached = table[table >= k]
        assert (reached > k).mean() == pytest.approx(process.p, abs=0.05)


def test_few_steps_have_the_length_too_and_a_table_is_always_the_same() -> None:
    process = Acceptance(6.5, 15)
    for steps, streams in ((10, 1), (40, 1), (10, 16)):
        table = process.table(steps, streams)
        assert 1 + table.mean() == pytest.approx(6.5, rel=0.06 if steps * streams == 10 else 0.02)
        assert abs(table.sum(0) - 5.5 * steps).max() <= 15  # what the KV cache is given room for
        assert (table == process.table(steps, streams)).all()
    assert process.steps(256) == 40 and process.steps(65) == 10


def test_varied_blocks_are_those_of_the_embedded_drafter() -> None:
    """At the same mean, as many blocks end early and as many are right to their end; and the gaps tell which."""
    data = np.load(Path(__file__).parents[1] / "speculation" / "drafted_blocks.npz")
    real = data["right"].cumprod(1).sum(1)
    process = VariedAcceptance(1 + real.mean(), 15)
    accepted, gaps = process.outcomes(400, 4)
    assert accepted.shape == (400, 4) and gaps.shape == (400, 4, 15) and gaps.dtype == np.float32
    assert accepted.mean() == pytest.approx(real.mean(), rel=0.02)
    assert accepted.var() == pytest.approx(real.var(), rel=0.1)
    alike = Acceptance(1 + real.mean(), 15).table(400, 4)
    assert alike.var() < 0.85 * real.var(), "equal chances for all drafts do not show it"
    for found, first in ((real, data["gaps"][:, :4].mean(1)), (accepted.ravel(), gaps.reshape(-1, 15)[:, :4].mean(1))):
        unsure, sure = found[first < np.quantile(first, 0.25)].mean(), found[first > np.quantile(first, 0.75)].mean()
        assert sure > 3 * unsure
    for steps, streams in ((10, 1), (40, 1), (10, 16)):
        few = process.outcomes(steps, streams)
        assert few.accepted.mean() == pytest.approx(real.mean(), rel=0.12 if steps * streams == 10 else 0.05)
        assert (few.accepted == process.outcomes(steps, streams).accepted).all()
    longer = Outcomes.joined([process.outcomes(3, 2, seed) for seed in range(4)], 10)
    assert longer.accepted.shape == (10, 2) and longer.gaps.shape == (10, 2, 15)


@pytest.mark.parametrize("length", [0.99, 16.01, float("nan"), -3])
def test_lengths_that_no_drafts_can_have(length: float) -> None:
    with pytest.raises(UserError, match="from 1 to 16"):
        Acceptance(length, 15)


def test_the_sampler_is_overruled_only_after_its_work() -> None:
    sampler = SyntheticSampler(8, frozenset(), torch.device("cpu"))
    sampler.stop()
    one, two = (Request(name, 0, [1], SamplingParams(), 0, 9) for name in "ab")
    rows = [SampleRow(one, [5, 6, 7][:k]) for k in range(4)] + [SampleRow(two, [3, 3][:k]) for k in range(3)]
    likeliest = [5, 6, 7, 2, 4, 3, 0]  # the target would accept all of the first, none of the second

    def said() -> list[int]:
        logits = torch.nn.functional.one_hot(torch.tensor(likeliest), 8).float()
        ids: list[int] = sampler(logits, rows).ids.tolist()
        return ids

    assert said()[0] != 5 and said()[4] != 3  # no table: nothing is accepted
    sampler.start(Outcomes(np.array([[1, 2], [3, 0], [9, 1]], np.int32), np.zeros((3, 2, 3), np.float32)))
    first, second, third = said(), said(), said()
    assert first[0] == 5 and first[1] != 6 and first[4:6] == [3, 3] and first[6] == 0
    assert second[:4] == [5, 6, 7, 2] and second[4] == 4  # its own id, where that is not the draft
    assert third[:4] == [5, 6, 7, 2] and third[4] == 3 and third[5] != 3


# ---- shapes


@pytest.mark.parametrize("form", FORMS)
def test_random_weights_of_a_format(form: str) -> None:
    """All matrices of the layers but the router's, with weights of a usual size and bytes as the plan counts them."""
    checkpoint, coded = random_model.RandomCheckpoint(random_model.SHAPES["tiny"], "cpu", form), 0
    for name in checkpoint.names():
        part = checkpoint.read(name)
        is_matrix = name.startswith("model.layers.") and len(part.shape) == 2
        assert isinstance(part, Coded) == is_matrix, name
        if isinstance(part, Coded):
            assert 0.01 < part.dequantize().std() < 0.04
            coded += pack([part], torch.device("cpu")).nbytes
    assert checkpoint.stored_bytes().quantised == coded
    experts = random_model.RandomCheckpoint(random_model.TARGET_FILES["gpt-oss-20b"], "cpu", form)
    names = {name.split(".", 3)[-1] for name in experts.names() if experts._is_coded(name)}
    projections = {f"self_attn.{part}_proj.weight" for part in "qkvo"}
    assert names == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", *projections}
    assert experts._matrix_shape("model.layers.0.mlp.experts.down_proj") == (32, 2880, 2880)


def test_an_engine_with_weights_of_a_format_counts_the_bytes_that_it_keeps() -> None:
    config = EngineConfig(model="tiny", device="cpu", dtype="float32", max_model_len=128, max_seqs=2)
    floats, coded = (random_model.random_engine(config, form=form) for form in ("", "mxfp4"))
    assert coded.runner.model.nbytes(1) == floats.runner.model.nbytes(1), "a CPU's reference keeps floats"


def test_drafter_shapes_are_those_of_the_published_drafters() -> None:
    draft = random_model.drafter_shape("dflash-5x", random_model.SHAPES["qwen3-8b"])
    assert draft.aux_layers == (1, 9, 17, 25, 33) and draft.block_size == 16 and draft.model.num_layers == 5
    assert [(spec.window, spec.causal) for spec in draft.model.attention] == [(0, False)] * 5
    own = sum(int(np.prod(size)) for size in draft.tensor_shapes().values())
    assert 2 * own / 1e9 == pytest.approx(2.10, abs=0.02)  # gigabytes of z-lab's Qwen3-8B-DFlash in bfloat16


# ---- the command


def test_a_given_acceptance_comes_out_as_given(offline: Run) -> None:
    out, report = offline(*DRAFTED, "--concurrency", "1,3", "--output-len", "80")
    assert "SYNTHETIC" in out and "p = 0.8599" in out and "(synthetic)" in out
    assert report["synthetic"] is True and report["drafter"] == "dflash-3x" and report["spec"] == "15"
    given = {"length": 6.5, "p": 0.859903, "depth": 15, "process": ""}
    assert report["acceptance"] | {"process": ""} == given and report["cut"] is True
    assert [row["streams"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert row["steps"] == 13 and row["length"] == pytest.approx(6.5, rel=0.03)
        assert row["decode_tok_s"] == pytest.approx(row["streams"] * row["length"] / row["step_ms"] * 1e3, rel=1e-3)
        assert row["share"] == pytest.approx(row["floor_ms"] / row["step_ms"], abs=1e-3)
        assert row["prefill_tok_s"] > 0
        assert set(row["floor_gb"]) == {"target", "target_kv", "drafter", "drafter_observes", "drafter_kv"}


@pytest.mark.parametrize("spec, drafter", [("off", None), ("0", "dflash-3x")])
def test_the_same_target_without_its_drafter_or_with_a_paused_one(offline: Run, spec: str, drafter: str | None) -> None:
    out, report = offline(*DRAFTED, "--batch", "2", "--output-len", "10", "--spec", spec)
    assert "SYNTHETIC" not in out and report["synthetic"] is False and report["drafter"] == drafter
    row = report["rows"][0]
    assert row["length"] == 1 and row["steps"] == 10
    assert set(row["floor_gb"]) == {"target", "target_kv"}


def test_fewer_drafts_than_the_block_holds(offline: Run) -> None:
    _, report = offline(*DRAFTED[:-1], "2.5", "--spec", "3", "--concurrency", "2", "--output-len", "50")
    assert report["acceptance"]["depth"] == 3 and report["rows"][0]["length"] == pytest.approx(2.5, rel=0.03)


def test_nothing_is_drafted_unless_asked(offline: Run) -> None:
    _, report = offline(*SMALL, "--concurrency", "1", "--output-len", "8")
    assert report["spec"] == "off" and report["rows"][0]["length"] == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--drafter-shape", "dflash-3x", "--synthetic-acceptance", "17"], "must be from 1 to 16"),
        (["--drafter-shape", "dflash-3x", "--synthetic-acceptance", "0.5"], "must be from 1 to 16"),
        (["--drafter-shape", "dflash-3x", "--synthetic-acceptance", "6", "--spec", "4"], "must be from 1 to 5"),
        (["--synthetic-acceptance", "6.5"], "--drafter-shape dflash-5x"),
        (["--drafter-shape", "eagle-1x"], "known are mtp, dflash-5x, dflash-3x"),
        (["--drafter-shape", "dflash-3x", "--shape", ""], "goes with a --shape"),
        (["--shape-weights", "int4", "--shape", ""], "--shape-weights goes with a --shape"),
        (["--drafter-shape", "dflash-3x", "--spec", "16"], "drafts at most 15"),
        (["--spec", "many"], "spec is 'many'"),
        (["--concurrency", "0"], "--concurrency is '0'"),
        (["--output-len", "4"], "--output-len is 4; it must be at least 8"),
        (["--prompt-len", "1020"], "need a context of"),
        (["--concurrency", "4", "--kv-tokens", "128"], "raise --kv-tokens"),
        (["--concurrency", "4", "--max-seqs", "3"], "raise --max-seqs"),
    ],
)
def test_what_can_not_be_measured(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", *SMALL, *args]) == 1
    printed = capsys.readouterr()
    assert words in printed.err and printed.out == "" and len(said(printed.err)) == 1


# ---- the engine under it


@pytest.mark.parametrize(("length", "each"), [(1.0, 1), (16.0, 16)])
def test_none_and_all_accepted(length: float, each: int) -> None:
    row = toy_bench(Acceptance(length, 15)).measure(Load(2, 20, 32), lambda done, total: None)
    assert row.length == each and row.steps == 32 // each


def test_steps_that_the_device_takes_accept_what_is_given_too() -> None:
    bench = toy_bench(Acceptance(6.5, 15), overlaps=True)
    row = bench.measure(Load(2, 20, 130), lambda done, total: None)
    assert row.steps == 20 and row.length == pytest.approx(6.5, rel=0.03)
    steps = bench.engine.steps
    assert isinstance(steps, DeviceSteps) and set(steps.requests) == set(steps._left), "every slot is given back"
    assert not steps.num_unread and not bench.engine.has_work


@pytest.mark.parametrize("overlaps", [True, False])
def test_depths_that_are_chosen_find_their_costs_measured_and_the_acceptance_given(overlaps: bool) -> None:
    """Which depths are chosen depends on the speed of this machine; measure() checks that the table was followed."""
    bench = toy_bench(Acceptance(6.5, 15), overlaps, "auto")
    assert bench.engine.drafting.budget
    verify = bench.engine.drafting.budget.costs.buckets[0, 0].verify
    assert all(verify.weight[GRID.index(1 + depth)] for depth in bench.engine.drafting.choices)
    row = bench.measure(Load(2, 20, 200), lambda done, total: None)
    assert 1 <= row.length < 6.6


def test_drafts_of_random_weights_differ_from_row_to_row() -> None:
    """One id many times would reach the same experts in every row."""
    bench, verified = toy_bench(Acceptance(6.5, 15), overlaps=True), list[list[list[int]]]()
    slots = bench.engine.steps.slots  # type: ignore[attr-defined]
    draft = slots._draft
    slots._draft = lambda kind: verified.append((ids := draft(kind)).tolist()) or ids  # type: ignore[method-assign]
    bench.measure(Load(2, 20, 40), lambda done, total: None)
    busy = [step for step in verified if len(step) == 2]
    assert busy and all(len({id_ for stream in step for id_ in stream}) > 24 for step in busy), "of 30"
    assert len({tuple(map(tuple, step)) for step in busy}) > len(busy) // 3, "passes repeat each other, steps do not"


@pytest.mark.parametrize("overlaps", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_blocks_that_vary_are_cut_by_the_gaps_that_are_given(overlaps: bool) -> None:
    """With rows that cost, whatever this machine says: fewer of them, and nearly as many tokens."""
    bench = toy_bench(VariedAcceptance(5.4, 15), overlaps, "auto")
    assert bench.engine.drafting.budget
    price(bench.engine.drafting.budget, 0.1)
    row = bench.measure(Load(2, 20, 200), lambda done, total: None)
    assert row.length > 4 and row.rows < 2 * 9, "whole blocks have 16 rows for 5.4 tokens"


@pytest.mark.parametrize("overlaps", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_blocks_that_are_alike_are_not_cut_because_random_weights_are_unsure(overlaps: bool) -> None:
    """Every draft is accepted with 0.84 and pays for its row; a drafter with random weights gives it almost nothing."""
    bench = toy_bench(Acceptance(5.9, 15), overlaps, "auto")
    assert bench.engine.drafting.budget
    price(bench.engine.drafting.budget, 0.01)
    row = bench.measure(Load(2, 20, 200), lambda done, total: None)
    assert row.length > 5.2 and row.rows > 2 * 14


@pytest.mark.parametrize("length", [1, 1.5, 5.9, 16])
def test_the_chance_of_drafts_that_are_alike_is_the_one_that_was_asked_for(length: float) -> None:
    process = Acceptance(length, 15)
    fit = Confidence(15, [Kind(0.69, False, True, True)])
    chance = fit.chances(np.zeros(1, int), np.full((1, 15), process.gap))[0, 0]
    assert chance == pytest.approx(process.p, abs=0.02)


def test_the_floor_counts_what_a_drafted_step_reads() -> None:
    read, model = toy_bench(None).floor_bytes(Load(2, 20, 40), drafted=1.0), TOY
    layer = (2 * 2 + 2 * 1) * 16 + 3 * 64
    head, layer = model.vocab_size * model.hidden_size, layer * model.hidden_size
    kv = 2 * 1 * 16
    assert read["target"] == 4 * (6 * layer + head) and read["drafter"] == 4 * (3 * layer + head)
    assert read["drafter_observes"] == 4 * model.hidden_size * (5 * model.hidden_size + 3 * kv)
    assert (read["target_kv"], read["drafter_kv"]) == (4 * 2 * 40 * kv * 6, 4 * 2 * 40 * kv * 3)


def test_requests_of_a_step_and_none_of_a_chunk_that_samples_nothing() -> None:
    rows = [SimpleNamespace(ahead=ahead) for ahead in ((), (5,), (5, 7), (), (), (1,))]
    assert spans(rows) == [(0, 3), (3, 4), (4, 6)]
    assert spans([]) == []
