"""Watches what slowly goes wrong while a server runs, warns, and reacts; the reaction ends when its cause does.

Each cause has a threshold at which it begins and one at which it ends. Both take several readings in a row. A cause
also ends after as long without readings, and with the engine that showed it.

| cause | value | reaction |
|---|---|---|
| memory low | available share of the memory, or of 64 GiB | the KV cache takes no more memory |
| memory critical | the same | new requests get 503 |
| GPU throttled | 1 if the GPU is throttled | fewer requests may wait: the queue is halved |
| steps slow | time of decode steps over their usual time | the queue is shorter by this factor |
| acceptance collapsed | share of first drafts that are accepted | nothing drafts, for a minute or more |

Where a GPU has its own memory, low memory only causes a warning. The queue shrinks as requests slow down, so that the
last request in it waits no longer than before. Steps that are slow because of other programs' load do not count
(engine/drift.py). Acceptance cannot be seen while nothing drafts, so drafting is tried again after a pause, which
doubles each time that acceptance collapses again at once.

Memory and throttling are read from the system: a server that swaps may get no answer from its engine, and the driver's
number of free bytes leaves out the page cache where GPU and CPU share one memory.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sparkdraft.backend import DRAFTING, GROWTH
from sparkdraft.server.engine_client import EngineClient
from sparkdraft.server.guards import Gate
from sparkdraft.util.this_machine import HELD_BACK, POWER_LIMIT, REASONS, ask, held_back

log = logging.getLogger(__name__)
EVERY = 2.0  # seconds between readings
SLOW_EVERY = 5  # readings between two questions to nvidia-smi, which takes some 50 ms
LEAST_STEPS = 64  # steps that drafted, before their acceptance counts
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 960.0  # seconds without drafting
GIB = 1 << 30
ENOUGH = 64 * GIB  # a larger machine counts as this large; 6 % of it are somewhat less than 4 GiB


@dataclass(frozen=True, slots=True)
class Cause:
    name: str
    begins: float
    ends: float
    reaction: str  # in words
    patience: int = 3  # readings in a row after which it begins
    calm: int = 5  # readings in a row after which it ends

    @property
    def is_high(self) -> bool:
        return self.begins > self.ends


MEMORY_LOW = Cause("memory low", 0.06, 0.09, "the KV cache takes no more memory")
MEMORY_CRITICAL = Cause("memory critical", 0.03, 0.05, "new requests get 503", patience=2)
THROTTLED = Cause("GPU throttled", 1, 0, "half as many requests may wait", 2, 2)
SLOW = Cause("steps slow", 2.5, 1.5, "fewer requests may wait, by the same factor", patience=10)
COLLAPSED = Cause("acceptance collapsed", 0.05, 0.15, "drafting is off for a while", patience=2)
CAUSES = (MEMORY_LOW, MEMORY_CRITICAL, THROTTLED, SLOW, COLLAPSED)
MEMORY = (MEMORY_LOW, MEMORY_CRITICAL)
OF_ENGINE = (SLOW, COLLAPSED)  # a new engine begins without them
OWN_MEMORY = "this is only a warning, because the model is in the GPU's own memory"
UNUSED = "torch gives back the memory that it keeps unused"
NOT_COMPARED = "the kernel does not say how long threads wait for a core, so other programs' load cannot be told apart"


@dataclass(frozen=True, slots=True)
class Memory:
    available: float  # bytes, without swapping
    total: float

    @property
    def level(self) -> float:
        """The available share of the whole, or of ENOUGH on a larger machine."""
        return self.available / min(self.total, ENOUGH)

    @property
    def said(self) -> str:
        share = self.available / self.total
        return f"{share:.1%} of the memory is available ({self.available / GIB:.1f} GiB)"


def memory_left(root: Path = Path("/")) -> Memory | None:
    """The memory of the machine or the control group, whichever has less left; None: not known."""
    found = []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines if ":" in line)}
        found.append(Memory(1024 * sizes["MemAvailable"], 1024 * sizes["MemTotal"]))
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        group = root / "sys/fs/cgroup"
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = int(stat["inactive_file"]) + int(stat["active_file"])  # which the system would drop
        found.append(Memory(limit - (used - files), limit))
    except (OSError, KeyError, ValueError):
        pass  # no control group, or no limit ("max")
    return min((each for each in found if each.total), key=lambda each: each.level, default=None)


def throttling(gpu: str = "", program: str = "nvidia-smi") -> tuple[list[str], str]:
    """Why the GPU with this UUID is throttled, and why that could not be read, or "". The power limit, which is reached
    under full load, does not count. Takes some 50 ms: call it in a thread."""
    rows, problem = ask([REASONS], gpu, program=program)
    masks = [held_back(row[0]) for row in rows]
    if not problem and (not masks or None in masks):
        problem = f"nvidia-smi does not say: {rows[0][0] if rows else 'no GPU'}"
    found = [name for bit, name in HELD_BACK.items() if bit != POWER_LIMIT and any((mask or 0) & bit for mask in masks)]
    return ([], problem) if problem else (found, "")


class Alarm:
    """The state of one cause: it begins and ends after enough readings in a row."""

    def __init__(self, cause: Cause) -> None:
        self.cause, self.value, self.active = cause, float("nan"), False
        self.said = ""  # the last reading that supports the state, in words
        self.times = 0  # how often it has begun
        self._run = 0  # readings in a row that ask for the other state
        self._missing = 0  # missing readings in a row

    def take(self, value: float | None, said: str = "") -> bool:
        """Take a reading, None if there is none. said: the reading in words. Returns whether the state has changed."""
        cause = self.cause
        if value is None:
            self._missing += 1
            return self._missing >= cause.calm and self.end("there are no new readings")
        self.value, self._missing = value, 0
        sign = 1 if cause.is_high else -1
        other = sign * (value - (cause.ends if self.active else cause.begins))
        is_other = other <= 0 if self.active else other >= 0
        self._run = self._run + 1 if is_other else 0
        changes = self._run >= (cause.calm if self.active else cause.patience)
        if changes or not is_other:
            self.said = said
        if changes:
            self._set(not self.active)
        return changes

    def end(self, said: str) -> bool:
        """End it whatever was read. Returns whether it was active."""
        was, self.said = self.active, said
        self._set(False)
        return was

    def _set(self, active: bool) -> None:
        self.active, self._run = active, 0
        self.times += active


T = TypeVar("T")


class Watched(Protocol):
    """The part of a server that the watchdog reads and acts on (service.py)."""

    client: EngineClient
    gate: Gate

    @property
    def ready(self) -> bool: ...

    async def engine_status(self) -> dict[str, Any]: ...

    async def in_thread(self, work: Callable[[], T]) -> T: ...


class Watchdog:
    def __init__(
        self,
        service: Watched,
        memory: Callable[[], Memory | None] = memory_left,
        throttling: Callable[[str], tuple[list[str], str]] = throttling,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service = service
        self.alarms = {cause.name: Alarm(cause) for cause in CAUSES}
        self.unread: dict[str, str] = {}  # causes that cannot be watched here, and why
        self._memory, self._throttling, self._clock = memory, throttling, clock
        self._count = 0
        self._counted = (0, 0)  # steps that drafted and first drafts accepted, at the last reading that counted
        self._pause, self._try_at = FIRST_PAUSE, 0.0
        self._compared = 0  # steps compared at the last reading
        self._engine: object = None  # the info of the engine that is watched
        self._switched: dict[str, bool] = {}  # parts of that engine, and whether they are on

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception as error:  # a watchdog that dies would be worse than one that misses something
                log.error("the watchdog failed because of a bug", exc_info=error)
            await asyncio.sleep(EVERY)

    async def look(self) -> None:
        """Read everything once, and react."""
        service, facts = self.service, self._facts
        self._meet(service.client.info)
        left = self._memory()
        for cause in MEMORY:
            self._take(cause, left.level if left else None, left.said if left else "")
        if facts.get("device") == "cuda" and self._count % SLOW_EVERY == 0:
            await self._ask_gpu(str(facts.get("gpu", "")))
        self._count += 1
        if service.ready and (status := await service.engine_status()):  # else a long step runs, and nothing is known
            self._step_times(status)
            self._acceptance(status.get("drafting") or {})
        self._react()

    def describe(self) -> dict[str, Any]:
        causes = {
            name: {
                "active": alarm.active,
                "value": None if math.isnan(alarm.value) else alarm.value,
                "times": alarm.times,
                "reaction": self._reaction(alarm.cause),
            }
            for name, alarm in self.alarms.items()
        }
        return {"causes": causes, "not watched": self.unread}

    @property
    def warnings(self) -> list[str]:
        return [f"{name}: {a.said}; {self._reaction(a.cause)}" for name, a in self.alarms.items() if a.active]

    # ---- the parts

    @property
    def _facts(self) -> Mapping[str, Any]:
        info = self.service.client.info
        return info.plan_facts if info else {}

    def _reaction(self, cause: Cause) -> str:
        """The reaction to a cause on this device, in words."""
        if cause in MEMORY and self._facts.get("gpu_memory") == "own":
            return OWN_MEMORY
        return UNUSED if cause is MEMORY_LOW and self._facts.get("device") == "cuda" else cause.reaction

    def _take(self, cause: Cause, value: float | None, said: str = "") -> None:
        alarm = self.alarms[cause.name]
        if alarm.take(value, said):
            self._say(alarm)

    def _say(self, alarm: Alarm) -> None:
        if alarm.active:
            log.warning("%s: %s; %s until this ends", alarm.cause.name, alarm.said, self._reaction(alarm.cause))
        else:
            log.warning("%s has ended: %s; back to normal", alarm.cause.name, alarm.said)

    def _meet(self, info: object) -> None:
        """Begin anew with a restarted engine, which has all its parts on."""
        if self._engine is info:
            return
        self._engine, self._switched, self._compared, self._counted = info, {}, 0, (0, 0)
        for alarm in (self.alarms[cause.name] for cause in OF_ENGINE):
            if alarm.end("a new engine runs"):
                self._say(alarm)

    async def _ask_gpu(self, gpu: str) -> None:
        names, problem = await self.service.in_thread(lambda: self._throttling(gpu))
        if problem:
            self.unread[THROTTLED.name] = problem
            return self._take(THROTTLED, None)
        self.unread.pop(THROTTLED.name, None)
        said = f"the GPU is throttled ({', '.join(names)})" if names else "the GPU is not throttled"
        self._take(THROTTLED, float(bool(names)), said)

    def _step_times(self, status: Mapping[str, Any]) -> None:
        """Without new steps the ratio is not read again, which counts as a missing reading only if nothing runs: a
        running request's steps may be of a new kind, or delayed by other programs' load."""
        drift, compared = status.get("step_drift"), status.get("steps_compared", 0)
        if compared is None:
            self.unread[SLOW.name] = NOT_COMPARED
            return
        is_new, self._compared = compared != self._compared, compared
        if drift is not None and is_new:
            self._take(SLOW, drift, f"decode steps take {drift:.1f} times as long as before")
        elif not status.get("running"):
            self._take(SLOW, None)

    def _acceptance(self, drafting: Mapping[str, Any]) -> None:
        """Read the acceptance of first drafts since the last reading; while drafting is off, decide when to retry."""
        alarm, now = self.alarms[COLLAPSED.name], self._clock()
        steps = int(drafting.get("num_spec_steps") or 0)
        accepted = int((drafting.get("per_position_accepted") or [0])[0])
        if alarm.active:
            if now >= self._try_at:
                alarm.end("drafting is tried again")
                log.warning("%s: drafting is tried again after %.0f s", COLLAPSED.name, self._pause)
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._counted = steps, accepted
            return
        new = steps - self._counted[0]
        if new < 0:  # a new engine counts from 0
            self._counted = 0, 0
        elif new >= LEAST_STEPS:
            share = (accepted - self._counted[1]) / new
            self._counted = steps, accepted
            self._take(COLLAPSED, share, f"{share:.1%} of first drafts are accepted")
            if share >= COLLAPSED.ends:
                self._pause = FIRST_PAUSE
            if alarm.active:
                self._try_at = now + self._pause

    def _react(self) -> None:
        """Make the reactions fit the alarms."""
        service, on = self.service, {name: alarm.active for name, alarm in self.alarms.items()}
        gate, reacts_to_memory = service.gate, self._facts.get("gpu_memory") != "own"
        gate.closed = self._reason(MEMORY_CRITICAL) if reacts_to_memory else ""
        gate.slow = self._reason(THROTTLED) or self._reason(SLOW)
        slowdowns = 2.0 * on[THROTTLED.name], self.alarms[SLOW.name].value if on[SLOW.name] else 0.0
        gate.slowdown = max(1.0, *slowdowns)
        wanted = {GROWTH: not (on[MEMORY_LOW.name] and reacts_to_memory), DRAFTING: not on[COLLAPSED.name]}
        for part, is_on in wanted.items():
            if self._switched.get(part, True) != is_on and service.ready:
                service.client.switch(part, is_on)
                self._switched[part] = is_on

    def _reason(self, cause: Cause) -> str:
        alarm = self.alarms[cause.name]
        return alarm.said if alarm.active else ""
