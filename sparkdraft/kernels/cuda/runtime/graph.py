"""A function's launches as a CUDA graph. All graphs share one pool of memory: what lies between their inputs and
outputs is dead when a replay has ended, and replays follow each other."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar
from weakref import WeakSet

import torch

_living: WeakSet[Graph] = WeakSet()
_broken: list[torch.cuda.CUDAGraph] = []  # graphs of failed captures, which torch may still ask about


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


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, **options: Any) -> Iterator[None]:
    """Captures what is launched within. If that fails, its own error is raised, not the one that ending its capture
    may raise too; torch is on the stream that it was on, and can capture again."""
    device, broke = torch.cuda.current_device(), None
    with no_garbage_collected(), torch.cuda.stream(torch.cuda.current_stream()):
        try:
            with torch.cuda.graph(graph, pool=pool, **options):
                try:
                    yield
                except Exception as error:
                    broke = error
                    raise
        except Exception as error:
            _end(graph, device, pool)
            raise broke or error from None


def _end(graph: torch.cuda.CUDAGraph, device: int, pool: Any) -> None:
    """Where CUDA broke a capture off, torch goes on to believe in it, and refuses the next."""
    try:
        graph.pool()
    except RuntimeError:  # it has not ended well
        _broken.append(graph)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):  # not public
            with suppress(RuntimeError, AttributeError):
                getattr(torch._C, name)(device, pool)


def _taken() -> int:
    """Bytes of the GPU in use, without those that torch keeps for later."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved() + torch.cuda.memory_allocated()


class Graph:
    RUN_FIRST: ClassVar = True

    def __init__(self, run: Callable[[], Any], beside: Graph | None = None) -> None:
        """'run' has run before, which loaded its kernels. 'output' is filled by `replay`."""
        torch.cuda.synchronize()
        self._graph, before = torch.cuda.CUDAGraph(), _taken()
        other = next(iter(_living), None)
        with capturing(self._graph, other._graph.pool() if other else torch.cuda.graph_pool_handle()):
            self.output = run()
        # What it launches, kept by the driver, and its output: the memory in between is every graph's.
        self.nbytes = max(_taken() - before, 0)
        _living.add(self)

    def replay(self) -> Any:
        self._graph.replay()
        return self.output
