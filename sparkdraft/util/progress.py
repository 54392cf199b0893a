"""Progress on standard error: a bar if that is a terminal, else a line from time to time.

    with progress("loading smollm2") as report:
        for i, part in enumerate(parts):
            load(part)
            report(i + 1, len(parts))

Work that ends within two seconds shows nothing. A separate thread draws, so that something moves even while the work
reports nothing. Where one stage runs inside another (a model is fetched while it is being loaded), the inner one is
shown. Standard output is never touched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

PATIENCE = 2.0  # seconds before anything is shown
REDRAW = 0.2  # seconds between two drawings of a bar
SELDOM = 2.0  # the same while speed is measured: drawing takes about a millisecond
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0  # seconds between two lines of a log: each pause is twice the one before
errors = Console(stderr=True, highlight=False, emoji=False)


class Meter:
    """The label and the progress of some work. Called with (done, total), it is a `weights.loader.Progress`."""

    def __init__(self, label: str, unit: str = "", is_drawn: bool = True, shows_left: bool = False) -> None:
        self.label, self.unit, self.is_drawn, self.shows_left = label, unit, is_drawn, shows_left
        self.done = self.total = 0
        self._begin = time.monotonic()
        self._first, self._before = 0, 0.0  # what was done before, and the seconds that it took

    def __call__(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def stage(self, label: str, done: int = 0, total: int = 0) -> None:
        self.label, self.done, self.total = label, done, total

    def resume(self, done: int, total: int, seconds: float) -> None:
        """Continue from what an earlier run has done in so many seconds."""
        self.done, self.total = done, total
        self._first, self._before, self._begin = done, seconds, time.monotonic() - seconds

    def state(self) -> str:
        count = f"{self.done} of {self.total}{self.unit and ' '}{self.unit}, " if self.total else ""
        return f"{count}{duration(time.monotonic() - self._begin)}{self._left()}"

    def _left(self) -> str:
        fresh = self.done - self._first
        if not self.shows_left or fresh < 1:
            return ""
        each = (time.monotonic() - self._begin - self._before) / fresh
        return f", about {duration(each * (self.total - self.done))} left"


def duration(seconds: float) -> str:
    """Format seconds as 45 s, 12 min or 3 h 20 min."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


_open: list[Meter] = []  # the innermost is last


@contextmanager
def progress(
    label: str, unit: str = "", redraw: float = REDRAW, is_drawn: bool = True, shows_left: bool = False
) -> Iterator[Meter]:
    """is_drawn: False if something else draws a bar for it on a terminal. shows_left: also show the time left, where
    all parts take about equally long."""
    meter, ended, shower = Meter(label, unit, is_drawn, shows_left), threading.Event(), None
    _open.append(meter)
    if len(_open) == 1:
        shower = threading.Thread(target=_show, args=(ended, redraw), daemon=True)
        shower.start()
    try:
        yield meter
    finally:
        ended.set()
        if shower:
            shower.join()
        _open.remove(meter)


T = TypeVar("T")


def waiting(pieces: Iterator[T], label: str) -> Generator[T, None, None]:
    """Yield the pieces as they come, with progress until the first one."""
    with progress(label):
        first = list(islice(pieces, 1))
    yield from first
    yield from pieces


def _show(ended: threading.Event, redraw: float) -> None:
    can_draw = errors.is_terminal and not errors.is_dumb_terminal
    if not ended.wait(PATIENCE):
        _draw(ended, redraw) if can_draw else _log(ended)


def _log(ended: threading.Event) -> None:
    pause = FIRST_PAUSE
    while not ended.is_set():
        meter = _open[-1]
        errors.print(f"{meter.label}: {meter.state()}", markup=False, soft_wrap=True)
        ended.wait(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _draw(ended: threading.Event, redraw: float) -> None:
    live, spinner = Live(console=errors, transient=True, auto_refresh=False, redirect_stdout=False), Spinner("dots")
    while not ended.is_set():
        meter = _open[-1]
        if meter.is_drawn:
            live.start()  # does nothing if it has been started
            live.update(_bar(meter, spinner), refresh=True)
        else:
            live.stop()
        ended.wait(redraw)
    live.stop()


def _bar(meter: Meter, spinner: Spinner) -> Table:
    line = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=meter.total or None, completed=meter.done, width=24)  # without a total it moves to and fro
    line.add_row(spinner, Text(meter.label), bar, Text(meter.state()))
    return line
