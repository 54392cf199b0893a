"""Tries settings one knob after the other within a time budget, and then judges the outcome: old against new, in turn.

All speeds come from one function that is handed in (operate/tune/engines.py), so this file knows numbers alone. A
setting is taken up if it is faster by more than the noise, which is measured beside it (operate/bench/speed/ratios.py).
Several lucky
measurements may add up, so what was found is measured again at the end, over all loads. It is kept only if it is faster
on the whole and slower on no load. No torch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from sparkdraft.core import UserError
from sparkdraft.operate.bench.speed.ratios import Sample, in_turn
from sparkdraft.operate.tune.knobs import Knob

Options = Mapping[str, Any]


class Run(NamedTuple):
    """One run of a load."""

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
        """By medians: one run beside other work of the machine must not end the search."""
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
        """Of the mean. The loads' own errors are independent."""
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


def least_seconds(run_seconds: float) -> float:
    """The shortest useful time: the old settings run twice, the first time to warm up, and then the last comparison
    must fit into its share. run_seconds: of one run of every load."""
    return run_seconds * (2 + LEAST_ROUNDS * RUNS / LARGEST_SHARE)


Say = Callable[[str], None]


class Search:
    def __init__(
        self, measure: Measure, loads: Sequence[str], budget: Budget, stage: Say, say: Say, uncounted: int = 1
    ) -> None:
        """stage: told what is being done. say: told each result. uncounted: runs of new settings that warm them up, at
        most."""
        self._measure, self.loads, self.budget, self.uncounted = measure, loads, budget, uncounted
        self.stage, self.say = stage, say

    def measure(self, options: Options, load: str) -> float:
        """Tokens per second of one run."""
        run = self._measure(options, load)
        self.budget.add(load, run.seconds)
        return run.tok_s

    def run(self, knobs: Iterable[Knob], old: Options) -> Outcome:
        """knobs: the first is asked for when the old settings have run, and there is time to try others."""
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
        """Seconds that the last comparison needs at least."""
        return LEAST_ROUNDS * self.budget.round_seconds(self.loads)

    # ---- the parts

    def _metric(self, options: Options, load: str) -> dict[str, float]:
        return {load: self.measure(options, load)}

    def _turn(self, knob: Knob, outcome: Outcome) -> None:
        """Try all values of a knob, and take up the fastest if it is faster."""
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
        """Before anything is tried: is there time for the comparison at the end?"""
        if (needed := self.reserve()) > LARGEST_SHARE * self.budget.left:
            minutes = math.ceil((self.budget.spent + needed / LARGEST_SHARE) / 60)
            raise UserError(
                f"a comparison of old and new takes {needed:.0f} s here, and {self.budget.left:.0f} s are left: give "
                f"--minutes {minutes} or more, or a smaller --output-len"
            )
