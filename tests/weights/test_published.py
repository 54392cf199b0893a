"""Tiny checkpoints that the tools themselves wrote (make_published.py): each matrix is what their libraries decode."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.quant.stored import as_float

FOLDERS = sorted(path.parent for path in (Path(__file__).parent / "published").glob("*/expected.json"))


def expected(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    return found


def digest(weight: Tensor) -> str:
    return hashlib.sha256(bytes((weight + 0).contiguous().view(torch.uint8).flatten().tolist())).hexdigest()


def test_there_are_some() -> None:
    names = {folder.name.split("-")[0] for folder in FOLDERS}
    assert names == {"compressed", "auto", "gptq", "awq", "modelopt"} and len(FOLDERS) == 18


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_matrix_to_the_last_bit(folder: Path) -> None:
    model, meant = open_checkpoint(str(folder)), expected(folder)
    assert len(meant) == 7 and {name.removesuffix(".weight") for name in model.names()} > meant.keys()
    for name, each in meant.items():
        stored = model.read(f"{name}.weight")
        assert not isinstance(stored, Tensor), f"{name} is quantised"
        weight = as_float(stored).to(getattr(torch, each["dtype"]))
        torch.testing.assert_close(weight.flatten()[:4].float(), torch.tensor(each["first"]), rtol=1e-2, atol=1e-6)
        assert digest(weight) == each["sha256"], name
