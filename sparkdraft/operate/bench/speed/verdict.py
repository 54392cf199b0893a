"""Compares a measured ratio with the expected one: it holds, it fell, or the machine is too noisy to tell.

Noise counts only where it could change the verdict: where it is larger than the tolerance, and reaches from the
measured ratio to the limit. A ratio of 0.55 with a limit of 0.98 has fallen on any machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.operate.bench.speed.lines import Line
from sparkdraft.operate.bench.speed.ratios import Sample

EXPECTED = Path(__file__).with_name("expected_ratios.json")
HEADER = f"{'line':<26} {'expected':>8} {'tolerance':>9} {'limit':>9} {'measured':>8} {'noise':>6}  verdict"


class Verdict(StrEnum):
    HOLDS = "holds"
    FELL = "FELL"
    UNSURE = "cannot tell"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Expected:
    """What a line should measure, and by how much it may be worse."""

    ratio: float
    tolerance: float
    source: str  # the date and the machine on which it was measured

    def limit(self, line: Line) -> float:
        return self.ratio + self.tolerance if line.lower_is_better else self.ratio - self.tolerance


@dataclass(frozen=True, slots=True)
class Judged:
    line: Line
    expected: Expected
    verdict: Verdict
    sample: Sample | None = None
    note: str = ""  # why it was skipped, or the result of a first measurement

    def row(self) -> str:
        expected, relation = self.expected, "<=" if self.line.lower_is_better else ">="
        measured, noise = "-", "-"
        if self.sample:
            measured, noise = f"{self.sample.ratio:.3f}", f"{self.sample.noise:.1%}"
        limit = f"{relation} {expected.limit(self.line):.3f}"
        numbers = f"{expected.ratio:8.3f} {expected.tolerance:9.3f} {limit:>9} {measured:>8} {noise:>6}"
        return f"{self.line.name:<26} {numbers}  {self.verdict}{f' ({self.note})' if self.note else ''}"

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"line": self.line.name, "verdict": self.verdict.value, "note": self.note or None}
        found |= {"expected": self.expected.ratio, "tolerance": self.expected.tolerance}
        found["limit"] = round(self.expected.limit(self.line), 4)
        if self.sample:
            found |= {"measured": round(self.sample.ratio, 4), "noise": round(self.sample.noise, 4)}
            found |= {"ratios": _rounded(self.sample.ratios), "controls": _rounded(self.sample.controls)}
        return found


def read_expected(device: str, path: Path = EXPECTED) -> dict[str, Expected]:
    """Line -> what is expected of it on this device."""
    entries = json.loads(path.read_text(encoding="utf-8"))[device]
    return {name: Expected(e["expected"], e["tolerance"], e["source"]) for name, e in entries.items()}


def judge(line: Line, expected: Expected, sample: Sample) -> Judged:
    limit, ratio = expected.limit(line), sample.ratio
    noise = sample.noise * ratio
    if noise > expected.tolerance and abs(ratio - limit) <= noise:
        return Judged(line, expected, Verdict.UNSURE, sample)
    holds = ratio <= limit if line.lower_is_better else ratio >= limit
    return Judged(line, expected, Verdict.HOLDS if holds else Verdict.FELL, sample)


def conclusion(judged: Sequence[Judged]) -> str:
    """One sentence that names the lines that fell, or could not be judged."""
    named = {verdict: [each.line.name for each in judged if each.verdict is verdict] for verdict in Verdict}
    parts = [f"{len(named[Verdict.HOLDS])} of {len(judged)} lines hold"]
    parts += [
        f"{verdict}: {', '.join(names)}" for verdict, names in named.items() if names and verdict is not Verdict.HOLDS
    ]
    if named[Verdict.UNSURE]:
        parts.append("this machine is too noisy for those, run them again when it is quiet")
    return "; ".join(parts)


def status(judged: Sequence[Judged]) -> int:
    """For the shell: 1 if a line fell, 2 if none fell but some could not be judged or nothing was measured, else 0."""
    verdicts = {each.verdict for each in judged}
    return 1 if Verdict.FELL in verdicts else 2 if Verdict.UNSURE in verdicts or verdicts <= {Verdict.SKIPPED} else 0


def check_names(lines: Sequence[Line], expected: dict[str, Expected]) -> None:
    """Check that every line has an expected ratio and every expected ratio a line."""
    names = {line.name for line in lines}
    if odd := sorted(names ^ expected.keys()):
        raise UserError(f"{EXPECTED.name} and the lines that are measured disagree about {', '.join(odd)}")


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]
