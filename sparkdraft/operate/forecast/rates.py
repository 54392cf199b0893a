"""Measures this machine's ceilings: how fast its memory is read, and how fast a GPU multiplies matrices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

SIZE = {"cpu": 512 << 20, "cuda": 4 << 30}  # bytes: far past any cache
SIDE = 8192  # rows and columns of the matrices


def memory_bandwidth(device: str, threads: int = 1, repeats: int = 5) -> float:
    """Return bytes per second: the better of a copy (read and written bytes both count) and a sum (read only)."""
    with _measuring(device, threads):
        source = torch.ones(SIZE[device] // 4, device=device)
        target = torch.empty_like(source)
        copy = 2 * source.nbytes / _best(lambda: target.copy_(source), device, repeats)
        return max(copy, source.nbytes / _best(source.sum, device, repeats))


def gemv_bandwidth(device: str, threads: int = 1, repeats: int = 5) -> float:
    """Return bytes per second of a matrix-vector product, as in decoding; in 16 bits on a GPU."""
    with _measuring(device, threads):
        matrix = torch.ones(SIZE[device] // 4 // SIDE, SIDE, device=device)
        matrix = matrix.bfloat16() if device == "cuda" else matrix
        vector = torch.ones(SIDE, dtype=matrix.dtype, device=device)
        return matrix.nbytes / _best(lambda: matrix @ vector, device, repeats)


@contextmanager
def _measuring(device: str, threads: int) -> Iterator[None]:
    """Sets the number of threads, and leaves a GPU's memory as it was for later plans and measurements."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def matmul_rate(repeats: int = 20) -> float:
    """Return a GPU's bfloat16 operations per second over 'repeats' matmuls in a row, as in a prompt."""
    a, b = (torch.randn(SIDE, SIDE, device="cuda").bfloat16() for _ in range(2))
    out = a @ b

    def work() -> None:
        for _ in range(repeats):
            torch.mm(a, b, out=out)

    return 2 * SIDE**3 * repeats / _best(work, "cuda", 2)


def _best(work: Callable[[], object], device: str, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        wait(device)
        begin = time.perf_counter()
        work()
        wait(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
