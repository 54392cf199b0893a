"""Processes: who is below one, which one a number meant, and how to end all of them."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def become_reaper() -> None:
    """Become the parent of whatever children leave behind: so are helpers found that changed their session."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def ends_with_parent() -> Callable[[], None]:
    """What a child runs before its program, so that the kernel tells it to end when this process is killed."""
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return prepare


def end_all() -> None:
    """Kill every process that is below this one, also those that have left the child's session."""
    while below := children(os.getpid()):
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found


def descendants(pid: int) -> list[int]:
    found = children(pid)
    for each in found:
        found += children(each)
    return found


def identity(pid: int) -> list[int]:
    """The number and the time of start, in ticks since the system's: numbers are used again. Empty: there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else [pid, int(fields[19])]


def runs(known: list[int]) -> bool:
    return bool(known) and identity(known[0]) == known


def end_known(known: Iterable[list[int]], grace: float = 3.0) -> list[int]:
    """Tell those that still run to end, kill those that do not; returns their numbers. No other process is touched."""
    running = [each for each in known if runs(each)]
    for sent, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
        for each in filter(runs, running):
            with suppress(ProcessLookupError):
                os.kill(each[0], sent)
        deadline = time.monotonic() + patience
        while any(map(runs, running)) and time.monotonic() < deadline:
            time.sleep(0.05)
    return [each[0] for each in running]
