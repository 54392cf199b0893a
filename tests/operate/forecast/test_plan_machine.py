"""Machine files: what they must say, what is refused, and the machine at hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkdraft.cli.plan import read_formats, read_model
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.operate.forecast import rates
from sparkdraft.operate.forecast.forecast import Forecast, Question
from sparkdraft.operate.forecast.machine import (
    FOLDER,
    find_machine,
    fit,
    known_machines,
    like,
    this_machine,
)
from sparkdraft.operate.forecast.rates import CpuRates, MatmulRate
from sparkdraft.operate.forecast.roofline import overlap
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.weight_formats import WeightFormats, kept_on_cpu, names_of, of_gguf
from sparkdraft.weights.gguf import GgufCheckpoint


@pytest.mark.parametrize("name", known_machines())
def test_every_file_is_whole(name: str) -> None:
    machine = find_machine(name)
    assert machine.name == name and len(machine.sources) >= 2, "each number has its source"
    assert any("bandwidth" in each for each in machine.sources)
    for engine in machine.engines.values():
        assert engine.origin and 0 < engine.error.dense <= engine.error.experts < 0.5
        for better, worse in ((engine.high, engine.expected), (engine.expected, engine.low)):
            assert better.floats >= worse.floats and better.coded >= worse.coded and better.rows >= worse.rows
            assert better.layer <= worse.layer and better.step <= worse.step and better.draft <= worse.draft
    assert machine.losses().expected.snapshots is False, "this engine replays states"


def test_the_machines_of_the_help_exist() -> None:
    assert {"gb10", "h200", "rtx-5090", "cpu"} <= set(known_machines())


def test_a_file_of_the_users_own(tmp_path: Path) -> None:
    data = json.loads((FOLDER / "gb10.json").read_text(encoding="utf-8"))
    path = tmp_path / "fast.json"
    path.write_text(json.dumps(data | {"bandwidth_gb_s": 500}), encoding="utf-8")
    machine = find_machine(str(path))
    assert machine.name == "fast" and machine.rates.bandwidth == 500e9


def without(key: str) -> Any:
    return lambda data: {name: value for name, value in data.items() if name != key}


def with_formats(data: Any, formats: Any) -> Any:
    engine = data["engines"]["sparkdraft"]
    return data | {"engines": {"sparkdraft": engine | {"losses": engine["losses"] | {"formats": formats}}}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("bandwidth_gb_s"), "lacks 'bandwidth_gb_s'"),
        (lambda data: data | {"device": "tpu"}, "needs a device"),
        (lambda data: data | {"bandwidth_gb_s": 0}, "above 0"),
        (lambda data: data | {"memory_gib": "much"}, "cannot be used"),
        (lambda data: data | {"capability": []}, "cannot be used"),
        (lambda data: data | {"engines": []}, "cannot be used"),
        (lambda data: data | {"engines": {"sparkdraft": {"from": "", "losses": {"speed": 1}}}}, "'speed' is no loss"),
        (lambda data: with_formats(data, {"nvpf4": 0.4}), "'nvpf4' is no format; formats are .*nvfp4"),
        (lambda data: with_formats(data, {"nvfp4": 0}), "shares must be above 0"),
        (lambda data: with_formats(data, 0.4), "cannot be used"),
        (lambda data: [data], "cannot be used"),
    ],
)
def test_a_bad_file_gets_one_sentence(tmp_path: Path, change: Any, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(
        json.dumps(change(json.loads((FOLDER / "gb10.json").read_text(encoding="utf-8")))), encoding="utf-8"
    )
    with pytest.raises(UserError, match=words):
        find_machine(str(path))


def test_text_that_is_no_json_and_names_that_are_not_known(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="cannot be used"):
        find_machine(str(path))
    with pytest.raises(
        UserError, match=r"Unknown machine 'gb20'; did you mean gb10\? Known machines are .*gb10.* and this"
    ):
        find_machine("gb20")


def test_a_gpu_gets_the_losses_of_its_file_or_the_widest() -> None:
    card = Hardware("cuda", "NVIDIA GB10", 20, 100 << 30, (12, 1))
    assert like(card).name == "gb10"
    assert like(replace(card, name="NVIDIA H200")).name == "h200"
    assert not like(replace(card, name="another")).losses().is_measured
    assert like(Hardware("cpu", "a CPU", 8, 8 << 30)).name == "cpu"


def test_the_machine_at_hand_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rates.SIZE, "cpu", 16 << 20)
    machine = this_machine()
    assert machine.name == "this" and machine.rates.bandwidth > 1e8 and machine.hardware.free_bytes > 0
    if machine.hardware.device == "cpu" and machine.native_problem is None:
        losses = machine.losses()
        assert losses.origin == "measured now, on its own CPU kernels" and losses.is_measured and not machine.notes
        assert min(losses.expected.coded, losses.expected.kv, losses.expected.layer) > 0
        assert {*losses.expected.formats} == {"quantised", "quantised4"} < {*machine.rates.arithmetic}


def test_without_its_kernels_a_cpu_gets_the_losses_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rates.SIZE, "cpu", 16 << 20)
    monkeypatch.setattr("sparkdraft.engine.machine.native_problem", lambda config, found: "no compiler")
    machine, file = this_machine(), find_machine("cpu")
    assert machine.native_problem == "no compiler" and machine.losses() == file.losses()
    per_core = file.rates.arithmetic["quantised"] / 2
    assert machine.rates.arithmetic["quantised"] == pytest.approx(per_core * machine.hardware.cores)
    assert any("two Neoverse" in note for note in machine.notes), "whose losses these are"


@pytest.mark.parametrize("read, row", [(1.0, 0.05), (1.0, 0.5), (0.6, 0.9)])
def test_reading_and_multiplying_are_told_apart(read: float, row: float) -> None:
    """What is measured at one row and at several is what the model of a step makes of both."""
    each = MatmulRate(overlap(read, row), overlap(read, 16 * row), nbytes=1000, rows=16, operations=2000)
    losses, arithmetic = fit(find_machine("cpu").losses().expected, CpuRates(each, each, 500.0, 1e-5), 2000.0)
    assert losses.coded == pytest.approx(1000 / read / 2000, rel=0.01)
    assert arithmetic["quantised4"] == pytest.approx(2000 / row, rel=0.01)
    assert losses.kv == 0.25 and losses.layer == 1e-5


def test_a_matrix_that_costs_nothing_more_for_more_rows_is_all_reading() -> None:
    each = MatmulRate(1.0, 1.0, nbytes=1000, rows=16, operations=2000)
    losses, arithmetic = fit(find_machine("cpu").losses().expected, CpuRates(each, each, 500.0, 1e-5), 2000.0)
    assert losses.coded == pytest.approx(0.5, rel=0.01) and arithmetic["quantised"] >= 1000 * 2000


def test_codes_of_four_bits_are_counted_on_a_cpu_only_where_its_kernels_run() -> None:
    machine, (model, raw) = find_machine("cpu"), read_model("smollm2")
    formats, label = read_formats("smollm2", "auto", raw, model, machine)
    assert formats and not label and formats.of("mlp", 3) == "quantised4" and formats.of("head") == "quantised"
    question = Question(model, machine, EngineConfig(model="smollm2"), formats)
    assert Forecast(question).formats == formats
    without = replace(question, machine=replace(machine, native_problem="no compiler"))
    assert names_of(Forecast(without).formats) == ["float32"]
    assert names_of(kept_on_cpu(WeightFormats.parse("nvfp4,attention=fp8"))) == ["quantised", "quantised4"]


@pytest.mark.parametrize("by_name", [True, False])
def test_the_embedded_file_is_counted_as_a_gpu_keeps_it(smollm2_path: Path, by_name: bool) -> None:
    """By its known name without the file, and by the header of the file: as an engine that opens it."""
    name, h200 = "smollm2" if by_name else str(smollm2_path), find_machine("h200")
    model, raw = read_model(name)
    formats, label = read_formats(name, "auto", raw, model, h200)
    assert formats and label == "int4-q4_1 and int8-q8_0"
    planned = Forecast(Question(model, h200, EngineConfig(model=name), formats)).held
    assert planned and planned.quantised == GgufCheckpoint(smollm2_path).stored_bytes().quantised


def test_a_part_of_a_gguf_counts_as_most_of_its_weights() -> None:
    types = {
        "model.layers.0.self_attn.q_proj.weight": ("q4_k", 100), "model.layers.0.self_attn.v_proj.weight": ("q6_k", 20),
        "model.layers.0.mlp.down_proj.weight": ("q6_k", 300), "model.layers.1.mlp.down_proj.weight": ("", 300),
        "model.embed_tokens.weight": ("q8_0", 500), "model.norm.weight": ("", 1),
    }  # fmt: skip
    found = of_gguf(types)
    assert (found.of("attention", 0), found.of("mlp", 0)) == ("int4-q4_k", "int8-q6_k")
    assert found.of("mlp", 1) == "bfloat16" and found.of("embedding") == found.of("head") == "int8-q8_0"
    assert of_gguf(types | {"lm_head.weight": ("q6_k", 500)}).of("head") == "int8-q6_k"


def test_formats_that_nobody_knows_are_eight_bits_on_a_cpu() -> None:
    model, _ = read_model("qwen3-8b")
    raw = {"quantization_config": {"quant_method": "hqq", "bits": 4}}
    assert read_formats("some/model", "auto", raw, model, find_machine("cpu")) == (None, "")
    with pytest.raises(UserError):
        read_formats("some/model", "auto", raw, model, find_machine("h200"))
    with pytest.raises(UserError, match="'quantised4' is no format"):
        WeightFormats.parse("quantised4")
