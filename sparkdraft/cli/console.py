"""How the commands speak to a person: notes about what runs otherwise than asked, and what went wrong.

Text that was asked for goes to standard output, all else to standard error, so that output can be piped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from sparkdraft.core import Fact
from sparkdraft.plan.resolve import Fallback, Plan
from sparkdraft.progress import errors


def note(text: str) -> None:
    errors.print(f"note: {text}", style="yellow", markup=False, soft_wrap=True)


def show_fallbacks(fallbacks: Iterable[Fallback]) -> None:
    for fallback in fallbacks:
        note(f"{fallback.name}: {fallback.reason}")


def show_plan(plan: Plan, fallbacks: Sequence[Fallback], facts: Iterable[Fact]) -> None:
    """What was planned, what runs otherwise than asked, and how it runs on this machine."""
    lines = [f"{fact.name}: {fact.value}" + (f" ({fact.reason})" if fact.reason else "") for fact in facts]
    errors.print("\n".join([plan.describe(fallbacks), *lines]), markup=False)


def fail(message: str) -> int:
    """One sentence on standard error; the exit status to return."""
    print(f"sparkdraft: {message}", file=sys.stderr)
    return 1
