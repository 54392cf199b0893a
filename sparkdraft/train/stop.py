"""SIGINT and SIGTERM as a flag that long work checks where it can stop. No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Stop = Callable[[], bool]


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Within it neither signal ends the program: the work asks, and stops where nothing is lost."""
    seen: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    old = {kind: signal.signal(kind, lambda number, frame: seen.append(number)) for kind in kinds}
    try:
        yield lambda: bool(seen)
    finally:
        for kind, handler in old.items():
            signal.signal(kind, handler)
