"""How long the C++ kernels take for one step of SmolLM2-135M on this CPU, with torch's float32 matmul beside them.

The matmuls are those of 30 layers and the head, each with weights of its own, so that they come from memory as they do
in a real step; attention is one layer's. Experts are one layer of Qwen3-30B-A3B, whose rows choose at random, and what
as many bytes take in one matrix is beside them. Times are the least of several runs, which is what a quiet machine
gives; tokens per second, and everything around the kernels, are for the engine's own benchmarks.

    python tools/cpu_kernels.py [--threads N] [--rows 1,4,8,16,512]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sparkdraft.kernels import native
from sparkdraft.kernels.ops import (
    GELU_TANH,
    SILU,
    Activation,
    AttentionParams,
    AttentionView,
    Norm,
    Normed,
    RopeArgs,
    Routing,
)
from sparkdraft.weights.linear import ExpertLinear
from sparkdraft.weights.quant.stored import GroupQuant

LAYERS, HIDDEN, INTER, VOCAB = 30, 576, 1536, 49152
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 16
SHAPES = ((HIDDEN, 960), (HIDDEN, HIDDEN), (HIDDEN, 2 * INTER), (INTER, HIDDEN))  # (in, out) of a layer
EXPERTS, TOP_K, EXPERT_HIDDEN, EXPERT_INTER = 128, 8, 2048, 768
WEIGHTS = LAYERS * sum(i * o for i, o in SHAPES) + HIDDEN * VOCAB


def random_quant(out: int, width: int, bits: int) -> GroupQuant:
    groups = width // 32
    scale = torch.rand(out, groups).mul_(0.01).half()
    if bits == 8:
        return GroupQuant(8, torch.randint(-127, 128, (out, groups, 32), dtype=torch.int8), scale, None)
    return GroupQuant(4, torch.randint(0, 256, (out, groups, 16), dtype=torch.uint8), scale, -scale * 8)


def least_ms(seconds: float, run: Callable[..., object], *arguments: object) -> float:
    """The least time of one run, among as many as fit 'seconds' (at least 2)."""
    best, stop, runs = float("inf"), time.perf_counter() + seconds, 0
    while runs < 2 or time.perf_counter() < stop:
        start = time.perf_counter()
        run(*arguments)
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return best * 1e3


def repeat(times: int, run: Callable[[], object]) -> None:
    for _ in range(times):
        run()


def matmuls(seconds: float, counts: list[int]) -> dict[str, dict[int, float]]:
    quants = [random_quant(o, i, 4) for _ in range(LAYERS) for i, o in SHAPES] + [random_quant(VOCAB, HIDDEN, 8)]
    start = time.perf_counter()
    packed = [native.PackedLinear.pack([w]) for w in quants]
    print(f"packing {sum(p.nbytes for p in packed) / 1e6:.0f} MB: {time.perf_counter() - start:.2f} s")
    floats = [torch.randn(w.shape) for w in quants]
    table: dict[str, dict[int, float]] = {"layers": {}, "head": {}, "step": {}, "float32": {}}
    native_linears = [p.linear for p in packed]
    torch_linears = [functools.partial(torch.nn.functional.linear, weight=w) for w in floats]
    for rows in counts:
        x = [torch.randn(rows, p.in_features) for p in packed[:4]] * LAYERS + [torch.randn(rows, HIDDEN)]
        table["layers"][rows] = least_ms(seconds, each, native_linears[:-1], x[:-1])
        table["head"][rows] = least_ms(seconds, each, native_linears[-1:], x[-1:])
        table["step"][rows] = least_ms(seconds, each, native_linears, x)
        table["float32"][rows] = least_ms(seconds, each, torch_linears, x)
    return table


def each(linears: list[Callable[[Tensor], Tensor]], inputs: list[Tensor]) -> None:
    """One after another, each result freed before the next: a model keeps none of them either."""
    for linear, x in zip(linears, inputs, strict=True):
        linear(x)


def attention_ms(rows: int, context: int, seconds: float) -> float:
    blocks = context // BLOCK
    q = torch.randn(rows, HEADS, HEAD_DIM)
    k, v = (torch.randn(blocks, KV_HEADS, BLOCK, HEAD_DIM) for _ in range(2))
    tables = torch.randperm(blocks).int().unsqueeze(0)
    view = AttentionView(torch.tensor([0, rows]).int(), torch.tensor([context]).int(), tables, rows, context)
    return least_ms(seconds, native.paged_attention, q, k, v, view, AttentionParams(0.125))


def random_experts(out: int, width: int, bits: int) -> ExpertLinear:
    return native.keep_experts([[random_quant(out, width, bits)] for _ in range(EXPERTS)], None, torch.Tensor.float)


def experts(seconds: float, counts: list[int]) -> dict[str, dict[int, float]]:
    """ms of a layer by rows; 'as one matrix' is what as many bytes take that lie in one piece and meet as many rows."""
    norm = Norm(torch.ones(EXPERT_HIDDEN), 1e-6)
    router = native.FloatLinear(torch.randn(EXPERTS, EXPERT_HIDDEN))
    table: dict[str, dict[int, float]] = {}
    for bits in (4, 8):
        gate_up = random_experts(2 * EXPERT_INTER, EXPERT_HIDDEN, bits)
        down = random_experts(EXPERT_HIDDEN, EXPERT_INTER, bits)
        whole = native.PackedLinear.pack([random_quant(EXPERTS * EXPERT_INTER, EXPERT_HIDDEN, bits)])
        for rows in counts:
            normed = Normed(torch.randn(rows, EXPERT_HIDDEN), norm)
            routings = [random_routing(rows) for _ in range(32)]  # others every time, so that weights come from memory
            turns = itertools.cycle(routings)
            ms = least_ms(seconds, through_experts, normed, turns, gate_up, down)
            distinct = sum(len(r.ids.unique()) for r in routings) / len(routings)
            each = max(1, round(rows * TOP_K / distinct))
            share = 3 * distinct / EXPERTS  # gate, up and down of as many; the matrix is one of the three of all
            dense = least_ms(seconds, whole.linear, torch.randn(each, EXPERT_HIDDEN)) * share
            table.setdefault(f"experts, {bits} bits", {})[rows] = ms
            table.setdefault(f"as one matrix, {bits} bits", {})[rows] = dense
    for rows in counts:
        normed = Normed(torch.randn(rows, EXPERT_HIDDEN), norm)
        table.setdefault("route", {})[rows] = least_ms(seconds, native.norm_route, normed, router, TOP_K, True)
    return table


def through_experts(normed: Normed, turns: Iterator[Routing], gate_up: ExpertLinear, down: ExpertLinear) -> None:
    native.norm_experts(normed, next(turns), gate_up, down, SILU)


def random_routing(rows: int) -> Routing:
    ids = torch.rand(rows, EXPERTS).argsort(-1)[:, :TOP_K].int().contiguous()
    return Routing(ids, torch.rand(rows, TOP_K))


def small_us(seconds: float) -> dict[str, float]:
    """One decode row through what stands between the matmuls, in us: mostly the price of a call."""
    x, weight, gate_up, qkv = (
        torch.randn(1, HIDDEN),
        torch.ones(HIDDEN),
        torch.randn(1, 2 * INTER),
        torch.randn(1, 960),
    )
    k, v = torch.randn(1, KV_HEADS, HEAD_DIM), torch.randn(1, KV_HEADS, HEAD_DIM)
    cache, slots, positions = (
        torch.zeros(4, KV_HEADS, BLOCK, HEAD_DIM),
        torch.zeros(1).int(),
        torch.zeros(1).int(),
    )
    table, gain, logits = torch.rand(16, HEAD_DIM), Norm(weight, 1e-5), torch.randn(1, EXPERTS)
    clamped, scores = Activation("clamped_swiglu", 7.0), torch.randn(1, VOCAB) * 30
    runs: dict[str, Callable[[], Tensor | None]] = {
        "rms_norm": lambda: native.rms_norm(x, weight, 1e-5),
        "qk_norm_rope": lambda: native.qk_norm_rope(qkv, RopeArgs(positions, table, HEADS, KV_HEADS, None, None, 1e-5)),
        "silu": lambda: native.gated(gate_up, SILU),
        "gelu_tanh": lambda: native.gated(gate_up, GELU_TANH),
        "clamped_swiglu": lambda: native.gated(gate_up, clamped),
        "add_normed": lambda: native.add_normed(x, x, gain, gain, 0.5).x,
        f"top {TOP_K} of {EXPERTS}": lambda: native.choose_experts(logits, TOP_K, True, None)[0],
        f"softcap of {VOCAB}": lambda: native.c.sd_softcap(scores.data_ptr(), VOCAB, 30.0),
        "kv_write": lambda: native.kv_write(k, v, cache, cache, slots),
    }
    return {name: least_ms(seconds / 8, repeat, 100, run) * 10 for name, run in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=0, help="0: all that this process may use")
    parser.add_argument("--rows", default="1,4,8,16,512")
    parser.add_argument("--seconds", type=float, default=0.7, help="for each number")
    options = parser.parse_args()
    if reason := native.unavailable_reason():
        sys.exit(reason)
    if options.threads:
        native.set_threads(options.threads)
        torch.set_num_threads(options.threads)
    counts = [int(n) for n in options.rows.split(",")]
    table = matmuls(options.seconds, counts)
    print(f"\n{'matmuls of a step, ms':<26}" + "".join(f"{n:>9}" for n in counts) + "   rows")
    for name, times in table.items():
        print(f"{name:<26}" + "".join(f"{times[n]:9.2f}" for n in counts))
    print(f"{'step, G multiply-adds/s':<26}" + "".join(f"{WEIGHTS * n / table['step'][n] / 1e6:9.0f}" for n in counts))
    attention = {f"{r}x{c}": attention_ms(r, c, options.seconds) for c in (512, 4096, 8192) for r in (1, 8, 512)}
    print("\nattention of a layer, ms   " + "   ".join(f"{name}: {ms:.3f}" for name, ms in attention.items()))
    mixture = experts(options.seconds, counts)
    print(f"\n{'experts of a layer, ms':<26}" + "".join(f"{n:>9}" for n in counts) + "   rows")
    for name, times in mixture.items():
        print(f"{name:<26}" + "".join(f"{times[n]:9.2f}" for n in counts))
    small = small_us(options.seconds)
    print("\none row, us                " + "   ".join(f"{name}: {us:.1f}" for name, us in small.items()))
    print(json.dumps({"matmul_ms": table, "attention_ms": attention, "experts_ms": mixture, "small_us": small}))


if __name__ == "__main__":
    main()
