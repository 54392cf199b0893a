"""Tunes and times the matmuls of few rows (kernels/cuda/few_rows.py) against cuBLAS and the memory's speed.

Every figure is a replayed CUDA graph of launches over copies of the weight that exceed the L2 together; bytes are the
weight's, shown as a share of a measured copy. One tile must serve all numbers of rows, so the best is chosen over all
of them, and one whose rows depend on their neighbours is thrown out; then whole layers of Qwen3-8B run with and
without overlap (pdl.py) and as cuBLAS with the small kernels around it. It ends in one line of JSON.

    python bench/cuda_few_rows.py            about a minute on an H200, a third of it compiling
    python bench/cuda_few_rows.py --quick    the tiles of the table alone, and fewer rows: about 20 seconds
    python bench/cuda_few_rows.py --dry      tiny shapes in Triton's interpreter: whether the script itself works
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from sparkdraft.bench.bandwidth import memory_bandwidth  # noqa: E402
from sparkdraft.kernels import cuda  # noqa: E402
from sparkdraft.kernels.cuda import few_rows, pdl  # noqa: E402
from sparkdraft.kernels.cuda.few_rows import Tile  # noqa: E402

DEVICE, DTYPE = ("cpu", torch.float16) if DRY else ("cuda", torch.bfloat16)
GPU = few_rows._gpu(torch.device(DEVICE))
TABLE = few_rows.tuned(GPU)
SHRINK = 96 if DRY else 1  # of every length
COLD_BYTES = 256 << 20  # a graph touches this much at least, four times the L2 of an H200
EPS = 1e-6
ROWS = {1: 2.0, 4: 1.0, 16: 2.0, 64: 1.0}  # how much each counts in the choice of a tile
HIDDEN, INTER, QKV = 4096 // SHRINK, 12288 // SHRINK, 6144 // SHRINK


@dataclass(frozen=True)
class Shape:
    name: str
    kind: str
    out: int
    in_: int

    @property
    def key(self) -> tuple[int, int]:
        return self.out // SHRINK, self.in_ // SHRINK

    @property
    def nbytes(self) -> int:
        return self.key[0] * self.key[1] * DTYPE.itemsize


SHAPES = [
    Shape("Qwen3-8B qkv", "norm_linear", 6144, 4096),
    Shape("Qwen3-8B o", "add_linear", 4096, 4096),
    Shape("Qwen3-8B gate_up", "norm_gated", 24576, 4096),
    Shape("Qwen3-8B down", "add_linear", 4096, 12288),
    Shape("Qwen3-8B head", "norm_argmax", 151936, 4096),
    Shape("DFlash fc", "linear", 4096, 20480),
    Shape("DFlash context_kv", "norm_linear", 10240, 4096),
    Shape("SmolLM2 qkv", "norm_linear", 960, 576),
    Shape("SmolLM2 o", "add_linear", 576, 576),
    Shape("SmolLM2 gate_up", "norm_gated", 3072, 576),
    Shape("SmolLM2 down", "add_linear", 576, 1536),
    Shape("SmolLM2 head", "norm_argmax", 49152, 576),
]


def candidates(shape: Shape, quick: bool) -> list[Tile]:
    """The tile in use first, then others of its kind."""
    first = TABLE.get((shape.out, shape.in_)) or few_rows._choose(shape.out, shape.in_, 2, GPU.sms)
    if shape.in_ < 2048:
        others = [(16, 64, 4, 10), (16, 64, 2, 10), (32, 64, 4, 10), (64, 64, 4, 6)]
        others += [(16, 128, 4, 13), (32, 128, 4, 13)] * (shape.in_ % 128 == 0)
    elif shape.out < 8192:
        others = [(16, 256, 4, 8), (32, 128, 4, 8), (32, 256, 4, 8), (32, 128, 2, 8), (64, 128, 4, 8), (64, 256, 4, 6)]
    else:
        others = [(32, 128, 4, 6), (64, 64, 4, 8), (64, 128, 4, 5), (64, 128, 2, 5), (128, 64, 4, 6), (128, 128, 8, 4)]
    tiles = [first] + [Tile(*numbers) for numbers in others]
    return list(dict.fromkeys(tiles))[: 1 if quick else 2 if DRY else None]


def normal(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_()


class Weights:
    """One pool of numbers that all shapes cut their copies from."""

    def __init__(self) -> None:
        largest = max(self.copies(shape) * shape.nbytes for shape in SHAPES)
        self.pool = normal(largest // DTYPE.itemsize).mul_(0.02)

    @staticmethod
    def copies(shape: Shape) -> int:
        if DRY:
            return 2
        return 2 if shape.nbytes > COLD_BYTES else min(max(-(-COLD_BYTES // shape.nbytes), 20), 320)

    def of(self, shape: Shape) -> list[Tensor]:
        out, in_ = shape.key
        count = self.copies(shape)
        return list(self.pool[: count * out * in_].view(count, out, in_))


class Inputs:
    def __init__(self, shape: Shape, rows: int) -> None:
        out, in_ = shape.key
        torch.manual_seed(0)  # the first rows of a small batch are those of a large one
        self.x, self.gain = normal(64, in_)[:rows], normal(in_)
        self.residual = normal(64, out)[:rows].clone()


def ours(shape: Shape, inputs: Inputs, weight: Tensor) -> Tensor:
    x, gain = inputs.x, inputs.gain
    if shape.kind == "linear":
        return few_rows.linear(x, weight)
    if shape.kind == "add_linear":
        few_rows.add_linear(inputs.residual, x, weight)
        return inputs.residual
    return {
        "norm_linear": few_rows.norm_linear,
        "norm_gated": few_rows.norm_gated,
        "norm_argmax": few_rows.norm_argmax,
    }[shape.kind](x, gain, EPS, weight)


def seconds(launches: list[Callable[[], object]], goal: float = 0.02) -> float:
    """Seconds a launch: the median of five timings of a graph that holds all of them."""
    launches[0]()  # compiles
    if DRY:
        begin_time = time.perf_counter()
        launches[-1]()
        return time.perf_counter() - begin_time
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay(times: int) -> float:
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / times / len(launches)

    replay(1)
    once = max(replay(1), 1e-7) * len(launches)
    return sorted(replay(max(1, int(goal / 5 / once))) for _ in range(5))[2]


@contextmanager
def using(shape: Shape, tile: Tile) -> Iterator[None]:
    """The tile in place of the table's."""
    kept = TABLE.get(shape.key)
    TABLE[shape.key] = tile
    few_rows._launch.cache_clear()
    try:
        yield
    finally:
        if kept is None:
            del TABLE[shape.key]
        else:
            TABLE[shape.key] = kept
        few_rows._launch.cache_clear()


