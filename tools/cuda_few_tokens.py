"""Tunes and times the matmuls of few rows (kernels/cuda/linear/few_tokens.py) against cuBLAS and the memory's speed.

Every figure is a replayed CUDA graph of launches over copies of the weight that exceed the L2 together; bytes are the
weight's, shown as a share of a measured copy. One tile must serve all numbers of rows, so the best is chosen over all
of them, and one whose rows depend on their neighbours is thrown out; then whole layers of Qwen3-8B run with and
without overlap (pdl.py) and as cuBLAS with the small kernels around it. The tiles found go into the user's own file
(kernels/cuda/runtime/tuned), which later runs on this machine use, or into the one that --out names. It ends in a
line of JSON.

    python tools/cuda_few_tokens.py            about a minute on an H200, a third of it compiling
    python tools/cuda_few_tokens.py --out sparkdraft/kernels/cuda/runtime/tuned/sm_90.json    for everybody
    python tools/cuda_few_tokens.py --quick    the tiles of the table alone, and fewer rows: about 20 seconds
    python tools/cuda_few_tokens.py --only Gemma,gpt    chosen shapes: seconds
    python tools/cuda_few_tokens.py --dry      tiny shapes in Triton's interpreter: whether the script itself works
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkdraft.kernels import cuda
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.runtime import pdl, tuned
from sparkdraft.kernels.cuda.runtime.gpu import gpu_of
from sparkdraft.kernels.cuda.runtime.timing import COLD_BYTES, seconds
from sparkdraft.kernels.ops import SILU, Norm, Normed
from sparkdraft.operate.forecast.rates import memory_bandwidth
from sparkdraft.operate.tune.tiles import TileSearch, compiling, float_tiles
from sparkdraft.weights.linear import WeightTiles

if DRY:
    import tests.kernels.triton_device  # noqa: F401  # mends the interpreter

DEVICE, DTYPE = ("cpu", torch.float16) if DRY else ("cuda", torch.bfloat16)
GPU = gpu_of(torch.device(DEVICE))
FORMAT = "16bit"
GOAL = 0.02  # seconds of replays per figure
SHRINK = 96 if DRY else 1  # of every length
EPS = 1e-6
ROWS = {1: 2.0, 4: 1.0, 16: 2.0}  # how much each counts in the choice of a tile
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
    Shape("Qwen3-30B-A3B qkv", "norm_linear", 5120, 2048),
    Shape("Qwen3-30B-A3B o", "add_linear", 2048, 4096),
    Shape("Qwen3-30B-A3B router", "norm_linear", 128, 2048),
    Shape("Qwen3-30B-A3B head", "norm_argmax", 151936, 2048),
    Shape("gpt-oss qkv", "norm_linear", 5120, 2880),
    Shape("gpt-oss o", "add_linear", 2880, 4096),
    Shape("gpt-oss-20b router", "norm_linear", 32, 2880),
    Shape("gpt-oss head", "norm_argmax", 201088, 2880),
    Shape("Gemma-4-31B qkv, sliding", "norm_linear", 16384, 5376),
    Shape("Gemma-4-31B qk, full", "norm_linear", 18432, 5376),
    Shape("Gemma-4-31B o, sliding", "linear", 5376, 8192),
    Shape("Gemma-4-31B o, full", "linear", 5376, 16384),
    Shape("Gemma-4-31B gate_up", "norm_gated", 43008, 5376),
    Shape("Gemma-4-31B down", "linear", 5376, 21504),
    Shape("Gemma-4-31B head", "norm_argmax", 262144, 5376),
    Shape("Gemma-4-26B-A4B qkv, sliding", "norm_linear", 8192, 2816),
    Shape("Gemma-4-26B-A4B o, sliding", "linear", 2816, 4096),
    Shape("Gemma-4-26B-A4B gate_up", "norm_gated", 4224, 2816),
    Shape("Gemma-4-26B-A4B down", "linear", 2816, 2112),
]


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
        cold = COLD_BYTES
        return 2 if shape.nbytes > cold else min(max(-(-cold // shape.nbytes), 20), 320)

    def of(self, shape: Shape) -> list[Tensor]:
        out, in_ = shape.key
        count = self.copies(shape)
        return list(self.pool[: count * out * in_].view(count, out, in_))


def prepared(x: Tensor, norm: Norm) -> Normed:
    """As an add_linear leaves it: with a part of the squares for each of its programs."""
    width = x.shape[1]
    scaled, squares = few_tokens.prepare(Normed(x, norm))
    parts = few_tokens._launch((width, width), FORMAT, 8 * DTYPE.itemsize, DTYPE.itemsize, 1, GPU).programs
    return Normed(x, norm, scaled, (squares / parts).repeat(1, parts))


class Inputs:
    def __init__(self, shape: Shape, rows: int) -> None:
        out, in_ = shape.key
        torch.manual_seed(0)  # the first rows of a small batch are those of a large one
        self.x, self.residual = normal(16, in_)[:rows], normal(16, out)[:rows].clone()
        self.normed, self.then = prepared(self.x, Norm(normal(in_), EPS)), Norm(normal(out), EPS)


def ours(shape: Shape, inputs: Inputs, matrix: Tensor) -> list[Tensor]:
    """All that a launch writes."""
    weight = WeightTiles(matrix)
    if shape.kind == "linear":
        return [few_tokens.linear(inputs.x, weight)]
    if shape.kind == "add_linear":
        left = few_tokens.add_linear(inputs.residual, inputs.x, weight, inputs.then)
        return [left.x, left.scaled, left.squares]
    kinds = {
        "norm_linear": few_tokens.norm_linear,
        "norm_gated": few_tokens.norm_gated,
        "norm_argmax": few_tokens.norm_argmax,
    }
    return [kinds[shape.kind](inputs.normed, weight)]


@contextmanager
def overlap(on: bool) -> Iterator[None]:
    kept, pdl.ENABLED = pdl.ENABLED, on
    try:
        yield
    finally:
        pdl.ENABLED = kept


def rows_agree(shape: Shape, weight: Tensor) -> bool:
    """Whether the first row is the same to the bit alone and among others."""
    alone, *others = ([part[0] for part in ours(shape, Inputs(shape, rows), weight)] for rows in ROWS)
    return all(all(map(torch.equal, alone, other)) for other in others)


def figures(times: dict[int, float], nbytes: int, bandwidth: float) -> str:
    return "  ".join(
        f"{t * 1e6:7.1f} us {nbytes / t / 1e9:5.0f} ({nbytes / t / bandwidth:4.0%})" for t in times.values()
    )


def tune(
    search: TileSearch, shape: Shape, weights: list[Tensor], rows: list[int], bandwidth: float
) -> dict[str, object]:
    print(f"{shape.name} {shape.out} x {shape.in_}, {shape.kind}, {len(weights)} copies; rows {rows}: us, GB/s, share")
    library = {}
    for count in rows:
        x = Inputs(shape, count).x
        library[count] = seconds([lambda w=w, x=x: F.linear(x, w) for w in weights], GOAL)
    print(f"  {'F.linear alone':24s} {figures(library, shape.nbytes, bandwidth)}", flush=True)

    def measure() -> list[float]:
        if not rows_agree(shape, weights[0]):
            raise RuntimeError("ROWS DEPEND ON THEIR NEIGHBOURS")
        return [seconds([lambda w=w, i=i: ours(shape, i, w) for w in weights], GOAL) for i in inputs]

    def describe(found: list[float]) -> str:
        return figures(dict(zip(rows, found, strict=True)), shape.nbytes, bandwidth)

    inputs, may_split = [Inputs(shape, count) for count in rows], shape.kind not in ("norm_gated", "norm_argmax")
    best = search.best(
        few_tokens.KERNEL, FORMAT, shape.key, float_tiles(shape.out, shape.in_, GPU, may_split), measure,
        lambda: [ours(shape, each, weights[0]) for each in (inputs[0], inputs[-1])], [ROWS[count] for count in rows],
        describe,
    )  # fmt: skip
    if not best:
        return {"F.linear_us": micros(library), "best": None}
    final = dict(zip(rows, measure(), strict=True))
    with overlap(False):
        apart = seconds([lambda w=w: ours(shape, inputs[0], w) for w in weights], GOAL)
    print(f"  launched one by one, 1 row: {apart * 1e6:.1f} us", flush=True)
    return {"F.linear_us": micros(library), "us": micros(final), "best": best}


def micros(times: dict[int, float]) -> dict[str, float]:
    return {str(rows): round(t * 1e6, 2) for rows, t in times.items()}


# A whole layer, but for attention itself


@dataclass(frozen=True)
class Layer:
    norm: Norm
    qkv: WeightTiles
    o: WeightTiles
    gate_up: WeightTiles
    down: WeightTiles

    def unfused(self, normed: Normed) -> Normed:
        residual = normed.x
        qkv = F.linear(cuda.rms_norm(residual, *normed.norm), self.qkv.codes)
        residual.addmm_(qkv[:, :HIDDEN], self.o.codes.t())
        gate_up = F.linear(cuda.rms_norm(residual, *self.norm), self.gate_up.codes)
        residual.addmm_(cuda.gated(gate_up, SILU), self.down.codes.t())
        return Normed(residual, self.norm)

    def fused(self, normed: Normed) -> Normed:
        qkv = few_tokens.norm_linear(normed, self.qkv)
        normed = few_tokens.add_linear(normed.x, qkv[:, :HIDDEN], self.o, self.norm)
        return few_tokens.add_linear(normed.x, few_tokens.norm_gated(normed, self.gate_up), self.down, self.norm)


def make_layers(count: int) -> list[Layer]:
    return [
        Layer(
            Norm(torch.ones(HIDDEN, dtype=DTYPE, device=DEVICE), EPS),
            *(
                WeightTiles(normal(*size).mul_(0.01))
                for size in ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTER, HIDDEN), (HIDDEN, INTER))
            ),
        )
        for _ in range(count)
    ]


def chains(rows: list[int], bandwidth: float) -> dict[str, object]:
    layers = make_layers(2 if DRY else 10)
    first = layers[0]
    nbytes = sum(w.codes.nbytes for w in (first.qkv, first.o, first.gate_up, first.down))
    floor = nbytes / bandwidth
    print(f"a layer of Qwen3-8B without attention, {len(layers)} in a graph; floor {floor * 1e6:.1f} us; rows {rows}")
    ways: list[tuple[str, Callable[[Layer, Normed], Normed], bool]] = [
        ("cuBLAS and small kernels", Layer.unfused, True),
        ("fused, one by one", Layer.fused, False),
        ("fused, overlapped", Layer.fused, True),
    ]

    def run(way: Callable[[Layer, Normed], Normed], normed: Normed) -> None:
        for layer in layers:
            normed = way(layer, normed)

    results: dict[str, object] = {"floor_us": round(floor * 1e6, 2)}
    with compiling("layers"):
        for _, way, on in ways[1:]:
            with overlap(on):
                run(way, prepared(normal(1, HIDDEN), first.norm))
    for name, way, on in ways:
        times = {}
        for count in rows:
            with overlap(on):
                launch = partial(run, way, prepared(normal(count, HIDDEN), first.norm))
                times[count] = seconds([launch], GOAL) / len(layers)
        print(f"  {name:44s} {figures(times, nbytes, bandwidth)}", flush=True)
        results[name] = micros(times)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the table's tiles alone, rows 1 and 16")
    parser.add_argument("--dry", action="store_true", help="tiny shapes in the interpreter, to try the script")
    parser.add_argument("--only", default="", help="shapes whose name begins so, and no whole layers")
    parser.add_argument("--out", type=Path, default=tuned.user_file(GPU), help="the file of tiles to write to")
    parser.add_argument("--most", type=int, help="tiles of a matrix that are tried at most")
    arguments = parser.parse_args()
    quick = arguments.quick
    SHAPES[:] = [shape for shape in SHAPES if shape.name.startswith(tuple(arguments.only.split(",")))]
    begin = time.perf_counter()
    bandwidth = 1e9 if DRY else memory_bandwidth("cuda")
    device = DEVICE if DRY else torch.cuda.get_device_name()
    print(f"{device}: copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    rows = [1, 16] if quick or DRY else list(ROWS)
    weights = Weights()
    search = TileSearch(GPU, lambda: True, most=1 if quick else 2 if DRY else arguments.most)
    shapes = {shape.name: tune(search, shape, weights.of(shape), rows, bandwidth) for shape in SHAPES}
    if not DRY:
        search.save(arguments.out)
    layer = {} if arguments.only else chains(rows, bandwidth)  # with the tiles just found
    spent = time.perf_counter() - begin
    print(f"{spent:.0f} s in all")
    print(json.dumps({"device": device, "copy_GB/s": round(bandwidth / 1e9), "shapes": shapes, "layer": layer}))


if __name__ == "__main__":
    main()
