"""Measures this machine: how fast its memory is read, how fast a GPU multiplies, and what the CPU kernels reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sparkdraft.kernels.ops import AttentionParams, AttentionView

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


# ---- what the CPU kernels reach
#
# The matrices and caches together exceed the CPU's own caches, as a model's do, and the kernels run as compiled steps,
# as in an engine. Tiny matrices show the fixed cost of a layer. All of it takes three seconds.

MATRIX_SIDE = 2048  # rows and columns of a matrix
MATRIX_BYTES = 110e6  # of its copies together
ROWS = 16
CONTEXT, BLOCK, HEADS, KV_HEADS, HEAD_DIM = 1024, 16, 9, 3, 64
CACHES = 48  # of one layer: 75 MB
LEAST = 0.2  # seconds per figure


class MatmulRate(NamedTuple):
    one_row: float  # seconds for one token
    several_rows: float  # seconds for 'rows' tokens
    nbytes: int  # of the matrix
    rows: int
    operations: int  # for one token


class CpuRates(NamedTuple):
    eight_bits: MatmulRate
    four_bits: MatmulRate
    keys: float  # bytes per second of keys and values that one token of a stream reads
    layer: float  # seconds of a layer with tiny matrices, in a compiled step


def measure_cpu(threads: int) -> CpuRates:
    from sparkdraft.kernels import native

    native.set_threads(threads)
    with torch.inference_mode():
        keys = 2 * CONTEXT * KV_HEADS * HEAD_DIM * 4 / _attention_seconds()
        return CpuRates(_matmul_rate(8), _matmul_rate(4), keys, _layer_seconds())


def _matmul_rate(bits: int) -> MatmulRate:
    from sparkdraft.kernels.native.packed import PackedLinear
    from sparkdraft.weights.quant.stored import GROUP, GroupQuant

    groups = MATRIX_SIDE // GROUP
    codes = torch.randint(127, (MATRIX_SIDE, groups, GROUP * bits // 8), dtype=torch.int8 if bits == 8 else torch.uint8)
    scale, offset = (torch.full((MATRIX_SIDE, groups), value, dtype=torch.float16) for value in (0.01, -0.08))
    made = GroupQuant(bits, codes, scale, None if bits == 8 else offset)
    matrices = [PackedLinear.pack([made])]
    matrices += [PackedLinear.pack([made]) for _ in range(int(MATRIX_BYTES / matrices[0].nbytes))]
    one, several = (torch.randn(rows, MATRIX_SIDE) for rows in (1, ROWS))
    alone, together = (_seconds([partial(matrix.linear, x) for matrix in matrices]) for x in (one, several))
    return MatmulRate(alone, together, matrices[0].nbytes, ROWS, 2 * MATRIX_SIDE * MATRIX_SIDE)


def _attention_seconds() -> float:
    from sparkdraft.kernels import native

    blocks = CONTEXT // BLOCK
    caches = [torch.randn(2, blocks, KV_HEADS, BLOCK, HEAD_DIM) for _ in range(CACHES)]
    start, length = torch.tensor([0, 1]).int(), torch.tensor([CONTEXT]).int()
    view = AttentionView(start, length, torch.arange(blocks).int()[None], 1, CONTEXT)
    q, params = torch.randn(1, HEADS, HEAD_DIM), AttentionParams(HEAD_DIM**-0.5)

    return _seconds([partial(native.paged_attention, q, k, v, view, params) for k, v in caches])


def _layer_seconds() -> float:
    from sparkdraft.cache.formats.dense import DenseKV
    from sparkdraft.kernels import native
    from sparkdraft.models.common.blocks import Step
    from sparkdraft.models.registry import architecture
    from sparkdraft.operate.bench.random_model import RandomCheckpoint
    from sparkdraft.operate.bench.shapes import shape
    from sparkdraft.weights.loader import Loader

    config, device = shape("tiny"), torch.device("cpu")
    load = Loader(RandomCheckpoint(config, "cpu"), device, torch.float32, native)
    model = architecture(config.model_type).build(config, load, native, BLOCK)
    kv = DenseKV(config.attention, 1, BLOCK, torch.float32, device, native)
    zero, one = torch.zeros(1).int(), torch.ones(1).int()
    step = Step(zero, zero, zero, AttentionView(torch.tensor([0, 1]).int(), one, zero[None], 1, BLOCK), kv.layers)
    return _seconds([partial(model.forward, step)]) / config.num_layers


def _seconds(calls: Sequence[Callable[[], Tensor]]) -> float:
    """Seconds per call of a compiled step of all calls, replayed for LEAST seconds: the better of two times."""
    from sparkdraft.kernels import native

    recorded, times = native.Graph(lambda: [call() for call in calls][-1]), []
    for _ in range(2):
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < LEAST:
            recorded.replay()
            count += len(calls)
        times.append((time.perf_counter() - begin) / count)
    return min(times)
