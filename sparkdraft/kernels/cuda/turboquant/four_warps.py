"""Through the codes with four warps: 64 lanes, and each warp unpacks what it multiplies, and nothing twice.

Of a tile's 64 keys a warp scores its own 16 for all lanes; then it adds up its own quarter of the values' columns over
all keys, from the weights that all warps have laid into shared memory. Queries and weights are what tensor cores read
from there, on Hopper by themselves (wgmma), elsewhere through registers.

    columns of a result    m = 64 h + 16 w + 8 x + c    warp w, lane 4c ..; byte 2h + x of the lane's, of the stretch
                                                        and the part of an eighth of its bytes that are the warp's
"""

# Tuples grow while a kernel is compiled, by sums, which are all that the compiler takes for it:
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
)

from sparkdraft.kernels.cuda.turboquant.levels import high_plane, num_stretches, registers
from sparkdraft.kernels.cuda.turboquant.tiles import (
    copy_tile,
    find_blocks,
    hide,
    in_order,
    lane_slice,
    mma,
    only_read,
    order,
    raise_peak,
    some_hidden,
    stages,
    unpack_keys,
)  # fmt: skip

LANES = gl.constexpr(64)


@triton.constexpr_function
def _scores(HOPPER: bool) -> gl.NVMMADistributedLayout:
    """[64 keys, 64 lanes], and results [columns, 64 lanes]"""
    if HOPPER:
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    return gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])


@triton.constexpr_function
def _value_bytes(width: int, stretches: int, pairs: bool) -> gl.DistributedLinearLayout:
    """[stretches, 64 keys, width], of which a warp has a stretch, and where they are two, half of each lane's bytes.

    Or, where they come in pairs, of the even keys or the odd ones.
    """
    chunk, parts = width // 8, 4 // stretches
    own = chunk // parts
    unit = 1 if pairs else 2
    registers_ = [[0, 0, 2**i] for i in range(own.bit_length() - 1)] + [[0, unit * n, 0] for n in (4, 8, 16)]
    lanes = [[0, unit, 0], [0, 2 * unit, 0], [0, 0, chunk], [0, 0, 2 * chunk], [0, 0, 4 * chunk]]
    warps = [[1, 0, 0], [2, 0, 0]] if stretches == 4 else [[0, 0, own], [1, 0, 0]]
    if not pairs:
        registers_ = [*registers_, [0, 1, 0]]
    return gl.DistributedLinearLayout(registers_, lanes, warps, [], [stretches, 32 * unit, width])


