"""Attention of ragged query rows over the paged cache: prompt chunks, decode rows and drafted blocks.

A program takes a tile of (query rows x grouped heads) of one sequence and one K/V head, so that all rows of a
tile share each read of K and V; where tiles are too few to fill the GPU the keys are split over further
programs, and a second small kernel joins the parts by their log-sum-exp. Choosing dtypes, blocks and lengths
is left to the caller: lengths are only read on the device, and the host integers of the view shape the
launch.

    rows of the batch      | seq 0: n0 rows | seq 1: n1 rows | ... | padding |
    a tile (group of 4)    | q0h0 q0h1 q0h2 q0h3 q1h0 ... |   rows of one sequence x its grouped heads
    keys of that tile      [low ........ full tiles ........ | masked by the diagonal ) high
    split over programs    [ share 0 | share 1 | ... | share i ), and empty ones that leave lse = -inf
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.view import AttentionView

MOST_SPLITS = 128
LONG_SPLIT, MOST_LONG_SPLITS = 4096, 4  # keys and cuts where the batch alone fills the GPU
SCRATCH_BYTES = 64 << 20  # most that the parts of a split launch may take


@triton.jit
def _find_sequence(query_start, tile, seqs, QUERIES: tl.constexpr):
    """The last sequence whose first tile is not after 'tile', where seq s begins at start // QUERIES + s.

    That numbering leaves every sequence at least ceil(n / QUERIES) tiles, whatever the lengths, so the host
    can size the grid by rows // QUERIES + seqs without knowing them; surplus tiles find no rows and exit.
    """
    left = 0
    right = seqs
    while left < right:
        middle = (left + right) // 2
        if tl.load(query_start + middle) // QUERIES + middle <= tile:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def _key_range(context, top, bottom, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys that any row of top .. bottom sees, [low, high), and those all see, [full_low, full_high).

    All but 'high' lie on the grid of BLOCK_N, so a row meets the same key tiles whatever rows share its tile.
    """
    low, full_low = 0, 0
    high = context
    full_high = context // BLOCK_N * BLOCK_N
    if CAUSAL:
        high = bottom + 1
        full_high = tl.maximum(top + 1, 0) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        low = tl.maximum(top - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        full_low = tl.cdiv(tl.maximum(bottom - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
        if not CAUSAL:
            high = tl.minimum(context, bottom + WINDOW)
            full_high = tl.maximum(tl.minimum(context, top + WINDOW), 0) // BLOCK_N * BLOCK_N
    return low, full_low, full_high, high


@triton.jit
def _load(pointer, mask, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def _scan(
    acc, peak, total, q, position, start, stop, k_cache, v_cache, table, stride_block, stride_position, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [start, stop). Unmasked, all rows must see all of them, in whole tiles."""
    dim = tl.arange(0, DIM)[None, :]
    WHOLE: tl.constexpr = (not MASKED) and (DIM == HEAD_DIM)
    # Block numbers are fetched one tile ahead by hand: loads that wait on loads would keep the compiler from
    # having more than one tile of K and V in flight.
    key = start + tl.arange(0, BLOCK_N)
    block = tl.load(table + key // BLOCK_SIZE, mask=key < stop, other=0)
    for first in tl.range(start, stop, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        inside = key < stop
        line = block.to(tl.int64) * stride_block + (key % BLOCK_SIZE) * stride_position  # may pass 2**31
        offset = line[:, None] + dim
        block = tl.load(table + (key + BLOCK_N) // BLOCK_SIZE, mask=key + BLOCK_N < stop, other=0)
        # V must read as zero where no row looks: 0 * NaN of a stale block would poison the sum.
        mask = dim < HEAD_DIM
        if MASKED:
            mask = mask & inside[:, None]
        k = _load(k_cache + offset, mask, WHOLE).to(q.dtype)  # [BLOCK_N, DIM]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
                if not CAUSAL:
                    seen = seen & (key[None, :] < position[:, None] + WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        base = new_peak
        if MASKED:
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen no key yet
        weights = tl.exp2(scores * scale - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        v = _load(v_cache + offset, mask, WHOLE).to(q.dtype)  # [BLOCK_N, DIM]
        acc = tl.dot(weights.to(q.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit(do_not_specialize=["query_start", "context_len", "block_tables", "stride_table", "seqs", "shortest"])
def _attend(
    q, k_cache, v_cache, out, lse, query_start, context_len, block_tables,
    seqs, shortest, scale,
    stride_row, stride_q_head, stride_block, stride_head, stride_position, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEARCH: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    if SEARCH:
        number = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles see most keys: start them first
        seq = _find_sequence(query_start, number, seqs, QUERIES)
        row_start = tl.load(query_start + seq)
        query_first = (number - row_start // QUERIES - seq) * QUERIES
    else:
        seq = tl.program_id(0)
        row_start = tl.load(query_start + seq)
        query_first = 0
    num_query = tl.load(query_start + seq + 1) - row_start
    if query_first >= num_query:
        return
    context = tl.load(context_len + seq)

    lane = tl.arange(0, BLOCK_M)
    query = query_first + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    valid = (lane < QUERIES * GROUP) & (query < num_query)
    row = (row_start + query).to(tl.int64)
    position = context - num_query + query
    top = context - num_query + query_first  # position of the tile's first row
    bottom = context - num_query + tl.minimum(query_first + QUERIES, num_query) - 1  # and of its last

    low, full_low, full_high, high = _key_range(context, top, bottom, CAUSAL, WINDOW, BLOCK_N)

    # A share depends on this sequence's keys, on the number of splits and on 'shortest'. The latter two are
    # constants of the launch, taken from the batch bucket: one bucket always cuts a sequence alike, two may
    # cut it differently.
    start, stop = low, high
    if SPLIT:
        share = tl.maximum(tl.cdiv(tl.maximum(high - low, 0), tl.num_programs(2)), shortest)
        share = tl.cdiv(share, BLOCK_N) * BLOCK_N
        start = low + tl.program_id(2) * share
        stop = tl.minimum(start + share, high)
        line = (row * (tl.num_programs(1) * GROUP) + head) * tl.num_programs(2) + tl.program_id(2)
        if start >= high:
            tl.store(lse + line, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=valid)
            return
    else:
        line = row * (tl.num_programs(1) * GROUP) + head

    dim = tl.arange(0, DIM)[None, :]
    mask = valid[:, None] & (dim < HEAD_DIM)
    q_tile = tl.load(q + row[:, None] * stride_row + head[:, None] * stride_q_head + dim, mask=mask, other=0.0)
    table = block_tables + seq.to(tl.int64) * stride_table
    k_cache += kv_head * stride_head
    v_cache += kv_head * stride_head
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    if SEARCH:  # long scans: only the edges of the range pay for masks
        mid_low = tl.minimum(tl.maximum(full_low, start), stop)
        mid_high = tl.minimum(tl.maximum(full_high, mid_low), stop)
        if WINDOW > 0:
            acc, peak, total = _scan(
                acc, peak, total, q_tile, position, start, mid_low,
                k_cache, v_cache, table, stride_block, stride_position, scale,
                True, CAUSAL, WINDOW, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, PRECISION,
            )  # fmt: skip
        acc, peak, total = _scan(
            acc, peak, total, q_tile, position, mid_low, mid_high,
            k_cache, v_cache, table, stride_block, stride_position, scale,
            False, CAUSAL, WINDOW, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, PRECISION,
        )  # fmt: skip
    else:  # few rows are bound by bytes: one loop keeps the loads in flight to the end
        mid_high = start
    acc, peak, total = _scan(
        acc, peak, total, q_tile, position, mid_high, stop,
        k_cache, v_cache, table, stride_block, stride_position, scale,
        True, CAUSAL, WINDOW, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, PRECISION,
    )  # fmt: skip

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a row without keys (padding) gives zeros
    tl.store(out + line[:, None] * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=mask)
    if SPLIT:
        tl.store(lse + line, peak + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=["query_start", "seqs", "splits"])
def _join(
    parts, lse, out, query_start, seqs, splits,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One (row, head): the mean of its parts weighted by 2 ** lse. Where lse = -inf none was written."""
    row = tl.program_id(0)
    if row >= tl.load(query_start + seqs):
        return
    line = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    power = tl.load(lse + line * splits + split, mask=split < splits, other=float("-inf"))
    peak = tl.max(power, 0)
    weight = tl.exp2(power - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weight, 0)
    dim = tl.arange(0, DIM)
    mask = (power > float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :]
    part = tl.load(parts + (line * splits + split)[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    mixed = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + line * HEAD_DIM + dim, mixed.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class Tile:
    block_m: int  # lanes: query rows x grouped heads
    block_n: int  # keys a step of the scan
    warps: int
    stages: int


# (bytes an element, padded head_dim) -> tile of a prompt chunk. These stay under the 99 KB of shared memory
# that an sm_121 block may take and spill no registers; tests/kernels/test_cuda.py compiles every entry and
# reads its size.
CHUNK_TILES = {
    (2, 64): Tile(128, 64, 8, 3),
    (2, 128): Tile(128, 32, 8, 3),
    (2, 256): Tile(64, 32, 8, 2),
    (4, 64): Tile(64, 32, 8, 2),
    (4, 128): Tile(64, 32, 8, 2),
    (4, 256): Tile(32, 16, 8, 2),
}
# The same for few rows a sequence, in order of lanes.
DECODE_TILES = {
    (2, 64): (Tile(16, 128, 4, 3), Tile(32, 128, 4, 3), Tile(64, 64, 4, 4), Tile(128, 64, 8, 3)),
    (2, 128): (Tile(16, 64, 4, 3), Tile(32, 64, 4, 3), Tile(64, 32, 4, 4), Tile(128, 32, 8, 3)),
    (2, 256): (Tile(16, 32, 4, 3), Tile(32, 32, 4, 3), Tile(64, 32, 8, 2)),
    (4, 64): (Tile(16, 32, 4, 2), Tile(64, 32, 8, 2)),
    (4, 128): (Tile(16, 32, 4, 2), Tile(64, 32, 8, 2)),
    (4, 256): (Tile(16, 16, 4, 2), Tile(32, 16, 8, 2)),
}
# What GPUs with 227 KB a block run instead: more keys in flight.
ROOMY_MAJORS = (9, 10)  # compute capability
ROOMY_CHUNK_TILES = CHUNK_TILES | {(2, 128): Tile(128, 64, 8, 3), (2, 256): Tile(128, 32, 8, 3)}
ROOMY_DECODE_TILES = DECODE_TILES | {
    (2, 128): (Tile(16, 64, 4, 4), Tile(32, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    (2, 256): (Tile(16, 32, 4, 4), Tile(32, 32, 4, 3), Tile(64, 32, 8, 3)),
}


@dataclass(frozen=True, slots=True)
class Launch:
    tile: Tile
    tiles: int
    splits: int
    shortest: int  # keys that a split takes at least
    search: bool  # a sequence may have several tiles, which must be found


@dataclass(frozen=True, slots=True)
class Gpu:
    sms: int
    roomy: bool


def _padded(head_dim: int) -> int:
    """Columns of a tile; the tables begin at 64, and the smaller heads of toy models are masked within it."""
    return max(triton.next_power_of_2(head_dim), 64)


def _choose_tile(lanes: int, dim: int, itemsize: int, roomy: bool) -> tuple[Tile, bool]:
    """The smallest decode tile that holds all lanes of a sequence, or else the chunk tile and True."""
    decode, chunk = (ROOMY_DECODE_TILES, ROOMY_CHUNK_TILES) if roomy else (DECODE_TILES, CHUNK_TILES)
    assert (itemsize, dim) in chunk, f"no tile for head_dim {dim} of {itemsize} bytes: have {sorted(chunk)}"
    few = next((tile for tile in decode[itemsize, dim] if tile.block_m >= lanes), None)
    return (few, False) if few else (chunk[itemsize, dim], True)


def _choose_splits(programs: int, slots: int, most: int) -> int:
    """The fewest splits that keep the GPU nearly as busy as the best number does (as FlashAttention does)."""
    busy = [programs * s / (triton.cdiv(programs * s, slots) * slots) for s in range(1, max(most, 1) + 1)]
    return next(s for s, share in enumerate(busy, 1) if share >= 0.9 * max(busy))


@lru_cache(maxsize=4096)
def _launch(
    rows: int,
    seqs: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    max_query: int,
    keys: int,
    gpu: Gpu,
) -> Launch:
    """How to cut the work, from host integers alone: tile shape, number of tiles and number of splits."""
    group = heads // kv_heads
    tile, search = _choose_tile(max_query * group, _padded(head_dim), itemsize, gpu.roomy)
    assert group <= tile.block_m, f"{group} query heads a K/V head: a tile has {tile.block_m} lanes"
    tiles = rows // (tile.block_m // group) + seqs if search else seqs
    slots = gpu.sms if tile.warps == 8 else 2 * gpu.sms  # programs that run at once
    most = SCRATCH_BYTES // (rows * heads * head_dim * 4)
    if tiles * kv_heads >= 0.8 * slots:  # full: only a context far longer than the others is still worth a cut
        splits = 1 if search else max(min(triton.cdiv(keys, LONG_SPLIT), MOST_LONG_SPLITS, most), 1)
        return Launch(tile, tiles, splits, LONG_SPLIT, search)
    shortest = max(128, 4 * tile.block_m)  # below this the parts, written and read, cost more than the cut saves
    most = min(triton.cdiv(keys, shortest), MOST_SPLITS, most)
    return Launch(tile, tiles, _choose_splits(tiles * kv_heads, slots, most), shortest, search)


@lru_cache
def _gpu(device: torch.device) -> Gpu:
    """What shapes a launch; under Triton's interpreter (CPU tensors), a small GPU that still makes splits."""
    if device.type != "cuda":
        return Gpu(8, False)
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.multi_processor_count, properties.major in ROOMY_MAJORS)


def paged_attention(
    q: Tensor,  # [rows, heads, head_dim], a strided view of qkv
    k_cache: Tensor,  # [blocks, kv_heads, block_size, head_dim]
    v_cache: Tensor,
    view: AttentionView,
    scale: float,
    causal: bool = True,
    window: int = 0,  # 0: all keys; else a row sees keys nearer than this
) -> Tensor:  # [rows, heads * head_dim]; rows past query_start[-1] are left unwritten
    assert q.stride(2) == k_cache.stride(3) == 1, (q.stride(), k_cache.stride())
    assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    rows, heads, head_dim = q.shape
    kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    seqs, dim, device = view.context_len.shape[0], _padded(head_dim), q.device
    out = torch.empty((rows, heads * head_dim), dtype=q.dtype, device=device)
    if rows == 0 or seqs == 0:
        return out
    keys = min(view.max_context, window + view.max_query) if window else view.max_context
    launch = _launch(rows, seqs, heads, kv_heads, head_dim, q.element_size(), view.max_query, keys, _gpu(device))
    tile, split = launch.tile, launch.splits > 1
    parts, lse = out, out  # one split writes its result directly; lse is then not touched
    if split:
        parts = torch.empty((rows, heads, launch.splits, head_dim), dtype=torch.float32, device=device)
        lse = torch.empty((rows, heads, launch.splits), dtype=torch.float32, device=device)
    _attend[(launch.tiles, kv_heads, launch.splits)](
        q, k_cache, v_cache, parts, lse, view.query_start, view.context_len, view.block_tables,
        seqs, launch.shortest, scale * math.log2(math.e),
        q.stride(0), q.stride(1), *k_cache.stride()[:3], view.block_tables.stride(0),
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, DIM=dim, BLOCK_SIZE=block_size,
        CAUSAL=causal, WINDOW=window, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, SEARCH=launch.search, SPLIT=split,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if split:
        _join[(rows, heads)](
            parts, lse, out, view.query_start, seqs, launch.splits,
            HEAD_DIM=head_dim, DIM=dim, SPLITS=triton.next_power_of_2(launch.splits), num_warps=4,
        )  # fmt: skip
    return out
