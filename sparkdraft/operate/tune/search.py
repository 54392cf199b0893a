"""Tries settings one knob after the other within a time budget, then compares old and new over all loads.

All speeds come from one function that is passed in (engines.py), so this file sees only numbers. A setting is taken if
it is faster by more than the noise measured beside it (operate/bench/ratios.py). Several lucky measurements may add up,
so the outcome is measured again at the end, and kept only if it is faster overall and slower on no load. No torch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.operate.bench.ratios import Sample, in_turn
from sparkdraft.plan.resolve import Plan

ONE, SEVERAL, BURST, LONG = "one stream", "several streams", "a burst", "a long prompt"
LOADS = (ONE, SEVERAL, BURST, LONG)
TILES = "tiles"  # not a field of EngineConfig: whether the tiles that were found are used


@dataclass(frozen=True, slots=True)
class Knob:
    name: str
    now: Any
    values: tuple[Any, ...]  # to be tried, the likeliest first
    loads: tuple[str, ...]  # that show its effect


def knobs(config: EngineConfig, plan: Plan, depths: Sequence[int], cores: int, kv_formats: Sequence[str]) -> list[Knob]:
    """The knobs of a machine, except those that the user has set. depths: the current choices, the last of which is the
    deepest possible; [0] if nothing drafts. kv_formats: those that the user allows."""
    rows, seqs = plan.max_step_tokens, plan.max_seqs
    found = [
        Knob("max_step_tokens", rows, (2 * rows, rows // 2, 4 * rows, rows // 4), (LONG, BURST)),
        Knob("max_seqs", seqs, (2 * seqs, seqs // 2, 4 * seqs), (BURST,)),
        Knob("kv", plan.kv, tuple(kv_formats), (SEVERAL, LONG)),
    ]
    if plan.device == "cpu":
        found.insert(0, Knob("threads", plan.threads, (cores, cores - 1, cores // 2), (ONE, BURST)))
    if len(depths) > 1 and config.spec == "auto":
        named = ",".join(map(str, depths))
        found.append(Knob("spec_depths", named, tuple(depth_lists(depths[-1])), (ONE, SEVERAL)))
    return [k for each in found if config.is_open(each.name) and (k := _useful(each)).values]


def depth_lists(deepest: int) -> list[str]:
    """The choices of depths to try: few are learnt and captured fast, many come nearer to the best."""
    few = {0, min(3, deepest), deepest}
    shallow = {d for d in (0, 1, 2, 3, 4) if d <= deepest}
    many = {d for d in (0, 1, 2, 3, 5, 7, 10, 15, 23, 31) if d <= deepest} | {deepest}
    return list(dict.fromkeys(",".join(map(str, sorted(depths))) for depths in (many, few, shallow)))


def _useful(knob: Knob) -> Knob:
    values = [v for v in dict.fromkeys(knob.values) if v != knob.now and (not isinstance(v, int) or v > 0)]
    return Knob(knob.name, knob.now, tuple(values), knob.loads)


# ---- the search

Options = Mapping[str, Any]


class Run(NamedTuple):
    """Record how long a run of a load took."""

    tok_s: float
    seconds: float


Measure = Callable[[Options, str], Run]  # settings, load
LEAST_GAIN = 0.01  # smaller gains are not worth a setting, whatever the noise seems to be
LEAST_ROUNDS, MOST_ROUNDS = 2, 6  # of the last comparison
RUNS = 4  # of a round: old, new, new, old
LARGEST_SHARE = 0.5  # of the budget that the last comparison may need


class Budget:
    """The time that is left, and how long each load takes."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.now, self._begin = seconds, now, now()
        self._runs: dict[str, list[float]] = {}

    @property
    def spent(self) -> float:
        return self.now() - self._begin

    @property
    def left(self) -> float:
        return self.seconds - self.spent

    def add(self, load: str, seconds: float) -> None:
        """A run of a load took so long."""
        self._runs.setdefault(load, []).append(seconds)

    def round_seconds(self, loads: Iterable[str], runs: int = RUNS) -> float:
        """The seconds of a round, by medians: one disturbed run must not end the search."""
        return sum(runs * statistics.median(self._runs[load]) for load in loads)


@dataclass(frozen=True, slots=True)
class Compared:
    """New settings against old ones, by load."""

    samples: dict[str, Sample]

    @property
    def ratio(self) -> float:
        return statistics.geometric_mean(sample.ratio for sample in self.samples.values())

    @property
    def noise(self) -> float:
        """The noise of the mean; the loads' errors are independent."""
        return math.hypot(*(sample.noise for sample in self.samples.values())) / len(self.samples)

    @property
    def slower(self) -> list[str]:
        """Loads that are slower by more than their noise."""
        return [name for name, each in self.samples.items() if 1 - each.ratio > max(each.noise, LEAST_GAIN)]

    @property
    def is_faster(self) -> bool:
        return self.ratio - 1 > max(self.noise, LEAST_GAIN) and not self.slower

    def text(self) -> str:
        parts = ", ".join(f"{name} {each.ratio:.3f}" for name, each in self.samples.items())
        return f"{self.ratio:.3f} of the old speed, noise {self.noise:.1%} ({parts})"


