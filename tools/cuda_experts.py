"""Checks and times the kernels of experts (kernels/cuda/moe/experts.py) in the shapes of published models on a GPU.

First results are compared with kernels/reference in float32, and rows alone with the same rows in a batch, to the
bit. Then every figure is a replayed CUDA graph of several layers whose weights and routings differ, so that nothing of
a layer is in the L2 when it is read. Bytes are those of the experts that at least one row has chosen, shown as a share
of a measured copy. Rows are routed at random, which spreads them over more experts than text would. It ends in a line
of JSON.

    python tools/cuda_experts.py                   under a minute on an H200
    python tools/cuda_experts.py --tune            also tries tiles and ways, and prints the best: two minutes
    python tools/cuda_experts.py --models qwen3-30b-a3b --rows 1 16
    python tools/cuda_experts.py --dry             tiny shapes in Triton's interpreter: whether the script itself works
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from torch import Tensor

from sparkdraft.kernels import cuda, reference
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.moe import experts
from sparkdraft.kernels.cuda.moe.experts import DOWN, FEW_DOWN, FEW_GATE_UP, GATE_UP, ROW_DOWN
from sparkdraft.kernels.cuda.moe.routing import cut
from sparkdraft.kernels.cuda.runtime import pdl, tuned
from sparkdraft.kernels.cuda.runtime.gpu import gpu_of
from sparkdraft.kernels.cuda.runtime.timing import seconds
from sparkdraft.kernels.ops import GELU_TANH, SILU, Activation, Norm, Normed, Routing
from sparkdraft.operate.forecast.rates import memory_bandwidth
from sparkdraft.operate.tune.tiles import TileSearch, expert_tiles
from sparkdraft.weights.linear import DenseExperts, DenseLinear

if DRY:
    import tests.kernels.triton_device  # noqa: F401  # mends the interpreter

DEVICE, DTYPE = ("cpu", torch.float16) if DRY else ("cuda", torch.bfloat16)
GPU = gpu_of(torch.device(DEVICE))
FORMAT, EPS = "16bit", 1e-6
ROUTER = few_tokens.KERNEL  # a router is a matrix like others, but smaller than any
LAYERS = 2 if DRY else 8
GOAL = 0.01  # seconds of replays per figure
CHECKED = (1, 3) if DRY else (1, 2, 4, 7, 16, 17, 64, 200)
BEGIN = time.perf_counter()


@dataclass(frozen=True)
class Model:
    name: str
    experts: int
    top_k: int
    hidden: int
    inter: int
    activation: Activation = SILU
    bias: bool = False

    @property
    def gate_up(self) -> tuple[int, int, int]:
        return self.experts, 2 * self.inter, self.hidden

    @property
    def down(self) -> tuple[int, int, int]:
        return self.experts, self.hidden, self.inter

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.inter * DTYPE.itemsize


MODELS = [
    Model("qwen3-30b-a3b", 128, 8, 2048, 768),
    Model("gpt-oss-20b", 32, 4, 2880, 2880, Activation("clamped_swiglu", 7.0), bias=True),
    Model("gemma4-26b-a4b", 128, 8, 2816, 704, GELU_TANH),
]
if DRY:
    MODELS = [Model("dry", 16, 2, 80, 48, Activation("clamped_swiglu", 7.0), bias=True), Model("dry2", 8, 2, 48, 40)]


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_().mul_(scale)


@dataclass(frozen=True)
class Layer:
    model: Model
    norm: Norm
    router: DenseLinear
    gate_up: DenseExperts
    down: DenseExperts

    def add(self, normed: Normed, routing: Routing) -> Normed:
        return cuda.add_experts(normed, routing, self.gate_up, self.down, self.model.activation, self.norm)

    def route(self, normed: Normed) -> Routing:
        return cuda.norm_route(normed, self.router, self.model.top_k, True)


def make_layers(model: Model, pool: Tensor) -> list[Layer]:
    layers, used = [], 0

    def take(*shape: int) -> Tensor:
        nonlocal used
        count = shape[0] * shape[1] * shape[2]
        used += count
        return pool[used - count : used].view(shape)

    for _ in range(LAYERS):
        wide, narrow = take(*model.gate_up), take(*model.down)
        biases = (normal(*wide.shape[:2]), normal(*narrow.shape[:2])) if model.bias else (None, None)
        router = DenseLinear(normal(model.experts, model.hidden, scale=0.05))
        norm = Norm(torch.ones(model.hidden, dtype=DTYPE, device=DEVICE), EPS)
        layers.append(Layer(model, norm, router, DenseExperts(wide, biases[0]), DenseExperts(narrow, biases[1])))
    return layers


def random_routing(model: Model, rows: int) -> Routing:
    ids = torch.rand(rows, model.experts, device=DEVICE).argsort(1)[:, : model.top_k].int().contiguous()
    return Routing(ids, torch.rand(rows, model.top_k, device=DEVICE).softmax(-1))


def prepared(x: Tensor, norm: Norm) -> Normed:
    """As the kernel before leaves few rows: with a part of the squares for each of its strips."""
    if x.shape[0] > few_tokens.MOST_TOKENS:
        return Normed(x, norm)
    scaled, squares = few_tokens.prepare(Normed(x, norm))
    return Normed(x, norm, scaled, (squares / 64).repeat(1, 64))


# Checks


def check(layer: Layer, rows: int) -> str:
    """What is wrong, or nothing. A result is compared in float32, where the reference rounds nothing on the way."""
    model, x = layer.model, normal(rows, layer.model.hidden, scale=0.05)  # small, so that what is added to it shows
    exact = Normed(x.float(), Norm(layer.norm.gain.float(), EPS))
    found, routing = layer.route(Normed(x, layer.norm)), random_routing(model, rows)
    router = DenseLinear(layer.router.weight.float())
    logits = reference.norm_logits(exact, router)
    expected = reference.norm_route(exact, router, model.top_k, True)
    wrong = []
    if found.ids.min() < 0 or found.ids.max() >= model.experts:
        return "ids of experts that do not exist"
    chosen = logits.gather(1, found.ids.long())  # rounding may swap equals, nothing else
    if not (logits.gather(1, expected.ids.long()) - chosen).abs().max() < 0.05:
        wrong.append("other experts are chosen")
    if not (found.weights - chosen.softmax(-1)).abs().max() < 0.01:
        wrong.append("the weights of choices differ")
    wide = [
        DenseExperts(e.floats.float(), None if e.bias is None else e.bias.float()) for e in (layer.gate_up, layer.down)
    ]
    target = reference.norm_experts(exact, routing, *wide, model.activation)
    got = cuda.norm_experts(Normed(x, layer.norm), routing, layer.gate_up, layer.down, model.activation)
    off = ((got.float() - target).abs().max() / target.abs().max()).item()
    if not off < 0.02:
        wrong.append(f"the experts' sum is off by {off:.3f} of its largest value")
    added = layer.add(Normed(x.clone(), layer.norm), routing)
    off = ((added.x.float() - (x.float() + target)).abs().max() / target.abs().max()).item()
    if not off < 0.04:
        wrong.append(f"the residual is off by {off:.3f}")
    if added.squares is not None:
        off = (added.squares.sum(1) / added.x.float().square().sum(1) - 1).abs().max().item()
        if not off < 1e-5:
            wrong.append(f"the squares are off by {off}")
    return "; ".join(wrong)


def rows_differ(layer: Layer) -> list[str]:
    """Rows whose bits depend on the rows beside them."""
    x, routing = normal(16, layer.model.hidden), random_routing(layer.model, 16)

    def run(at: slice) -> list[Tensor]:
        part = Routing(routing.ids[at].contiguous(), routing.weights[at].contiguous())
        left = layer.add(Normed(x[at].clone(), layer.norm), part)
        return [left.x, left.scaled, left.squares]

    whole, wrong = run(slice(0, 16)), []
    for first, last in ((0, 1), (5, 6), (15, 16), (0, 2), (2, 6), (3, 11), (1, 16)):
        for name, a, b in zip(("x", "scaled", "squares"), run(slice(first, last)), whole, strict=True):
            if not torch.equal(a, b[first:last]):
                wrong.append(f"{name} of rows {first} to {last}")
    return wrong


def run_checks(model: Model, layer: Layer, results: dict[str, object]) -> None:
    for rows in CHECKED:
        try:
            wrong = check(layer, rows)
        except Exception as error:
            wrong = f"failed: {str(error).splitlines()[0][:200]}"
        print(f"{model.name}, {rows} rows: {wrong or 'as the reference'}", flush=True)
        results[f"{model.name} check {rows}"] = wrong or "ok"
    try:
        differ = rows_differ(layer)
    except Exception as error:
        differ = [f"failed: {str(error).splitlines()[0][:200]}"]
    print(f"{model.name}, rows alone and in company: {'; '.join(differ) or 'same bits'}", flush=True)
    results[f"{model.name} same bits"] = differ or "ok"


# Times


class Case:
    """Some rows, and a routing for each layer."""

    def __init__(self, layers: list[Layer], rows: int) -> None:
        torch.manual_seed(rows)
        self.model, self.layers, self.rows = layers[0].model, layers, rows
        self.routings = [random_routing(self.model, rows) for _ in layers]
        x = normal(rows, self.model.hidden)
        self.normed = [prepared(x.clone(), layer.norm) for layer in layers]
        self.inside = normal(rows * self.model.top_k, self.model.inter)
        self.distinct = sum(len(r.ids.unique()) for r in self.routings) / len(layers)

    def each(self, launch: Callable[[Layer, Routing, Normed], object]) -> float:
        triples = zip(self.layers, self.routings, self.normed, strict=True)
        return seconds([lambda t=triple: launch(*t) for triple in triples], GOAL)

    def blocks(self, routing: Routing):
        model = self.model
        if experts.one_by_one(self.rows, model.top_k, model.experts):
            return None
        return cut(routing, model.experts, experts.block_size(self.rows, model.top_k, model.experts))

    def gate_up(self) -> float:
        made = [self.blocks(routing) for routing in self.routings]
        sets = list(zip(self.layers, self.routings, self.normed, made, strict=True))
        activation = self.model.activation
        return seconds(
            [lambda s=s: experts.run_gate_up(s[2], s[1], s[0].gate_up, s[3], activation) for s in sets], GOAL
        )

    def down(self) -> float:
        """With the sum."""
        made = [self.blocks(routing) for routing in self.routings]
        few = self.rows <= few_tokens.MOST_TOKENS

        def launch(layer: Layer, routing: Routing, normed: Normed, blocks) -> None:
            if blocks is None:
                experts.run_row_down(self.inside, routing, layer.down, normed.x, layer.norm)
                return
            parts = experts.run_down(self.inside, self.rows, layer.down, blocks, torch.float32 if few else DTYPE)
            experts.run_sum(parts, routing, layer.down, normed.x, layer.norm)

        sets = list(zip(self.layers, self.routings, self.normed, made, strict=True))
        return seconds([lambda s=s: launch(*s) for s in sets], GOAL)

    def logits(self) -> float:
        return self.each(lambda layer, routing, normed: cuda.norm_logits(normed, layer.router))

    def time(self, kernel: str) -> float:
        return {ROUTER: self.logits, GATE_UP: self.gate_up, FEW_GATE_UP: self.gate_up}.get(kernel, self.down)()

    def nbytes(self, kernel: str) -> float:
        if kernel == ROUTER:
            return self.layers[0].router.nbytes
        return self.distinct * self.model.expert_bytes * (2 / 3 if kernel in (GATE_UP, FEW_GATE_UP) else 1 / 3)

    def cutting(self) -> float:
        if self.blocks(self.routings[0]) is None:
            return 0.0
        return self.each(lambda layer, routing, normed: self.blocks(routing))

    def routed(self) -> float:
        """All of a layer, its own router's choice put aside: that of unlike weights is as random, but unknown."""

        def launch(layer: Layer, routing: Routing, normed: Normed) -> None:
            layer.route(normed)
            layer.add(normed, routing)

        return self.each(launch)


