"""Checks and times the kernels of recurrent layers (kernels/cuda/recurrent/delta_steps.py and its kin) on a GPU.

First states are compared with a recurrence in float64, and rows with the same rows in other steps, to the bit. Then
come all layers of published models: decoding as it goes on, sixteen steps after each other with their replays and
folds, beside the time that the states' bytes take by a measured copy; and prompts beside the time of the model's
matmuls. Every figure is a replayed CUDA graph. It ends in a line of JSON.

    python tools/cuda_delta_rule.py                under a minute on an H200
    python tools/cuda_delta_rule.py --tune         also tries tiles, and prints the best: two minutes more
    python tools/cuda_delta_rule.py --models qwen3.5-27b --streams 1 --prompt 32000
    python tools/cuda_delta_rule.py --dry          tiny shapes in Triton's interpreter: whether the script itself works
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkdraft.kernels import cuda
from sparkdraft.kernels.cuda.recurrent import delta_chunks, delta_steps
from sparkdraft.kernels.cuda.runtime import pdl, tuned
from sparkdraft.kernels.cuda.runtime.gpu import gpu_of
from sparkdraft.kernels.ops import FOLD, AttentionView, DeltaParams, RecurrentState, input_ring, record_ring
from sparkdraft.operate.forecast.rates import memory_bandwidth
from sparkdraft.operate.tune import tiles
from sparkdraft.operate.tune.tiles import TileSearch

if DRY:
    import tests.kernels.triton_device  # noqa: F401  # mends the interpreter

DEVICE, DTYPE = ("cpu", torch.float16) if DRY else ("cuda", torch.bfloat16)
GPU = gpu_of(torch.device(DEVICE))
WIDTH, EPS = 4, 1e-6
MOST_ROWS = 4 if DRY else 16
BEGIN = time.perf_counter()


@dataclass(frozen=True)
class Model:
    name: str
    key_heads: int
    heads: int
    layers: int  # those that are recurrent
    active: float  # weights that a row meets, in billions
    dim: int = 128

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.heads) * self.dim

    @property
    def state_bytes(self) -> int:
        return 4 * self.heads * self.dim * self.dim


MODELS = [
    Model("qwen3.5-27b", 16, 48, 48, 26.0),
    Model("qwen3.5-35b-a3b", 16, 32, 30, 3.0),
    Model("coder-next", 16, 32, 36, 3.0),
]
if DRY:
    MODELS = [Model("dry", 1, 2, 2, 0.01, 16)]


def delta_tiles(kernel: str, dim: int) -> list[list[int]]:
    """Return tiles for recurrent layers, the likeliest first: there may be no time for all."""
    if kernel == delta_steps.KERNEL:
        found = [[16, 1], [8, 1], [32, 1], [16, 2], [32, 2], [64, 4], [128, 8]]
    elif kernel == delta_chunks.INSIDE:
        return [[4], [8], [2]]
    else:
        found = [[32, 4, 2], [64, 4, 2]]  # with one stage, Triton 3.6 reads memory that is not its own on an H200
    return [tile for tile in found if tile[0] <= dim]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Layers:
    """The memories of all of a model's layers, for some streams; the weights of one, which nobody reads twice."""

    def __init__(self, model: Model, layers: int, slots: int, dtype: torch.dtype = DTYPE) -> None:
        self.model, self.dtype, dim = model, dtype, model.dim
        ring = record_ring(MOST_ROWS)

        def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(layers, slots, *shape, dtype=dtype, device=DEVICE)

        self.states = numbers(model.heads, dim, dim)
        self.bases = numbers(model.heads, dtype=torch.int32)
        rest = (
            numbers(ring, model.key_heads, dim), numbers(ring, model.heads, dim), numbers(ring, model.heads),
            numbers(input_ring(MOST_ROWS, WIDTH), model.channels, dtype=dtype),
        )  # fmt: skip
        self.memories = [RecurrentState(*each, MOST_ROWS) for each in zip(self.states, self.bases, *rest, strict=True)]
        self.weight = (torch.rand(model.channels, WIDTH, device=DEVICE) - 0.5) * 2
        self.params = DeltaParams(
            *(model.key_heads, model.heads, dim, dim),
            rate=-torch.rand(model.heads, device=DEVICE) * 2 - 0.05,
            bias=torch.rand(model.heads, device=DEVICE) * 4 - 4,
        )
        self.gain = torch.ones(dim, device=DEVICE)

    def rows(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows before the convolution, a and b, and the gate."""
        widths = (self.model.channels, 2 * self.model.heads, self.model.heads * self.model.dim)
        return tuple(torch.randn(count, width, device=DEVICE).to(self.dtype) for width in widths)  # type: ignore


def view_of(counts: list[int], firsts: list[int]) -> AttentionView:
    starts = [sum(counts[:s]) for s in range(len(counts) + 1)]
    ends = [first + count for first, count in zip(firsts, counts, strict=True)]
    tables = torch.zeros(len(counts), 1, dtype=torch.int32, device=DEVICE)
    return AttentionView(int32(starts), int32(ends), tables, max(counts), max(ends))


# Checks


def exact(layers: Layers, conv: Tensor, ab: Tensor) -> tuple[Tensor, Tensor]:
    """o of all rows, and the state after them, by the recurrence in float64 on the CPU's or GPU's own torch."""
    model, params = layers.model, layers.params
    wide = model.key_heads * model.dim
    q, k, v = conv.double().split([wide, wide, model.heads * model.dim], -1)
    share = model.heads // model.key_heads
    q, k = (t.view(-1, model.key_heads, model.dim) for t in (q, k))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + EPS) for t in (q, k))
    q, k = q.repeat_interleave(share, 1) * model.dim**-0.5, k.repeat_interleave(share, 1)
    v = v.view(-1, model.heads, model.dim)
    a, b = ab.double().split(model.heads, -1)
    decay, beta = torch.exp(params.rate.double() * F.softplus(a + params.bias.double())), torch.sigmoid(b)
    state = torch.zeros(model.heads, model.dim, model.dim, dtype=torch.float64, device=DEVICE)
    out = []
    for row in range(len(conv)):
        state = state * decay[row].view(-1, 1, 1)
        update = beta[row].unsqueeze(1) * (v[row] - torch.einsum("hk,hkv->hv", k[row], state))
        state = state + k[row].unsqueeze(2) * update.unsqueeze(1)
        out.append(torch.einsum("hk,hkv->hv", q[row], state).flatten())
    return torch.stack(out), state


def exact_conv(layers: Layers, x: Tensor) -> Tensor:
    padded = F.pad(x.double().t(), (WIDTH - 1, 0)).unsqueeze(0)
    return F.silu(F.conv1d(padded, layers.weight.double().unsqueeze(1), groups=x.shape[1])[0].t())


def run_cuts(layers: Layers, slot: int, x: Tensor, ab: Tensor, cuts: list[tuple[int, int, int]]) -> tuple[Tensor, ...]:
    """Convolution and o of rows in steps of (first, rows that stand, rejected rows behind them)."""
    memory, convs, outs = layers.memories[0], [], []
    for first, kept, rejected in cuts:
        more_x, more_ab, _ = layers.rows(rejected)
        part = torch.cat((x[first : first + kept], more_x)), torch.cat((ab[first : first + kept], more_ab))
        view, slots = view_of([kept + rejected], [first]), int32([slot])
        conv = cuda.causal_conv(part[0], layers.weight, memory, slots, view)
        convs.append(conv[:kept])
        outs.append(cuda.delta_rule(conv, part[1], memory, slots, view, layers.params)[:kept])
    return torch.cat(convs), torch.cat(outs)


def off(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).abs().max() / expected.abs().max()).item()


def check(model: Model, results: dict[str, object]) -> None:
    total = 70 if DRY else 600
    short = [(i, min(3, total - i), 1) for i in range(0, total, 3)]
    single = [(i, 1, 0) for i in range(total)]
    prompt = [(0, total // 3, 0), (total // 3, 1, 2), (total // 3 + 1, total - total // 3 - 1, 0)]
    for dtype, limit, of_state in ((DTYPE, 0.02, 3e-5), (torch.float32, 1e-5, 1e-5)):
        torch.manual_seed(0)
        layers = Layers(model, 1, 4, dtype)
        layers.states.fill_(float("nan"))
        x, ab, _ = layers.rows(total)
        found = {name: run_cuts(layers, s, x, ab, cuts) for s, (name, cuts) in
                 enumerate((("single", single), ("short", short), ("prompt", prompt)))}  # fmt: skip
        conv = found["single"][0]
        expected, state = exact(layers, conv, ab)
        wrong = []
        if not (error := off(conv, exact_conv(layers, x))) < limit:
            wrong.append(f"the convolution is off by {error:.1e}")
        for name, (convs, o) in found.items():
            if not torch.equal(convs, conv):
                wrong.append(f"{name}: other bits of the convolution")
            if not (error := off(o, expected)) < limit:
                wrong.append(f"{name}: o is off by {error:.1e}")
            if name != "prompt" and not torch.equal(o, found["single"][1]):
                wrong.append(f"{name}: other bits of o")
        error = off(layers.states[0, 2], state)
        if not error < of_state or not bool((layers.bases[0, 2] == total).all()):
            wrong.append(f"the state after a prompt is off by {error:.1e}")
        wrong += company_differs(layers, x, ab, found["single"][1])
        name = f"{model.name} {str(dtype).split('.')[1]}"
        print(f"{name}: {'; '.join(wrong) or 'right'}; a prompt's state is off by {error:.1e}", flush=True)
        results[f"{name} check"] = wrong or "ok"


def company_differs(layers: Layers, x: Tensor, ab: Tensor, expected: Tensor) -> list[str]:
    """The same rows as several streams in one batch, in steps of two: a race between programs would show here."""
    memory, streams, slots = layers.memories[0], 4, int32([0, 1, 2, 3])
    for first in range(0, min(len(x), 100) - 1, 2):
        view = view_of([2] * streams, [first] * streams)
        conv = cuda.causal_conv(x[first : first + 2].repeat(streams, 1), layers.weight, memory, slots, view)
        o = cuda.delta_rule(conv, ab[first : first + 2].repeat(streams, 1), memory, slots, view, layers.params)
        if not torch.equal(o, expected[first : first + 2].repeat(streams, 1)):
            return [f"{streams} streams: other bits of o from row {first} on"]
    return []


# Times


def seconds(work: Callable[[], object]) -> float:
    """Of one replay."""
    return tiles.seconds([work], goal=0.05)


class Decoding:
    """Sixteen steps of all layers after each other; each stream takes 'advance' rows per step."""

    STEPS, FIRST = (2 if DRY else 16), 64

    def __init__(self, layers: Layers, streams: int, rows: int) -> None:
        self.layers, self.streams, self.rows = layers, streams, rows
        self.advance = 1 if rows == 1 else (rows + 1) // 2 - 1
        self.views = [
            view_of([rows] * streams, [self.FIRST + step * self.advance] * streams) for step in range(self.STEPS)
        ]
        self.slots, self.inputs = int32(list(range(streams))), layers.rows(streams * rows)

    def conv(self, memory: RecurrentState, view: AttentionView) -> Tensor:
        return cuda.causal_conv(self.inputs[0], self.layers.weight, memory, self.slots, view)

    def rule(self, memory: RecurrentState, view: AttentionView, conv: Tensor | None = None) -> Tensor:
        qkv = self.inputs[0] if conv is None else conv
        return cuda.delta_rule(qkv, self.inputs[1], memory, self.slots, view, self.layers.params)

    def both(self, memory: RecurrentState, view: AttentionView) -> Tensor:
        return cuda.gated_norm(self.rule(memory, view, self.conv(memory, view)), self.inputs[2], self.layers.gain, EPS)

    def time(self, each: Callable[[RecurrentState, AttentionView], object]) -> float:
        """Seconds per step of all layers."""

        def work() -> None:
            self.layers.bases.fill_(self.FIRST)
            for view in self.views:
                for memory in self.layers.memories:
                    each(memory, view)

        return seconds(work) / self.STEPS

    @property
    def nbytes(self) -> float:
        """Each state read once per step, and written where it folds; u, o and rows are small beside it."""
        folds = min(self.advance / FOLD, 1.0)
        return len(self.layers.memories) * self.streams * self.layers.model.state_bytes * (1 + folds)


def bench_decoding(model: Model, streams: int, bandwidth: float, results: dict[str, object]) -> None:
    layers = Layers(model, model.layers, streams)
    for rows in (1, MOST_ROWS):
        case = Decoding(layers, streams, rows)
        parts = {"conv": case.time(case.conv), "rule": case.time(case.rule), "all": case.time(case.both)}
        floor = case.nbytes / bandwidth
        whole = 2 * len(layers.memories) * streams * model.state_bytes / bandwidth
        text = "  ".join(f"{name} {t * 1e6:7.0f} us" for name, t in parts.items())
        print(
            f"{model.name:16s} {streams:2d} streams of {rows:2d} rows, {model.layers} layers: {text}; states read, and"
            f" written where they fold: {floor * 1e6:.0f} us ({floor / parts['rule']:.0%} of rule); read and written:"
            f" {whole * 1e6:.0f} us",
            flush=True,
        )
        results[f"{model.name} {streams}x{rows}"] = {name: round(t * 1e6, 1) for name, t in parts.items()}
        results[f"{model.name} {streams}x{rows}"]["floor"] = round(floor * 1e6, 1)


class Prompt:
    """One step of many rows, in one layer."""

    def __init__(self, model: Model, rows: int) -> None:
        self.layers, self.rows = Layers(model, 1, 1), rows
        self.view, self.slots, self.inputs = view_of([rows], [0]), int32([0]), self.layers.rows(rows)
        self.memory = self.layers.memories[0]

    def conv(self) -> Tensor:
        return cuda.causal_conv(self.inputs[0], self.layers.weight, self.memory, self.slots, self.view)

    def rule(self) -> Tensor:
        return cuda.delta_rule(self.inputs[0], self.inputs[1], self.memory, self.slots, self.view, self.layers.params)

    def norm(self) -> Tensor:
        return cuda.gated_norm(self.inputs[2], self.inputs[2], self.layers.gain, EPS)


def matmul_rate() -> float:
    """FLOP/s of a large matmul."""
    if DRY:
        return 1e9
    a = torch.randn(8192, 8192, device=DEVICE).to(DTYPE)
    return 2 * 8192**3 / seconds(lambda: a @ a)


def bench_prompt(model: Model, total: int, rate: float, results: dict[str, object]) -> None:
    for rows in sorted({total} | ({2048, 8192} if not DRY else set())):
        case = Prompt(model, rows)
        scale = model.layers * total / rows  # of all layers and of all rows
        parts = {"conv": case.conv, "rule": case.rule, "norm": case.norm}
        times = {name: seconds(work) * scale for name, work in parts.items()}
        matmuls = 2 * model.active * 1e9 * total / rate
        text = "  ".join(f"{name} {t * 1e3:7.1f} ms" for name, t in times.items())
        print(
            f"{model.name:16s} {total} rows in steps of {rows}, {model.layers} layers: {text};"
            f" all are {sum(times.values()) / matmuls:.1%} of {matmuls * 1e3:.0f} ms of matmuls",
            flush=True,
        )
        results[f"{model.name} prompt {rows}"] = {name: round(t * 1e3, 2) for name, t in times.items()}
        results[f"{model.name} prompt {rows}"]["matmuls"] = round(matmuls * 1e3, 1)


# Tiles


def forms(kernel: str) -> str:
    return "32bit" if kernel == delta_steps.KERNEL else f"{8 * DTYPE.itemsize}bit"


def tune(search: TileSearch, model: Model, rows: int) -> None:
    """The tiles of a shape. Those of decoding over four cases, each beside its own fastest."""
    layers = Layers(model, min(model.layers, 12), 1 if DRY else 16)
    cases = [Decoding(layers, s, r) for s in ((1,) if DRY else (1, 16)) for r in (1, MOST_ROWS)]
    prompt, dims = Prompt(model, rows), (model.dim, model.dim)
    measures = {delta_steps.KERNEL: lambda: [case.time(case.rule) for case in cases]}
    measures |= dict.fromkeys((delta_chunks.INSIDE, delta_chunks.THROUGH), lambda: [seconds(prompt.rule)])
    for kernel, measure in measures.items():
        shape = dims if kernel == delta_steps.KERNEL else (model.heads, *dims)
        search.best(kernel, forms(kernel), shape, delta_tiles(kernel, model.dim), measure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=[m.name for m in MODELS], choices=[m.name for m in MODELS])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 2] if DRY else [1, 16])
    parser.add_argument("--prompt", type=int, default=70 if DRY else 32000, help="rows of a prompt")
    parser.add_argument("--tune", action="store_true", help="try tiles, for each number of heads once")
    parser.add_argument("--out", type=Path, help="a file of tiles to lay the best over, such as the user's own")
    parser.add_argument("--limit", type=float, default=200, help="seconds after which no more tiles are tried")
    parser.add_argument("--dry", action="store_true", help="tiny shapes in the interpreter, to try the script")
    arguments = parser.parse_args()
    models = [m for m in MODELS if m.name in arguments.models]
    bandwidth, rate = (1e9 if DRY else memory_bandwidth("cuda")), matmul_rate()
    where = "the interpreter" if DRY else torch.cuda.get_device_name()
    print(f"{where}: {bandwidth / 1e9:.0f} GB/s, {rate / 1e12:.0f} TFLOP/s, overlapped launches "
          f"{pdl.active(torch.device(DEVICE))}", flush=True)  # fmt: skip
    results: dict[str, object] = {"device": where, "GB/s": round(bandwidth / 1e9), "TFLOP/s": round(rate / 1e12)}
    limit, tuned_heads = 0.0, set[int]()
    search = TileSearch(GPU, lambda: time.perf_counter() - BEGIN < limit, most=2 if DRY else None)
    for model in models:
        try:
            check(model, results)
            if arguments.tune and model.heads not in tuned_heads:
                tuned_heads.add(model.heads)
                limit = arguments.limit * len(tuned_heads) / len({m.heads for m in models})
                tune(search, model, 70 if DRY else 8192)
                check(model, results)  # with those tiles
            for streams in arguments.streams:
                bench_decoding(model, streams, bandwidth, results)
            bench_prompt(model, arguments.prompt, rate, results)
        except Exception as error:
            print(f"{model.name} failed: {str(error).splitlines()[0][:300]}", flush=True)
            results[f"{model.name} failed"] = str(error).splitlines()[0][:300]
    print(f"{time.perf_counter() - BEGIN:.0f} s", flush=True)
    if arguments.tune:
        print(tuned.text(search.found))
        if arguments.out:
            search.save(arguments.out)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