@dataclass(slots=True)
class Outcome:
    old: dict[str, Any]
    new: dict[str, Any]
    verdict: Compared | None = None  # None: nothing that was tried is faster
    tried: list[tuple[str, str]] = field(default_factory=list)  # setting, and what came of it
    skipped: list[str] = field(default_factory=list)  # settings that there was no time for

    @property
    def is_kept(self) -> bool:
        return self.verdict is not None and self.verdict.is_faster

    def conclusion(self) -> str:
        if self.verdict is None:
            return "nothing that was tried is faster by more than the noise: the old settings are kept"
        if self.is_kept:
            return f"faster by {self.verdict.ratio - 1:.1%}, noise {self.verdict.noise:.1%}: the new settings are kept"
        found = f"measured again, the new settings run at {self.verdict.text()}"
        reason = f"slower on {' and '.join(self.verdict.slower)}" if self.verdict.slower else "no gain beyond the noise"
        return f"{found}: {reason}, so the old settings are kept"


Say = Callable[[str], None]


class Search:
    def __init__(
        self, measure: Measure, loads: Sequence[str], budget: Budget, stage: Say, say: Say, uncounted: int = 1
    ) -> None:
        """stage: called with what is being done. say: called with each result. uncounted: the most warm-up runs of new
        settings."""
        self._measure, self.loads, self.budget, self.uncounted = measure, loads, budget, uncounted
        self.stage, self.say = stage, say

    def measure(self, options: Options, load: str) -> float:
        """Tokens per second of one run."""
        run = self._measure(options, load)
        self.budget.add(load, run.seconds)
        return run.tok_s

    def run(self, knobs: Iterable[Knob], old: Options) -> Outcome:
        """knobs: asked for once the old settings have run and time is left to try others."""
        outcome = Outcome(dict(old), dict(old))
        for load in self.loads:
            self.stage(f"the old settings, {load}")
            self.say(f"{load}: {self.measure(old, load):.1f} tok/s")
        self._check_budget()
        for knob in knobs:
            self._turn(knob, outcome)
        if outcome.new != outcome.old:
            self.stage("old and new settings in turn")
            outcome.verdict = self.compare(outcome.old, outcome.new, self.loads, self._rounds())
            for load, sample in outcome.verdict.samples.items():
                self.say(f"new against old, {load}: {sample.ratio:.3f}, noise {sample.noise:.1%}")
        return outcome

    def compare(self, old: Options, new: Options, loads: Iterable[str], rounds: int) -> Compared:
        found: dict[str, Sample] = {}
        for load in loads:
            before, after = (partial(self._metric, options, load) for options in (old, new))
            found |= in_turn(before, after, rounds, lambda done, total: None)
        return Compared(found)

    def reserve(self) -> float:
        """The least seconds of the last comparison."""
        return LEAST_ROUNDS * self.budget.round_seconds(self.loads)

    # ---- the parts

    def _metric(self, options: Options, load: str) -> dict[str, float]:
        return {load: self.measure(options, load)}

    def _turn(self, knob: Knob, outcome: Outcome) -> None:
        """Try all values of a knob and take the fastest if it is faster than the old one."""
        best, ratio = None, 0.0
        for value in knob.values:
            setting = f"{knob.name} {value}"
            if self.budget.left < self.reserve() + self.budget.round_seconds(knob.loads, RUNS + self.uncounted):
                outcome.skipped.append(setting)
                continue
            self.stage(setting)
            try:
                found = self.compare(outcome.new, outcome.new | {knob.name: value}, knob.loads, 1)
            except UserError as error:
                outcome.tried.append((setting, f"cannot run: {error}"))
            else:
                outcome.tried.append((setting, found.text()))
                if found.is_faster and found.ratio > ratio:
                    best, ratio = value, found.ratio
            self.say(": ".join(outcome.tried[-1]))
        if best is not None:
            outcome.new[knob.name] = best

    def _rounds(self) -> int:
        each = max(self.budget.round_seconds(self.loads), 1e-9)
        return min(max(int(self.budget.left / each), LEAST_ROUNDS), MOST_ROUNDS)

    def _check_budget(self) -> None:
        """Raise UserError if there is no time for the comparison at the end."""
        if (needed := self.reserve()) > LARGEST_SHARE * self.budget.left:
            minutes = math.ceil((self.budget.spent + needed / LARGEST_SHARE) / 60)
            raise UserError(
                f"a comparison of old and new takes {needed:.0f} s here, and {self.budget.left:.0f} s are left: give "
                f"--minutes {minutes} or more, or a smaller --output-len"
            )
