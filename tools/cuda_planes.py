"""Checks and times quantised weights that stay quantised (kernels/cuda/linear/planes.py) in the shapes of published
models.

First every format runs through every kernel and is compared with float64 products of what its codes mean, and rows
alone with the same rows in a batch, to the bit. Then every figure is a replayed CUDA graph of launches over copies of
the weight that exceed the L2 together; bytes are those that are kept, shown as a share of a measured copy ("floor"),
beside the same matrix in bfloat16. Experts are timed as whole layers, with routings drawn at random. It ends in a line
of JSON.

    python tools/cuda_planes.py                          about two minutes on an H200
    python tools/cuda_planes.py --check                  the comparisons alone: half a minute, most of it compiling
    python tools/cuda_planes.py --tune --out sparkdraft/kernels/cuda/runtime/tuned/sm_90.json     tries tiles:
    --limit seconds python tools/cuda_planes.py --formats mxfp4 --only gpt-oss --rows 1 16 64
    python tools/cuda_planes.py --dry                    tiny shapes in Triton's interpreter: does the script work?
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from torch import Tensor

from sparkdraft.kernels import cuda, reference
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.linear.planes import PlaneExperts, PlaneLinear
from sparkdraft.kernels.cuda.moe import experts
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.cuda.runtime.gpu import gpu_of
from sparkdraft.kernels.cuda.runtime.timing import COLD_BYTES, seconds
from sparkdraft.kernels.ops import SILU, Activation, Norm, Normed, Routing
from sparkdraft.operate.bench.random_model import random_coded as sane_coded
from sparkdraft.operate.forecast.rates import memory_bandwidth
from sparkdraft.operate.tune.tiles import TileSearch, coded_tiles, expert_tiles, wide_tiles
from sparkdraft.weights.linear import DenseExperts, DenseLinear, ExpertLinear, Linear
from sparkdraft.weights.planes import Planes, pack
from tests.weights.formats_of_codes import FORMATS, random_coded

if DRY:
    import tests.kernels.triton_device  # noqa: F401  # mends the interpreter

DEVICE, DTYPE = ("cpu", torch.float16) if DRY else ("cuda", torch.bfloat16)
GPU, EPS = gpu_of(torch.device(DEVICE)), 1e-6
TIMED = ("mxfp4", "int4", "nvfp4", "fp8")  # of sparkdraft/operate/bench/random_model.py
LAYERS = 2 if DRY else 8
GOAL = 0.01  # seconds of replays per figure
BEGIN = time.perf_counter()
CLAMPED = Activation("clamped_swiglu", 7.0)


@dataclass(frozen=True)
class Shape:
    name: str
    kind: str
    out: int
    in_: int


@dataclass(frozen=True)
class Model:
    name: str
    experts: int
    top_k: int
    hidden: int
    inter: int
    activation: Activation
    bias: bool
    formats: tuple[str, ...]


SHAPES = [
    Shape("Qwen3-8B qkv", "norm_linear", 6144, 4096),
    Shape("Qwen3-8B o", "add_linear", 4096, 4096),
    Shape("Qwen3-8B gate_up", "norm_gated", 24576, 4096),
    Shape("Qwen3-8B down", "add_linear", 4096, 12288),
    Shape("gpt-oss-20b qkv", "norm_linear", 5120, 2880),
    Shape("gpt-oss-20b o", "add_linear", 2880, 4096),
    Shape("gpt-oss-20b head", "norm_argmax", 201088, 2880),
    Shape("qwen3-30b-a3b qkv", "norm_linear", 5120, 2048),
    Shape("qwen3-30b-a3b o", "add_linear", 2048, 4096),
]
MODELS = [
    Model("gpt-oss-20b", 32, 4, 2880, 2880, CLAMPED, True, ("mxfp4",)),
    Model("qwen3-30b-a3b", 128, 8, 2048, 768, SILU, False, ("int4", "nvfp4", "fp8")),
]
if DRY:
    SHAPES = [Shape("dry qkv", "norm_linear", 96, 160), Shape("dry o", "add_linear", 48, 128)]
    MODELS = [Model("dry experts", 8, 2, 96, 64, CLAMPED, True, ("mxfp4",))]


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_().mul_(scale)


# Checks


def off_by(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-9)).item()


def check_format(name: str, out: int, in_: int) -> list[str]:
    """What is wrong with one matrix of a format, over all numbers of rows."""
    bias, wrong = normal(out), []
    part = random_coded(name, out, in_, DEVICE)
    matrix = PlaneLinear(pack([part], torch.device(DEVICE)), bias)
    weight = part.dequantize().double()
    if not torch.equal(matrix.rows().dequantize(), part.dequantize()):
        wrong.append("it is not turned back")
    for rows in (1, 3) if DRY else (1, 5, 16, 17, 64, 200, 600):
        x, residual = normal(rows, in_), normal(rows, out)
        norm = Norm(torch.rand(in_, device=DEVICE).to(DTYPE) + 0.5, EPS)
        exact = x.double() @ weight.t() + bias.double()
        wide = x.double()
        normed = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS) * norm.gain.double()
        found = {"linear": off_by(matrix.linear(x), exact), "logits": off_by(matrix.linear_float32(x), exact)}
        found["norm_linear"] = off_by(cuda.norm_linear(Normed(x, norm), matrix), normed @ weight.t() + bias.double())
        total = residual.double() + exact
        cuda.add_linear(residual, x, matrix, Norm(torch.ones(out, dtype=DTYPE, device=DEVICE), EPS))
        found["add_linear"] = off_by(residual, total)
        plain = PlaneLinear(matrix.planes)
        if out % 2 == 0:
            both = (normed @ weight.t()).float()
            gated = cuda.norm_gated(Normed(x, norm), plain, SILU)
            found["norm_gated"] = off_by(gated, reference.gated(both, SILU).double())
        logits = cuda.norm_logits(Normed(x, norm), plain)
        if rows <= 16 and cuda.norm_argmax(Normed(x, norm), plain).tolist() != logits.argmax(1).tolist():
            wrong.append(f"argmax of {rows} rows")
        wrong += [f"{kind} of {rows} rows is off by {off:.4f}" for kind, off in found.items() if not off < 0.02]
        if rows == 1:  # in float32 sums: a bfloat16 result is rounded once
            sharp = few_tokens.norm_linear(Normed(x, norm), plain.tiles, torch.float32)
            scaled = (wide * norm.gain.double()).to(DTYPE).double()
            exact32 = scaled @ weight.t() * torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS)
            if not off_by(sharp, exact32) < 1e-4:
                wrong.append(f"sums are off by {off_by(sharp, exact32):.2e}: more than float32 rounds")
    return wrong + rows_differ(matrix)


def rows_differ(matrix: PlaneLinear) -> list[str]:
    out, in_ = matrix.tiles.shape
    x, residual, then = normal(16, in_), normal(16, out), Norm(normal(out), EPS)

    def run(at: slice) -> list[Tensor]:
        left = few_tokens.add_linear(residual[at].clone(), x[at], matrix.tiles, then)
        assert left.scaled is not None and left.squares is not None
        return [left.x, left.scaled, left.squares, few_tokens.linear(x[at], matrix.tiles)]

    whole, wrong = run(slice(0, 16)), []
    for first, last in ((0, 1), (5, 6), (15, 16), (0, 2), (3, 11)):
        for name, a, b in zip(("x", "scaled", "squares", "linear"), run(slice(first, last)), whole, strict=True):
            if not torch.equal(a, b[first:last]):
                wrong.append(f"bits of {name} of rows {first} to {last} hang on others")
    return wrong


def run_checks(results: dict[str, object]) -> bool:
    good = True
    for name, (_, group, *_) in FORMATS.items():
        for out, in_ in ((48, 128),) if DRY else ((1000, 2880), (4096, 4096), (130, 256)):
            if in_ % (group or 16):
                continue
            try:
                wrong = check_format(name, out, in_)
            except Exception as error:
                wrong = [f"failed: {str(error).splitlines()[0][:200]}"]
            print(
                f"{name}, {out} x {in_}: {'; '.join(wrong) or 'as float64, same bits alone and in company'}", flush=True
            )
            results[f"check {name} {out}x{in_}"] = wrong or "ok"
            good &= not wrong
    return good


# Times of single matrices


def copies(nbytes: int) -> int:
    return 2 if DRY or nbytes > COLD_BYTES else min(max(-(-COLD_BYTES // nbytes), 20), 320)


class Inputs:
    def __init__(self, shape: Shape, rows: int) -> None:
        torch.manual_seed(0)
        self.x, self.residual = normal(rows, shape.in_), normal(rows, shape.out)
        norm = Norm(torch.ones(shape.in_, dtype=DTYPE, device=DEVICE), EPS)
        self.normed, self.then = prepared(self.x, norm), Norm(torch.ones(shape.out, dtype=DTYPE, device=DEVICE), EPS)


def prepared(x: Tensor, norm: Norm) -> Normed:
    """As the kernel before leaves few rows: with a part of the squares for each of its strips."""
    if x.shape[0] > few_tokens.MOST_TOKENS:
        return Normed(x, norm)
    scaled, squares = few_tokens.prepare(Normed(x, norm))
    return Normed(x, norm, scaled, (squares / 64).repeat(1, 64))


def launch(shape: Shape, inputs: Inputs, matrix: Linear) -> object:
    if shape.kind == "add_linear":
        return cuda.add_linear(inputs.residual, inputs.x, matrix, inputs.then)
    if shape.kind == "norm_gated":
        return cuda.norm_gated(inputs.normed, matrix, SILU)
    return (
        cuda.norm_argmax(inputs.normed, matrix)
        if shape.kind == "norm_argmax"
        else cuda.norm_linear(inputs.normed, matrix)
    )


def make(form: str, shape: Shape) -> list[Linear]:
    """Copies of one matrix: '' in floats."""
    if not form:
        one: Linear = DenseLinear(normal(shape.out, shape.in_, scale=0.02))
        return [one, *(DenseLinear(one.tiles.codes.clone()) for _ in range(copies(one.nbytes) - 1))]
    generator = torch.Generator(DEVICE).manual_seed(0)
    first = pack([sane_coded(form, shape.out, shape.in_, generator)], torch.device(DEVICE))
    return [PlaneLinear(first), *(PlaneLinear(clone(first)) for _ in range(copies(first.nbytes) - 1))]


def clone(part: Planes) -> Planes:
    tensors = (part.codes, part.scale, part.offset, part.row_scale)
    return Planes(part.layout, part.out, *(None if t is None else t.clone() for t in tensors))


def time_shape(shape: Shape, matrices: list[Linear], rows: list[int]) -> dict[int, float]:
    times = {}
    for count in rows:
        inputs = Inputs(shape, count)
        times[count] = seconds([lambda m=m, i=inputs: launch(shape, i, m) for m in matrices], GOAL)
    return times


def figures(times: dict[int, float], nbytes: int, bandwidth: float) -> str:
    return "  ".join(f"{n} rows {t * 1e6:7.1f} us ({nbytes / t / bandwidth:4.0%})" for n, t in times.items())


def bench_shape(
    shape: Shape, formats: list[str], rows: list[int], bandwidth: float, results: dict[str, object]
) -> None:
    for form in ["", *formats]:
        if form == "mxfp4" and not shape.name.startswith(("gpt-oss", "dry")):
            continue
        try:
            matrices = make(form, shape)
            times = time_shape(shape, matrices, rows)
        except Exception as error:
            print(f"{shape.name} {form} failed: {str(error).splitlines()[0][:200]}", flush=True)
            continue
        nbytes = matrices[0].nbytes
        text = figures(times, nbytes, bandwidth)
        print(f"{shape.name:20s} {form or 'bf16':6s} floor {nbytes / bandwidth * 1e6:6.1f} us: {text}", flush=True)
        results[f"{shape.name} {form or 'bf16'}"] = {str(n): round(t * 1e6, 2) for n, t in times.items()}


# Experts


@dataclass(frozen=True)
class Layer:
    gate_up: ExpertLinear
    down: ExpertLinear
    norm: Norm


def make_layers(model: Model, form: str) -> list[Layer]:
    generator, device = torch.Generator(DEVICE).manual_seed(0), torch.device(DEVICE)
    layers = []
    for _ in range(LAYERS):
        kept: list[ExpertLinear] = []
        for out, in_ in ((2 * model.inter, model.hidden), (model.hidden, model.inter)):
            bias = normal(model.experts, out) if model.bias else None
            if form:
                whole = pack([sane_coded(form, model.experts * out, in_, generator)], device)
                kept.append(PlaneExperts(whole, model.experts, bias))
            else:
                kept.append(DenseExperts(normal(model.experts, out, in_, scale=0.02), bias))
        layers.append(Layer(*kept, Norm(torch.ones(model.hidden, dtype=DTYPE, device=DEVICE), EPS)))
    return layers


def random_routing(model: Model, rows: int) -> Routing:
    ids = torch.rand(rows, model.experts, device=DEVICE).argsort(1)[:, : model.top_k].int().contiguous()
    return Routing(ids, torch.rand(rows, model.top_k, device=DEVICE).softmax(-1))


def check_experts(model: Model, layer: Layer) -> list[str]:
    wrong = []
    dense = [
        DenseExperts(torch.stack([each.expert(n).rows().dequantize() for n in range(each.count)]).to(DTYPE), each.bias)
        for each in (layer.gate_up, layer.down)
    ]
    for rows in (1, 3) if DRY else (1, 4, 16, 64, 300):
        x, routing = normal(rows, model.hidden), random_routing(model, rows)
        got = cuda.norm_experts(Normed(x, layer.norm), routing, layer.gate_up, layer.down, model.activation)
        expected = cuda.norm_experts(Normed(x, layer.norm), routing, *dense, model.activation)
        off = off_by(got, expected.double())
        if not off < 0.02:
            wrong.append(f"{rows} rows are off by {off:.4f}")
    x, routing = normal(16, model.hidden), random_routing(model, 16)

    def run(at: slice) -> list[Tensor]:
        part = Routing(routing.ids[at].contiguous(), routing.weights[at].contiguous())
        left = cuda.add_experts(
            Normed(x[at].clone(), layer.norm), part, layer.gate_up, layer.down, model.activation, layer.norm
        )
        return [left.x, left.scaled, left.squares]

    whole = run(slice(0, 16))
    for first, last in ((0, 1), (7, 8), (2, 6), (1, 16)):
        if not all(torch.equal(a, b[first:last]) for a, b in zip(run(slice(first, last)), whole, strict=True)):
            wrong.append(f"bits of rows {first} to {last} hang on others")
    return wrong


class Case:
    """A layer's experts over some rows, with a routing for each layer."""

    def __init__(self, model: Model, layers: list[Layer], rows: int) -> None:
        torch.manual_seed(rows)
        self.model, self.layers, self.rows = model, layers, rows
        self.routings = [random_routing(model, rows) for _ in layers]
        self.normed = [prepared(normal(rows, model.hidden), layer.norm) for layer in layers]
        self.distinct = sum(len(r.ids.unique()) for r in self.routings) / len(layers)

    def seconds(self) -> float:
        triples = list(zip(self.layers, self.routings, self.normed, strict=True))
        activation = self.model.activation
        return seconds(
            [lambda t=t: cuda.add_experts(t[2], t[1], t[0].gate_up, t[0].down, activation, t[0].norm) for t in triples],
            GOAL,
        )

    @property
    def nbytes(self) -> float:
        one = self.layers[0]
        return self.distinct / self.model.experts * (one.gate_up.nbytes + one.down.nbytes)


