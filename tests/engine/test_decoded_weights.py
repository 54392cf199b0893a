"""Quantised weights that are decoded on a GPU: which matrices are timed before the plan, and that all become floats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparkdraft.config import EngineConfig
from sparkdraft.engine import load
from sparkdraft.engine.build import build_engine
from sparkdraft.engine.facts import formats
from sparkdraft.engine.load import open_model, stored_of
from sparkdraft.engine.machine import plan_here
from sparkdraft.plan.hardware import Hardware
from sparkdraft.text.tokenizer import Tokenizer
from sparkdraft.weights.plane_layout import PassTimes

GPU = Hardware("cuda", "a GPU", 8, 80 << 30, (9, 0))
TIMES = PassTimes((2e-3,) * 3, (1e-3,) * 3)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int, str]]]:
    """The matrices of each question for times: rows, width, levels."""
    pytest.importorskip("triton", reason="triton is not installed")
    from sparkdraft.kernels.cuda.linear import speed

    found: list[list[tuple[int, int, str]]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(load, "detect", lambda config: GPU)
    monkeypatch.setattr(
        speed,
        "pass_times",
        lambda each: found.append([(rows, width, form.levels) for rows, width, form in each]) or TIMES,
    )
    return found


def test_the_products_of_a_pass_are_timed_before_the_plan(
    smollm2_path: Path, asked: list[list[tuple[int, int, str]]]
) -> None:
    opened = open_model(EngineConfig.of(model=str(smollm2_path), device="cpu", spec="off"))
    stored = stored_of(opened.config, opened.checkpoint, opened.model_config)
    assert stored.times == TIMES
    (matrices,) = asked
    layer = [(960, 576, "int4"), (576, 576, "int4"), (3072, 576, "int4"), (576, 1536, "int4")]
    assert [each[:2] for each in matrices] == [each[:2] for each in layer] * 30 + [(49152, 576)]
    assert sum(levels == "int4" for *_, levels in matrices) >= 100
    for named in ({"weights": "int4"}, {"dtype": "float32"}):
        assert stored_of(replace(opened.config, **named), opened.checkpoint, opened.model_config).times is None
    assert len(asked) == 1


def test_floats_have_no_times(tiny: Path, asked: list[list[tuple[int, int, str]]]) -> None:
    opened = open_model(EngineConfig.of(model=str(tiny), device="cpu", spec="off"))
    assert stored_of(opened.config, opened.checkpoint, opened.model_config).times is None and not asked


def test_a_plan_that_decodes_keeps_no_code_of_the_file(smollm2_path: Path) -> None:
    """On a CPU, whose kernels round floats to 8 bits: none of the 4 bits of the file is left."""
    config = EngineConfig.of(model=str(smollm2_path), device="cpu", spec="off", kv_tokens=256, max_model_len=256)
    opened = open_model(config)
    plan = plan_here(config, opened.model_config)
    if plan.kernels != "native":
        pytest.skip("needs the CPU kernels")
    tokenizer, kept = Tokenizer.of(opened.checkpoint), []
    for decoded in (False, True):
        made = replace(plan, decoded=decoded)
        engine = build_engine(made, config, opened.model_config, opened.checkpoint, tokenizer)
        kept.append(formats(engine.runner.model.matrices))
    assert "4bit" in kept[0] and kept[1] == "8bit"
