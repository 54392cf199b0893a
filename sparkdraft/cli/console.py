"""What the commands share on the terminal: a progress bar for loading, and one way to say what went wrong.

Text that was asked for goes to standard output, all else to standard error, so that output can be piped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from sparkdraft.core import Fact
from sparkdraft.plan.resolve import Plan

PATIENCE = 2.0  # seconds a person waits without wanting to be told
errors = Console(stderr=True, highlight=False)


@contextmanager
def loading(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar over tensors, drawn only once loading has taken longer than a person's patience."""
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=errors, transient=True)
    task = bar.add_task(label)
    begin, shown = time.monotonic(), False

    def report(done: int, total: int) -> None:
        nonlocal shown
        if not shown and time.monotonic() - begin > PATIENCE:
            bar.start()
            shown = True
        bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        if shown:
            bar.stop()


def show_fallbacks(plan: Plan) -> None:
    for fallback in plan.fallbacks:
        errors.print(f"note: {fallback.name}: {fallback.reason}", style="yellow", markup=False)


def show_plan(plan: Plan, facts: Iterable[Fact]) -> None:
    """All that was settled, fallbacks among it, and how it runs here."""
    lines = [f"{fact.name}: {fact.value}" + (f" ({fact.reason})" if fact.reason else "") for fact in facts]
    errors.print("\n".join([plan.describe(), *lines]), markup=False)


def fail(message: str) -> int:
    """One sentence on standard error; the exit status to return."""
    print(f"sparkdraft: {message}", file=sys.stderr)
    return 1
