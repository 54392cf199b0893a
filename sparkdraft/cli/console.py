"""Notes about what runs differently from what was asked, errors, and text that wraps at a terminal's width.

Requested text goes to standard output, everything else to standard error, so that output can be piped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from rich.cells import cell_len

from sparkdraft.core import Fact, Fallback
from sparkdraft.plan.resolve import Plan
from sparkdraft.util.progress import errors


def say(line: str) -> None:
    """Print a line of a server's log."""
    print(line, file=sys.stderr, flush=True)


def note(text: str) -> None:
    errors.print(f"note: {text}", style="yellow", markup=False, soft_wrap=True)


def show_fallbacks(fallbacks: Iterable[Fallback]) -> None:
    for fallback in fallbacks:
        note(f"{fallback.name}: {fallback.reason}")


def show_plan(plan: Plan, fallbacks: Sequence[Fallback], facts: Iterable[Fact]) -> None:
    """Print the plan, what runs differently from what was asked, and how it runs on this machine."""
    lines = [f"{fact.name}: {fact.value}" + (f" ({fact.reason})" if fact.reason else "") for fact in facts]
    errors.print("\n".join([plan.describe(fallbacks), *lines]), markup=False)


def terminal_width(stream: TextIO) -> int:
    """Columns of the terminal that this writes to; 0: it is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


class WordWrap:
    """Text that comes in pieces, with line breaks between words: a word is written once its end is known. A line may
    break on both sides of a wide character, as Chinese and Japanese are written without spaces. A word that is longer
    than a line is left to the terminal."""

    def __init__(self, write: Callable[[str], object], width: Callable[[], int]) -> None:
        """width: columns of the terminal now; 0: there is none, and nothing is changed."""
        self._write, self._width = write, width
        self._column, self._gap, self._word = 0, "", ""

    def add(self, text: str) -> None:
        if not self._width():
            self._write(text)
            return
        for char in text:
            if char == "\n":
                self.end()
                self._write(char)
                self._column = 0
            elif char.isspace():
                self._put()
                self._gap += char.expandtabs(4)
            elif cell_len(char) == 2:
                self._put()
                self._word = char
                self._put()
            else:
                self._word += char

    def end(self) -> None:
        """Write what was held back."""
        self._put()
        self._gap = ""

    def _put(self) -> None:
        if not self._word:
            return
        width, size = self._width() or sys.maxsize, cell_len(self._word)
        if self._column and self._column + len(self._gap) + size > width:
            self._gap, self._column = "\n", -1
        elif not self._column:  # less indentation where it leaves no room
            self._gap = self._gap[: max(width - size, 0)]
        self._write(self._gap + self._word)
        self._column += len(self._gap) + size
        if self._column > width:
            self._column = (self._column - 1) % width + 1
        self._gap = self._word = ""


def fail(message: str) -> int:
    """Print one sentence on standard error; returns the exit status."""
    print(f"sparkdraft: {message}", file=sys.stderr)
    return 1
