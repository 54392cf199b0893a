"""A lock on the folder that a long job writes to, and signals that stop the job without losing work."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkdraft.core import UserError


@contextmanager
def alone_in(folder: Path, what: str) -> Iterator[None]:
    """Hold an exclusive lock on the folder; the lock ends with the process. Raises UserError if another process has it.

    what: what is in the folder, for the error message.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(place)
        raise UserError(
            f"Another process is writing to {what} {folder}: wait for its end, or name another folder."
        ) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(place)


Stop = Callable[[], bool]


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Keep SIGINT and SIGTERM from ending the program; the work asks the result and stops where nothing is lost."""
    seen = list[int]()
    kinds = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    old = {kind: signal.signal(kind, lambda number, frame: seen.append(number)) for kind in kinds}
    try:
        yield lambda: bool(seen)
    finally:
        for kind, handler in old.items():
            signal.signal(kind, handler)
