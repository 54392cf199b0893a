"""Attention over codes and exact rows: decode rows, drafted blocks and prompt chunks.

Codes come from memory two tiles ahead of their use and become levels in the very registers in which tensor cores want
them: a sum does not mind its order, so columns are taken as the bytes happen to lie, and the query and the result
follow. Programs of one warp have 8 lanes (rows x grouped heads), those of four 64. Written in Gluon, Triton's language
with layouts.

    keys of a row at p     | first |............ coded ............| recent .. p |     its own border, whatever its tile
    shares of its keys     64 coded ones are a tile, and 16 exact ones: of both, tile t goes to share t % S

Queries come rotated, and results leave so (join.py takes them back). A row's bits hang on its own query and keys alone,
as attention.py beside this folder has it: tiles are counted from the first key, keys that a row does not see add exact
zeros, one warp and four do the same in the same order, and launches of up to most_query rows are cut alike. Products
are not fused with sums: a score is rounded alike with and without a mask.
"""

# Tuples grow while a kernel is compiled, by sums, which are all that the compiler takes for it:
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_wait

from sparkdraft.kernels.cuda.turboquant.four_warps import column_of, scan_by_four_warps, share_query
from sparkdraft.kernels.cuda.turboquant.levels import num_stretches
from sparkdraft.kernels.cuda.turboquant.one_warp import load_query, scan_by_one_warp
from sparkdraft.kernels.cuda.turboquant.tiles import (
    as_right,
    in_order,
    key_slice,
    lane_slice,
    left,
    mma,
    raise_peak,
    right,
    times,
)  # fmt: skip


@triton.constexpr_function
def _loaded(width: int, W: int) -> gl.BlockedLayout:
    """[16 keys, width] of float16, read 16 bytes at a time"""
    across = min(width // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [W, 1], [1, 0])


@gluon.jit
def _load_rows(page, held, begin: gl.constexpr, WIDTH: gl.constexpr, DIM: gl.constexpr, W: gl.constexpr):
    """Some columns of 16 exact keys, or values; 0 where they are not to be read."""
    LAYOUT: gl.constexpr = _loaded(WIDTH, W)
    key = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    place = page + key * DIM + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :] + begin
    mask = gl.convert_layout(held, gl.SliceLayout(1, LAYOUT))[:, None]
    return gl.load(place, mask=mask, other=0.0).to(gl.float16)


@gluon.jit
def _exact_scores(q, page, held, COUNT: gl.constexpr, DIM: gl.constexpr, LANES: gl.constexpr, W: gl.constexpr):
    WIDTH: gl.constexpr = DIM // COUNT
    scores = gl.zeros([16, LANES], gl.float32, mma(W))
    for s in gl.static_range(COUNT):
        k = gl.convert_layout(in_order(_load_rows(page, held, s * WIDTH, WIDTH, DIM, W), 16, WIDTH), left(W))
        asked = q[s] if W == 1 else q[s].permute((1, 0)).load(right(W))
        scores = mma_v2(k, asked, scores)
    return scores