def bench_experts(
    model: Model, formats: list[str], rows: list[int], bandwidth: float, results: dict[str, object],
    search: TileSearch | None,
) -> None:  # fmt: skip
    for form in ("", *(each for each in model.formats if each in formats)):
        layers = make_layers(model, form)
        if form and search:
            tune_experts(search, model, layers)
        if form:  # with the tiles just found
            try:
                wrong = check_experts(model, layers[0])
            except Exception as error:
                wrong = [f"failed: {str(error).splitlines()[0][:200]}"]
            print(
                f"{model.name} experts {form}: {'; '.join(wrong) or 'as floats, same bits alone and in company'}",
                flush=True,
            )
            results[f"check {model.name} experts {form}"] = wrong or "ok"
        for count in rows:
            try:
                case = Case(model, layers, count)
                spent = case.seconds()
            except Exception as error:
                print(
                    f"{model.name} experts {form} {count} rows failed: {str(error).splitlines()[0][:200]}", flush=True
                )
                continue
            share = case.nbytes / spent / bandwidth
            floor = case.nbytes / bandwidth * 1e6
            print(
                f"{model.name:16s} experts {form or 'bf16':6s} {count:4d} rows, {case.distinct:5.1f} experts: "
                f"{spent * 1e6:7.1f} us, floor {floor:6.1f} ({share:4.0%})", flush=True,
            )  # fmt: skip
            results[f"{model.name} experts {form or 'bf16'} {count}"] = round(spent * 1e6, 2)
        del layers


