"""Finds the processes below one, identifies a process beyond its id, and ends all of them."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
RECORD = "processes.json"  # in the folder of a run: its keeper and everything below it


def become_reaper() -> None:
    """Makes this process adopt orphans of its children, so that helpers in other sessions are found too."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def ends_with_parent() -> Callable[[], None]:
    """Returns a preexec_fn that makes the kernel terminate the child when this process is killed."""
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return prepare


def end_all() -> None:
    """Kills every process below this one, in whatever session."""
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
    """Returns process id and start time in ticks, because ids are reused; [] if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else [pid, int(fields[19])]


def runs(known: list[int]) -> bool:
    return bool(known) and identity(known[0]) == known


def end_recorded(run: Path, even_kept: bool = False) -> None:
    """Ends processes that an earlier keeper has recorded in this folder and that still run. even_kept: also if that
    keeper itself, the first of them, still runs."""
    path = run / RECORD
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    if known and (even_kept or not runs(known[0])):
        end_known(known)
        path.unlink(missing_ok=True)


def end_known(known: Iterable[list[int]], grace: float = 3.0) -> None:
    """Terminates those that still run, and kills those that do not end. Ids that were reused are left alone."""
    running = [each for each in known if runs(each)]
    for sent, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
        for each in filter(runs, running):
            with suppress(ProcessLookupError):
                os.kill(each[0], sent)
        deadline = time.monotonic() + patience
        while any(map(runs, running)) and time.monotonic() < deadline:
            time.sleep(0.05)
