"""The lines of `bench check-speed`, their verdicts, and the loop that measures them. No torch.

Each line compares two speeds measured in turn (operate/bench/ratios.py) with the expected ratio. A line that does not
hold is measured a second time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.operate.bench.ratios import Progress, Sample
from sparkdraft.util.names import did_you_mean


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    what: str
    lower_is_better: bool = False


def for_streams(kind: str, streams: int) -> str:
    """Name a line that is measured at several numbers of streams."""
    return f"{kind}-{streams}-stream" + ("s" if streams > 1 else "")


CPU = (
    Line("paused-drafter", "plain steps with a drafter loaded, against --spec off, one stream"),
    Line("drafted-code", "default against --spec off: tok/s of `generate --chat`, one prompt in a fresh process"),
    Line("drafted-json", "the same, prompts that ask for JSON"),
    Line("drafted-questions", "the same, questions"),
    Line("drafted-prose", "the same, prose"),
    Line("auto-sampled", "default against --spec off: tok/s of whole requests, temperature 0.7, one stream"),
    Line("auto-4-streams", "default against --spec off: tok/s of whole requests, 4 streams"),
    Line("auto-16-streams", "the same, 16 streams"),
    Line("first-token-16-streams", "default against --spec off: time to the first token, 16 streams", True),
    Line("server-1-stream", "tok/s through HTTP against LLM.generate, one stream"),
    Line("server-4-streams", "the same, 4 streams"),
    Line("start-in-steps", "a fresh process's time to its first token, against 1000 plain steps", True),
    Line("start-with-drafter", "the same, default against --spec off", True),
    Line(
        "long-prompt-largest-gap", "8 streams while a long prompt is read: largest gap, against the step target", True
    ),
    Line("long-prompt-median-gap", "the same, median gap", True),
    Line("long-prompt-first-token", "that prompt's time to its first token, against alone", True),
)
CUDA = (
    Line("floor-1-stream", "Qwen3-8B's shape, plain: bytes read per second against the measured bandwidth, 1 stream"),
    Line("floor-4-streams", "the same, 4 streams"),
    Line("floor-16-streams", "the same, 16 streams"),
    Line("paused-1-stream", "Qwen3-8B's shape: tok/s with a paused drafter against none, 1 stream"),
    Line("paused-16-streams", "the same, 16 streams"),
    Line("drafted-1-stream", "Qwen3-8B's shape, 15 drafts per step, synthetic acceptance 6.5, against plain, 1 stream"),
    Line("drafted-4-streams", "the same, 4 streams"),
    Line("drafted-16-streams", "the same, 16 streams"),
    Line("prompt-of-matmul", "a prompt of 8,192 tokens: operations per second against a matmul's measured rate"),
    Line("floor-32000-tokens", "plain at 32,000 tokens, 1 stream: bytes read per second against the bandwidth"),
    Line("turboquant-32000-tokens", "TurboQuant against exact: tok/s of 4 streams at 32,000 tokens"),
    Line("turboquant-prompt", "TurboQuant against exact: reading those prompts"),
    Line("embedded-drafted-code", "the embedded model, drafted against plain, code prompts, one stream"),
)
LINES = {"cpu": CPU, "cuda": CUDA}


# ---- verdicts
#
# Noise counts only where it could change the verdict: where it exceeds the tolerance and spans the distance from the
# measured ratio to the limit. A ratio of 0.55 against a limit of 0.98 has fallen on any machine.

EXPECTED = Path(__file__).with_name("expected_ratios.json")
HEADER = f"{'line':<26} {'expected':>8} {'tolerance':>9} {'limit':>9} {'measured':>8} {'noise':>6}  verdict"


class Verdict(StrEnum):
    HOLDS = "holds"
    FELL = "FELL"
    UNSURE = "cannot tell"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected ratio of a line, and by how much it may be worse."""

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
    """Read the expected ratio of each line on this device."""
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


def check_names(lines: Sequence[Line], expected: dict[str, Expected]) -> None:
    """Check that every line has an expected ratio and every expected ratio a line."""
    names = {line.name for line in lines}
    if odd := sorted(names ^ expected.keys()):
        raise UserError(f"{EXPECTED.name} and the lines that are measured disagree about {', '.join(odd)}")


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


def select(lines: Sequence[Line], only: str) -> Names:
    """Return the lines named in a comma-separated list; all if it is empty."""
    known = [line.name for line in lines]
    asked = [name.strip() for name in only.split(",") if name.strip()] or known
    for name in asked:
        if name not in known:
            question = did_you_mean(name, known)
            raise UserError(f"--only names the unknown line '{name}'; {question and question + ' '}--list shows all")
    return frozenset(asked)


def check(
    groups: Sequence[Group], lines: Sequence[Line], expected: dict[str, Expected], wanted: Names, bar: Bar
) -> Iterator[Judged]:
    """Yield the verdict of each wanted line as soon as it is known."""
    by_name = {line.name: line for line in lines}
    for group in groups:
        names = [name for name in group.names if name in wanted]
        if names:
            yield from _check_group(group, [by_name[name] for name in names], expected, bar)


def _check_group(group: Group, lines: list[Line], expected: dict[str, Expected], bar: Bar) -> list[Judged]:
    try:
        judged = _measure(group, lines, expected, bar)
    except Skipped as reason:
        return [Judged(line, expected[line.name], Verdict.SKIPPED, note=str(reason)) for line in lines]
    doubtful = [each.line for each in judged if each.verdict is not Verdict.HOLDS]
    if not doubtful:
        return judged
    again = {each.line.name: each for each in _measure(group, doubtful, expected, bar, "once more: ")}
    return [_second(each, again[each.line.name]) if each.line.name in again else each for each in judged]


def _measure(
    group: Group, lines: list[Line], expected: dict[str, Expected], bar: Bar, prefix: str = ""
) -> list[Judged]:
    names = frozenset(line.name for line in lines)
    with bar(prefix + ", ".join(line.name for line in lines)) as progress:
        samples = group.measure(names, progress)
    return [judge(line, expected[line.name], samples[line.name]) for line in lines]


def _second(first: Judged, second: Judged) -> Judged:
    assert first.sample is not None
    return replace(second, note=f"first {first.sample.ratio:.3f}, {first.verdict}")
