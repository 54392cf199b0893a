"""The lines of `bench check-speed`, their verdicts, and the loop that measures them. No torch.

Each line compares the ratio of two speeds measured in turn (operate/bench/ratios.py) with that of
expected_ratios.json. A line that does not hold is measured a second time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.operate.bench.ratios import Progress, Sample
from sparkdraft.util.names import did_you_mean

EXPECTED = Path(__file__).with_name("expected_ratios.json")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    what: str  # is compared
    expected: float  # ratio
    tolerance: float  # by how much it may be worse
    source: str  # the date and the machine on which it was measured
    lower_is_better: bool = False

    @property
    def limit(self) -> float:
        return self.expected + self.tolerance if self.lower_is_better else self.expected - self.tolerance


def read_lines(device: str) -> dict[str, Line]:
    entries = json.loads(EXPECTED.read_text(encoding="utf-8"))[device]
    return {name: Line(name, **entry) for name, entry in entries.items()}


def for_streams(kind: str, streams: int) -> str:
    """Name a line that is measured at several numbers of streams."""
    return f"{kind}-{streams}-stream" + ("s" if streams > 1 else "")


# ---- verdicts
#
# Noise counts only where it could change the verdict: where it exceeds the tolerance and spans the distance from the
# measured ratio to the limit. A ratio of 0.55 against a limit of 0.98 has fallen on any machine.

HEADER = f"{'line':<26} {'expected':>8} {'tolerance':>9} {'limit':>9} {'measured':>8} {'noise':>6}  verdict"


class Verdict(StrEnum):
    HOLDS = "holds"
    FELL = "FELL"
    UNSURE = "cannot tell"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Judged:
    line: Line
    verdict: Verdict
    sample: Sample | None = None
    note: str = ""  # why it was skipped, or the result of a first measurement

    def row(self) -> str:
        line, measured, noise = self.line, "-", "-"
        if self.sample:
            measured, noise = f"{self.sample.ratio:.3f}", f"{self.sample.noise:.1%}"
        limit = f"{'<=' if line.lower_is_better else '>='} {line.limit:.3f}"
        numbers = f"{line.expected:8.3f} {line.tolerance:9.3f} {limit:>9} {measured:>8} {noise:>6}"
        return f"{line.name:<26} {numbers}  {self.verdict}{f' ({self.note})' if self.note else ''}"

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"line": self.line.name, "verdict": self.verdict.value, "note": self.note or None}
        found |= {"expected": self.line.expected, "tolerance": self.line.tolerance, "limit": round(self.line.limit, 4)}
        if self.sample:
            found |= {"measured": round(self.sample.ratio, 4), "noise": round(self.sample.noise, 4)}
            found |= {"ratios": _rounded(self.sample.ratios), "controls": _rounded(self.sample.controls)}
        return found


def judge(line: Line, sample: Sample) -> Judged:
    ratio, noise = sample.ratio, sample.noise * sample.ratio
    if noise > line.tolerance and abs(ratio - line.limit) <= noise:
        return Judged(line, Verdict.UNSURE, sample)
    holds = ratio <= line.limit if line.lower_is_better else ratio >= line.limit
    return Judged(line, Verdict.HOLDS if holds else Verdict.FELL, sample)


def conclusion(judged: Sequence[Judged]) -> str:
    """Say in one sentence which lines fell or could not be judged."""
    named = {verdict: [each.line.name for each in judged if each.verdict is verdict] for verdict in Verdict}
    parts = [f"{len(named[Verdict.HOLDS])} of {len(judged)} lines hold"]
    parts += [
        f"{verdict}: {', '.join(names)}" for verdict, names in named.items() if names and verdict is not Verdict.HOLDS
    ]
    if named[Verdict.UNSURE]:
        parts.append("this machine is too noisy for those, run them again when it is quiet")
    return "; ".join(parts)


def status(judged: Sequence[Judged]) -> int:
    """Exit status: 1 if a line fell, 2 if none fell but some could not be judged or nothing was measured, else 0."""
    verdicts = {each.verdict for each in judged}
    return 1 if Verdict.FELL in verdicts else 2 if Verdict.UNSURE in verdicts or verdicts <= {Verdict.SKIPPED} else 0


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]


# ---- measuring

Names = frozenset[str]
Measure = Callable[[Names, Progress], dict[str, Sample]]  # the lines wanted -> a sample of each
Bar = Callable[[str], AbstractContextManager[Progress]]


class Skipped(Exception):
    """Raised where lines cannot be measured here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Group:
    """Lines that are measured together."""

    names: tuple[str, ...]
    measure: Measure


def select(known: Collection[str], only: str) -> Names:
    """Return the lines named in a comma-separated list; all if it is empty."""
    asked = [name.strip() for name in only.split(",") if name.strip()] or known
    for name in asked:
        if name not in known:
            question = did_you_mean(name, list(known))
            raise UserError(f"--only names the unknown line '{name}'; {question and question + ' '}--list shows all")
    return frozenset(asked)


def check(groups: Sequence[Group], lines: Mapping[str, Line], wanted: Names, bar: Bar) -> Iterator[Judged]:
    """Yield the verdict of each wanted line as soon as it is known."""
    for group in groups:
        names = [name for name in group.names if name in wanted]
        if names:
            yield from _check_group(group, [lines[name] for name in names], bar)


def _check_group(group: Group, lines: list[Line], bar: Bar) -> list[Judged]:
    try:
        judged = _measure(group, lines, bar)
    except Skipped as reason:
        return [Judged(line, Verdict.SKIPPED, note=str(reason)) for line in lines]
    doubtful = [each.line for each in judged if each.verdict is not Verdict.HOLDS]
    if not doubtful:
        return judged
    again = {each.line.name: each for each in _measure(group, doubtful, bar, "once more: ")}
    return [_second(each, again[each.line.name]) if each.line.name in again else each for each in judged]


def _measure(group: Group, lines: list[Line], bar: Bar, prefix: str = "") -> list[Judged]:
    with bar(prefix + ", ".join(line.name for line in lines)) as progress:
        samples = group.measure(frozenset(line.name for line in lines), progress)
    return [judge(line, samples[line.name]) for line in lines]


def _second(first: Judged, second: Judged) -> Judged:
    assert first.sample is not None
    return replace(second, note=f"first {first.sample.ratio:.3f}, {first.verdict}")
