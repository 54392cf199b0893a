"""SIGINT and SIGTERM as a flag that long work checks where it can stop, and as an end of work that can be given up. No
torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Stop = Callable[[], bool]


class Stopped(Exception):
    """Work was given up in the middle because a signal asked to stop."""


class Signals:
    """Called, it says whether one has come."""

    def __init__(self) -> None:
        self._seen = self._raises = False

    def __call__(self) -> bool:
        return self._seen

    def handle(self, number: int, frame: FrameType | None) -> None:
        self._seen = True
        if self._raises:
            self._raises = False
            raise Stopped

    @contextmanager
    def give_up(self) -> Iterator[None]:
        """Within it a signal raises Stopped as soon as Python runs: torch has finished an operator, or in a backward
        pass a part of it that is computed again."""
        self._raises = True
        try:
            if self._seen:
                raise Stopped
            yield
        finally:
            self._raises = False


@contextmanager
def stop_signals() -> Iterator[Signals]:
    """Within it neither signal ends the program: the work asks, and stops where nothing is lost."""
    signals = Signals()
    kinds = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    old = {kind: signal.signal(kind, signals.handle) for kind in kinds}
    try:
        yield signals
    finally:
        for kind, handler in old.items():
            signal.signal(kind, handler)
