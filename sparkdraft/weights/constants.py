"""Tensors that kernels make on first use and keep: one decorator for all of them.

The first use may lie within a capture (kernels/cuda/runtime/graph.py, kernels/cuda/runtime/compiling.py), and a
capture runs
nothing: a tensor made there would be kept without ever having been filled, in memory that goes with the capture. Such a
tensor is made on a stream that is not captured, so it is filled before the first kernel reads it, whoever asks for it
first. `tests/kernels/test_constants.py` finds cached functions that return tensors in any other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import ParamSpec

import torch
from torch import Tensor

Parameters = ParamSpec("Parameters")


def device_constant(make: Callable[Parameters, Tensor]) -> Callable[Parameters, Tensor]:
    """As functools.cache, for a function that returns a tensor which nobody replaces."""

    @cache
    @wraps(make)
    def made(*arguments: Parameters.args, **options: Parameters.kwargs) -> Tensor:
        if not is_captured():
            return make(*arguments, **options)
        with _aside():
            return make(*arguments, **options)

    return made  # type: ignore[return-value]


def is_captured() -> bool:
    """Whether what is launched now is captured, and so does not run."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def _aside() -> Iterator[None]:
    """What is launched within runs now, and has ended with the block. Captures take streams of the usual priority, so
    a stream of another priority is none of theirs."""
    stream = torch.cuda.Stream(priority=-1)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