@gluon.jit
def _add_exact(acc, given, page, held, COUNT: gl.constexpr, DIM: gl.constexpr, W: gl.constexpr):
    """acc: as one_warp.py and four_warps.py have their results' columns."""
    WIDTH: gl.constexpr = DIM // COUNT
    grown = ()
    if W == 1:
        for s in gl.static_range(COUNT):
            v = gl.reshape(_load_rows(page, held, s * WIDTH, WIDTH, DIM, W), [16, 8, WIDTH // 8])
            v = gl.permute(v, (2, 1, 0)).reshape([WIDTH, 16])
            grown = grown + (mma_v2(gl.convert_layout(v, left(W)), given, acc[s]),)
    else:
        v = gl.reshape(_load_rows(page, held, 0, DIM, DIM, W), [16, COUNT, 8, 4 // COUNT, DIM // 64, 2])
        v = gl.permute(v, (4, 1, 3, 5, 2, 0)).reshape([DIM, 16])
        grown = (mma_v2(gl.convert_layout(v, left(W)), given, acc[0]),)
    return grown


@gluon.jit
def _scan_exact(
    acc, peak, sums, total, q, position, begin, end, step, top, bottom,
    pages, exact_of, table, stride_page, stride_part, scale,
    K: gl.constexpr, V: gl.constexpr, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr,
    DIM: gl.constexpr, LANES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Online softmax over the exact keys of tiles begin, begin + step ..: 16 keys each, in pages that are read."""
    lane_key = gl.arange(0, 16, key_slice(W))
    for tile in range(begin, end, step):
        key = tile * 16 + lane_key
        page = gl.load(exact_of + gl.load(table + tile)).to(gl.int64)
        place = pages + page * stride_page
        # Only those that some row takes exactly are there for sure: 0 * NaN of a stale page would poison a sum.
        held = (page >= 0) & (key <= bottom) & ((key < FIRST) | (key + RECENT > top))
        recent = key[:, None] + RECENT > position[None, :]
        seen = (key[:, None] <= position[None, :]) & (recent | (key < FIRST)[:, None])
        if WINDOW > 0:
            seen = seen & (key[:, None] > position[None, :] - WINDOW)
        scores = gl.where(seen, _exact_scores(q, place, held, K, DIM, LANES, W) * scale, float("-inf"))
        peak, base, decay = raise_peak(peak, scores)
        weights = gl.exp2(scores - base)
        sums, total = sums * decay, total * decay[None, :] + weights
        acc = times(acc, decay, V if W == 1 else 1)
        acc = _add_exact(acc, as_right(weights, LANES, W), place + stride_part, held, V, DIM, W)
    return acc, peak, sums, total


@gluon.jit
def _find_sequence(query_start, tile, seqs, LANES: gl.constexpr, GROUP: gl.constexpr):
    """The last sequence whose first tile is not after 'tile', where seq s begins at its first lane // LANES + s."""
    first = 0
    after = seqs
    while first < after:
        middle = (first + after) // 2
        if gl.load(query_start + middle) * GROUP // LANES + middle <= tile:
            first = middle + 1
        else:
            after = middle
    return first - 1


@gluon.jit
def _find_tile(query_start, seqs, LANES: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr):
    """A program's sequence, and which of its tiles."""
    if TILES > 0:
        return gl.program_id(0) // TILES, gl.program_id(0) % TILES
    else:
        number = gl.num_programs(0) - 1 - gl.program_id(0)  # the last tiles see most keys: start them first
        seq = _find_sequence(query_start, number, seqs, LANES, GROUP)
        return seq, number - gl.load(query_start + seq) * GROUP // LANES - seq


@gluon.jit
def _first_own(begin, share, shares):
    """The first of a share's tiles that is not before 'begin'."""
    return begin + (share + shares - begin % shares) % shares


@gluon.jit(do_not_specialize=["query_start", "context_len", "block_tables", "stride_table", "seqs"])
def attend(
    q, records, pages, exact_of, out, lse, query_start, context_len, block_tables, seqs, scale,
    stride_row, stride_q_head, stride_record, stride_record_head, stride_page, stride_part, stride_page_head,
    stride_table,
    KEY_LEVELS: gl.constexpr, KEY_PTX: gl.constexpr, VALUE_LEVELS: gl.constexpr, VALUE_PTX: gl.constexpr,
    AT: gl.constexpr, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr, GROUP: gl.constexpr,
    DIM: gl.constexpr, W: gl.constexpr, TILES: gl.constexpr, SPLIT: gl.constexpr, HOPPER: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Writes rotated means of the values, and where SPLIT, for each share, the log2 of its weights' sum.

    TILES: tiles of each sequence, or 0 where sequences differ much and a tile looks for its own. W: warps.
    """
    if PDL:
        gdc_wait()
    K: gl.constexpr = num_stretches(KEY_LEVELS)
    V: gl.constexpr = num_stretches(VALUE_LEVELS)
    COUNT: gl.constexpr = V if W == 1 else 1  # tensors of a result
    LANES: gl.constexpr = 8 if W == 1 else 64
    kv_head, share, shares = gl.program_id(1), gl.program_id(2), gl.num_programs(2)
    seq, tile = _find_tile(query_start, seqs, LANES, GROUP, TILES)
    row_start = gl.load(query_start + seq)
    num_query = gl.load(query_start + seq + 1) - row_start
    if tile * LANES >= num_query * GROUP:
        return
    before = gl.load(context_len + seq) - num_query  # the position of the sequence's first row
    lane = tile * LANES + gl.arange(0, LANES, lane_slice(W))
    query = lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    valid = query < num_query
    row = (row_start + query).to(gl.int64)
    position = before + query
    top = before + tile * LANES // GROUP  # position of the tile's first row
    bottom = before + gl.minimum((tile * LANES + LANES - 1) // GROUP, num_query - 1)  # and of its last
    line = row * (gl.num_programs(1) * GROUP) + head
    if SPLIT:
        line = line * shares + share

    low = 0
    if WINDOW > 0:
        low = gl.maximum(top - WINDOW + 1, 0)
    stop = gl.maximum(bottom - RECENT + 1, 0)  # past the last key that any row takes by its code
    begin, end = _first_own(low // 64, share, shares), (stop + 63) // 64
    # Tiles of exact keys: those of the first, and from the first recent one of any row on.
    last = gl.maximum(bottom + 16, 0) // 16 if FIRST + RECENT > 0 else 0
    firsts = gl.minimum((FIRST + 15) // 16, last)
    first = _first_own(low // 16, share, shares)
    recent = _first_own(gl.maximum(gl.maximum(top - RECENT + 1, low) // 16, firsts), share, shares)
    if SPLIT:  # noqa: SIM102 (one is known when it is compiled)
        if (begin >= end) & (first >= firsts) & ((recent >= last) | (RECENT == 0)):
            gl.store(lse + line, gl.full([LANES], float("-inf"), gl.float32, lane_slice(W)), mask=valid)
            return

    if W == 1:
        turned = load_query(q, row, head, valid, stride_row, stride_q_head, DIM // K, DIM)
    else:
        turned = share_query(q, row, head, valid, stride_row, stride_q_head, DIM // K, DIM)
    table = block_tables + seq.to(gl.int64) * stride_table
    acc = ()
    for _ in gl.static_range(COUNT):
        acc = acc + (gl.zeros([DIM // COUNT, LANES], gl.float32, mma(W)),)
    peak = gl.full([LANES], float("-inf"), gl.float32, lane_slice(W))
    sums = gl.zeros([LANES], gl.float32, lane_slice(W))
    if begin < end:
        records += kv_head * stride_record_head
        if W == 1:
            acc, peak, sums = scan_by_one_warp(
                turned, position, begin, end, shares, top, bottom, stop, records, table, stride_record, scale,
                KEY_LEVELS, KEY_PTX, VALUE_LEVELS, VALUE_PTX, AT, FIRST, RECENT, WINDOW, DIM,
            )  # fmt: skip
        else:
            acc, peak, sums = scan_by_four_warps(
                turned, position, begin, end, shares, top, bottom, stop, records, table, stride_record, scale,
                KEY_LEVELS, KEY_PTX, VALUE_LEVELS, VALUE_PTX, AT, FIRST, RECENT, WINDOW, DIM, HOPPER,
            )  # fmt: skip
    if FIRST + RECENT > 0:
        total = gl.zeros([16, LANES], gl.float32, mma(W))  # of a lane's weights, by where in a block their keys lie
        pages += kv_head * stride_page_head
        for part in gl.static_range(2):
            if (FIRST if part == 0 else RECENT) > 0:
                acc, peak, sums, total = _scan_exact(
                    acc, peak, sums, total, turned, position,
                    first if part == 0 else recent, firsts if part == 0 else last, shares, top, bottom,
                    pages, exact_of, table, stride_page, stride_part, scale,
                    K, V, FIRST, RECENT, WINDOW, DIM, LANES, W,
                )  # fmt: skip
        sums += gl.sum(total, 0)
    acc = times(acc, 1.0 / gl.where(sums == 0.0, 1.0, sums), COUNT)  # a row without keys (padding) gives zeros
    n = gl.arange(0, DIM // COUNT, key_slice(W))
    column = column_of(n, V, DIM) if W == 4 else n % 8 * (DIM // V // 8) + n // 8
    place = out + (line * DIM)[None, :] + column[:, None]
    for s in gl.static_range(COUNT):
        mask = valid[None, :] & (n >= 0)[:, None]
        gl.store(place + s * (DIM // COUNT), acc[s].to(out.dtype.element_ty), mask=mask)
    if SPLIT:
        gl.store(lse + line, peak + gl.log2(sums), mask=valid)
