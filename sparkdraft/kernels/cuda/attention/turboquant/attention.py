"""Attention over codes and uncoded tokens. Written in Gluon, Triton's language with layouts.

Codes come from memory a tile or two ahead of their use, and become levels in registers. A sum does not mind its order,
so columns are taken as the bytes lie, and the query follows. Programs of one warp have 8 lanes (rows x grouped heads),
those of four 64.

    keys of a row at p     | first |............ coded ............| recent .. p |     its own border, whatever its tile
    shares of its keys     64 coded ones are a tile, and 16 uncoded ones: of both, tile t goes to share t % S

Queries come rotated, and results leave rotated (`join` takes them back). A row's bits depend on its own query and keys
alone: tiles are counted from the first key, unseen keys add exact zeros, one warp and four do the same in the same
order, and launches of up to same_bits_up_to rows are split alike. Products are not fused with sums, so that a score is
rounded alike with and without a mask.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from sparkdraft.kernels.cuda.attention.paged import LOG2E
from sparkdraft.kernels.cuda.attention.turboquant import four_warps, one_warp
from sparkdraft.kernels.cuda.attention.turboquant.levels import num_stretches


@triton.constexpr_function
def _lanes(W: int, HOPPER: bool) -> gl.SliceLayout:
    return one_warp.LANES.value if W == 1 else gl.SliceLayout(1, four_warps.wide(64, HOPPER))


@gluon.jit
def _add_up(total, W: gl.constexpr):
    """Sums 8 parts of each lane in one order: the last four to the first, the last two, the last."""
    x = gl.reshape(gl.permute(total, (1, 0)) if W == 4 else total, [2, 2, 2, 8 if W == 1 else 64])
    return gl.sum(gl.sum(gl.sum(x, 0), 0), 0)


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


@gluon.jit
def _count(begin, end, step):
    return (gl.maximum(end - begin, 0) + step - 1) // step


@gluon.jit
def _uncoded_tiles(low, top, bottom, share, shares, FIRST: gl.constexpr, RECENT: gl.constexpr):
    """A share's tiles of uncoded keys: the first of those of the first keys and how many, the first of those from the
    first recent key of any row on, and how many of both."""
    last = gl.maximum(bottom + 16, 0) // 16
    firsts = gl.minimum((FIRST + 15) // 16, last)
    first = _first_own(low // 16, share, shares)
    recent = _first_own(gl.maximum(gl.maximum(top - RECENT + 1, low) // 16, firsts), share, shares)
    num_first = _count(first, firsts, shares)
    num_recent = _count(recent, last, shares) if RECENT > 0 else 0
    return first, num_first, recent, num_first + num_recent


@gluon.jit(do_not_specialize=["sinks", "query_start", "context_len", "block_tables", "stride_table", "seqs"])
def attend(
    q, records, pages, page_of, sinks, out, lse, query_start, context_len, block_tables, seqs, scale,
    stride_row, stride_q_head, stride_record, stride_record_head, stride_page, stride_part, stride_page_head,
    stride_table,
    KEY_LEVELS: gl.constexpr, KEY_PTX: gl.constexpr, VALUE_LEVELS: gl.constexpr, VALUE_PTX: gl.constexpr,
    AT: gl.constexpr, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr, GROUP: gl.constexpr,
    DIM: gl.constexpr, W: gl.constexpr, TILES: gl.constexpr, SPLIT: gl.constexpr, HOPPER: gl.constexpr,
    SINKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Writes rotated means of the values, and where SPLIT, for each share, the log2 of its weights' sum.

    TILES: tiles of each sequence, or 0 where sequences differ much and a tile looks for its own. W: warps.
    """
    if PDL:
        gdc_wait()
    LANES: gl.constexpr = 8 if W == 1 else 64
    LAYOUT: gl.constexpr = _lanes(W, HOPPER)
    kv_head, share, shares = gl.program_id(1), gl.program_id(2), gl.num_programs(2)
    seq, tile = _find_tile(query_start, seqs, LANES, GROUP, TILES)
    row_start = gl.load(query_start + seq)
    num_query = gl.load(query_start + seq + 1) - row_start
    if tile * LANES >= num_query * GROUP:
        return
    before = gl.load(context_len + seq) - num_query  # the position of the sequence's first row
    lane = tile * LANES + gl.arange(0, LANES, LAYOUT)
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
    first, num_first, recent, num_uncoded = _uncoded_tiles(low, top, bottom, share, shares, FIRST, RECENT)
    if SPLIT:  # noqa: SIM102 (one is known when it is compiled)
        if (begin >= end) & (num_uncoded == 0):
            gl.store(lse + line, gl.full([LANES], float("-inf"), gl.float32, LAYOUT), mask=valid)
            return

    table = block_tables + seq.to(gl.int64) * stride_table
    coded = (begin, end, shares, top, bottom, stop, records + kv_head * stride_record_head, table, stride_record)
    strides = (stride_page, stride_part, stride_page_head)
    uncoded = (first, num_first, recent, num_uncoded, shares, top, bottom, pages, page_of, table, kv_head, strides)
    if W == 1:
        acc, peak, total = one_warp.mix(
            q, row, head, valid, position, stride_row, stride_q_head, coded, uncoded, scale,
            KEY_LEVELS, KEY_PTX, VALUE_LEVELS, VALUE_PTX, AT, FIRST, RECENT, WINDOW, DIM,
        )  # fmt: skip
    else:
        acc, peak, total = four_warps.mix(
            q, row, head, valid, position, stride_row, stride_q_head, coded, uncoded, scale,
            KEY_LEVELS, KEY_PTX, VALUE_LEVELS, VALUE_PTX, AT, FIRST, RECENT, WINDOW, DIM, HOPPER,
        )  # fmt: skip
    sums = gl.convert_layout(_add_up(total, W), LAYOUT, True)
    if SINKS and not SPLIT:  # of a split row they join at the end, once
        sink = gl.load(sinks + head, mask=valid, other=0.0) * LOG2E
        highest = gl.maximum(peak, sink)
        decay = gl.exp2(peak - highest)
        factor = decay / (sums * decay + gl.exp2(sink - highest))
    else:
        factor = 1.0 / gl.where(sums == 0.0, 1.0, sums)  # a row without keys (padding) gives zeros
    if W == 1:
        one_warp.write_result(acc, factor, out, line, valid, num_stretches(VALUE_LEVELS), DIM)
    else:
        four_warps.write_result(acc, factor, out, line, valid, DIM, HOPPER)
    if SPLIT:
        gl.store(lse + line, peak + gl.log2(sums), mask=valid)
