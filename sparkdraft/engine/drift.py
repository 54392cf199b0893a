"""Whether steps take longer than they did: the time of recent decode steps over what such steps took before.

Steps are told apart by their requests, tokens and context. The usual time of a kind follows the fastest steps and is
never raised, so a machine that has become slow does not pass for a usual one. Other programs' load makes steps longer
too: steps are judged in batches, and a batch is dropped if a thread of this process waited for a core through much of
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

Kind = tuple[int, int, int]

LEARNT = 16  # steps of a kind before its later ones are compared
FALL = 0.25  # how far a faster step lowers what its kind takes
WEIGHT = 1 / 64  # of one step in the recent mean
BATCH = 1.0  # seconds of steps that are judged together
WAITED = 0.2  # share of a batch's time that a thread may have waited for a core
LATE = 8.0  # a step that is later than this counts as this late: a kernel was compiled, or the process was stopped


class CoreWait:
    """How long threads of this process were ready to run while others had all the cores."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._before: dict[str, int] = {}  # nanoseconds, per thread

    def __call__(self) -> float | None:
        """Seconds since the last call, of the thread that waited longest. None: the kernel does not say."""
        now: dict[str, int] = {}
        with suppress(OSError, ValueError):
            for thread in os.listdir(self._tasks):
                with suppress(FileNotFoundError):  # it has just ended
                    ran, waited, _ = map(int, (self._tasks / thread / "schedstat").read_text().split())
                    if ran:  # a kernel that does not count says 0 everywhere
                        now[thread] = waited
        most = max((waited - self._before.get(thread, waited) for thread, waited in now.items()), default=None)
        self._before = now
        return None if most is None else most / 1e9


class StepDrift:
    def __init__(self, core_wait: Callable[[], float | None] | None = None) -> None:
        self._core_wait = core_wait or CoreWait()
        self.is_known = self._core_wait() is not None  # whether steps can be compared here
        self._usual: dict[Kind, float] = {}
        self._steps: dict[Kind, int] = {}
        self._batch: list[float] = []  # each step's time over the usual one
        self._batch_seconds = 0.0
        self._recent, self._num_recent = 1.0, 0
        self.num_compared = 0  # steps so far: a reader sees by it whether the ratio is new

    @property
    def ratio(self) -> float | None:
        """None before there are steps to compare."""
        return self._recent if self._num_recent * WEIGHT >= 1 else None

    def learn(self, num_seqs: int, num_rows: int, context: int, seconds: float) -> None:
        """One step in which requests only decoded. context: tokens of all requests together. 0 seconds: its time is not
        known."""
        if not seconds:
            return
        kind = _about(num_seqs), _about(num_rows), _about(context >> 8)
        steps, usual = self._steps.get(kind, 0), self._usual.get(kind, seconds)
        self._steps[kind] = steps + 1
        self._usual[kind] = usual + FALL * min(seconds - usual, 0.0)
        if steps >= LEARNT:
            self._batch.append(min(seconds / usual, LATE))
        self._batch_seconds += seconds
        if self._batch_seconds >= BATCH:
            self._judge()

    def _judge(self) -> None:
        """Counts the steps of the batch, unless other programs had the cores meanwhile."""
        waited = self._core_wait()
        if waited is not None and waited <= WAITED * self._batch_seconds:
            for late in self._batch:
                self._num_recent += 1
                self._recent += (late - self._recent) * max(WEIGHT, 1 / self._num_recent)
            self.num_compared += len(self._batch)
        self._batch, self._batch_seconds = [], 0.0

    def forget_recent(self) -> None:
        self._batch, self._batch_seconds = [], 0.0
        self._recent, self._num_recent = 1.0, 0


def _about(number: int) -> int:
    """The number's first four binary digits."""
    shift = max(number.bit_length() - 4, 0)
    return number >> shift << shift