def bench(layers: list[Layer], rows: int, bandwidth: float, results: dict[str, object]) -> None:
    model, case = layers[0].model, Case(layers, rows)
    nbytes = case.distinct * model.expert_bytes
    parts = {
        "logits": (case.logits(), 0.0),
        "route": (case.each(lambda layer, routing, normed: layer.route(normed)), 0.0),
        "cut": (case.cutting(), 0.0),
        "gate_up": (case.gate_up(), case.nbytes(GATE_UP)),
        "down": (case.down(), case.nbytes(DOWN)),
        "block": (case.routed(), nbytes),
    }
    flops = 6 * rows * model.top_k * model.hidden * model.inter
    text = "  ".join(
        f"{name} {t * 1e6:7.1f} us" + (f" {count / t / 1e9:5.0f} ({count / t / bandwidth:4.0%})" if count else "")
        for name, (t, count) in parts.items()
    )
    rate = flops / parts["block"][0] / 1e12
    print(f"{model.name:16s} {rows:5d} rows, {case.distinct:5.1f} experts: {text}  {rate:5.0f} TFLOP/s", flush=True)
    results[f"{model.name} {rows}"] = {name: round(t * 1e6, 2) for name, (t, _) in parts.items()}
    results[f"{model.name} {rows}"]["share"] = round(nbytes / parts["block"][0] / bandwidth, 3)


