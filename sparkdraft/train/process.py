"""Keeps the work of a long job: a lock on its folder, files that are replaced whole, and signals that wait."""

from __future__ import annotations

import fcntl
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


def write_whole(path: Path, content: bytes, ending: str) -> None:
    """Replace a file by a new one, or leave it as it is. ending: of the name under which the new one is written."""
    fresh = path.with_name(path.name + ending)
    try:
        fresh.write_bytes(content)
        sync(fresh)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


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
