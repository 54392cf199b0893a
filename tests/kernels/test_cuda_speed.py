"""Times of a model's matrices, as codes and as floats: every format is measured, once per GPU and tiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.kernels.cuda.linear import speed
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.weights.plane_layout import ROWS, CodeForm
from tests.kernels.triton_device import DEVICE, DTYPES, gpu

MATRICES = [
    (96, 64, CodeForm("int4", 4, 32, "f16", "f32")),
    (64, 96, CodeForm("int8", 8, 32, "f16")),
    (64, 64, CodeForm("e4m3", 8, 0, row_scale=True)),
]


@gpu
def test_times_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    measure = speed.measure
    monkeypatch.setattr(speed, "DTYPE", DTYPES[0])
    monkeypatch.setattr(speed, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(speed, "measure", lambda *given: measured.append(len(given[0])) or measure(*given))
    found = speed.pass_times(MATRICES)
    assert len(found.codes) == len(found.floats) == len(ROWS) and min(*found.codes, *found.floats) > 0
    assert speed.pass_times(MATRICES) == found and measured == [3]
    speed.pass_times(MATRICES[:2])
    assert measured == [3, 2], "other matrices"
    monkeypatch.setattr(tuned, "find", lambda gpu, key: [16, 32, 2, 2] if key.kernel == "few_rows" else None)
    monkeypatch.setattr(speed, "measure", lambda *given: measured.append(0) or found)
    speed.pass_times(MATRICES)
    assert measured == [3, 2, 0], "other tiles"
    (file,) = (tmp_path / "tuned").iterdir()
    assert len(json.loads(file.read_text())) == 3
    file.write_text("damaged")
    speed.pass_times(MATRICES)
    assert measured == [3, 2, 0, 0] and len(json.loads(file.read_text())) == 1


@gpu
def test_of_a_large_model_only_what_the_l2_does_not_hold_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    monkeypatch.setattr(speed, "DTYPE", DTYPES[0])
    monkeypatch.setattr(speed, "COLD_BYTES", 20_000)
    monkeypatch.setattr(speed, "_times", lambda matrices, inputs: shown.append(len(matrices)) or (1.0,) * 3)
    speed.measure(MATRICES * 1000, torch.device(DEVICE))
    assert shown[0] == shown[1] < 10