# Tiles


def candidates(kernel: str, key: tuple[int, ...]) -> list[list[int]]:
    if kernel == ROUTER:  # so small that all of it may be in flight at once
        return [[16, 128, 4, 8], [16, 64, 4, 16], [16, 128, 4, 16], [16, 256, 4, 9], [16, 256, 2, 9], [16, 512, 4, 6]]
    return expert_tiles(kernel, key, FORMAT, GPU, 0, DTYPE.itemsize)


def jobs(model: Model) -> list[tuple[str, tuple[int, ...], list[int]]]:
    """Kernel, its key in the table, and the rows that count."""
    wide, narrow = model.gate_up[1:], model.down[1:]
    if DRY:
        return [(FEW_GATE_UP, (*wide, 2), [1, 3]), (ROW_DOWN, (*narrow, 2), [1]), (FEW_DOWN, (*narrow, 2), [3])]
    found: list[tuple[str, tuple[int, ...], list[int]]] = [(ROUTER, (model.experts, model.hidden), [1, 16])]
    few = [n for n in (1, 4) if experts.one_by_one(n, model.top_k, model.experts)]
    found += [
        (FEW_GATE_UP, (*wide, model.top_k), [1, 8, 16]),
        (ROW_DOWN, (*narrow, model.top_k), few),
        (FEW_DOWN, (*narrow, model.top_k), [8, 16]),
    ]
    for rows in (64, 256, 1024, 2048):
        size = experts.block_size(rows, model.top_k, model.experts)
        if (GATE_UP, (*wide, size)) not in [job[:2] for job in found]:
            found += [(GATE_UP, (*wide, size), [rows]), (DOWN, (*narrow, size), [rows])]
    return found


