"""Kernels know tensors and nothing else. Three modules hold the same operators; a plan names the one that runs."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


class Unrecordable(Exception):
    """A step holds an operator that a recording would miss; the message is its name."""


def load(name: str) -> ModuleType:
    """name: "reference" (torch), "native" (C++ for CPUs) or "cuda" (Triton); imported only when it is used."""
    return import_module(f"sparkdraft.kernels.{name}")
