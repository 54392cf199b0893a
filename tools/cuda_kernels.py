"""Times the Triton kernels in the geometry of Qwen3-8B (32/8 heads of 128) against what the GPU can do, and attention
in those of other models.

Every figure is a replayed CUDA graph of many launches, each on blocks that the last ones did not touch, so
that caches do not flatter it; bytes count K and V once and are shown as a share of a measured copy,
arithmetic as a share of a measured matmul. It checks nothing (tests/kernels/test_cuda.py does) and ends in
one line of JSON.

    python tools/cuda_kernels.py            about half a minute on an H200, most of it compiling
    python tools/cuda_kernels.py --tune     also tries other attention tiles, another half minute
    python tools/cuda_kernels.py --heads    only attention in all geometries, with tiles tried for heads of 512
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkdraft.kernels import cuda
from sparkdraft.kernels.cuda.attention import paged
from sparkdraft.kernels.cuda.attention.paged import Tile
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.cuda.runtime.gpu import gpu_of
from sparkdraft.kernels.cuda.runtime.timing import COLD_BYTES, seconds
from sparkdraft.kernels.ops import SILU, AttentionParams, AttentionView, RopeArgs
from sparkdraft.operate.forecast.rates import memory_bandwidth

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
HIDDEN, INTER = 4096, 12288
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2  # K and V of one token in one layer, bf16
SCALE = DIM**-0.5


@dataclass(frozen=True)
class Geometry:
    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    sinks: bool = False

    @property
    def token_bytes(self) -> int:
        return 2 * self.kv_heads * self.dim * 2


QWEN3 = Geometry(HEADS, KV_HEADS, DIM)
GEOMETRIES = {
    "Qwen3-8B": QWEN3,
    "Qwen3.5-27B": Geometry(24, 4, 256),
    "Qwen3.5-122B": Geometry(32, 2, 256),
    "Gemma-4-31B, window": Geometry(32, 16, 256, 1024),
    "Gemma-4-31B, full": Geometry(32, 4, 512),
    "gpt-oss, window": Geometry(64, 8, 64, 128, True),
    "gpt-oss, full": Geometry(64, 8, 64, 0, True),
}


def randn(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def copies_for(used: int, most: int = 128) -> int:
    return min(max(-(-COLD_BYTES // used), 1), most)


class Cache:
    """One pool of K and V that all cases share; views lie side by side, so launches do not overlap."""

    def __init__(self, tokens: int, geometry: Geometry = QWEN3) -> None:
        self.geometry = geometry
        self.k = randn(tokens // BLOCK, geometry.kv_heads, BLOCK, geometry.dim)
        self.v = randn(tokens // BLOCK, geometry.kv_heads, BLOCK, geometry.dim)
        self.order = torch.randperm(tokens // BLOCK, device="cuda").to(torch.int32)

    def views(self, seqs: int, rows: int, context: int) -> list[AttentionView]:
        blocks = -(-context // BLOCK)
        read = seqs * self.seen(rows, context) * self.geometry.token_bytes
        count = min(copies_for(read), len(self.order) // (seqs * blocks))
        starts, contexts = int32([rows * s for s in range(seqs + 1)]), int32([context] * seqs)
        tables = self.order[: count * seqs * blocks].view(count, seqs, blocks)
        return [AttentionView(starts, contexts, table, rows, context) for table in tables]

    def seen(self, rows: int, context: int) -> int:
        """Keys that any row sees."""
        return min(self.geometry.window + rows - 1, context) if self.geometry.window else context

    def attend(self, seqs: int, rows: int, context: int) -> float:
        g = self.geometry
        q = randn(seqs * rows, (g.heads + 2 * g.kv_heads) * g.dim)[:, : g.heads * g.dim].view(-1, g.heads, g.dim)
        sinks = torch.zeros(g.heads, device="cuda") if g.sinks else None
        params = AttentionParams(g.dim**-0.5, window=g.window, sinks=sinks)
        views = self.views(seqs, rows, context)
        return seconds([lambda v=v: cuda.paged_attention(q, self.k, self.v, v, params) for v in views])


def report(results: dict[str, object], name: str, time: float, rate: float, unit: str, ceiling: float) -> None:
    share = f"{100 * rate / ceiling:5.1f} % of {ceiling:.0f}"
    print(f"{name:44s} {time * 1e6:10.1f} us {rate:8.0f} {unit:8s} {share}", flush=True)
    results[name] = {"us": round(time * 1e6, 2), unit: round(rate, 1), "share": round(rate / ceiling, 3)}


def ceilings() -> tuple[float, float]:
    """GB/s of memory and TFLOP/s of a matmul."""
    a, b = randn(8192, 8192), randn(8192, 8192)
    return memory_bandwidth("cuda") / 1e9, 2 * 8192**3 / seconds([lambda: a @ b]) / 1e12


def attention_flops(rows: int, context: int) -> float:
    return 4 * HEADS * DIM * rows * (context - (rows - 1) / 2)  # a row sees the keys before it


def bench_attention(cache: Cache, results: dict[str, object], bandwidth: float, matmul: float) -> None:
    for rows, name in ((1, "decode"), (16, "verify 16 rows")):
        for seqs in (1, 16, 64):
            for context in (256, 4096, 32000):
                time = cache.attend(seqs, rows, context)
                rate = seqs * context * TOKEN_BYTES / time / 1e9
                report(results, f"{name}, {seqs} seqs x {context}", time, rate, "GB/s", bandwidth)
    for rows, context in ((8192, 8192), (2048, 32000), (256, 32000)):
        time = cache.attend(1, rows, context)
        rate = attention_flops(rows, context) / time / 1e12
        report(results, f"chunk of {rows} rows, context {context}", time, rate, "TFLOP/s", matmul)
    q, k, v = randn(1, HEADS, 8192, DIM), randn(1, HEADS, 8192, DIM), randn(1, HEADS, 8192, DIM)
    time = seconds([lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)])
    rate = attention_flops(8192, 8192) / time / 1e12
    report(results, "torch sdpa, 8192 rows, unpaged, no GQA", time, rate, "TFLOP/s", matmul)


def elementwise_cases(cache: Cache, rows: int, spread: int) -> dict[str, tuple[int, Callable[[int], object]]]:
    """Bytes a row and the launch on input i of 'spread', which are taken in turn so that they come from memory."""
    weight, norm, table = randn(HIDDEN), randn(DIM), torch.randn(40960, DIM, device="cuda")
    x, gate_up = randn(spread, rows, HIDDEN), randn(spread, rows, 2 * INTER)
    qkv = randn(spread, rows, (HEADS + 2 * KV_HEADS) * DIM)
    positions = torch.arange(rows, dtype=torch.int32, device="cuda")
    rope = RopeArgs(positions, table, HEADS, KV_HEADS, norm, norm, 1e-6)
    return {
        "rms_norm": (4 * HIDDEN, lambda i: cuda.rms_norm(x[i], weight, 1e-6)),
        "rope_write": (
            4 * HEADS * DIM + 2 * TOKEN_BYTES + 4 * DIM,
            lambda i: cuda.rope_write(qkv[i], rope, cache.k, cache.v, positions),
        ),
        "gated": (6 * INTER, lambda i: cuda.gated(gate_up[i], SILU)),
    }


def bench_elementwise(cache: Cache, results: dict[str, object], bandwidth: float) -> None:
    for rows, spread in ((1, 64), (16, 64), (8192, 8)):
        for name, (row_bytes, launch) in elementwise_cases(cache, rows, spread).items():
            time = seconds([partial(launch, i) for i in range(spread)], goal=0.02)
            report(results, f"{name}, {rows} rows", time, rows * row_bytes / time / 1e9, "GB/s", bandwidth)


def bench_geometries(results: dict[str, object], bandwidth: float, matmul: float) -> None:
    for name, geometry in GEOMETRIES.items():
        cache = Cache(16 * 32000, geometry)
        for rows in (1, 16):
            for seqs, context in ((1, 4096), (1, 32000), (16, 4096), (16, 32000)):
                time = cache.attend(seqs, rows, context)
                rate = seqs * cache.seen(rows, context) * geometry.token_bytes / time / 1e9
                report(results, f"{name}: {rows} rows, {seqs} seqs x {context}", time, rate, "GB/s", bandwidth)
        time, rows = cache.attend(1, 2048, 8192), 2048
        keys = geometry.window or 8192 - (rows - 1) / 2
        rate = 4 * geometry.heads * geometry.dim * rows * keys / time / 1e12
        report(results, f"{name}: chunk of {rows} rows, context 8192", time, rate, "TFLOP/s", matmul)
        if geometry.dim == 512:
            tune(cache, results, TUNE_512)


TUNE_512 = [
    (1, 1, 32000, [Tile(16, 32, 8, 2), Tile(16, 32, 4, 2), Tile(16, 32, 4, 3), Tile(16, 16, 4, 3), Tile(16, 32, 8, 3)]),
    (1, 16, 32000, [Tile(16, 32, 8, 2), Tile(16, 32, 4, 2), Tile(16, 32, 4, 3), Tile(16, 16, 4, 3)]),
    (4, 1, 32000, [Tile(32, 32, 8, 2), Tile(32, 16, 8, 3), Tile(32, 32, 4, 2), Tile(64, 32, 8, 2)]),
    (8, 1, 32000, [Tile(64, 32, 8, 2), Tile(64, 16, 8, 3), Tile(64, 64, 8, 1), Tile(64, 32, 4, 2)]),
    (
        2048,
        1,
        8192,
        [Tile(64, 32, 8, 2), Tile(64, 16, 8, 3), Tile(64, 64, 8, 1), Tile(32, 32, 8, 2), Tile(32, 32, 4, 2)],
    ),
]
TUNE = [  # rows, seqs, context, tiles to try in place of the table's
    (1, 1, 32000, [Tile(16, 64, 4, 3), Tile(16, 32, 4, 5), Tile(16, 128, 4, 3), Tile(16, 64, 2, 4)]),
    (16, 1, 32000, [Tile(64, 32, 4, 4), Tile(64, 64, 8, 3), Tile(64, 128, 8, 2)]),
    (8192, 1, 8192, [Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3)]),
]


def tune(cache: Cache, results: dict[str, object], cases: list[tuple[int, int, int, list[Tile]]]) -> None:
    """Times only: a decode tile serves many numbers of rows, so which to write into a file of tiles is for a person."""
    tables = tuned.tables(gpu_of(torch.device("cuda")))
    decode, chunk = (tables[f"attention_{kind}", "16bit"] for kind in ("decode", "chunk"))
    dim = cache.geometry.dim
    kept = decode[dim,], chunk[dim,]
    for rows, seqs, context, candidates in cases:
        for tile in candidates:
            numbers = [tile.block_m, tile.block_n, tile.warps, tile.stages]
            decode[dim,], chunk[dim,] = [numbers] if rows <= 16 else [], numbers
            paged._launch.cache_clear()
            name = f"tune {dim}: {rows} rows, {seqs} seqs x {context}, {tile}"
            try:
                time = cache.attend(seqs, rows, context)
            except Exception as error:  # a tile too large for this GPU is a result as well
                print(name, "failed:", str(error).splitlines()[0])
                continue
            print(f"{name}: {time * 1e6:.1f} us", flush=True)
            results[name] = {"us": round(time * 1e6, 2)}
    decode[dim,], chunk[dim,] = kept
    paged._launch.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tune", action="store_true", help="also try other attention tiles")
    parser.add_argument("--heads", action="store_true", help="only attention, in the geometries of several models")
    arguments = parser.parse_args()
    bandwidth, matmul = ceilings()
    device = torch.cuda.get_device_name()
    print(f"{device}: copy {bandwidth:.0f} GB/s, bf16 matmul {matmul:.0f} TFLOP/s", flush=True)
    results: dict[str, object] = {
        "device": device,
        "copy_GB/s": round(bandwidth),
        "matmul_TFLOP/s": round(matmul),
    }
    if arguments.heads:
        bench_geometries(results, bandwidth, matmul)
        print(json.dumps(results))
        return
    free = torch.cuda.mem_get_info()[0]
    tokens = min(64 * 32000, int(free * 0.6) // TOKEN_BYTES) // BLOCK * BLOCK
    cache = Cache(tokens)
    bench_attention(cache, results, bandwidth, matmul)
    bench_elementwise(cache, results, bandwidth)
    if arguments.tune:
        tune(cache, results, TUNE)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
