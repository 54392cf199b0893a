"""The CI script runs both stages, fails if one of them does, and does not silently skip kernels; and no test stops the
clock of others."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

WHEELS = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")  # as pyproject.toml has it
RUN = Path(__file__).parent.parent / ".ci" / "run"


@pytest.mark.parametrize(
    ("failing", "stages"), [("none", ["test", "test-long"]), ("test", ["test"]), ("test-long", ["test", "test-long"])]
)
def test_a_stage_that_fails_fails_the_run(tmp_path: Path, failing: str, stages: list[str]) -> None:
    """The real make is replaced by one that only notes its target, and the browser's driver by one that is not called,
    so that none is installed."""
    for name, script in (
        ("make", f'echo "$1" >> {tmp_path}/ran; [ "$1" != {failing} ] || exit 7'),
        ("chromedriver", ""),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run([RUN], env=environment, capture_output=True, text=True)
    assert (tmp_path / "ran").read_text().split() == stages
    assert result.returncode == (0 if failing == "none" else 7), result.stderr
    for stage in stages:
        assert f"make {stage}: exit status {7 if stage == failing else 0} after " in result.stdout


@pytest.mark.skipif(not WHEELS, reason="Triton has no wheel for this machine")
def test_the_gpu_kernels_are_not_skipped_for_lack_of_triton() -> None:
    """Without it all of tests/kernels/test_cuda*.py would be skipped unnoticed."""
    assert find_spec("triton"), "Triton is not installed: run make dev"


def test_no_test_replaces_the_clock_of_the_whole_process() -> None:
    """Servers of other tests run in threads beside. An event loop that reads a time of 0 once waits for hours: it takes
    the time of its next timer for the seconds until then. Replace the name `time` in the module under test instead."""
    replaced = re.compile(r"""setattr\((\w+\.)*time,|setattr\("([\w.]+\.)?time\.""")
    found = {
        f"{path.name}: {line.strip()}"
        for path in Path(__file__).parent.rglob("*.py")
        for line in path.read_text().splitlines()
        if replaced.search(line)
    }
    assert not found
