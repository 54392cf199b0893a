"""A lock on a folder that one process at a time writes to: a corpus, or a training run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkdraft.core import UserError


@contextmanager
def alone_in(folder: Path, what: str) -> Iterator[None]:
    """Within it no other process is; the lock ends with the process. Raises UserError for a second one. what: is in the
    folder, for people."""
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
