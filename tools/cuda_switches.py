"""Times the kernels of few decoded rows old against new, by the switches that choose between them, on a GPU.

    join       attention's parts joined by a second kernel (old), or by the last program to end (new)
    unit       keys of a split at least: 128 (old), or 64 and 32 (new), whole tiles; bits may differ, the cut does
    route      the choice of experts by a kernel of its own (old), or by the router's last program (new)
    eight      rows padded to 16 (old) or to 8 (new), wgmma's tiles too; floats, codes and experts

Each line ends in whether both gave the same bits. Every figure is a replayed CUDA graph of launches over copies of the
weights, or of keys, that exceed the L2 together. It ends in a line of JSON.

    python tools/cuda_switches.py                     some five minutes on an H200, nearly all of it compiling
    python tools/cuda_switches.py --only join,route
    python tools/cuda_switches.py --dry               tiny shapes in Triton's interpreter: whether the script works
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from torch import Tensor

from sparkdraft.kernels import cuda
from sparkdraft.kernels.cuda.attention import paged
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.linear.planes import tiles_of
from sparkdraft.kernels.cuda.moe import routing
from sparkdraft.kernels.ops import SILU, AttentionParams, AttentionView, Norm, Normed, Routing
from sparkdraft.operate.bench.random_model import random_coded
from sparkdraft.operate.tune.tiles import COLD_BYTES, forget, seconds
from sparkdraft.weights.linear import DenseExperts, DenseLinear, ExpertLinear, WeightTiles
from sparkdraft.weights.planes import pack

if DRY:
    import tests.kernels.triton_device  # noqa: F401  # mends the interpreter

DEVICE, DTYPE = ("cpu", torch.float16) if DRY else ("cuda", torch.bfloat16)
GOAL, EPS, BLOCK = 0.02, 1e-6, 16
COPIES = 2 if DRY else 128  # at most
Setting = Sequence[tuple[ModuleType, str, object]]
Launch = Callable[[], object]  # gives all that is written


@contextmanager
def set_to(setting: Setting) -> Iterator[None]:
    kept = [(module, name, getattr(module, name)) for module, name, _ in setting]
    for module, name, value in setting:
        setattr(module, name, value)
    forget()
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
        forget()


def tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found.clone()]
    return [each.clone() for each in found if isinstance(each, Tensor)]


def compare(results: dict[str, object], name: str, settings: dict[str, Setting], launches: list[Launch]) -> None:
    """The first setting is the old one."""
    times, bits = {}, []
    for label, setting in settings.items():
        try:
            with set_to(setting):
                bits.append(tensors(launches[0]()))
                times[label] = seconds(launches, GOAL)
        except Exception as error:  # what does not compile here is a result as well
            print(f"{name:58s} {label}: failed: {str(error).splitlines()[0][:120]}", flush=True)
            return
    same = all(len(each) == len(bits[0]) and all(map(torch.equal, each, bits[0])) for each in bits)
    old = next(iter(times.values()))
    text = "  ".join(f"{label} {t * 1e6:7.2f} us ({t / old:5.2f})" for label, t in times.items())
    print(f"{name:58s} {text}  {'same bits' if same else 'OTHER BITS'}", flush=True)
    results[name] = {label: round(t * 1e6, 2) for label, t in times.items()} | {"same bits": same}


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_().mul_(scale)


def copies(nbytes: int) -> int:
    return min(max(-(-COLD_BYTES // nbytes), 2), COPIES)


# Attention


@dataclass(frozen=True)
class Geometry:
    name: str
    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    sinks: bool = False


GEOMETRIES = [
    Geometry("qwen3-30b-a3b", 32, 4, 128),
    Geometry("gpt-oss-20b", 64, 8, 64, 0, True),
    Geometry("gpt-oss-20b window", 64, 8, 64, 128, True),
    Geometry("qwen3-8b", 32, 8, 128),
    Geometry("qwen3.5-27b", 24, 4, 256),
    Geometry("gemma4-31b full", 32, 4, 512),
]
BOUND = 64 if DRY else 32768  # keys that a recorded step allows for, whatever the context is
if DRY:
    GEOMETRIES = [Geometry("dry", 4, 1, 64, 0, True)]


def attend(g: Geometry, seqs: int, rows: int, context: int, most: int) -> list[Launch]:
    blocks = -(-context // BLOCK)
    count = copies(4 * seqs * blocks * BLOCK * g.kv_heads * g.dim)
    k, v = (normal(count * seqs * blocks, g.kv_heads, BLOCK, g.dim) for _ in range(2))
    tables = torch.randperm(len(k), device=DEVICE).int().view(count, seqs, blocks)
    starts = torch.arange(seqs + 1, dtype=torch.int32, device=DEVICE) * rows
    contexts = torch.full((seqs,), context, dtype=torch.int32, device=DEVICE)
    params = AttentionParams(g.dim**-0.5, True, g.window, torch.zeros(g.heads, device=DEVICE) if g.sinks else None)
    q = normal(seqs * rows, g.heads, g.dim)
    views = [AttentionView(starts, contexts, table, rows, max(BOUND, context)) for table in tables]
    return [lambda view=view: cuda.paged_attention(q, k, v, view, params, most) for view in views]


def joins(results: dict[str, object]) -> None:
    settings = {"apart": [(paged, "JOIN_INSIDE", 0)], "inside": [(paged, "JOIN_INSIDE", 1 << 40)]}
    for g in GEOMETRIES:
        for seqs, rows in ((1, 1), (1, 4), (16, 1)) if not DRY else ((1, 1),):
            for context in (300, 1000, 8000, 32000) if seqs < 16 and not DRY else (200 if DRY else 1000,):
                name = f"join {g.name}: {seqs} x {rows} rows, {context} keys"
                compare(results, name, settings, attend(g, seqs, rows, context, rows))


def units(results: dict[str, object]) -> None:
    settings = {str(unit): [(paged, "LEAST_UNIT", unit)] for unit in (128, 64, 32)}
    for g in GEOMETRIES:
        for context in (150,) if DRY else (100, 300, 1000, 4000):
            compare(results, f"unit {g.name}: 1 row, {context} keys", settings, attend(g, 1, 1, context, 0))


# Experts' choice


def normed_rows(rows: int, dim: int) -> Normed:
    """As the kernel before leaves them."""
    norm = Norm(torch.ones(dim, dtype=DTYPE, device=DEVICE), EPS)
    scaled, squares = few_tokens.prepare(Normed(normal(rows, dim), norm))
    return Normed(normal(rows, dim), norm, scaled, (squares / 32).repeat(1, 32))


def routes(results: dict[str, object]) -> None:
    settings = {"apart": [(routing, "ROUTE_FEW", False)], "inside": [(routing, "ROUTE_FEW", True)]}
    models = [("qwen3-30b-a3b", 128, 2048, 8), ("gpt-oss-20b", 32, 2880, 4), ("qwen3.5-35b-a3b", 256, 2048, 8)]
    for name, count, hidden, top_k in [("dry", 16, 48, 2)] if DRY else models:
        routers = [DenseLinear(normal(count, hidden, scale=0.05)) for _ in range(copies(2 * count * hidden))]
        for rows in (1, 4, 16):
            normed = normed_rows(rows, hidden)
            launches = [lambda r=r, n=normed, k=top_k: cuda.norm_route(n, r, k, True) for r in routers]
            compare(results, f"route {name}: {rows} rows", settings, launches)


# Rows padded to 8


EIGHT: dict[str, Setting] = {
    "16": [(few_tokens, "EIGHT_ROWS", False)],
    "8": [(few_tokens, "EIGHT_ROWS", True), (few_tokens, "EIGHT_ROWS_OF_WGMMA", True)],
}
MATRICES = [("qkv", 6144, 4096), ("o", 4096, 4096), ("down", 4096, 12288)]
if DRY:
    MATRICES = [("dry", 48, 128)]


def matrix(form: str, out: int, in_: int, generator: torch.Generator) -> WeightTiles:
    if form == "floats":
        return WeightTiles(normal(out, in_, scale=0.02))
    return tiles_of(pack([random_coded(form, out, in_, generator)], torch.device(DEVICE)))


def eights(results: dict[str, object]) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    for form in ("floats", "int4", "mxfp4", "nvfp4", "fp8"):
        for name, out, in_ in MATRICES:
            weights = [matrix(form, out, in_, generator) for _ in range(min(copies(out * in_), 16))]
            for rows in (1, 8):
                x, residual, then = normal(rows, in_), normal(rows, out), Norm(normal(out), EPS)

                def launch(w: WeightTiles, x: Tensor = x, residual: Tensor = residual, then: Norm = then) -> Any:
                    return few_tokens.add_linear(residual.clone(), x, w, then)

                launches = [lambda w=w, launch=launch: launch(w) for w in weights]
                compare(results, f"eight {form} {name} {out} x {in_}: {rows} rows", EIGHT, launches)
    for form, count, top_k, hidden, inter in (
        [("mxfp4", 8, 2, 96, 64)]
        if DRY
        else [("mxfp4", 32, 4, 2880, 2880), ("int4", 128, 8, 2048, 768), ("floats", 128, 8, 2048, 768)]
    ):
        layers = [layer(form, count, hidden, inter, generator) for _ in range(2 if DRY else 4)]
        for rows in (1, 4, 8):
            normed = normed_rows(rows, hidden)
            ids = [torch.rand(rows, count, device=DEVICE).argsort(1)[:, :top_k].int().contiguous() for _ in layers]
            share = torch.full((rows, top_k), 1 / top_k, device=DEVICE)
            launches = [
                lambda a=a, n=normed, i=i, share=share: cuda.norm_experts(n, Routing(i, share), *a, SILU)
                for a, i in zip(layers, ids, strict=True)
            ]
            compare(results, f"eight experts {form} {count} of {hidden} x {inter}: {rows} rows", EIGHT, launches)


def layer(form: str, count: int, hidden: int, inter: int, g: torch.Generator) -> tuple[ExpertLinear, ExpertLinear]:
    if form == "floats":
        wide, narrow = normal(count, 2 * inter, hidden, scale=0.02), normal(count, hidden, inter, scale=0.02)
        return DenseExperts(wide), DenseExperts(narrow)
    made = [[[random_coded(form, *size, g)] for _ in range(count)] for size in ((2 * inter, hidden), (hidden, inter))]
    return tuple(cuda.keep_experts(each, None, lambda part: part) for each in made)  # type: ignore[return-value]


PARTS = {"join": joins, "unit": units, "route": routes, "eight": eights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--dry", action="store_true", help="tiny shapes in the interpreter, to try the script")
    arguments, begin = parser.parse_args(), time.perf_counter()
    where = "the interpreter" if DRY else torch.cuda.get_device_name()
    print(f"{where}; in brackets: of the first time", flush=True)
    results: dict[str, object] = {"device": where}
    for name in arguments.only.split(","):
        PARTS[name](results)
    print(f"{time.perf_counter() - begin:.0f} s")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
