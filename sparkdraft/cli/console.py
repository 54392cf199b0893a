"""How the commands speak to a person: notes about what runs differently from what was asked, and errors.

Requested text goes to standard output, everything else to standard error, so that output can be piped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from sparkdraft.core import Fact, Fallback
from sparkdraft.plan.resolve import Plan
from sparkdraft.progress import errors


def note(text: str) -> None:
    errors.print(f"note: {text}", style="yellow", markup=False, soft_wrap=True)


def show_fallbacks(fallbacks: Iterable[Fallback]) -> None:
    for fallback in fallbacks:
        note(f"{fallback.name}: {fallback.reason}")


def show_plan(plan: Plan, fallbacks: Sequence[Fallback], facts: Iterable[Fact]) -> None:
    """Print the plan, what runs differently from what was asked, and how it runs on this machine."""
    lines = [f"{fact.name}: {fact.value}" + (f" ({fact.reason})" if fact.reason else "") for fact in facts]
    errors.print("\n".join([plan.describe(fallbacks), *lines]), markup=False)


def fail(message: str) -> int:
    """Print one sentence on standard error; returns the exit status."""
    print(f"sparkdraft: {message}", file=sys.stderr)
    return 1