# Tiles


def tune_shape(search: TileSearch, shape: Shape, form: str, few: bool) -> None:
    if form == "mxfp4" and not shape.name.startswith(("gpt-oss", "dry")):
        return
    matrices, size = make(form, shape), (shape.out, shape.in_)
    tiles = matrices[0].tiles
    assert tiles is not None and tiles.layout is not None
    step, may_split = tiles.layout.tile, shape.kind not in ("norm_gated", "norm_argmax")
    tried = coded_tiles(*size, step, tiles.format, GPU, may_split)
    jobs = [(few_tokens.KERNEL, size, tried, [1, 3] if DRY else [1, 4, 16])]
    for count in () if few or shape.kind == "norm_argmax" else (20,) if DRY else (32, 64):
        jobs.append((few_tokens.WIDE, (*size, few_tokens.block_tokens(count)), wide_tiles(step, count), [count]))
    for kernel, key, tried, rows in jobs:
        print(f"{shape.name} {form}: {kernel}, rows {rows}", flush=True)
        search.best(
            kernel, tiles.format, key, tried, lambda r=rows: list(time_shape(shape, matrices, r).values()),
            lambda r=rows: [launch(shape, Inputs(shape, each), matrices[0]) for each in (r[0], r[-1])],
        )  # fmt: skip