@contextmanager
def overlap(on: bool, ahead: int = few_rows.AHEAD_BYTES) -> Iterator[None]:
    kept = pdl.ENABLED, few_rows.AHEAD_BYTES
    pdl.ENABLED, few_rows.AHEAD_BYTES = on, ahead
    few_rows._launch.cache_clear()
    try:
        yield
    finally:
        pdl.ENABLED, few_rows.AHEAD_BYTES = kept
        few_rows._launch.cache_clear()


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Launches of these kernels within are compiled on all cores and not run; what fails, fails again when timed."""
    begin, run = time.perf_counter(), few_rows._run
    few_rows._run = lambda kernel, grid, *arguments, **options: kernel.warmup(*arguments, grid=grid, **options)
    try:
        from triton.runtime._async_compile import AsyncCompileMode

        with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
            yield
    except Exception as error:  # of the compiler or of its threads: all is compiled once more where it is used
        print(f"compiling {what} ahead stopped: {error!r}", flush=True)
    finally:
        few_rows._run = run
        print(f"{what} compiled in {time.perf_counter() - begin:.1f} s", flush=True)


def compile_tiles(weights: Weights, rows: list[int], quick: bool) -> None:
    with compiling("tiles"):
        for shape in SHAPES:
            weight = weights.of(shape)[0]
            for tile in candidates(shape, quick):
                for count in sorted({*rows, 64}):
                    with using(shape, tile):
                        ours(shape, Inputs(shape, count), weight)
            if not quick:
                with overlap(False):  # the table's tile, likely the best
                    ours(shape, Inputs(shape, 1), weight)


def rows_agree(shape: Shape, weight: Tensor) -> bool:
    """Whether the first row is the same to the bit alone, among 16 and among 64."""
    results = [ours(shape, Inputs(shape, rows), weight)[0] for rows in (1, 16, 64)]
    return all(torch.equal(results[0], other) for other in results[1:])


def time_tile(shape: Shape, tile: Tile, weights: list[Tensor], rows: list[int]) -> dict[int, float] | None:
    """Seconds by rows; None where the tile cannot run here, or not alike for all rows: a result as well."""
    times = {}
    try:
        with using(shape, tile):
            if not rows_agree(shape, weights[0]):
                print(f"  {tile}: ROWS DEPEND ON THEIR NEIGHBOURS", flush=True)
                return None
            for count in rows:
                inputs = Inputs(shape, count)
                times[count] = seconds([lambda w=w, i=inputs: ours(shape, i, w) for w in weights])
    except Exception as error:
        print(f"  {tile} failed: {str(error).splitlines()[0][:100]}", flush=True)
        return None
    return times


def figures(times: dict[int, float], nbytes: int, bandwidth: float) -> str:
    return "  ".join(
        f"{t * 1e6:7.1f} us {nbytes / t / 1e9:5.0f} ({nbytes / t / bandwidth:4.0%})" for t in times.values()
    )


def tune(shape: Shape, weights: list[Tensor], rows: list[int], quick: bool, bandwidth: float) -> dict[str, object]:
    print(f"{shape.name} {shape.out} x {shape.in_}, {shape.kind}, {len(weights)} copies; rows {rows}: us, GB/s, share")
    library = {}
    for count in rows:
        x = Inputs(shape, count).x
        library[count] = seconds([lambda w=w, x=x: F.linear(x, w) for w in weights])
    print(f"  {'F.linear alone':44s} {figures(library, shape.nbytes, bandwidth)}", flush=True)
    found: dict[Tile, dict[int, float]] = {}
    for tile in candidates(shape, quick):
        times = time_tile(shape, tile, weights, rows)
        if times:
            found[tile] = times
            print(f"  {tile!s:44s} {figures(times, shape.nbytes, bandwidth)}", flush=True)
    if not found:
        return {"F.linear_us": micros(library), "best": None}
    fastest = {count: min(times[count] for times in found.values()) for count in rows}
    best = min(found, key=lambda tile: sum(ROWS[c] * found[tile][c] / fastest[c] for c in rows))
    one = Inputs(shape, 1)
    with using(shape, best), overlap(False):
        apart = seconds([lambda w=w: ours(shape, one, w) for w in weights])
    print(f"  best {best}; launched one by one, 1 row: {apart * 1e6:.1f} us", flush=True)
    numbers = [best.block_n, best.block_k, best.warps, best.stages]
    return {"F.linear_us": micros(library), "us": micros(found[best]), "best": numbers}


def micros(times: dict[int, float]) -> dict[str, float]:
    return {str(rows): round(t * 1e6, 2) for rows, t in times.items()}


# A whole layer, but for attention itself


@dataclass(frozen=True)
class Layer:
    gain: Tensor
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor

    def unfused(self, residual: Tensor) -> None:
        qkv = F.linear(cuda.rms_norm(residual, self.gain, EPS), self.qkv)
        residual.addmm_(qkv[:, :HIDDEN], self.o.t())
        gate_up = F.linear(cuda.rms_norm(residual, self.gain, EPS), self.gate_up)
        residual.addmm_(cuda.silu_mul(gate_up), self.down.t())

    def normed_apart(self, residual: Tensor) -> None:
        qkv = few_rows.linear(cuda.rms_norm(residual, self.gain, EPS), self.qkv)
        few_rows.add_linear(residual, qkv[:, :HIDDEN], self.o)
        gate_up = few_rows.linear(cuda.rms_norm(residual, self.gain, EPS), self.gate_up)
        few_rows.add_linear(residual, cuda.silu_mul(gate_up), self.down)

    def fused(self, residual: Tensor) -> None:
        qkv = few_rows.norm_linear(residual, self.gain, EPS, self.qkv)
        few_rows.add_linear(residual, qkv[:, :HIDDEN], self.o)
        few_rows.add_linear(residual, few_rows.norm_gated(residual, self.gain, EPS, self.gate_up), self.down)


def make_layers(count: int) -> list[Layer]:
    return [
        Layer(
            torch.ones(HIDDEN, dtype=DTYPE, device=DEVICE),
            *(
                normal(*size).mul_(0.01)
                for size in ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTER, HIDDEN), (HIDDEN, INTER))
            ),
        )
        for _ in range(count)
    ]


def chains(rows: list[int], quick: bool, bandwidth: float) -> dict[str, object]:
    layers = make_layers(2 if DRY else 10)
    first = layers[0]
    nbytes = sum(w.nbytes for w in (first.qkv, first.o, first.gate_up, first.down))
    floor = nbytes / bandwidth
    print(f"a layer of Qwen3-8B without attention, {len(layers)} in a graph; floor {floor * 1e6:.1f} us; rows {rows}")
    ways: list[tuple[str, Callable[[Layer, Tensor], None], bool, int]] = [
        ("cuBLAS and small kernels", Layer.unfused, True, few_rows.AHEAD_BYTES),
        ("fused, one by one", Layer.fused, False, few_rows.AHEAD_BYTES),
        ("fused, overlapped", Layer.fused, True, few_rows.AHEAD_BYTES),
    ]
    if not quick:
        ways += [(f"fused, overlapped, {n >> 10} KB ahead", Layer.fused, True, n) for n in (0, 16 << 10, 64 << 10)]
        ways += [("norm and gate apart, overlapped", Layer.normed_apart, True, few_rows.AHEAD_BYTES)]
    results: dict[str, object] = {"floor_us": round(floor * 1e6, 2)}
    with compiling("layers"):
        for _, way, on, ahead in ways[1:]:
            for count in rows:
                with overlap(on, ahead):
                    way(first, normal(count, HIDDEN))
    for name, way, on, ahead in ways:
        times = {}
        for count in rows:
            residual = normal(count, HIDDEN)
            with overlap(on, ahead):
                times[count] = seconds([lambda r=residual, w=way: [w(layer, r) for layer in layers]]) / len(layers)
        print(f"  {name:44s} {figures(times, nbytes, bandwidth)}", flush=True)
        results[name] = micros(times)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the table's tiles alone, rows 1 and 16")
    parser.add_argument("--dry", action="store_true", help="tiny shapes in the interpreter, to try the script")
    quick = parser.parse_args().quick
    begin = time.perf_counter()
    bandwidth = 1e9 if DRY else memory_bandwidth("cuda")
    device = DEVICE if DRY else torch.cuda.get_device_name()
    print(f"{device}: copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    rows = [1, 16] if quick or DRY else list(ROWS)
    weights = Weights()
    compile_tiles(weights, rows, quick)
    shapes = {shape.name: tune(shape, weights.of(shape), rows, quick, bandwidth) for shape in SHAPES}
    print("TUNED: dict[tuple[int, int], Tile] = {")
    for shape in SHAPES:
        if tile := shapes[shape.name]["best"]:
            TABLE[shape.key] = Tile(*tile)
            print(f"    ({shape.out}, {shape.in_}): Tile({', '.join(map(str, tile))}),  # {shape.name}")
    print("}", flush=True)
    few_rows._launch.cache_clear()
    layer = chains(rows, quick, bandwidth)  # with the tiles just found
    spent = time.perf_counter() - begin
    print(f"{spent:.0f} s in all")
    print(json.dumps({"device": device, "copy_GB/s": round(bandwidth / 1e9), "shapes": shapes, "layer": layer}))


if __name__ == "__main__":
    main()
