"""Attention of ragged query rows over the paged cache: prompt chunks, decode tokens and drafted blocks.

A program takes a tile of (query rows x grouped heads) of one sequence and one K/V head, so that all rows of a tile
share each read of K and V. Where tiles are too few to fill the GPU, keys are split over further programs. Their parts
are joined by log-sum-exp: by the last of a tile's programs to end (ending.py) where a tile has few rows, else by a
second kernel.

    rows of the batch      | seq 0: n0 rows | seq 1: n1 rows | ... | padding |
    a tile (group of 4)    | q0h0 q0h1 q0h2 q0h3 q1h0 ... |   rows of one sequence x its grouped heads
    keys of that tile      [low ........ full tiles ........ | masked by the diagonal ) high
    split over S programs  | unit 0 | unit 1 | ... | unit S | ...   unit u to program u % S; without keys, lse = -inf

A row's bits depend on its own q and keys, BLOCK_N, the unit and S, never on the rows in its tile or the tile's height.
Units are counted from a sequence's first key, and keys that a row does not see add exact zeros. Sums are made by `dot`,
in the order of the keys: on Hopper mma.sync and wgmma round alike, as the project MMA-Sim has measured. Parts are added
one after the other (`_mix`). With `same_bits_up_to`, BLOCK_N, unit and S are those of a larger block, so a drafted
block and a single row agree to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.cuda.runtime.ending import MOST_GROUPS, counters, is_last
from sparkdraft.kernels.cuda.runtime.gpu import Gpu, gpu_of
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.kernels.ops import AttentionParams, AttentionView

MOST_SPLITS = 128
LONG_SPLIT, MOST_LONG_SPLITS = 4096, 4  # keys and cuts where the batch alone fills the GPU
SCRATCH_BYTES = 64 << 20  # most that the parts of a split launch may take
LEAST_UNIT = 128  # keys of a split: one to four tiles. Fewer would be a shorter chain of them, and more parts to join
JOIN_INSIDE = 1 << 16  # numbers of all parts of a tile up to which its last program joins them; 0: never
JOIN_NUMBERS = 1024  # of parts that a warp has on their way at once
WIDE = 512  # columns from which a program of the second kernel has more warps
LOG2E = tl.constexpr(math.log2(math.e))
SUM_LANES = tl.constexpr(8)  # columns of a dot that adds up weights: the fewest that tensor cores take


@triton.jit
def _find_sequence(query_start, tile, seqs, QUERIES: tl.constexpr):
    """The last sequence whose first tile is not after 'tile', where seq s begins at start // QUERIES + s.

    So every sequence has at least ceil(n / QUERIES) tiles, and rows // QUERIES + seqs are enough for the grid; surplus
    tiles find no rows and exit.
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

    All but 'high' are multiples of BLOCK_N, so a row meets the same key tiles whatever rows share its tile.
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
def _first_key(n, split, splits, BLOCK_N: tl.constexpr, RUN: tl.constexpr, SPLIT: tl.constexpr):
    """Where the n-th tile of a program begins: its units, of RUN tiles each, lie 'splits' units apart."""
    if SPLIT:
        return ((n // RUN * splits + split) * RUN + n % RUN) * BLOCK_N
    else:
        return n * BLOCK_N


@triton.jit
def _count_tiles(tiles, split, splits, RUN: tl.constexpr, SPLIT: tl.constexpr):
    """Return how many of a sequence's first tiles are this program's."""
    if SPLIT:
        units = tiles // RUN
        whole = tl.cdiv(tl.maximum(units - split, 0), splits) * RUN
        return whole + tl.where(units % splits == split, tiles % RUN, 0)
    else:
        return tiles


@triton.jit
def _load(pointer, mask, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def _scan(
    acc, peak, total, q, position, begin, end, stop, split, splits,
    k_cache, v_cache, table, stride_block, stride_position, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    RUN: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over this program's tiles begin .. end, of keys below 'stop'. Unmasked, all rows see all keys."""
    dim = tl.arange(0, DIM)[None, :]
    WHOLE: tl.constexpr = (not MASKED) and (DIM == HEAD_DIM)
    ones = tl.full([BLOCK_N, SUM_LANES], 1.0, q.dtype)
    # Block numbers are fetched one tile ahead: loads that wait on loads would keep K and V from being in flight.
    key = _first_key(begin, split, splits, BLOCK_N, RUN, SPLIT) + tl.arange(0, BLOCK_N)
    block = tl.load(table + key // BLOCK_SIZE, mask=key < stop, other=0)
    for n in tl.range(begin, end):
        key = _first_key(n, split, splits, BLOCK_N, RUN, SPLIT) + tl.arange(0, BLOCK_N)
        inside = key < stop
        line = block.to(tl.int64) * stride_block + (key % BLOCK_SIZE) * stride_position  # may pass 2**31
        offset = line[:, None] + dim
        after = _first_key(n + 1, split, splits, BLOCK_N, RUN, SPLIT) + tl.arange(0, BLOCK_N)
        block = tl.load(table + after // BLOCK_SIZE, mask=after < stop, other=0)
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
        weights = tl.exp2(scores * scale - base[:, None]).to(q.dtype)
        decay = tl.exp2(peak - base)[:, None]
        # Summed as they are multiplied, rounded and by the tensor cores: the order of a `sum` depends on the layout.
        total = tl.dot(weights, ones, total * decay, input_precision=PRECISION)
        v = _load(v_cache + offset, mask, WHOLE).to(q.dtype)  # [BLOCK_N, DIM]
        acc = tl.dot(weights, v, acc * decay, input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _scan_all(
    acc, peak, total, q_tile, position, begin, end, full_low, full_high, high, split, splits,
    k_cache, v_cache, table, stride_block, stride_position, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, RUN: tl.constexpr, SEARCH: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`_scan` over a split's tiles, with masks where they are needed."""
    if SEARCH:  # long scans: only the edges of the range pay for masks
        mid_low = _count_tiles(full_low // BLOCK_N, split, splits, RUN, SPLIT)
        mid_low = tl.minimum(tl.maximum(mid_low, begin), end)
        mid_high = _count_tiles(full_high // BLOCK_N, split, splits, RUN, SPLIT)
        mid_high = tl.minimum(tl.maximum(mid_high, mid_low), end)
        if WINDOW > 0:
            acc, peak, total = _scan(
                acc, peak, total, q_tile, position, begin, mid_low, high, split, splits,
                k_cache, v_cache, table, stride_block, stride_position, scale,
                True, CAUSAL, WINDOW, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, RUN, SPLIT, PRECISION,
            )  # fmt: skip
        acc, peak, total = _scan(
            acc, peak, total, q_tile, position, mid_low, mid_high, high, split, splits,
            k_cache, v_cache, table, stride_block, stride_position, scale,
            False, CAUSAL, WINDOW, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, RUN, SPLIT, PRECISION,
        )  # fmt: skip
    else:  # few rows are bound by bytes: one loop keeps the loads in flight to the end
        mid_high = begin
    acc, peak, total = _scan(
        acc, peak, total, q_tile, position, mid_high, end, high, split, splits,
        k_cache, v_cache, table, stride_block, stride_position, scale,
        True, CAUSAL, WINDOW, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, RUN, SPLIT, PRECISION,
    )  # fmt: skip
    return acc, peak, total


@triton.jit
def _find_tile(query_start, seqs, QUERIES: tl.constexpr, SEARCH: tl.constexpr):
    """A program's sequence, the sequence's first row, and which of its rows is the tile's first."""
    if SEARCH:
        number = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles see most keys: start them first
        seq = _find_sequence(query_start, number, seqs, QUERIES)
        row_start = tl.load(query_start + seq)
        query_first = (number - row_start // QUERIES - seq) * QUERIES
    else:
        seq = tl.program_id(0)
        row_start = tl.load(query_start + seq)
        query_first = 0
    return seq, row_start, query_first


@triton.jit
def _load_power(lse, place, number, real, end, first, used, splits, WRITTEN: tl.constexpr):
    """The log-sum-exp of parts 'number' of some lines, -inf where there is none, and whether there can be one."""
    exists = real & (number < end)
    if WRITTEN:
        exists = exists & ((number + splits - first) % splits < used)
    power = tl.load(lse + place + number, mask=exists, other=float("-inf"), cache_modifier=".cg")
    return power, exists if WRITTEN else power > float("-inf")


@triton.jit
def _load_part(parts, place, number, exists, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    dim = tl.arange(0, DIM)[None, :]
    source = parts + (place + number)[:, None] * HEAD_DIM + dim
    return tl.load(source, mask=exists[:, None] & (dim < HEAD_DIM), other=0.0, cache_modifier=".cg")


@triton.jit
def _mix(
    parts, lse, sink, place, real, end, first, used, splits,
    SINKS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, LINES: tl.constexpr, STEP: tl.constexpr,
    MORE: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    """[LINES, DIM]: the means of lines' parts weighted by 2 ** lse, added up one after the other.

    place: a line's first part. end: past the last part that exists. WRITTEN: only those of the 'used' splits from
    'first' on, in a ring, were written; else all lse were, and where it is -inf, the part was not. A head's sink is one
    more part, of zeros. STEP parts are on their way at once, MORE: there may be more. Parts are read past the L1,
    because other programs have written them. Loop variables are as wide as a part: a change of layout would wait for
    all warps.
    """
    powers, held = (), ()  # tuples grow by sums: the compiler takes nothing else for it
    for number in tl.static_range(STEP):
        power, exists = _load_power(lse, place, number, real, end, first, used, splits, WRITTEN)
        part = _load_part(parts, place, number, exists, HEAD_DIM, DIM)
        powers, held = powers + (power,), held + (part,)  # type: ignore[assignment]  # noqa: RUF005
    peaks = tl.full([LINES, DIM], float("-inf"), tl.float32)
    for number in tl.static_range(STEP):
        peaks = tl.maximum(peaks, powers[number][:, None])
    if MORE:
        for start in range(STEP, end, STEP):
            for offset in tl.static_range(STEP):
                power, _ = _load_power(lse, place, start + offset, real, end, first, used, splits, WRITTEN)
                peaks = tl.maximum(peaks, power[:, None])
    peak = tl.max(peaks, 1)
    if SINKS:
        peak = tl.maximum(peak, sink * LOG2E)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros([LINES, DIM], tl.float32)
    acc = tl.zeros([LINES, DIM], tl.float32)
    for number in tl.static_range(STEP):
        weight = tl.broadcast_to(tl.exp2(powers[number] - base)[:, None], [LINES, DIM])
        total += weight
        acc = tl.fma(held[number], weight, acc)
    if MORE:
        for start in range(STEP, end, STEP):
            for offset in tl.static_range(STEP):
                later = start + offset
                power, exists = _load_power(lse, place, later, real, end, first, used, splits, WRITTEN)
                part = _load_part(parts, place, later, exists, HEAD_DIM, DIM)
                weight = tl.broadcast_to(tl.exp2(power - base)[:, None], [LINES, DIM])
                total += weight
                acc = tl.fma(part, weight, acc)
    if SINKS:
        total += tl.exp2(tl.fma(sink, LOG2E, -base))[:, None]  # written out: the compiler would fuse it, or not
    return acc / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _join_tile(
    parts, lse, sinks, out, lanes, row_start, query_first, first, units,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, LINES: tl.constexpr, STEP: tl.constexpr,
    MORE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """`_join` for the lanes of this program's tile. Units of keys first .. first + units have been seen."""
    splits, heads = tl.num_programs(2), tl.num_programs(1) * GROUP
    end, used = tl.minimum(first + units, splits), tl.minimum(units, splits)
    dim = tl.arange(0, DIM)[None, :]
    for begin in range(0, lanes, LINES):
        lane = begin + tl.arange(0, LINES)
        head = tl.program_id(1) * GROUP + lane % GROUP
        line = (row_start + query_first + lane // GROUP).to(tl.int64) * heads + head
        sink = None
        if SINKS:
            sink = tl.load(sinks + head, mask=lane < lanes, other=0.0)
        mixed = _mix(
            parts, lse, sink, line * splits, lane < lanes, end, first % splits, used, splits,
            SINKS, HEAD_DIM, DIM, LINES, STEP, MORE, True,
        )  # fmt: skip
        mask = (lane < lanes)[:, None] & (dim < HEAD_DIM)
        tl.store(out + line[:, None] * HEAD_DIM + dim, mixed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["sinks", "query_start", "context_len", "block_tables", "stride_table", "seqs"])
def _attend(
    q, k_cache, v_cache, sinks, out, lse, joined, counters, query_start, context_len, block_tables, seqs, scale,
    stride_row, stride_q_head, stride_block, stride_head, stride_position, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RUN: tl.constexpr, SEARCH: tl.constexpr, SPLIT: tl.constexpr,
    LINES: tl.constexpr, STEP: tl.constexpr, MORE: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out: where the parts go if SPLIT, else the result. joined: where the result then goes; None: `_join` makes it."""
    enter(PDL)
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    seq, row_start, query_first = _find_tile(query_start, seqs, QUERIES, SEARCH)
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
    split, splits = tl.program_id(2), tl.num_programs(2)
    begin = _count_tiles(low // BLOCK_N, split, splits, RUN, SPLIT)
    end = _count_tiles(tl.cdiv(tl.maximum(high, 0), BLOCK_N), split, splits, RUN, SPLIT)
    first_unit = low // BLOCK_N // RUN
    units = tl.maximum(tl.cdiv(high, BLOCK_N * RUN) - first_unit, 1)  # no keys: the first program still writes zeros
    if SPLIT:
        line = (row * (tl.num_programs(1) * GROUP) + head) * splits + split
        if joined is not None:
            if (split + splits - first_unit % splits) % splits >= units:
                return
        elif begin >= end:
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
    total = tl.zeros([BLOCK_M, SUM_LANES], tl.float32)  # the same in all its columns

    acc, peak, total = _scan_all(
        acc, peak, total, q_tile, position, begin, end, full_low, full_high, high, split, splits,
        k_cache, v_cache, table, stride_block, stride_position, scale,
        CAUSAL, WINDOW, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, RUN, SEARCH, SPLIT, PRECISION,
    )  # fmt: skip

    sums = tl.max(total, 1)
    if SINKS and not SPLIT:  # of a split row they join at the end, once
        sink = tl.load(sinks + head, mask=valid, other=0.0) * LOG2E
        highest = tl.maximum(peak, sink)
        decay = tl.exp2(peak - highest)
        acc = acc * decay[:, None]
        sums = sums * decay + tl.exp2(sink - highest)
    result = acc / tl.where(sums == 0.0, 1.0, sums)[:, None]  # a row without keys (padding) gives zeros
    tl.store(out + line[:, None] * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=mask)
    if SPLIT:
        tl.store(lse + line, peak + tl.log2(sums), mask=valid)
        if joined is not None:
            counter = counters + tl.program_id(0) * tl.num_programs(1) + kv_head
            if is_last(counter, tl.minimum(units, splits)):
                lanes = tl.minimum(num_query - query_first, QUERIES) * GROUP
                _join_tile(
                    out, lse, sinks, joined, lanes, row_start, query_first, first_unit, units,
                    GROUP, HEAD_DIM, DIM, LINES, STEP, MORE, SINKS,
                )  # fmt: skip


@triton.jit(do_not_specialize=["sinks", "query_start", "seqs", "splits"])
def _join(
    parts, lse, sinks, out, query_start, seqs, splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    LINES: tl.constexpr, STEP: tl.constexpr, MORE: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some lines (row, head) of all."""
    enter(PDL)
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    real = line < tl.load(query_start + seqs).to(tl.int64) * HEADS
    sink = None
    if SINKS:
        sink = tl.load(sinks + line % HEADS)
    mixed = _mix(
        parts, lse, sink, line * splits, real, splits, 0, splits, splits,
        SINKS, HEAD_DIM, DIM, LINES, STEP, MORE, False,
    )  # fmt: skip
    dim = tl.arange(0, DIM)[None, :]
    mask = real[:, None] & (dim < HEAD_DIM)
    tl.store(out + line[:, None] * HEAD_DIM + dim, mixed.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Tile:
    block_m: int  # lanes: query rows x grouped heads
    block_n: int  # keys a step of the scan
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Launch:
    tile: Tile
    tiles: int
    splits: int
    unit: int  # keys that a split takes at a time, whole tiles
    search: bool  # a sequence may have several tiles, which must be found


def _padded(head_dim: int) -> int:
    """Columns of a tile; the tables begin at 64, and smaller heads are masked within it."""
    return max(triton.next_power_of_2(head_dim), 64)


def _choose_tile(lanes: int, dim: int, itemsize: int, gpu: Gpu) -> tuple[Tile, bool]:
    """The smallest decode tile that holds all lanes of a sequence, or else the chunk tile and True."""
    decode, chunk = (tuned.find(gpu, key) for key in tile_keys(dim, itemsize))
    assert chunk, f"no tile for head_dim {dim} of {itemsize} bytes"
    few = next((Tile(*tile) for tile in decode or () if tile[0] >= lanes), None)
    return (few, False) if few else (Tile(*chunk), True)


def tile_keys(head_dim: int, itemsize: int) -> list[tuned.Key]:
    """All that launches look up: for few rows, and for chunks."""
    form, shape = f"{8 * itemsize}bit", (_padded(head_dim),)
    return [tuned.Key(kernel, form, shape) for kernel in ("attention_decode", "attention_chunk")]


def _choose_splits(programs: int, slots: int, most: int, near: float = 0.9) -> int:
    """The fewest splits that keep the GPU nearly as busy as the best number does (as FlashAttention does)."""
    busy = [programs * s / (triton.cdiv(programs * s, slots) * slots) for s in range(1, max(most, 1) + 1)]
    return next(s for s, share in enumerate(busy, 1) if share >= near * max(busy))


@lru_cache(maxsize=4096)
def _launch(
    rows: int, seqs: int, heads: int, kv_heads: int, head_dim: int, itemsize: int,
    max_query: int, same_bits_up_to: int, keys: int, gpu: Gpu,
) -> Launch:  # fmt: skip
    """How to cut the work, from host integers alone.

    Launches with max_query <= same_bits_up_to get the same block_n, unit and splits, whatever their rows; those of
    another number of sequences may get others.
    """
    group, dim, alike = heads // kv_heads, _padded(head_dim), max_query <= same_bits_up_to
    tile, search = _choose_tile(max_query * group, dim, itemsize, gpu)
    assert group <= tile.block_m, f"{group} query heads a K/V head: a tile has {tile.block_m} lanes"
    widest, cut_rows = (same_bits_up_to, same_bits_up_to * seqs) if alike else (max_query, rows)
    like, like_search = _choose_tile(widest * group, dim, itemsize, gpu)
    tiles = rows // (tile.block_m // group) + seqs if search else seqs
    like_tiles = cut_rows // (like.block_m // group) + seqs if like_search else seqs
    unit, splits = _choose_cuts(like, like_tiles * kv_heads, cut_rows * heads * head_dim, keys, like_search, alike, gpu)
    tile = replace(tile, block_n=like.block_n, stages=max(tile.stages, like.stages))
    return Launch(tile, tiles, splits, unit, search)


def _choose_cuts(
    tile: Tile, programs: int, elements: int, keys: int, search: bool, alike: bool, gpu: Gpu
) -> tuple[int, int]:
    """Unit and splits of a launch of so many programs, whose result has so many elements."""
    slots = gpu.sms if tile.warps == 8 else 2 * gpu.sms  # programs that run at once
    most = SCRATCH_BYTES // (elements * 4)
    if programs >= 0.8 * slots:  # full: only a context far longer than the others is still worth a cut
        return LONG_SPLIT, 1 if search else max(min(triton.cdiv(keys, LONG_SPLIT), MOST_LONG_SPLITS, most), 1)
    # Smaller, the parts, written and read, cost more than the cut saves; alike, it must suit single rows too.
    unit = max(LEAST_UNIT, tile.block_n, (2 if alike else 4) * tile.block_m)
    return unit, _choose_splits(programs, slots, min(triton.cdiv(keys, unit), MOST_SPLITS, most))


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, view: AttentionView, params: AttentionParams, same_bits_up_to: int = 0
) -> Tensor:
    assert q.stride(2) == k_cache.stride(3) == 1, (q.stride(), k_cache.stride())
    assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    rows, heads, head_dim = q.shape
    kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    seqs, dim, device = view.context_len.shape[0], _padded(head_dim), q.device
    out = torch.empty((rows, heads * head_dim), dtype=q.dtype, device=device)
    if rows == 0 or seqs == 0:
        return out
    window = params.window
    keys = min(view.max_context, window + max(view.max_query, same_bits_up_to)) if window else view.max_context
    shape = (rows, seqs, heads, kv_heads, head_dim, q.element_size(), view.max_query, same_bits_up_to, keys)
    launch = _launch(*shape, gpu_of(device))
    tile, split = launch.tile, launch.splits > 1
    parts, lse, joined, counts = out, out, None, None  # one split writes its result directly, and nothing else
    sizes, inside = {"LINES": 1, "STEP": 1, "MORE": False}, False
    if split:
        parts = torch.empty((rows, heads, launch.splits, head_dim), dtype=torch.float32, device=device)
        lse = torch.empty((rows, heads, launch.splits), dtype=torch.float32, device=device)
        lanes = min(view.max_query * heads // kv_heads, tile.block_m)
        inside = lanes * launch.splits * dim <= JOIN_INSIDE and launch.tiles * kv_heads <= MOST_GROUPS
    if inside:
        joined, counts, sizes = out, counters(device), _join_sizes(lanes, launch.splits, dim, tile.warps)
    run(
        _attend, (launch.tiles, kv_heads, launch.splits),
        q, k_cache, v_cache, params.sinks, parts, lse, joined, counts, view.query_start, view.context_len,
        view.block_tables, seqs, params.scale * math.log2(math.e),
        q.stride(0), q.stride(1), *k_cache.stride()[:3], view.block_tables.stride(0),
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, DIM=dim, BLOCK_SIZE=block_size,
        CAUSAL=params.causal, WINDOW=window, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, RUN=launch.unit // tile.block_n if split else 1,
        SEARCH=launch.search, SPLIT=split, **sizes, SINKS=params.sinks is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if split and not inside:
        warps = 4 if dim < WIDE else 8
        sizes = _join_sizes(warps * JOIN_NUMBERS // (launch.splits * dim), launch.splits, dim, warps)
        run(
            _join, (triton.cdiv(rows * heads, sizes["LINES"]),),
            parts, lse, params.sinks, out, view.query_start, seqs, launch.splits,
            HEADS=heads, HEAD_DIM=head_dim, DIM=dim, **sizes, SINKS=params.sinks is not None,
            num_warps=warps,
        )  # fmt: skip
    return out


def _join_sizes(lanes: int, splits: int, dim: int, warps: int) -> dict[str, int]:
    """Constants of `_mix` for up to so many lines at a time: 4 parts of each at least are on their way."""
    numbers, most = warps * JOIN_NUMBERS, triton.next_power_of_2(splits)
    lines = min(triton.next_power_of_2(max(lanes, 1)), max(numbers // 4 // dim, 1))
    step = min(most, numbers // (lines * dim))
    return {"LINES": lines, "STEP": step, "MORE": step < most}
