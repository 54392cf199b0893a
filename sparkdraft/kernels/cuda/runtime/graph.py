"""A function's launches as a CUDA graph. All graphs share one pool of memory: what lies between their inputs and
outputs is dead when a replay has ended, and replays follow each other."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar
from weakref import WeakSet

import torch
from torch import Tensor

_living: WeakSet[Graph] = WeakSet()


@contextmanager
def no_garbage_collected() -> Iterator[None]:
    """An old engine's graphs, freed in the middle of a capture, would end it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Graph:
    RUN_FIRST: ClassVar = True

    def __init__(self, run: Callable[[], Tensor], beside: Graph | None = None) -> None:
        """'run' has run before, which loaded its kernels. 'output' is filled by `replay`."""
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        other = next(iter(_living), None)
        with no_garbage_collected(), torch.cuda.graph(self._graph, pool=other._graph.pool() if other else None):
            self.output = run()
        _living.add(self)

    def replay(self) -> Tensor:
        self._graph.replay()
        return self.output
