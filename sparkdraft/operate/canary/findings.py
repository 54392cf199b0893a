"""Findings of probes, and the parts of a server that can be switched off because of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparkdraft.backend import DRAFTING, PREFIX_CACHE

GRAMMARS, TOOLS, CODED_CACHE = "structured output", "tool calls", "coded KV cache"
PARTS = (DRAFTING, PREFIX_CACHE, GRAMMARS, TOOLS, CODED_CACHE)
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    probe: str  # what was asked
    status: str  # PASSED, FAILED or SKIPPED
    detail: str  # what was seen, in words
    part: str = ""  # the part of the server that is to blame if it failed; empty: no part can be switched off for it
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Failed(Exception):
    """Raised by a probe; the message says what was seen and what was expected."""


class Skipped(Exception):
    """Raised by a probe that cannot ask its question here; the message says why."""


def ask_all(
    probes: Sequence[tuple[str, str, Callable[[], str]]],
    report: Callable[[int, int], None],
    budget: float,
    broken: Callable[[Exception], str],
) -> list[Finding]:
    """Run probes: name, part to blame, and what returns what was seen.

    budget: seconds after which no probe begins. broken: returns what to say of an unexpected error, or raises it.
    """
    found, end = [], time.monotonic() + budget
    for done, (name, part, probe) in enumerate(probes):
        report(done, len(probes))
        begin = time.monotonic()
        try:
            if begin > end:
                raise Skipped(f"the {budget:g} s are over; `sparkdraft check` asks without a limit")
            status, detail = PASSED, probe()
        except Skipped as reason:
            status, detail = SKIPPED, str(reason)
        except Failed as reason:
            status, detail = FAILED, str(reason)
        except Exception as error:
            status, detail = FAILED, broken(error)
        found.append(Finding(name, status, detail, part, round(time.monotonic() - begin, 2)))
    return found


def failures(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status == FAILED]


def summary(findings: Sequence[Mapping[str, Any]]) -> str:
    """Summarise findings (as dicts) in one line: '5 passed, 2 skipped in 2.3 s', and failed probes by name."""
    counts = Counter(finding["status"] for finding in findings)
    failed = [finding["probe"] for finding in findings if finding["status"] == FAILED]
    said = ", ".join(f"{counts[status]} {status}" for status in (PASSED, FAILED, SKIPPED) if counts[status])
    return f"{said} in {sum(f['seconds'] for f in findings):.1f} s" + (f"; FAILED: {', '.join(failed)}" * bool(failed))


def table(findings: Iterable[Finding]) -> str:
    """Format a line per finding."""
    rows = list(findings)
    width = max((len(row.probe) for row in rows), default=0)
    return "\n".join(f"{row.status:7}  {row.probe:{width}}  {row.seconds:5.1f} s  {row.detail}" for row in rows)