@triton.constexpr_function
def _high_bytes(layout: gl.DistributedLinearLayout, eighth: int) -> gl.DistributedLinearLayout:
    """The same with columns as [of which eighth, in it]"""
    bases = [
        [[stretch, key, column // eighth, column % eighth] for stretch, key, column in part]
        for part in (layout.reg_bases, layout.lane_bases, layout.warp_bases)
    ]
    stretches, keys, columns = layout.shape
    return gl.DistributedLinearLayout(*bases, [], [stretches, keys, columns // eighth, eighth])


@gluon.jit
def share_query(q, row, head, valid, stride_row, stride_head, WIDTH: gl.constexpr, DIM: gl.constexpr):
    """Its stretches in shared memory, [64 lanes, columns] each, with columns in the order of a key's bytes."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], gl.float16)
    column = order(gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)), WIDTH)
    line = gl.convert_layout(row * stride_row + head * stride_head, gl.SliceLayout(1, LAYOUT))
    mask = gl.convert_layout(valid, gl.SliceLayout(1, LAYOUT))[:, None]
    place = q + line[:, None] + column[None, :]
    stretches = ()
    for s in gl.static_range(DIM // WIDTH):
        x = gl.load(place + s * WIDTH, mask=mask, other=0.0).to(gl.float16)
        stretches = stretches + (gl.allocate_shared_memory(gl.float16, [64, WIDTH], SHARED, x),)
    return stretches


@gluon.jit
def _dot(a, b, acc, HOPPER: gl.constexpr):
    """b: in shared memory."""
    if HOPPER:
        return warpgroup_mma(a, b, acc)
    else:
        return mma_v2(a, b.load(gl.DotOperandLayout(1, _scores(HOPPER), 2)), acc)


@gluon.jit
def _even_and_odd(x, COUNT: gl.constexpr, WIDTH: gl.constexpr):
    LAYOUT: gl.constexpr = _value_bytes(WIDTH, COUNT, True)
    even, odd = gl.split(gl.permute(gl.reshape(x, [COUNT, 32, 2, WIDTH]), (0, 1, 3, 2)))
    return gl.convert_layout(even, LAYOUT, True), gl.convert_layout(odd, LAYOUT, True)


@gluon.jit
def _unpack_values(value_stages, stage, LEVELS: gl.constexpr, PTX: gl.constexpr, DIM: gl.constexpr):
    """Levels of all keys' values, [stretches, 32 pairs, bytes]: of the first and the last two of four bytes."""
    COUNT: gl.constexpr = num_stretches(LEVELS)
    WIDTH: gl.constexpr = DIM // COUNT
    LAYOUT: gl.constexpr = _value_bytes(WIDTH, COUNT, False)
    PAIRS: gl.constexpr = _value_bytes(WIDTH, COUNT, True)
    TYPES: gl.constexpr = (gl.float16, gl.float16)
    low = gl.expand_dims(value_stages[0].index(stage).load(gl.SliceLayout(0, LAYOUT)), 0)
    even, odd = _even_and_odd(low + gl.zeros([COUNT, 64, WIDTH], gl.uint8, LAYOUT), COUNT, WIDTH)
    stretch = gl.arange(0, COUNT, gl.SliceLayout(1, gl.SliceLayout(2, PAIRS)))[:, None, None]
    pair = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, PAIRS)))[None, :, None]
    byte = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, PAIRS)))[None, None, :]
    if DIM >= 128:
        first = (byte % 4 == 0) & (pair >= 0) & (stretch >= 0)
    else:  # a lane has two bytes of a key: the four of a register are those of two pairs
        first = (byte % 2 == 0) & (pair % 8 < 4) & (stretch >= 0)
    # Shifts, once in a register of four: to the stretch's nibble, and in it.
    down = gl.where(first, stretch * (8 // COUNT) // 4 * 4, 0).to(gl.uint8)
    up = gl.where(first, 4 - stretch * (8 // COUNT) // 4 * 4, 0).to(gl.uint8)
    again = gl.where(first, stretch * (8 // COUNT) % 4, 0).to(gl.uint8)
    if high_plane(LEVELS):
        EIGHTH: gl.constexpr = DIM // 8
        APART: gl.constexpr = _high_bytes(LAYOUT, EIGHTH)
        high = value_stages[2].index(stage).load(gl.SliceLayout(1, gl.SliceLayout(0, APART)))
        high = gl.expand_dims(gl.expand_dims(high, 1), 0)
        high = high + gl.zeros([COUNT, 64, WIDTH // EIGHTH, EIGHTH], gl.uint8, APART)
        high = gl.convert_layout(gl.reshape(high, [COUNT, 64, WIDTH]), LAYOUT, True)
        high_even, high_odd = _even_and_odd(high, COUNT, WIDTH)
        high_down = gl.where(first, byte // EIGHTH + stretch * (8 // COUNT), 0).to(gl.uint8)
        planes = [even, odd, down, up, again, high_even, high_odd, high_down]
        return gl.inline_asm_elementwise(PTX, registers(4, 8), planes, TYPES, True, 4)
    else:
        return gl.inline_asm_elementwise(PTX, registers(4, 5), [even, odd, down, up, again], TYPES, True, 4)


@gluon.jit
def _left_values(first, last, COUNT: gl.constexpr, DIM: gl.constexpr, HOPPER: gl.constexpr):
    """-> [columns, 64 keys] as the left of a dot."""
    both = gl.join(first, last)  # the last index: which half of a register's four bytes
    PARTS: gl.constexpr = 4 // COUNT
    if DIM >= 128:  # stretch, pair, chunk, part, word, byte of its half, odd, half
        apart = gl.reshape(both, [COUNT, 32, 8, PARTS, DIM // 128, 2, 2, 2])
        x = gl.permute(apart, (4, 7, 0, 3, 5, 2, 1, 6)).reshape([DIM, 64])
    else:  # stretch, pairs, byte of its half, pair, chunk, part, odd, pair's bit
        few = gl.reshape(both, [COUNT, 4, 2, 4, 8, PARTS, 2, 2])
        x = gl.permute(few, (0, 5, 2, 4, 1, 7, 3, 6)).reshape([DIM, 64])
    return gl.convert_layout(x, gl.DotOperandLayout(0, _scores(HOPPER), 2), True)


@gluon.jit
def column_of(m, COUNT: gl.constexpr, DIM: gl.constexpr):
    """The column that a result has at m."""
    PARTS: gl.constexpr = 4 // COUNT
    OWN: gl.constexpr = DIM // 32  # bytes of a lane
    warp = m // 16 % 4
    byte = warp % PARTS * OWN + m // 64 * 2 + m // 8 % 2
    return warp // PARTS * (DIM // COUNT) + m % 8 * (PARTS * OWN) + byte


@gluon.jit
def _add_up(total):
    """[64 keys, 64 lanes] -> [64 lanes]: of each warp's keys, then of the first and of the last two warps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2, 2], [32, 1, 1], [4, 1, 1], [2, 1, 0])
    parts = gl.permute(gl.sum(gl.reshape(total, [4, 16, LANES]), 1), (1, 0)).reshape([LANES, 2, 2])
    even, odd = gl.split(gl.convert_layout(parts, LAYOUT))
    first, last = gl.split(even + odd)
    return gl.convert_layout(first + last, lane_slice(4))


@gluon.jit
def scan_by_four_warps(
    q, position, begin, end, step, top, bottom, stop, records, table, stride_record, scale,
    KEY_LEVELS: gl.constexpr, KEY_PTX: gl.constexpr, VALUE_LEVELS: gl.constexpr, VALUE_PTX: gl.constexpr,
    AT: gl.constexpr, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr, DIM: gl.constexpr,
    HOPPER: gl.constexpr,
):  # fmt: skip
    """As scan_by_one_warp."""
    K: gl.constexpr = num_stretches(KEY_LEVELS)
    V: gl.constexpr = num_stretches(VALUE_LEVELS)
    SCORES: gl.constexpr = _scores(HOPPER)
    lane_key = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    where = gl.convert_layout(position, gl.SliceLayout(0, SCORES))
    key_stages, value_stages = stages(KEY_LEVELS, DIM), stages(VALUE_LEVELS, DIM)
    GIVEN: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, LANES], gl.float16)
    given = gl.allocate_shared_memory(gl.float16, [64, LANES], GIVEN)
    acc = gl.zeros([DIM, LANES], gl.float32, SCORES)
    peak = gl.full([LANES], float("-inf"), gl.float32, gl.SliceLayout(0, SCORES))
    total = gl.zeros([64, LANES], gl.float32, SCORES)
    stage = 0
    blocks = find_blocks(table, begin, stop)
    copy_tile(blocks, key_stages, value_stages, 0, records, stride_record, KEY_LEVELS, VALUE_LEVELS, AT, DIM, 4)
    blocks = find_blocks(table, begin + step, stop)
    fence_async_shared()  # the query is there
    for tile in range(begin, end, step):
        start = tile * 64
        copy_tile(
            blocks, key_stages, value_stages, 1 - stage, records, stride_record, KEY_LEVELS, VALUE_LEVELS, AT, DIM, 4
        )
        blocks = find_blocks(table, tile + 2 * step, stop)
        async_copy.wait_group(1)
        k = unpack_keys(key_stages, stage, 0, KEY_LEVELS, KEY_PTX, DIM, 4)
        scores = gl.zeros([64, LANES], gl.float32, SCORES)
        for s in gl.static_range(K):
            own = gl.convert_layout(in_order(k[s], 64, DIM // K), gl.DotOperandLayout(0, SCORES, 2), True)
            scores = _dot(own, q[s].permute((1, 0)), scores, HOPPER)
        key_scale = key_stages[1].index(stage).load(gl.SliceLayout(1, SCORES)).to(gl.float32)
        value_scale = value_stages[1].index(stage).load(gl.SliceLayout(1, SCORES))
        scores = scores * (key_scale * scale)[:, None]
        if some_hidden(start, top, bottom, FIRST, RECENT, WINDOW):
            scores = hide(scores, start + lane_key, where, FIRST, RECENT, WINDOW)
            value_scale = only_read(value_scale, start + lane_key, stop, FIRST)
        peak, base, decay = raise_peak(peak, scores)
        weights = gl.exp2(scores - base)
        total = total * decay[None, :] + weights
        given.store((weights * value_scale.to(gl.float32)[:, None]).to(gl.float16))
        fence_async_shared()
        v = _unpack_values(value_stages, stage, VALUE_LEVELS, VALUE_PTX, DIM)
        acc = _dot(_left_values(v[0], v[1], V, DIM, HOPPER), given, acc * decay[None, :], HOPPER)
        stage = 1 - stage
    async_copy.wait_group(0)
    return (gl.convert_layout(acc, mma(4)),), gl.convert_layout(peak, lane_slice(4)), _add_up(total)
