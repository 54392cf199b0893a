"""Ctrl-C and a polite kill, heard as a question that long work asks itself: shall I stop here? No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Stop = Callable[[], bool]


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Within it neither ends the program: whoever works asks, and ends where nothing is lost."""
    seen: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    old = {kind: signal.signal(kind, lambda number, frame: seen.append(number)) for kind in kinds}
    try:
        yield lambda: bool(seen)
    finally:
        for kind, handler in old.items():
            signal.signal(kind, handler)
