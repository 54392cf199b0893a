"""Attention with four warps, 64 lanes: each warp unpacks a quarter of a tile's keys and values into shared memory, for
all, and has 16 lanes of the scores, of the softmax and of the result to itself.

Tensor cores work on a tile's scores while its values are unpacked, and on its values while the next tile's keys are;
on Hopper they read shared memory by themselves (wgmma), elsewhere through registers. Two barriers a tile are enough:

    before scores      this tile's keys lie unpacked, the values of the last have been read
    before values      this tile's values lie unpacked, its keys have been read, the next tile's codes have come
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparkdraft.kernels.cuda.attention.turboquant.levels import num_stretches
from sparkdraft.kernels.cuda.attention.turboquant.tiles import (  # fmt: skip
    copy_tile,
    find_blocks,
    hide,
    hide_uncoded,
    in_order,
    is_held,
    key_bytes,
    load_codes,
    only_read,
    powers,
    raise_peak,
    some_hidden,
    stages,
    unpack,
)

LANES = gl.constexpr(64)
TOTALS = gl.constexpr(  # [64 lanes, 8]: of a lane's weights, by the place of their keys among 8
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8]
    )
)


@triton.constexpr_function
def wide(columns: int, HOPPER: bool) -> gl.NVMMADistributedLayout:
    """[64 lanes, columns] of a dot's result: a warp has 16 lanes"""
    if HOPPER:
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    return gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])


@triton.constexpr_function
def _in_shared(rows: int, dim: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, dim], gl.float16)


