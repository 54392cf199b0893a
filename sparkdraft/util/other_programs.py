"""Measures what other programs take of the CPU while something is timed. No torch.

On a busy machine every speed is too low, and a ratio of two speeds is noise. The demo, the doctor and the benchmarks
watch with this and say so.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from sparkdraft.util.cores import usable_cores

STAT = Path("/proc/stat")
ENOUGH = 0.9  # of the cores that a measurement needs: daemons and timers of an idle machine take a few per cent


class Spent(NamedTuple):
    """Seconds."""

    wall: float
    busy: float  # of this process's cores, by any program
    own: float  # by this process and its children that have ended


def spent() -> Spent | None:
    """None where the system does not say (macOS)."""
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
    """Watches from its creation on."""

    def __init__(self) -> None:
        self.cores = usable_cores()
        self._load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        self._begin = spent()

    @property
    def taken(self) -> float:
        """Cores that other programs used on average; where the system does not say, the load average at the start."""
        now = spent()
        if not now or not self._begin:
            return min(self._load, self.cores)
        wall, busy, own = (b - a for a, b in zip(self._begin, now, strict=True))
        return min(max((busy - own) / max(wall, 1e-9), 0.0), self.cores)

    def disturbance(self, device: str, threads: int = 0) -> str:
        """Why what was measured meanwhile is too low, or "" if there were cores enough. threads: of a measurement on
        the CPU, by default one per core; a GPU needs one core that launches its steps."""
        taken, needed = self.taken, (threads or self.cores) if device == "cpu" else 1
        if self.cores - taken >= ENOUGH * min(needed, self.cores):
            return ""
        return f"other programs took {100 * taken / self.cores:.0f} % of the {self.cores} CPU cores"
