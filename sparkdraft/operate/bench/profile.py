"""Where a decode step's time goes: its parts, its most expensive kernels, and the gaps in which the device was idle.

Parts are timed by waiting for the device after each of them; kernels and gaps come from torch.profiler. Both disturb
the speed, so they run in passes of their own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from sparkdraft.core import Batch
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.sampler import Sampled, Sampler, SampleRow
from sparkdraft.operate.forecast.rates import wait
from sparkdraft.operate.instrument import replaced

MOST = 10  # rows per table
WIDTH = 56  # characters of a kernel's name: some are longer than a screen
ACTIVITY = {"cuda": ProfilerActivity.CUDA, "cpu": ProfilerActivity.CPU}
UNSEEN = {
    "native": "the native kernels are not torch operators and count as idle here; --dtype float32 runs operators",
    "cuda": "torch.profiler saw no kernel on this GPU: its driver may allow tracing to administrators only",
    "reference": "torch.profiler saw no operator",
}


# ---- parts


@dataclass(slots=True)
class Parts:
    """Seconds spent in parts of the steps. The rest is scheduling, committing, and observing at block borders."""

    draft: float = 0.0  # proposing drafts
    target: float = 0.0  # running the target and sampling, until the ids can be read


class TimedSampler:
    """Waits for the sampler's result at once, as the engine would a moment later."""

    def __init__(self, inner: Sampler, device: str, parts: Parts) -> None:
        self.inner, self.device, self.parts = inner, device, parts
        self.begin = 0.0  # set when the target starts

    def __call__(self, logits: Tensor, rows: list[SampleRow]) -> Sampled:
        sampled = self.inner(logits, rows)
        wait(self.device)
        self.parts.target += time.perf_counter() - self.begin
        return sampled

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextmanager
def timed_parts(engine: Engine, parts: Parts) -> Iterator[None]:
    """Times the engine's steps into 'parts'."""
    device = engine.plan.device
    timed = TimedSampler(engine.sampler, device, parts)
    propose, run = engine.drafting.propose, engine.runner.run

    def timed_propose(batch: Batch) -> None:
        wait(device)
        begin = time.perf_counter()
        propose(batch)
        wait(device)
        parts.draft += time.perf_counter() - begin

    def timed_run(batch: Batch) -> Tensor:
        timed.begin = time.perf_counter()
        return run(batch)

    stand_ins = (
        (engine.drafting, "propose", timed_propose),
        (engine.runner, "run", timed_run),
        (engine, "sampler", timed),
    )
    with replaced(*stand_ins):
        yield


# ---- kernels and gaps


@dataclass(frozen=True, slots=True)
class Span:
    """A run of a kernel, or on a CPU of an operator, which may contain others."""

    name: str
    start: float  # microseconds
    end: float
    own: float  # without what it contains


@dataclass(slots=True)
class Cost:
    """All runs of one kernel, or all gaps between the same two."""

    name: str
    count: int = 0
    total: float = 0.0  # microseconds
    longest: float = 0.0

    def add(self, time: float) -> None:
        self.count, self.total, self.longest = self.count + 1, self.total + time, max(self.longest, time)


@dataclass(slots=True)
class Profile:
    steps: int
    wall: float  # microseconds of those steps, by the host's clock
    busy: float = 0.0  # time in which at least one kernel ran
    kernels: list[Cost] = field(default_factory=list)  # the most expensive
    gaps: list[Cost] = field(default_factory=list)  # the largest in sum
    note: str = ""  # what could not be seen, and why

    def as_dict(self) -> dict[str, Any]:
        tables = {name: [self._costs(c) for c in getattr(self, name)] for name in ("kernels", "gaps")}
        scale = 1e-3 / self.steps
        sums = {"step_ms": self.wall * scale, "busy_ms": self.busy * scale, "idle_ms": (self.wall - self.busy) * scale}
        return {"steps": self.steps} | {k: round(v, 4) for k, v in sums.items()} | tables | {"note": self.note}

    def _costs(self, cost: Cost) -> dict[str, Any]:
        each = {"a_step": cost.count / self.steps, "us_each": cost.total / cost.count, "longest_us": cost.longest}
        each["ms_a_step"] = cost.total * 1e-3 / self.steps
        return {"name": cost.name} | {k: round(v, 4) for k, v in each.items()}

    def text(self) -> str:
        scale = 1e-3 / self.steps
        lines = [
            f"profile of {self.steps} decode steps: {self.wall * scale:.2f} ms per step under the profiler, "
            f"busy {self.busy * scale:.2f} ms, idle {(self.wall - self.busy) * scale:.2f} ms"
        ]
        for title, costs in (("most expensive", self.kernels), ("idle between", self.gaps)):
            lines.append(f"  {title:<{WIDTH}}  n/step  us each  longest us    ms/step  of the step")
            lines += [self._line(cost) for cost in costs]
        return "\n".join(lines + ([f"  note: {self.note}"] if self.note else []))

    def _line(self, cost: Cost) -> str:
        each, share = cost.total / cost.count, cost.total / self.wall
        amounts = f"{cost.count / self.steps:6.1f}  {each:7.1f}  {cost.longest:10.1f}"
        return f"  {cost.name:<{WIDTH}}  {amounts}  {cost.total * 1e-3 / self.steps:9.3f}  {share:11.1%}"


def recorder(device: str) -> profile:
    """Record kernels on a GPU, operators on a CPU: each further activity slows the host down."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it prints on standard error that it starts and stops
    return profile(activities=[ACTIVITY[device]], acc_events=True)


def summary(profiler: profile, kernels: str, seconds: list[float]) -> Profile:
    """Summarise recorded steps. seconds: of each. kernels: their module, as a plan names it."""
    spans = list(_spans(profiler, DeviceType.CUDA if kernels == "cuda" else DeviceType.CPU))
    found = Profile(len(seconds), sum(seconds) * 1e6, note="" if spans and kernels != "native" else UNSEEN[kernels])
    found.kernels = most_expensive(spans)
    found.busy, found.gaps = find_gaps(spans)
    return found


def _spans(profiler: profile, kind: DeviceType) -> Iterator[Span]:
    for event in profiler.events() or ():
        if event.device_type == kind:
            start, end = event.time_range.start, event.time_range.end
            own = event.self_cpu_time_total if kind == DeviceType.CPU else end - start
            yield Span(event.name, start, end, own)


def most_expensive(spans: Iterable[Span]) -> list[Cost]:
    costs: dict[str, Cost] = {}
    for span in spans:
        costs.setdefault(span.name, Cost(_short(span.name, WIDTH))).add(span.own)
    return _top(costs.values())


def find_gaps(spans: Iterable[Span]) -> tuple[float, list[Cost]]:
    """Return (microseconds in which at least one ran, the largest idle times by the pair of kernels around them)."""
    busy, gaps, last = 0.0, dict[tuple[str, str], Cost](), None
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        reached = last.end if last else span.start
        busy += max(span.end - max(span.start, reached), 0.0)
        if last and span.start > reached:
            half = (WIDTH - 4) // 2
            name = f"{_short(last.name, half)} -> {_short(span.name, half)}"
            gaps.setdefault((last.name, span.name), Cost(name)).add(span.start - reached)
        if last is None or span.end > reached:
            last = span
    return busy, _top(gaps.values())


def _top(costs: Iterable[Cost]) -> list[Cost]:
    return sorted(costs, key=lambda cost: -cost.total)[:MOST]


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"
