"""Times attention over the compressed KV cache against attention over a bf16 cache, at Qwen3-8B's 32/8 heads of 128.

Every figure is a replayed CUDA graph of many launches, each on blocks that the last ones did not touch; GB/s count what
is read of the cache: codes and scales, and the uncoded rows of the hybrid mode. It checks nothing
(tests/kernels/test_cuda_turboquant.py does) and ends in one line of JSON.

    python tools/cuda_turboquant.py        about half a minute on an H200, most of it compiling
"""

from __future__ import annotations

import argparse
import json
from functools import partial

import cuda_kernels  # beside this script
import torch
from cuda_kernels import BLOCK, COLD_BYTES, DIM, HEADS, KV_HEADS, SCALE, TOKEN_BYTES, Cache
from torch import Tensor

from sparkdraft.kernels import cuda
from sparkdraft.kernels.cuda.attention import turboquant
from sparkdraft.kernels.ops import AttentionParams, AttentionView, RopeArgs
from sparkdraft.kernels.turboquant.layout import token_bytes
from sparkdraft.kernels.turboquant.store import CodedLayer, RecordLayout
from sparkdraft.kernels.turboquant.vectors import VectorFormat

CASES = [(1, 1, 4000), (1, 4, 32000), (1, 8, 32000), (16, 1, 32000), (16, 4, 32000)]  # rows, seqs, context
FORMATS = [(4, 3), (5, 4)]  # bits of keys and of values
MODES = {"hybrid": (4, 128), "full": (0, 0)}  # uncoded keys: the first, the recent
TOKENS = 10 * 32000  # of the pool that all cases share
CHUNK = 8192  # rows written at once
MOST_COPIES = 96  # launches in a graph