def tune_experts(search: TileSearch, model: Model, layers: list[Layer]) -> None:
    wide, narrow = (2 * model.inter, model.hidden), (model.hidden, model.inter)
    jobs: list[tuple[str, ExpertLinear, tuple[int, ...], list[int]]] = [
        (experts.FEW_GATE_UP, layers[0].gate_up, (*wide, model.top_k), [1, 16]),
        (experts.ROW_DOWN, layers[0].down, (*narrow, model.top_k), [1, 2]),
        (experts.FEW_DOWN, layers[0].down, (*narrow, model.top_k), [16]),
    ]
    for rows in (64, 256, 1024):
        size = experts.block_size(rows, model.top_k, model.experts, coded=True)
        jobs += [(experts.GATE_UP, layers[0].gate_up, (*wide, size), [rows])]
        jobs += [(experts.DOWN, layers[0].down, (*narrow, size), [rows])]
    seen = set()
    for kernel, matrix, key, rows in jobs[: 3 if DRY else None]:
        tiles = matrix.tiles
        assert tiles is not None and tiles.layout is not None
        if kernel == experts.ROW_DOWN:
            rows = [n for n in rows if experts.one_by_one(n, model.top_k, model.experts)]
        if (kernel, key) in seen or not rows:
            continue
        seen.add((kernel, key))
        cases = [Case(model, layers, 3 if DRY and n > 3 else n) for n in rows]
        print(f"{model.name} {kernel} {key}, rows {rows}", flush=True)
        search.best(
            kernel, tiles.format, key, expert_tiles(kernel, key, tiles.format, GPU, tiles.layout.tile, DTYPE.itemsize),
            lambda c=cases: [case.seconds() for case in c],
            lambda c=cases: [
                cuda.add_experts(
                    case.normed[0], case.routings[0], layers[0].gate_up, layers[0].down, model.activation,
                    layers[0].norm,
                )
                for case in c
            ],
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--formats", nargs="+", default=list(TIMED), choices=TIMED)
    parser.add_argument("--only", default="", help="shapes and models whose name begins so; several with commas")
    parser.add_argument("--part", choices=("matrices", "experts"), help="these alone")
    parser.add_argument("--few", action="store_true", help="tiles of up to 16 rows alone")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 512])
    parser.add_argument("--check", action="store_true", help="compare with float64, and time nothing")
    parser.add_argument("--no-check", action="store_true", help="time alone")
    parser.add_argument("--tune", action="store_true", help="try tiles")
    parser.add_argument("--out", type=Path, default=tuned.user_file(GPU), help="the file of tiles to write to")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which nothing more is tried")
    parser.add_argument("--most", type=int, help="tiles of a matrix that are tried at most")
    parser.add_argument("--dry", action="store_true", help="tiny shapes in the interpreter, to try the script")
    arguments = parser.parse_args()
    begins = tuple(arguments.only.split(","))
    bandwidth = 1e9 if DRY else memory_bandwidth("cuda")
    where = "the interpreter" if DRY else torch.cuda.get_device_name()
    print(f"{where}: {bandwidth / 1e9:.0f} GB/s", flush=True)
    results: dict[str, object] = {"device": where, "GB/s": round(bandwidth / 1e9)}
    good = arguments.no_check or run_checks(results)
    rows, share = [1, 3, 20] if DRY else arguments.rows, 0.0
    search = TileSearch(
        GPU, lambda: time.perf_counter() - BEGIN < share * arguments.limit, most=2 if DRY else arguments.most
    )
    shapes = [s for s in SHAPES if s.name.startswith(begins) and not arguments.check and arguments.part != "experts"]
    models = [m for m in MODELS if m.name.startswith(begins) and not arguments.check and arguments.part != "matrices"]
    for place, shape in enumerate(shapes, 1):
        share = place / (len(shapes) + 2 * len(models))
        for form in arguments.formats if arguments.tune else ():
            tune_shape(search, shape, form, arguments.few)
        bench_shape(shape, arguments.formats, rows, bandwidth, results)
    share = 1.0
    for model in models:
        bench_experts(model, arguments.formats, rows, bandwidth, results, search if arguments.tune else None)
    print(f"{time.perf_counter() - BEGIN:.0f} s", flush=True)
    if arguments.tune and not DRY:
        search.save(arguments.out)
    print(json.dumps(results))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
