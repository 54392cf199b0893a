"""A function's launches as a CUDA graph: recorded once, replayed by one launch.

Inputs must live at fixed addresses and lengths be read on the device, as they are in all of these kernels.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """An old engine's graphs, freed in the middle of a capture, would end it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Recording:
    RUNS = False  # making one computes nothing

    def __init__(self, run: Callable[[], Tensor], beside: Recording | None = None) -> None:
        """run: has run before, which compiled and loaded what a capture may not; capturing it computes nothing.

        beside: an earlier recording of the same owner, whose memory this one shares: only one replays at a time.
        """
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with _no_garbage_collected(), torch.cuda.graph(self._graph, pool=beside._graph.pool() if beside else None):
            self.output = run()

    def replay(self) -> Tensor:
        """The same launches on what the inputs hold now; returns the same tensor, filled anew."""
        self._graph.replay()
        return self.output
