"""The script that trains the package's drafter, run once at toy size on a CPU: all its stages, and a second call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdraft.drafters.dflash import DFlashConfig
from sparkdraft.drafters.find import open_drafter

ROOT = Path(__file__).parent.parent.parent


def call(tmp_path: Path, out: str, *more: str) -> dict[str, object]:
    command = [
        sys.executable,
        str(ROOT / "tools" / "train_default.py"),
        "--device",
        "cpu",
        "--small",
        "--seconds",
        "60",
    ]
    command += ["--out", str(tmp_path / out), "--work", str(tmp_path / "work"), *more]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / out / "results.json").read_text())
    assert isinstance(results, dict) and json.loads(done.stdout.splitlines()[-1]) == results
    return results


@pytest.mark.slow
def test_a_dry_run_and_one_that_goes_on_from_it(tmp_path: Path) -> None:
    first = call(tmp_path, "one")
    assert {"data", "corpus", "training", "trained"} <= set(first)
    for folder in ("weights", "drafter"):
        files = list((tmp_path / "one" / folder).iterdir())
        assert max(file.stat().st_size for file in files) < 16 << 20 and sum(f.stat().st_size for f in files) < 60e6
    source = open_drafter(str(tmp_path / "one" / "drafter"))
    made = DFlashConfig.read(source.config)
    assert made.sees and (made.sees.first, made.sees.last) == (16, 256) and made.draft_vocab_size == 24576
    assert 0 < source.config["trained_context"] <= 320
    steps = first["training"]["all_steps"]  # type: ignore[index]
    second = call(tmp_path, "two", "--resume", str(tmp_path / "one"), "--seed", "1", "--no-evaluation")
    assert "trained" not in second
    assert second["training"]["all_steps"] > steps  # type: ignore[index]
    assert second["settings"]["init"] == str(tmp_path / "one" / "weights")  # type: ignore[index]