def launch_once(kernel: str, case: Case) -> None:
    layer, routing, normed = case.layers[0], case.routings[0], case.normed[0]
    blocks, few = case.blocks(routing), case.rows <= few_tokens.MOST_TOKENS
    if kernel == ROUTER:
        cuda.norm_logits(normed, layer.router)
    elif kernel in (GATE_UP, FEW_GATE_UP):
        experts.run_gate_up(normed, routing, layer.gate_up, blocks, case.model.activation)
    elif kernel == ROW_DOWN:
        experts.run_row_down(case.inside, routing, layer.down, normed.x, layer.norm)
    elif blocks is not None:
        experts.run_down(case.inside, case.rows, layer.down, blocks, torch.float32 if few else DTYPE)


def compare_ways(layers: list[Layer], results: dict[str, object], limit: float) -> None:
    """A layer's experts with pairs one by one and in blocks of each size, whatever the rule says."""
    model = layers[0].model
    for rows in (3,) if DRY else (2, 4, 8, 16, 32, 64, 128, 256, 512, 2048):
        if time.perf_counter() - BEGIN > limit:
            return
        sizes = [16] if rows <= few_tokens.MOST_TOKENS else [16, 32, 64] if rows <= 128 else [16, 32, 64, 128]
        times = {}
        for size in ([0] if rows <= few_tokens.MOST_TOKENS else []) + sizes:
            try:
                with (
                    patch.object(experts, "one_by_one", lambda *_, size=size: not size),
                    patch.object(experts, "block_size", lambda *_, size=size: size),
                ):
                    times[size] = Case(layers, rows).each(lambda layer, routing, normed: layer.add(normed, routing))
            except Exception as error:
                print(f"  {rows} rows in blocks of {size} failed: {str(error).splitlines()[0][:120]}", flush=True)
        text = "  ".join(f"{f'blocks of {size}' if size else 'one by one'} {t * 1e6:.1f}" for size, t in times.items())
        print(f"{model.name} {rows} rows, us: {text}", flush=True)
        results[f"{model.name} {rows} ways"] = {str(size): round(t * 1e6, 1) for size, t in times.items()}


