"""`device_constant`: a decorator for tensors that kernels make on first use and keep.

The first use may be inside a CUDA graph capture, which runs nothing: a tensor made there would never be filled. So such
tensors are made on a stream that is not captured.
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
    """Like functools.cache, for a function that returns a constant tensor."""

    @cache
    @wraps(make)
    def made(*arguments: Parameters.args, **options: Parameters.kwargs) -> Tensor:
        if not is_captured():
            return make(*arguments, **options)
        with _aside():
            return make(*arguments, **options)

    return made  # type: ignore[return-value]


def is_captured() -> bool:
    """True if a capture is under way, so that launches do not run."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def _aside() -> Iterator[None]:
    """Launches in this block run now and are complete at its end. Captures use streams of the usual priority, so a
    stream of another priority is not one of theirs."""
    stream = torch.cuda.Stream(priority=-1)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
