"""Watches what slowly goes wrong while a server runs, warns, and reacts; the reaction ends when its cause does.

Each cause has a value that is read from time to time, a threshold at which it begins, a lower one at which it ends, and
a number of readings in a row that both take, so that a value near a threshold does not switch back and forth. A cause
also ends when nothing runs that it could be read from for that long, and with the engine that showed it.

| cause | value | reaction |
|---|---|---|
| memory low | share of memory, of at most 64 GiB, that can still be had | the KV cache takes no more memory |
| memory critical | the same | new requests get 503; neither, but a warning, where a GPU has its own memory |
| GPU throttled | 1 if the GPU is throttled | fewer requests may wait: the queue is halved |
| steps slow | time of decode steps over what they took | the queue is shorter by this factor |
| acceptance collapsed | share of first drafts that are accepted | nothing drafts, for a minute or more |

A slow machine is no reason to refuse what can wait. The queue shrinks as far as requests take longer, so that the last
in it waits no longer than before. Steps that are slow because other programs have the cores do not count at all
(engine/drift.py).

Acceptance cannot be seen while nothing drafts, so drafting is tried again after a pause, which doubles each time that
it collapses again at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdraft.backend import DRAFTING, GROWTH
from sparkdraft.server import readings

if TYPE_CHECKING:
    from sparkdraft.server.service import Service

log = logging.getLogger(__name__)
EVERY = 2.0  # seconds between readings
SLOW_EVERY = 5  # readings between two questions to nvidia-smi, which takes some 50 ms
LEAST_STEPS = 64  # steps that drafted, before their acceptance counts
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 960.0  # seconds without drafting


@dataclass(frozen=True, slots=True)
class Cause:
    name: str
    begins: float
    ends: float
    reaction: str  # in words
    patience: int = 3  # readings in a row at which it begins
    calm: int = 5  # readings in a row at which it ends

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


class Alarm:
    """The state of one cause: it begins and ends after enough readings in a row."""

    def __init__(self, cause: Cause) -> None:
        self.cause, self.value, self.active = cause, float("nan"), False
        self.said = ""  # in words, the last reading that speaks for the state
        self.times = 0  # that it has begun
        self._run = 0  # readings in a row that ask for the other state
        self._missing = 0  # times in a row that there was no reading

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
        """End it if it is active, whatever was read. Returns whether it was."""
        was, self.said = self.active, said
        self._set(False)
        return was

    def _set(self, active: bool) -> None:
        self.active, self._run = active, 0
        self.times += active


class Watchdog:
    def __init__(
        self,
        service: Service,
        memory: Callable[[], readings.Memory | None] = readings.memory_left,
        throttling: Callable[[str], tuple[list[str], str]] = readings.throttling,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service = service
        self.alarms = {cause.name: Alarm(cause) for cause in CAUSES}
        self.unread: dict[str, str] = {}  # causes that cannot be watched here, and why
        self._memory, self._throttling, self._clock = memory, throttling, clock
        self._count = 0
        self._counted = (0, 0)  # steps that drafted and first drafts accepted, at the last reading that counted
        self._pause, self._try_at = FIRST_PAUSE, 0.0
        self._compared = 0  # steps that the last reading of their times was made of
        self._engine: object = None  # the info of the engine that the parts were switched in
        self._switched: dict[str, bool] = {}  # parts of that engine, and whether they are on

    async def run(self) -> None:
        """Forever."""
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
        """For /v1/status."""
        alarms = {
            name: {
                "active": alarm.active,
                "value": alarm.value if alarm.value == alarm.value else None,
                "times": alarm.times,
                "reaction": self._reaction(alarm.cause),
            }
            for name, alarm in self.alarms.items()
        }
        return {"causes": alarms, "not watched": self.unread}

    @property
    def warnings(self) -> list[str]:
        return [f"{name}: {a.said}; {self._reaction(a.cause)}" for name, a in self.alarms.items() if a.active]

    # ---- the parts

    @property
    def _facts(self) -> Mapping[str, Any]:
        info = self.service.client.info
        return info.plan_facts if info else {}

    def _reaction(self, cause: Cause) -> str:
        """In words, as it is on this device."""
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
        """An engine that was started again has all its parts on, and nothing is known of it yet."""
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
        """Without new steps the last ratio says nothing new. Only if nothing runs, that is a reading of its own: steps
        of a request that runs may be of a new kind, or beside other programs' load."""
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
        """The acceptance of first drafts since the last reading that counted; while nothing drafts, when to try."""
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
        """Bring the reactions into line with the alarms."""
        service, on = self.service, {name: alarm.active for name, alarm in self.alarms.items()}
        gate, reacts = service.gate, self._facts.get("gpu_memory") != "own"  # to memory
        gate.closed = self._reason(MEMORY_CRITICAL) if reacts else ""
        gate.slow = self._reason(THROTTLED) or self._reason(SLOW)
        slowdowns = 2.0 * on[THROTTLED.name], self.alarms[SLOW.name].value if on[SLOW.name] else 0.0
        gate.slowdown = max(1.0, *slowdowns)
        wanted = {GROWTH: not (on[MEMORY_LOW.name] and reacts), DRAFTING: not on[COLLAPSED.name]}
        for part, is_on in wanted.items():
            if self._switched.get(part, True) != is_on and service.ready:
                service.client.switch(part, is_on)
                self._switched[part] = is_on

    def _reason(self, cause: Cause) -> str:
        alarm = self.alarms[cause.name]
        return alarm.said if alarm.active else ""
