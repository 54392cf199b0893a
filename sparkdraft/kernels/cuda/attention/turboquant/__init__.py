"""The TurboQuant cache on the GPU: vectors are coded as they are written, and attended to without being decoded.

Codes and uncoded tokens both lie in rotated space (kernels/turboquant/store.py), so queries are rotated and keys are
not; a key's scale multiplies its score, a value's scale its weight, and the sum is rotated back once.

    write.py        queries rotated in place, keys and values coded and packed, after their norms and RoPE
    levels.py       packed codes to levels, as PTX
    attention.py    the kernel; one_warp.py and four_warps.py go through codes and uncoded tokens, with tiles.py
    rotation.py     the rotation, and parts joined and rotated back
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from sparkdraft.kernels.cuda.attention.paged import MOST_SPLITS, SCRATCH_BYTES, _choose_splits
from sparkdraft.kernels.cuda.attention.turboquant.attention import attend
from sparkdraft.kernels.cuda.attention.turboquant.levels import as_they_lie, in_pairs
from sparkdraft.kernels.cuda.attention.turboquant.rotation import join, signs, turn_back
from sparkdraft.kernels.cuda.attention.turboquant.write import write
from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.runtime.gpu import Gpu, gpu_of
from sparkdraft.kernels.ops import AttentionParams, AttentionView, RopeArgs
from sparkdraft.kernels.turboquant.codebook import codebook
from sparkdraft.kernels.turboquant.layout import KERNEL_LIMITS, PLANES
from sparkdraft.kernels.turboquant.store import CodedLayer, RecordLayout

DIMS, BLOCK_SIZE = KERNEL_LIMITS["cuda"]
BLOCK_N = 64  # keys of a tile
JOIN_ELEMENTS = 4096  # that a program of the second kernel holds
FEW_LANES = 16  # of a sequence, up to which programs of one warp take them
LANES = {1: 8, 4: 64}  # of a program, by its warps
MOST_REGISTERS = {1: {64: 128, 128: 168, 256: 255}, 4: {64: 168, 128: 255, 256: 255}}  # of a thread, by warps and dim


@dataclass(frozen=True, slots=True)
class Constants:
    """What the kernels are compiled with, of a layer's layout."""

    key_levels: tuple[float, ...]  # of a unit vector
    value_levels: tuple[float, ...]
    offsets: tuple[int, ...]  # of K low, K high, V low, V high, K scales, V scales; -1: no such plane

    def options(self, dim: int) -> dict[str, object]:
        return {"KEY_LEVELS": self.key_levels, "VALUE_LEVELS": self.value_levels, "AT": self.offsets, "DIM": dim}


@lru_cache
def _constants(layout: RecordLayout) -> Constants:
    starts, offsets = iter(layout.offsets), []
    for bits in (layout.key_bits, layout.value_bits):
        offsets += [next(starts), next(starts) if len(PLANES[bits]) > 1 else -1]
    key, value = (
        tuple(level * layout.dim**-0.5 for level in codebook(layout.dim, bits).levels)
        for bits in (layout.key_bits, layout.value_bits)
    )
    return Constants(key, value, (*offsets, *starts))


def _check(layer: CodedLayer) -> None:
    layout, pages = layer.layout, layer.pages
    assert layout.dim in DIMS and layout.block_size == BLOCK_SIZE, f"head_dim {layout.dim}, blocks {layout.block_size}"
    assert layer.records.stride(2) == 1 and layer.records.stride(1) % 16 == 0, layer.records.stride()
    assert (pages is None) == (layer.page_of is None) == (layer.first + layer.recent == 0), "pages serve uncoded rows"
    assert pages is None or pages.stride()[3:] == (layout.dim, 1), pages.stride()


