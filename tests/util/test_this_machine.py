"""What other programs take of the cores is found, and what this process takes itself is not counted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparkdraft.util import this_machine
from sparkdraft.util.this_machine import OtherPrograms, Spent, spent
from tests.patience import wait_for


def test_programs_that_keep_all_cores_busy_are_found() -> None:
    """While this process sleeps, all that is computed on its cores is others' work, however many there are."""
    cores = len(os.sched_getaffinity(0))
    spins = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * cores)]
    try:
        for each in spins:
            wait_for(lambda pid=each.pid: "python" in os.readlink(f"/proc/{pid}/exe"))
        others = OtherPrograms()
        time.sleep(0.5)
        assert others.taken > 0.8 * cores
        assert others.disturbance("cpu").endswith(f" % of the {cores} CPU cores")
    finally:
        for each in spins:
            each.kill()
            each.wait()


def test_what_the_system_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle time and waiting for a disk are not work, and other cores are not ours. Guests are counted as user time."""
    (tmp_path / "stat").write_text(
        "cpu  900 900 900 900 900 900 900 900 900 900\n"
        "cpu0 10 20 30 500 600 1 2 3 10 20\ncpu1 100 0 0 500 0 0 0 0 0 0\ncpu2 700 0 0 0 0 0 0 0 0 0\nintr 5 5\n"
    )
    monkeypatch.setattr(this_machine, "STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    found = spent()
    assert found and found.busy == pytest.approx((66 + 100) / os.sysconf("SC_CLK_TCK"))
    (tmp_path / "stat").unlink()
    assert spent() is None and 0 <= OtherPrograms().taken <= 2, "the load average takes its place"


@pytest.mark.parametrize(
    ("busy", "device", "threads", "found"),
    [
        (16.0, "cpu", 0, ""),  # all of it is this process's
        (17.0, "cpu", 0, ""),  # a fortieth: an idle machine has as much
        (24.0, "cpu", 0, "other programs took 20 % of the 4 CPU cores"),
        (24.0, "cpu", 3, ""),  # the fourth core is theirs
        (36.0, "cpu", 3, "other programs took 50 % of the 4 CPU cores"),
        (36.0, "cuda", 0, ""),
        (55.0, "cuda", 0, "other programs took 98 % of the 4 CPU cores"),
    ],
)
def test_cores_that_a_measurement_lacks(
    busy: float, device: str, threads: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds, in which this process computes for 16 on 4 cores."""
    read = iter([Spent(100.0, 1000.0, 50.0), Spent(110.0, 1000.0 + busy, 66.0)])
    monkeypatch.setattr(this_machine, "spent", lambda: next(read))
    monkeypatch.setattr(this_machine, "usable_cores", lambda: 4)
    assert OtherPrograms().disturbance(device, threads) == found
