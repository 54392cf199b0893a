"""The time of kernels: that of a replayed CUDA graph whose launches read more than the L2 holds, as a step's do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

COLD_BYTES = 256 << 20  # a graph reads this much at least, five times the L2 of an H200
Launch = Callable[[], object]


def seconds(launches: Sequence[Launch], goal: float = 0.1) -> float:
    """Return the seconds per launch: the median of five timings of a graph that holds all launches."""
    if not torch.cuda.is_available():  # in the interpreter
        begin = time.perf_counter()
        launches[-1]()
        return time.perf_counter() - begin
    launches[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    begin_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay(times: int) -> float:
        begin_event.record()
        for _ in range(times):
            graph.replay()
        end_event.record()
        end_event.synchronize()
        return float(begin_event.elapsed_time(end_event)) / 1e3 / times / len(launches)

    once = max(replay(2), 1e-7) * len(launches)
    return sorted(replay(max(1, int(goal / 5 / once))) for _ in range(5))[2]