def _write(
    layer: CodedLayer, k: Tensor, v: Tensor, slots: Tensor, q: Tensor | None,
    positions: Tensor | None = None, table: Tensor | None = None, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, eps: float = 0.0, v_norm: bool = False,
) -> None:  # fmt: skip
    _check(layer)
    assert k.stride(2) == v.stride(2) == 1, (k.stride(), v.stride())
    assert layer.centre is None or layer.centre.is_contiguous()
    rows, kv_heads, dim = k.shape
    layout, records, pages = layer.layout, layer.records, layer.pages
    heads, queries = (0, k) if q is None else (q.shape[1], q)
    if not rows:
        return
    most, half = (0, 1) if table is None else (table.shape[0], table.shape[1] // 2)
    run(
        write, (rows, heads + 2 * kv_heads),
        queries, k, v, records, pages, layer.page_of, signs(dim, k.device), layer.centre, slots,
        len(records) * BLOCK_SIZE, positions, table, q_norm, k_norm, 0 if table is None else table.stride(0), most, eps,
        queries.stride(0), queries.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *records.stride()[:2], *((0, 0, 0) if pages is None else pages.stride()[:3]),
        **_constants(layout).options(dim), STEPS=dim.bit_length() - 1, BLOCK_SIZE=BLOCK_SIZE,
        HEADS=heads, KV_HEADS=kv_heads, HAS_PAGES=pages is not None, CENTRED=layer.centre is not None,
        ROPE=table is not None, HALF=half, Q_NORM=q_norm is not None, K_NORM=k_norm is not None, V_NORM=v_norm,
        num_warps=1,
    )  # fmt: skip


def tq_write(layer: CodedLayer, k: Tensor, v: Tensor, slots: Tensor, q: Tensor | None = None) -> None:
    _write(layer, k, v, slots, q)


def tq_rope_write(layer: CodedLayer, qkv: Tensor, args: RopeArgs, slots: Tensor) -> None:
    positions, table, num_heads, num_kv_heads, q_norm, k_norm, eps, values = args
    assert qkv.stride(1) == 1 and table.stride(1) == 1, (qkv.stride(), table.stride())
    heads = qkv.view(qkv.shape[0], args.projected_heads, -1)
    q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    v = k if values == "keys" else heads[:, num_heads + num_kv_heads :]
    _write(layer, k, v, slots, q, positions, table, q_norm, k_norm, eps, values != "given")


@dataclass(frozen=True, slots=True)
class Launch:
    warps: int
    tiles: int  # programs along the rows
    per_sequence: int  # tiles of each sequence, or 0: a tile looks for its own
    splits: int  # programs that share the keys; 1: it writes its result itself


def _at_once(warps: int, layout: RecordLayout, gpu: Gpu) -> int:
    """Programs that an SM runs at once by registers and shared memory: two tiles of codes, and with four warps the
    query, and levels of keys and values, which take turns where they are long."""
    shared = 2 * BLOCK_N * sum(layout.planes)
    if warps == 4:
        shared += (3 if layout.dim < 256 else 2) * BLOCK_N * layout.dim * 2
    room = (228 if gpu.roomy else 100) << 10
    return max(min((64 << 10) // (32 * warps * MOST_REGISTERS[warps][layout.dim]), room // (shared + 1024)), 1)


@lru_cache(maxsize=4096)
def _launch(
    rows: int, seqs: int, heads: int, kv_heads: int, layout: RecordLayout,
    max_query: int, same_bits_up_to: int, keys: int, gpu: Gpu,
) -> Launch:  # fmt: skip
    """How to cut the work, from host integers alone: into as many programs as run at once. All with max_query <=
    same_bits_up_to get the same splits."""
    group, alike = heads // kv_heads, max_query <= same_bits_up_to
    widest = same_bits_up_to if alike else max_query
    warps, like_warps = (1 if rows * group <= FEW_LANES else 4 for rows in (max_query, widest))
    per_sequence = triton.cdiv(max_query * group, LANES[warps]) if max_query <= 16 else 0
    tiles = seqs * per_sequence if per_sequence else rows * group // LANES[warps] + seqs
    programs = kv_heads * (seqs * triton.cdiv(widest * group, LANES[like_warps]) if alike else tiles)
    slots = gpu.sms * _at_once(like_warps, layout, gpu)
    most = SCRATCH_BYTES // ((widest * seqs if alike else rows) * heads * layout.dim * 4)
    if not alike and (programs >= slots or most < 2):
        return Launch(warps, tiles, per_sequence, 1)
    most = min(triton.cdiv(keys, BLOCK_N), MOST_SPLITS, most)
    return Launch(warps, tiles, per_sequence, _choose_splits(programs, slots, most, near=0.96))


def tq_attention(
    layer: CodedLayer, q: Tensor, view: AttentionView, params: AttentionParams, same_bits_up_to: int = 0
) -> Tensor:
    _check(layer)
    assert params.causal, "only drafters look ahead, and they keep an exact cache"
    assert params.sinks is None or layer.centre is None, "a centre shifts all scores, and would have to shift sinks"
    assert q.stride(2) == 1, q.stride()
    rows, heads, dim = q.shape
    layout, records, pages, device = layer.layout, layer.records, layer.pages, q.device
    seqs, kv_heads, steps = view.context_len.shape[0], records.shape[1], dim.bit_length() - 1
    out = torch.empty((rows, heads * dim), dtype=q.dtype, device=device)
    if rows == 0 or seqs == 0:
        return out
    window = params.window
    keys = min(view.max_context, window + max(view.max_query, same_bits_up_to)) if window else view.max_context
    gpu = gpu_of(device)
    launch = _launch(rows, seqs, heads, kv_heads, layout, view.max_query, same_bits_up_to, keys, gpu)
    half = q.dtype == torch.bfloat16  # rotated, float16 lies in its place
    mixed = lse = out.view(torch.float16) if half else out
    shares, split = launch.splits, launch.splits > 1
    if split:
        mixed = torch.empty((rows, heads, shares, dim), dtype=torch.float32, device=device)
        lse = torch.empty((rows, heads, shares), dtype=torch.float32, device=device)
    constants = _constants(layout)
    run(
        attend, (launch.tiles, kv_heads, shares),
        q.view(torch.float16) if half else q, records, pages, layer.page_of, params.sinks, mixed, lse,
        view.query_start, view.context_len, view.block_tables, seqs, params.scale * math.log2(math.e),
        q.stride(0), q.stride(1), *records.stride()[:2], *((0, 0, 0) if pages is None else pages.stride()[:3]),
        view.block_tables.stride(0),
        **constants.options(dim),
        KEY_PTX=as_they_lie(constants.key_levels),
        VALUE_PTX=(in_pairs if launch.warps == 1 else as_they_lie)(constants.value_levels),
        FIRST=layer.first, RECENT=layer.recent, WINDOW=window, GROUP=heads // kv_heads,
        W=launch.warps, TILES=launch.per_sequence, SPLIT=split, HOPPER=launch.warps == 4 and gpu.wgmma,
        SINKS=params.sinks is not None,
        num_warps=launch.warps, enable_fp_fusion=False,
        maxnreg=MOST_REGISTERS[launch.warps][dim],
    )  # fmt: skip
    if split:
        padded = triton.next_power_of_2(shares)
        lines = max(JOIN_ELEMENTS // (padded * dim), 1)
        run(
            join, (triton.cdiv(rows * heads, lines),),
            mixed, lse, signs(dim, device), params.sinks, out, view.query_start, seqs, shares,
            HEADS=heads, DIM=dim, STEPS=steps, SHARES=padded, LINES=lines, SINKS=params.sinks is not None, num_warps=4,
        )  # fmt: skip
    else:
        lines = JOIN_ELEMENTS // dim
        run(
            turn_back, (triton.cdiv(rows * heads, lines),), mixed, out, signs(dim, device), view.query_start, seqs,
            HEADS=heads, DIM=dim, STEPS=steps, LINES=lines, num_warps=4,
        )  # fmt: skip
    return out