def coded_layer(cache: Cache, bits: tuple[int, int], mode: tuple[int, int]) -> CodedLayer:
    """The keys and values of a dense cache, written by the kernel; every block has a page where there are any."""
    blocks, device = len(cache.k), cache.k.device
    layout = RecordLayout(BLOCK, DIM, *bits)
    records = torch.zeros((blocks, KV_HEADS, layout.nbytes), dtype=torch.uint8, device=device)
    pages, page_of = None, None
    if mode != (0, 0):
        pages = torch.zeros((blocks, 2, KV_HEADS, BLOCK, DIM), dtype=torch.float16, device=device)
        page_of = torch.randperm(blocks, device=device).int()
    keys, values = (VectorFormat(DIM, b, device=device) for b in bits)
    centre = torch.zeros((KV_HEADS, DIM), device=device)
    layer = CodedLayer(layout, records, keys, values, centre, pages, page_of, *mode)
    for start in range(0, blocks * BLOCK, CHUNK):
        some = slice(start // BLOCK, (start + CHUNK) // BLOCK)
        k, v = (x[some].transpose(1, 2).flatten(0, 1).contiguous() for x in (cache.k, cache.v))
        slots = torch.arange(start, start + len(k), dtype=torch.int32, device=device)
        turboquant.tq_write(layer, k, v, slots)
    return layer


def views(cache: Cache, rows: int, seqs: int, context: int, used: int) -> list[AttentionView]:
    """As many as it takes to read COLD_BYTES, of blocks side by side, where one reads so many bytes."""
    blocks = -(-context // BLOCK)
    count = min(-(-COLD_BYTES // used), MOST_COPIES, len(cache.order) // (seqs * blocks))
    starts = cuda_kernels.int32([rows * s for s in range(seqs + 1)])
    contexts = cuda_kernels.int32([context] * seqs)
    tables = cache.order[: count * seqs * blocks].view(count, seqs, blocks)
    return [AttentionView(starts, contexts, table, rows, context) for table in tables]


def queries(rows: int, seqs: int) -> Tensor:
    qkv = cuda_kernels.randn(rows * seqs, (HEADS + 2 * KV_HEADS) * DIM)  # any numbers will do for rotated ones
    return qkv[:, : HEADS * DIM].view(-1, HEADS, DIM)


def bytes_read(layer: CodedLayer, rows: int, seqs: int, context: int) -> int:
    uncoded = min(layer.first + layer.recent + rows - 1, context) if layer.pages is not None else 0
    coded = context - layer.first - layer.recent
    layout = layer.layout
    return seqs * KV_HEADS * (coded * token_bytes(DIM, layout.key_bits, layout.value_bits) + uncoded * 4 * DIM)


def time_coded(cache: Cache, layer: CodedLayer, rows: int, seqs: int, context: int) -> float:
    q, used = queries(rows, seqs), bytes_read(layer, rows, seqs, context)
    launches = [
        partial(turboquant.tq_attention, layer, q, view, AttentionParams(SCALE))
        for view in views(cache, rows, seqs, context, used)
    ]
    return cuda_kernels.seconds(launches)


def time_dense(cache: Cache, rows: int, seqs: int, context: int) -> float:
    q, used = queries(rows, seqs), seqs * context * TOKEN_BYTES
    launches = [
        partial(cuda.paged_attention, q, cache.k, cache.v, view, AttentionParams(SCALE))
        for view in views(cache, rows, seqs, context, used)
    ]
    return cuda_kernels.seconds(launches)


def name_of(layer: CodedLayer) -> str:
    mode = next(name for name, uncoded in MODES.items() if uncoded == (layer.first, layer.recent))
    return f"K{layer.layout.key_bits}V{layer.layout.value_bits} {mode}"


def bench_attention(cache: Cache, layers: list[CodedLayer], results: dict[str, object]) -> None:
    for rows, seqs, context in CASES:
        case = f"{rows} rows, {seqs} seqs x {context}"
        dense = time_dense(cache, rows, seqs, context)
        rate = seqs * context * TOKEN_BYTES / dense / 1e9
        print(f"{case:28s} {'bf16':12s} {dense * 1e6:9.1f} us {rate:7.0f} GB/s", flush=True)
        results[f"{case}, bf16"] = {"us": round(dense * 1e6, 2), "GB/s": round(rate)}
        for layer in layers:
            time = time_coded(cache, layer, rows, seqs, context)
            rate, ratio = bytes_read(layer, rows, seqs, context) / time / 1e9, dense / time
            print(f"{case:28s} {name_of(layer):12s} {time * 1e6:9.1f} us {rate:7.0f} GB/s {ratio:6.2f} x", flush=True)
            results[f"{case}, {name_of(layer)}"] = {
                "us": round(time * 1e6, 2), "GB/s": round(rate), "times": round(ratio, 3)
            }  # fmt: skip


def bench_write(cache: Cache, layers: list[CodedLayer], results: dict[str, object]) -> None:
    for rows in (1, 16, CHUNK):
        slots = torch.arange(rows, dtype=torch.int32, device=cache.k.device)
        kv, table = cuda_kernels.randn(rows, 2 * KV_HEADS * DIM), torch.randn(CHUNK, DIM, device=slots.device)
        rope = (kv, RopeArgs(slots, table, 0, KV_HEADS, None, None, 1e-6))
        times = {"bf16": cuda_kernels.seconds([partial(cuda.rope_write, *rope, cache.k, cache.v, slots)] * 32)}
        for layer in layers:
            times[name_of(layer)] = cuda_kernels.seconds([partial(turboquant.tq_rope_write, layer, *rope, slots)] * 32)
        print(f"write {rows} rows:", ", ".join(f"{name} {time * 1e6:.1f} us" for name, time in times.items()))
        results[f"write {rows} rows"] = {name: round(time * 1e6, 2) for name, time in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.parse_args()
    results: dict[str, object] = {"device": torch.cuda.get_device_name()}
    cache = Cache(TOKENS)
    layers = [coded_layer(cache, bits, mode) for bits in FORMATS for mode in MODES.values()]
    bench_attention(cache, layers, results)
    bench_write(cache, layers, results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