@triton.constexpr_function
def _value_bytes(width: int) -> gl.DistributedLinearLayout:
    """[16 keys a warp, width] of codes: 8 lanes in turn have 8 keys, and write to all banks of shared memory"""
    chunk = width // 4
    lanes = [[1, 0], [2, 0], [4, 0], [0, chunk], [0, 2 * chunk]]
    return gl.DistributedLinearLayout([*powers(chunk), [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, width])


@triton.constexpr_function
def _rows(rows: int, width: int, dim: int) -> gl.DistributedLinearLayout:
    """[rows, dim] of numbers: of each stretch of some width a lane has a quarter, as in key_bytes"""
    chunk = width // 4
    vector = min(chunk, 8)
    lanes = [[0, chunk], [0, 2 * chunk], [1, 0], [2, 0], [4, 0]]
    columns = [[0, 2**i] for i in range(vector.bit_length() - 1, dim.bit_length() - 1)]
    rest = [c for c in columns if c not in lanes] + [[n, 0] for n in (8, 16, 32) if n < rows]
    return gl.DistributedLinearLayout([*powers(vector), *rest[:-2]], lanes, rest[-2:], [], [rows, dim])


@gluon.jit
def _in_order(x, ROWS: gl.constexpr, WIDTH: gl.constexpr, DIM: gl.constexpr):
    """Stretches of keys, or queries, side by side, each in the order in which one warp has their columns."""
    LINES: gl.constexpr = ROWS * (DIM // WIDTH)
    return gl.reshape(in_order(gl.reshape(x, [LINES, WIDTH]), LINES, WIDTH), [ROWS, DIM])


@gluon.jit
def _load_query(q, row, head, valid, stride_row, stride_head, WIDTH: gl.constexpr, DIM: gl.constexpr):
    """[64 lanes, columns], with columns in the order of the keys'."""
    LAYOUT: gl.constexpr = _rows(64, WIDTH, DIM)
    line = gl.convert_layout(row * stride_row + head * stride_head, gl.SliceLayout(1, LAYOUT))
    mask = gl.convert_layout(valid, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))[None, :]
    x = gl.load(q + line[:, None] + column, mask=mask, other=0.0).to(gl.float16)
    return _in_order(x, 64, WIDTH, DIM)


@gluon.jit
def _share_query(x, DIM: gl.constexpr):
    return gl.allocate_shared_memory(gl.float16, [64, DIM], _in_shared(64, DIM), x)


@gluon.jit
def _find_first(table, begin, step, stop):
    """The blocks of the first three tiles: all at once, and while the query comes."""
    return (
        find_blocks(table, begin, stop),
        find_blocks(table, begin + step, stop),
        find_blocks(table, begin + 2 * step, stop),
    )


@gluon.jit
def _nothing(DIM: gl.constexpr, HOPPER: gl.constexpr):
    """The sums of values and of weights before any key."""
    return gl.zeros([LANES, DIM], gl.float32, wide(DIM, HOPPER)), gl.zeros([LANES, 8], gl.float32, TOTALS)


@gluon.jit
def _dot(a, b, acc, HOPPER: gl.constexpr, FRESH: gl.constexpr):
    """On its way; _wait has the result. a, b: in shared memory, or a in registers. FRESH: acc is zeros."""
    if HOPPER:
        return warpgroup_mma(a, b, acc, use_acc=not FRESH, is_async=True)
    else:
        LAYOUT: gl.constexpr = acc.type.layout
        b = b.load(gl.DotOperandLayout(1, LAYOUT, 2))
        if FRESH:
            return mma_v2(a.load(gl.DotOperandLayout(0, LAYOUT, 2)), b, acc)
        else:
            return mma_v2(a, b, acc)


@gluon.jit
def _wait(acc, HOPPER: gl.constexpr):
    if HOPPER:
        return warpgroup_mma_wait(0, [acc])
    else:
        return acc


@gluon.jit
def _side_by_side(levels, WIDTH: gl.constexpr, DIM: gl.constexpr):
    """[64, WIDTH] of each stretch -> [64, DIM]"""
    COUNT: gl.constexpr = DIM // WIDTH
    both = gl.join(levels[0], levels[COUNT // 2])
    if COUNT == 4:
        both = gl.join(both, gl.join(levels[1], levels[3]))
    return gl.permute(gl.reshape(both, [64, WIDTH, COUNT]), (0, 2, 1)).reshape([64, DIM])


@gluon.jit
def _lay_keys(shared, stages, slot, LEVELS: gl.constexpr, PTX: gl.constexpr, DIM: gl.constexpr):
    """A tile's keys from codes to shared memory."""
    WIDTH: gl.constexpr = DIM // num_stretches(LEVELS)
    LAYOUT: gl.constexpr = key_bytes(WIDTH, 4)
    levels = unpack(load_codes(stages, slot, 0, LEVELS, LAYOUT, DIM), LEVELS, PTX, LAYOUT, DIM)
    shared.store(_in_order(_side_by_side(levels, WIDTH, DIM), 64, WIDTH, DIM))


@gluon.jit
def _lay_values(shared, codes, LEVELS: gl.constexpr, PTX: gl.constexpr, DIM: gl.constexpr):
    WIDTH: gl.constexpr = DIM // num_stretches(LEVELS)
    shared.store(_side_by_side(unpack(codes, LEVELS, PTX, _value_bytes(WIDTH), DIM), WIDTH, DIM))


@gluon.jit
def _fold(weights, KEYS: gl.constexpr):
    """[64 lanes, keys] -> [64 lanes, 8], in the order in which one warp adds them up."""
    x = gl.sum(gl.reshape(weights, [LANES, KEYS // 16, 2, 8]), 2)
    if KEYS == 64:
        x = gl.sum(gl.sum(gl.reshape(x, [LANES, 2, 2, 8]), 2), 1)
    return gl.convert_layout(gl.reshape(x, [LANES, 8]), TOTALS, True)


@gluon.jit
def _grow(total, decay, weights, KEYS: gl.constexpr):
    less = gl.convert_layout(decay, gl.SliceLayout(1, TOTALS), True)
    return total * less[:, None] + _fold(weights, KEYS)


@gluon.jit
def _add_values(acc, decay, weights, values, DIM: gl.constexpr, HOPPER: gl.constexpr):
    """acc decayed, and the values on their way to it."""
    RESULT: gl.constexpr = wide(DIM, HOPPER)
    given = gl.convert_layout(weights.to(gl.float16), gl.DotOperandLayout(0, RESULT, 2), True)
    less = gl.convert_layout(decay, gl.SliceLayout(1, RESULT), True)
    return _dot(given, values, acc * less[:, None], HOPPER, False)


@gluon.jit
def _scan_codes(
    acc, peak, total, q, position, coded, found, scale,
    KEY_LEVELS: gl.constexpr, KEY_PTX: gl.constexpr, VALUE_LEVELS: gl.constexpr, VALUE_PTX: gl.constexpr,
    AT: gl.constexpr, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr, DIM: gl.constexpr,
    HOPPER: gl.constexpr,
):  # fmt: skip
    """As in one_warp.py. position: in shared memory, as it is seldom looked at. found: by _find_first."""
    begin, end, step, top, bottom, stop, records, table, stride_record = coded
    SCORES: gl.constexpr = wide(64, HOPPER)
    VALUE_BYTES: gl.constexpr = _value_bytes(DIM // num_stretches(VALUE_LEVELS))
    # Where vectors are long, shared memory is short: keys and values take turns in it, and codes come one tile ahead.
    ROOMY: gl.constexpr = DIM < 256
    AHEAD: gl.constexpr = 2 if ROOMY else 1
    key_stages, value_stages = stages(KEY_LEVELS, AHEAD, DIM), stages(VALUE_LEVELS, 2, DIM)
    keys = gl.allocate_shared_memory(gl.float16, [64, DIM], _in_shared(64, DIM))
    values = gl.allocate_shared_memory(gl.float16, [64, DIM], _in_shared(64, DIM)) if ROOMY else keys
    lane_key = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    for i in gl.static_range(AHEAD):
        copy_tile(
            found[i], key_stages, value_stages, i, i, records, stride_record, KEY_LEVELS, VALUE_LEVELS, AT, DIM, 4
        )
    blocks = found[AHEAD]
    async_copy.wait_group(AHEAD - 1)
    _lay_keys(keys, key_stages, 0, KEY_LEVELS, KEY_PTX, DIM)
    stage = 0
    for tile in range(begin, end, step):
        start = tile * 64
        codes = load_codes(value_stages, stage, 0, VALUE_LEVELS, VALUE_BYTES, DIM)
        key_scale = key_stages[1].index(stage).load(gl.SliceLayout(0, SCORES))
        value_scale = value_stages[1].index(stage).load(gl.SliceLayout(0, SCORES))
        fence_async_shared()
        scores = _dot(q, keys.permute((1, 0)), gl.zeros([LANES, 64], gl.float32, SCORES), HOPPER, True)
        next_ = 1 - stage
        copy_tile(
            blocks, key_stages, value_stages, stage if ROOMY else 0, stage if ROOMY else next_, records, stride_record,
            KEY_LEVELS, VALUE_LEVELS, AT, DIM, 4,
        )  # fmt: skip
        blocks = find_blocks(table, tile + (AHEAD + 1) * step, stop)
        if ROOMY:
            _lay_values(values, codes, VALUE_LEVELS, VALUE_PTX, DIM)
        scores = _wait(scores, HOPPER) * (key_scale.to(gl.float32) * scale)[None, :]
        if some_hidden(start, top, bottom, FIRST, RECENT, WINDOW):
            where = position.load(gl.SliceLayout(1, SCORES))[:, None]
            scores = hide(scores, (start + lane_key)[None, :], where, FIRST, RECENT, WINDOW)
            value_scale = only_read(value_scale, start + lane_key, stop, FIRST)
        peak, base, decay = raise_peak(peak, scores, 1)
        weights = gl.exp2(scores - base[:, None])
        total = _grow(total, decay, weights, 64)
        if not ROOMY:
            _lay_values(values, codes, VALUE_LEVELS, VALUE_PTX, DIM)
        fence_async_shared()
        async_copy.wait_group(AHEAD - 1)
        acc = _add_values(acc, decay, weights * value_scale.to(gl.float32)[None, :], values, DIM, HOPPER)
        if not ROOMY:
            acc = _wait(acc, HOPPER)
        _lay_keys(keys, key_stages, next_ if ROOMY else 0, KEY_LEVELS, KEY_PTX, DIM)
        if ROOMY:
            acc = _wait(acc, HOPPER)
        stage = next_
    async_copy.wait_group(0)
    return acc, peak, total


@gluon.jit
def _load_rows(
    page, number, start, top, bottom, FIRST: gl.constexpr, RECENT: gl.constexpr, WIDTH: gl.constexpr, DIM: gl.constexpr
):
    """16 uncoded keys, or values."""
    LAYOUT: gl.constexpr = _rows(16, WIDTH, DIM)
    key = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    place = page + key * DIM + gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))[None, :]
    held = is_held(start + key, number, top, bottom, FIRST, RECENT)
    return gl.load(place, mask=held, other=0.0).to(gl.float16)


@gluon.jit
def _scan_uncoded(
    acc, peak, total, q, position, uncoded, scale,
    K: gl.constexpr, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr, DIM: gl.constexpr,
    HOPPER: gl.constexpr,
):  # fmt: skip
    """As in one_warp.py."""
    first, num_first, recent, num_uncoded, step, top, bottom, pages, page_of, table, kv_head, strides = uncoded
    stride_page, stride_part, stride_page_head = strides
    offset = kv_head * stride_page_head
    SCORES: gl.constexpr = wide(16, HOPPER)
    keys = gl.allocate_shared_memory(gl.float16, [16, DIM], _in_shared(16, DIM))
    values = gl.allocate_shared_memory(gl.float16, [16, DIM], _in_shared(16, DIM))
    lane_key = gl.arange(0, 16, gl.SliceLayout(0, SCORES))[None, :]
    for i in range(num_uncoded):
        tile = gl.where(i < num_first, first + i * step, recent + (i - num_first) * step)
        start = tile * 16
        number = gl.load(page_of + gl.load(table + tile)).to(gl.int64)
        page = pages + number * stride_page + offset
        k = _load_rows(page, number, start, top, bottom, FIRST, RECENT, DIM // K, DIM)
        v = _load_rows(page + stride_part, number, start, top, bottom, FIRST, RECENT, 32, DIM)
        keys.store(_in_order(k, 16, DIM // K, DIM))
        values.store(v)
        fence_async_shared()
        scores = _wait(_dot(q, keys.permute((1, 0)), gl.zeros([LANES, 16], gl.float32, SCORES), HOPPER, True), HOPPER)
        where = position.load(gl.SliceLayout(1, SCORES))[:, None]
        scores = hide_uncoded(scores * scale, start + lane_key, where, FIRST, RECENT, WINDOW)
        LINES: gl.constexpr = gl.SliceLayout(1, SCORES)
        new, base, less = raise_peak(gl.convert_layout(peak, LINES, True), scores, 1)
        weights = gl.exp2(scores - base[:, None])
        total = _grow(total, less, weights, 16)
        acc = _wait(_add_values(acc, less, weights, values, DIM, HOPPER), HOPPER)
        peak = gl.convert_layout(new, peak.type.layout, True)
    return acc, peak, total


@gluon.jit
def mix(
    q, row, head, valid, position, stride_row, stride_q_head, coded, uncoded, scale,
    KEY_LEVELS: gl.constexpr, KEY_PTX: gl.constexpr, VALUE_LEVELS: gl.constexpr, VALUE_PTX: gl.constexpr,
    AT: gl.constexpr, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr, DIM: gl.constexpr,
    HOPPER: gl.constexpr,
):  # fmt: skip
    """As in one_warp.py."""
    begin, end, step, _, _, stop, _, table, _ = coded
    K: gl.constexpr = num_stretches(KEY_LEVELS)
    peak = gl.full([LANES], float("-inf"), gl.float32, gl.SliceLayout(1, wide(64, HOPPER)))
    asked = _load_query(q, row, head, valid, stride_row, stride_q_head, DIM // K, DIM)
    found = _find_first(table, begin, step, stop)
    asked = _share_query(asked, DIM)
    where = gl.allocate_shared_memory(gl.int32, [LANES], gl.SwizzledSharedLayout(1, 1, 1, [0]), position)
    acc, total = _nothing(DIM, HOPPER)
    if begin < end:
        acc, peak, total = _scan_codes(
            acc, peak, total, asked, where, coded, found, scale,
            KEY_LEVELS, KEY_PTX, VALUE_LEVELS, VALUE_PTX, AT, FIRST, RECENT, WINDOW, DIM, HOPPER,
        )  # fmt: skip
    if FIRST + RECENT > 0:
        acc, peak, total = _scan_uncoded(
            acc, peak, total, asked, where, uncoded, scale, K, FIRST, RECENT, WINDOW, DIM, HOPPER
        )
    return acc, peak, total


@gluon.jit
def write_result(acc, factor, out, line, valid, DIM: gl.constexpr, HOPPER: gl.constexpr):
    RESULT: gl.constexpr = wide(DIM, HOPPER)
    ROWS: gl.constexpr = gl.SliceLayout(1, RESULT)
    column = gl.arange(0, DIM, gl.SliceLayout(0, RESULT))[None, :]
    place = out + gl.convert_layout(line * DIM, ROWS, True)[:, None] + column
    mask = gl.convert_layout(valid, ROWS, True)[:, None] & (column >= 0)
    acc = acc * gl.convert_layout(factor, ROWS, True)[:, None]
    gl.store(place, acc.to(out.dtype.element_ty), mask=mask)
