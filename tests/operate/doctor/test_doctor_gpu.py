"""The doctor as typed, on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkdraft.cli.main import main
from tests.kernels.triton_device import gpu_only
from tests.models.tiny import write_tiny


@gpu_only
def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(write_tiny(tmp_path / "tiny", "llama")), "--device", "cuda", "--json"]) <= 1
    report = json.loads(capsys.readouterr().out)
    names = {each["name"]: each for each in report["findings"]}
    assert {"GPU", "clocks", "memory bandwidth", "matrix tiles", "attention tiles", "kernel launches"} <= names.keys()
    assert "launched ahead" in names["overlapped steps"]["proof"] and "replayed" in names["decode steps"]["proof"]
