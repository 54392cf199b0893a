"""Looks inside a running engine by replacing its methods for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(*stand_ins: tuple[Any, str, Any]) -> Iterator[None]:
    """Replaces attributes within the block. stand_ins: (object, name, stand-in)."""
    unset = object()
    before = [vars(owner).get(name, unset) for owner, name, _ in stand_ins]
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(stand_ins, before, strict=True):
            delattr(owner, name) if value is unset else setattr(owner, name, value)
