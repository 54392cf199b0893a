"""Goes through the lines: measures each, compares, and measures once more those that did not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from sparkdraft.core import UserError
from sparkdraft.operate.bench.speed.lines import Line
from sparkdraft.operate.bench.speed.ratios import Progress, Sample
from sparkdraft.operate.bench.speed.verdict import Expected, Judged, Verdict, judge
from sparkdraft.util.names import did_you_mean

Names = frozenset[str]
Measure = Callable[[Names, Progress], dict[str, Sample]]  # the lines wanted -> a sample of each
Bar = Callable[[str], AbstractContextManager[Progress]]


class Skipped(Exception):
    """These lines cannot be measured here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Group:
    """Lines that are measured together."""

    names: tuple[str, ...]
    measure: Measure


def select(lines: Sequence[Line], only: str) -> Names:
    """The lines that were asked for, by comma-separated names; all if none."""
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
    """A verdict for each wanted line, as soon as it is known."""
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
