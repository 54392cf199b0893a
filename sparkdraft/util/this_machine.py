"""This machine: its usable cores, the CPU time that other programs take, and what nvidia-smi says. No torch."""

from __future__ import annotations

import csv
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple


def usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


# ---- other programs
#
# On a busy machine every speed is too low, and a ratio of two speeds is noise. The demo, the doctor and the benchmarks
# watch for it and say so.

STAT = Path("/proc/stat")
ENOUGH = 0.9  # of the cores that a measurement needs: daemons and timers of an idle machine take a few per cent


class Spent(NamedTuple):
    """Seconds so far."""

    wall: float
    busy: float  # of this process's cores, by any program
    own: float  # by this process and its children that have ended


def spent() -> Spent | None:
    """Return the seconds spent so far; None if the system does not say."""
    try:
        lines = STAT.read_text().splitlines()
    except OSError:
        return None
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    busy = 0
    for name, *ticks in map(str.split, lines):
        if name in cores:
            user, nice, system, _idle, _waits_for_disk, *interrupts_and_stolen = map(int, ticks[:8])
            busy += user + nice + system + sum(interrupts_and_stolen)
    return Spent(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]))


class OtherPrograms:
    """Measures the CPU time that other programs take, from its creation on."""

    def __init__(self) -> None:
        self.cores = usable_cores()
        self._load = os.getloadavg()[0]
        self._begin = spent()

    @property
    def taken(self) -> float:
        """Cores that other programs used on average, or else the load average at the start."""
        now = spent()
        if not now or not self._begin:
            return min(self._load, self.cores)
        wall, busy, own = (b - a for a, b in zip(self._begin, now, strict=True))
        return min(max((busy - own) / max(wall, 1e-9), 0.0), self.cores)

    def disturbance(self, device: str, threads: int = 0) -> str:
        """Say why what was measured meanwhile is too low; "" if there were cores enough. threads: of a measurement on
        the CPU, by default one per core. A GPU needs one core to launch its steps."""
        taken, needed = self.taken, (threads or self.cores) if device == "cpu" else 1
        if self.cores - taken >= ENOUGH * min(needed, self.cores):
            return ""
        return f"other programs took {100 * taken / self.cores:.0f} % of the {self.cores} CPU cores"


# ---- nvidia-smi

REASONS = "clocks_event_reasons.active"
# Bits of REASONS that lower the clocks. Idle (1) and clocks that an application set (2) are no faults.
POWER_LIMIT = 0x04  # which a GPU reaches under full load, too
HELD_BACK = {
    POWER_LIMIT: "the power limit",
    0x08: "a slowdown of the hardware (heat, or its power supply)",
    0x20: "heat, by the driver",
    0x40: "heat, by the hardware",
    0x80: "the power supply's brake",
}
SECONDS = 10  # that nvidia-smi may take


def ask(
    fields: Sequence[str],
    gpu: str = "",
    meanwhile: Callable[[], object] = lambda: time.sleep(0.01),
    program: str = "nvidia-smi",
) -> tuple[list[list[str]], str]:
    """Return the fields of each GPU, or why nvidia-smi cannot be asked. gpu: UUID of the only one to ask for.
    meanwhile: called repeatedly until the answer comes."""
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    command += ["-i", gpu] if gpu else []
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as asked:
            deadline = time.monotonic() + SECONDS
            meanwhile()  # once at least, however soon it answers
            while asked.poll() is None and time.monotonic() < deadline:
                meanwhile()
            is_late = asked.poll() is None
            asked.kill()  # does nothing to one that has ended
            text = asked.communicate()[0]
    except FileNotFoundError:
        return [], "nvidia-smi is not installed"
    except OSError as error:
        return [], f"nvidia-smi cannot be run ({error.strerror})"
    if is_late:
        return [], f"nvidia-smi did not answer within {SECONDS} s"
    if asked.returncode:
        said = text.strip().splitlines()[0] if text.strip() else asked.returncode
        return [], f"nvidia-smi fails ({said})"
    rows = csv.reader(text.strip().splitlines(), skipinitialspace=True)
    return [row for row in rows if len(row) == len(fields)], ""


def held_back(reasons: str) -> int | None:
    """Parse the bits of REASONS as nvidia-smi prints them; None if it does not tell."""
    try:
        return int(reasons, 16)
    except ValueError:  # "[N/A]"
        return None
