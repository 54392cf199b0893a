"""What a plan counts for weights: those that another engine has loaded are not counted twice, and those that --weights
quantises are counted as they are kept, with the head beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparkdraft.config import EngineConfig
from sparkdraft.engine.load import open_model, stored_of
from sparkdraft.operate.tune import engines as tuned
from sparkdraft.operate.tune.engines import Engines
from sparkdraft.operate.tune.search import ONE
from sparkdraft.plan import hardware
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.resolve import model_bytes, resolve
from tests.drafters.tiny_mtp import write_target

GPU = Hardware("cuda", "a GPU", 8, 8 << 30, (9, 0))


def test_a_model_that_fits_once_runs_in_several_engines(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = [0], 3_000_000
    monkeypatch.setattr(hardware, "free_memory", lambda: free - taken[0])
    config = EngineConfig.of(model=str(tiny), device="cpu", dtype="float32", max_seqs=2, max_step_tokens=16, spec="off")
    engines = Engines(open_model(config), ["abc"], 8)
    assert engines.speed({}, ONE).tok_s > 0
    taken[0] = engines.plan.memory.weights
    assert 2 * taken[0] > 0.85 * free, "two of them do not fit"
    assert engines.speed({"threads": 1}, ONE).tok_s > 0
    assert engines._full_plan({}).memory == engines.plan.memory, "a server would have the memory of both"


def test_tune_counts_weights_as_they_are_loaded(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "detect", lambda config: GPU)
    opened = open_model(EngineConfig.of(model=str(tiny), spec="off"))
    floats, coded = (
        Engines(replace(opened, config=EngineConfig(spec="off", weights=form)), ["abc"], 8).plan.memory.weights
        for form in ("auto", "fp8")
    )
    assert coded < 0.9 * floats


def test_a_head_in_the_targets_file_is_counted_beside_quantised_weights(tmp_path: Path) -> None:
    folder, _ = write_target(tmp_path, "qwen3_5")
    opened = open_model(EngineConfig.of(model=str(folder), drafter="mtp", weights="fp8"))
    config, model, caps = opened.config, opened.model_config, opened.caps
    assert caps and caps.in_target
    with_head, without = (stored_of(config, opened.checkpoint, model, each) for each in (caps, None))
    plans = [
        resolve(config, model, GPU, drafter=caps, stored=with_head),
        resolve(config, model, GPU, stored=without),
    ]
    assert plans[0].memory.weights == plans[1].memory.weights + 2 * caps.num_weights
    own = model_bytes(config, model, GPU, None, caps, with_head)
    assert own == plans[1].memory.weights, "the model's own, which engines share"