def tune(search: TileSearch, model: Model, layers: list[Layer], kernels: list[str], bandwidth: float) -> None:
    """Each kernel by itself."""
    for kernel, key, rows in jobs(model):
        if kernel not in kernels:
            continue
        print(f"{model.name} {kernel} {key}, rows {rows}", flush=True)
        cases = [Case(layers, count) for count in rows]

        def describe(times: list[float], kernel: str = kernel, cases: list[Case] = cases) -> str:
            return "  ".join(
                f"{case.rows} rows {t * 1e6:7.1f} us ({case.nbytes(kernel) / t / bandwidth:4.0%})"
                for case, t in zip(cases, times, strict=True)
            )

        def once(kernel: str = kernel, cases: list[Case] = cases) -> None:
            for case in cases:
                launch_once(kernel, case)

        measured = partial(lambda k, c: [case.time(k) for case in c], kernel, cases)
        tried = candidates(kernel, key)
        search.best(kernel, FORMAT, key, tried, measured, once, describe=describe)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=[m.name for m in MODELS], choices=[m.name for m in MODELS])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 256, 2048])
    parser.add_argument("--tune", action="store_true", help="try tiles, and all ways for each number of rows")
    parser.add_argument("--out", type=Path, help="a file of tiles to lay the best over, such as the user's own")
    kernels = [ROUTER, FEW_GATE_UP, ROW_DOWN, FEW_DOWN, GATE_UP, DOWN]
    parser.add_argument("--kernels", nargs="+", default=kernels, choices=kernels, help="whose tiles to try")
    parser.add_argument("--limit", type=float, default=200, help="seconds after which nothing more is tried")
    parser.add_argument("--most", type=int, help="tiles of a matrix that are tried at most")
    parser.add_argument("--dry", action="store_true", help="tiny shapes in the interpreter, to try the script")
    arguments = parser.parse_args()
    models = [m for m in MODELS if m.name in arguments.models]
    rows = [1, 3] if DRY else arguments.rows
    bandwidth = 1e9 if DRY else memory_bandwidth("cuda")
    where = "the interpreter" if DRY else torch.cuda.get_device_name()
    print(f"{where}: {bandwidth / 1e9:.0f} GB/s, overlapped launches {pdl.active(torch.device(DEVICE))}", flush=True)
    results: dict[str, object] = {"device": where, "GB/s": round(bandwidth / 1e9)}
    pool = normal(LAYERS * max(m.experts * m.expert_bytes for m in models) // DTYPE.itemsize, scale=0.02)
    limit = 0.0
    search = TileSearch(GPU, lambda: time.perf_counter() - BEGIN < limit, most=2 if DRY else arguments.most)
    for place, model in enumerate(models, 1):
        layers = make_layers(model, pool)
        run_checks(model, layers[0], results)
        if arguments.tune:
            limit = arguments.limit * place / len(models)
            tune(search, model, layers, arguments.kernels, bandwidth)
            if arguments.kernels == kernels:
                compare_ways(layers, results, limit + 10)
        for count in rows:
            try:
                bench(layers, count, bandwidth, results)
            except Exception as error:
                print(f"{model.name}, {count} rows failed: {str(error).splitlines()[0][:200]}", flush=True)
    print(f"{time.perf_counter() - BEGIN:.0f} s", flush=True)
    if arguments.tune:
        print(tuned.text(search.found))
        if arguments.out:
            search.save(arguments.out)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
