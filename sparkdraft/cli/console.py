"""How the commands speak to a person: notes about what runs otherwise than asked, and what went wrong.

Text that was asked for goes to standard output, all else to standard error, so that output can be piped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from sparkdraft.core import Fact
from sparkdraft.plan.resolve import Plan
from sparkdraft.progress import errors


def note(text: str) -> None:
    errors.print(f"note: {text}", style="yellow", markup=False, soft_wrap=True)


def show_fallbacks(plan: Plan) -> None:
    for fallback in plan.fallbacks:
        note(f"{fallback.name}: {fallback.reason}")


def show_plan(plan: Plan, facts: Iterable[Fact]) -> None:
    """All that was settled, fallbacks among it, and how it runs here."""
    lines = [f"{fact.name}: {fact.value}" + (f" ({fact.reason})" if fact.reason else "") for fact in facts]
    errors.print("\n".join([plan.describe(), *lines]), markup=False)


def fail(message: str) -> int:
    """One sentence on standard error; the exit status to return."""
    print(f"sparkdraft: {message}", file=sys.stderr)
    return 1
