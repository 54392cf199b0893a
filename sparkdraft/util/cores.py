"""The CPU cores that this process may use: those of its affinity, not all that the machine has. No torch."""

from __future__ import annotations

import os


def usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
