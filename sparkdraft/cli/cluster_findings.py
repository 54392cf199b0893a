"""How findings about the machines of a cluster are printed, and the sentence where one of them is broken."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sparkdraft.core import UserError
from sparkdraft.operate.doctor.finding import Finding, Status


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def show_findings(findings: Sequence[Finding]) -> None:
    part = ""
    for each in findings:
        if each.part != part:
            part = each.part
            say(part)
        say(f"  {each.status.word:<8}{each.name}: {each.value}")
        if each.advice:
            say(f"          -> {each.advice}")


def refuse_broken(findings: Sequence[Finding]) -> None:
    """Raises UserError with the first that is broken."""
    broken = [each for each in findings if each.status == Status.BROKEN]
    if broken:
        first = broken[0]
        where = "" if first.part in first.value else f"{first.part}: {first.name}: "
        more = f" (and {len(broken) - 1} more, above)" if len(broken) > 1 else ""
        advice = f": {first.advice}" if first.advice else ""
        raise UserError(f"{where}{first.value}{advice}{more}")
