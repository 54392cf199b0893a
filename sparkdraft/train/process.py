"""A lock on the folder that a long job writes to, and signals that stop the job without losing work."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

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


class Stopped(Exception):
    """Work was given up in the middle because a signal asked to stop."""


class Signals:
    """Remembers SIGINT and SIGTERM; calling it tells whether one has come."""

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
        """Let a signal raise Stopped as soon as Python runs again: after an operator of torch, or during a backward
        pass after a part that is recomputed."""
        self._raises = True
        try:
            if self._seen:
                raise Stopped
            yield
        finally:
            self._raises = False


@contextmanager
def stop_signals() -> Iterator[Signals]:
    """Keep both signals from ending the program; the work asks the result and stops where nothing is lost."""
    signals = Signals()
    kinds = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    old = {kind: signal.signal(kind, signals.handle) for kind in kinds}
    try:
        yield signals
    finally:
        for kind, handler in old.items():
            signal.signal(kind, handler)
