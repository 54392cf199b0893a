"""Measures two things in turn (A, B, B, A) and estimates how far their ratio can be trusted on a noisy machine.

A machine that slows down steadily slows both sides of a round alike. Both As of a round are the same work, so their
difference is the noise of the machine in that minute.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

Metrics = dict[str, float]
Side = Callable[[], Metrics]
Progress = Callable[[int, int], None]  # (parts done, parts in all)

# Two standard errors of the median of n rounds are 2 * 1.25 * s / sqrt(n), where s is the deviation of one round's
# ratio. A against A deviates by sqrt(2) * s, and 1.48 times the median distance from 0 estimates a deviation.
TWO_ERRORS = 2 * 1.25 * 1.48 / math.sqrt(2)


@dataclass(frozen=True, slots=True)
class Sample:
    """The measured ratio of two things, round by round."""

    ratios: list[float]  # B against A
    controls: list[float]  # A against A: 1 on a quiet machine
    differ: bool = False  # rounds of different work: each counts the same, and no median is taken

    @property
    def ratio(self) -> float:
        return statistics.geometric_mean(self.ratios) if self.differ else statistics.median(self.ratios)

    @property
    def noise(self) -> float:
        """The uncertainty of the ratio, as a share of it. One bad round moves a mean, so there all rounds count."""
        if self.differ:
            return math.sqrt(2 * statistics.fmean(math.log(c) ** 2 for c in self.controls) / len(self.ratios))
        return TWO_ERRORS * statistics.median(abs(math.log(c)) for c in self.controls) / math.sqrt(len(self.ratios))


def joined(samples: Iterable[Sample], differ: bool = False) -> Sample:
    """Join the rounds of several samples. differ: they are not the same work."""
    each = list(samples)
    return Sample([r for s in each for r in s.ratios], [c for s in each for c in s.controls], differ)


def in_turn(a: Side, b: Side, rounds: int, progress: Progress) -> dict[str, Sample]:
    """Run A, B, B, A in each round; return a sample per metric that both sides give."""
    samples: dict[str, Sample] = {}
    for done in range(rounds):
        first, one, other, last = a(), b(), b(), a()
        for name in first.keys() & one.keys():
            sample = samples.setdefault(name, Sample([], []))
            sample.ratios.append(math.sqrt(one[name] * other[name] / (first[name] * last[name])))
            sample.controls.append(last[name] / first[name])
        progress(done + 1, rounds)
    return samples


def against(value: float, measured: list[float]) -> Sample:
    """Compare measurements of one thing with a given value; the control of each is the one before."""
    controls = [later / earlier for earlier, later in pairwise(measured)]
    return Sample([each / value for each in measured], controls or [1.0])


def part(progress: Progress, done: int, total: int) -> Progress:
    """Report the progress of a part as progress of the whole."""
    return lambda more, _: progress(done + more, total)
