"""Finds what the files of a package declare, so that a new model, drafter or format is one file and no list."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any


def found_in(package: str, attribute: str) -> Iterator[tuple[str, Any]]:
    """Import every module directly in a package, in the order of their names, and yield (module, value) of those that
    define 'attribute'."""
    for info in iter_modules(import_module(package).__path__):
        if not info.ispkg:
            value = getattr(import_module(f"{package}.{info.name}"), attribute, None)
            if value is not None:
                yield info.name, value
