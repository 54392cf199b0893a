"""How long tests wait. A limit only ends a hang: it is minutes, however short the wait usually is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENT = 400.0  # seconds until a test gives up

Found = TypeVar("Found")


def wait_for(what: Callable[[], Found | None], why: Callable[[], object] = lambda: "") -> Found:
    """What the call returns, once that is true. why: what to show if it never is."""
    deadline = time.monotonic() + PATIENT
    while not (found := what()):
        assert time.monotonic() < deadline, f"it did not come true: {why()}"
        time.sleep(0.02)
    return found
