"""Attention with one warp, 8 lanes: each 16 keys are unpacked as they are needed, in registers alone.

Scores stand on their side, keys down and lanes across, so that 8 lanes are enough for tensor cores.

codes of 16 keys       K: lane 4k + c has key k and k + 8, a quarter c of their bytes
                       V: lane 4c + k has the keys 2k, 2k + 1, 2k + 8, 2k + 9, an eighth c of their bytes
columns of a result    n of a stretch is column n % 8 * chunk + n // 8, where an eighth of the bytes is a chunk
"""

# Tuples grow while a kernel is compiled, by sums, which are all that the compiler takes for it:
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sparkdraft.kernels.cuda.attention.turboquant.levels import high_plane, num_stretches, registers
from sparkdraft.kernels.cuda.attention.turboquant.tiles import (  # fmt: skip
    copy_tile,
    find_blocks,
    hide,
    hide_uncoded,
    in_order,
    is_held,
    key_bytes,
    load_codes,
    load_high,
    once_in_four,
    only_read,
    powers,
    raise_peak,
    some_hidden,
    stages,
    unpack,
)

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))  # [16 keys, or columns, 8 lanes]
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
KEYS = gl.constexpr(gl.SliceLayout(1, MMA.value))
LANES = gl.constexpr(gl.SliceLayout(0, MMA.value))
TOTALS = gl.constexpr(  # [8, 8 lanes]: of a lane's weights, by the place of their keys among 8
    gl.DistributedLinearLayout([[0, 1]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [], [], [8, 8])
)


@triton.constexpr_function
def _query(width: int) -> gl.DistributedLinearLayout:
    """[8 lanes, width]"""
    chunk = width // 4
    lanes = [[0, chunk], [0, 2 * chunk], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(powers(chunk), lanes, [], [], [8, width])


@triton.constexpr_function
def _result(width: int) -> gl.DistributedLinearLayout:
    """[width, 8 lanes]"""
    chunk = width // 8
    lanes = [[0, 2], [0, 4], [chunk, 0], [2 * chunk, 0], [4 * chunk, 0]]
    columns = [[column, 0] for _, column in powers(chunk)]
    return gl.DistributedLinearLayout([*columns, [0, 1]], lanes, [], [], [width, 8])


@triton.constexpr_function
def _value_bytes(width: int) -> gl.DistributedLinearLayout:
    """[16 keys, width]; even and odd keys lie in the same lanes"""
    chunk = width // 8
    lanes = [[2, 0], [4, 0], [0, chunk], [0, 2 * chunk], [0, 4 * chunk]]
    return gl.DistributedLinearLayout([*powers(chunk), [8, 0], [1, 0]], lanes, [], [], [16, width])


@triton.constexpr_function
def _pair_bytes(width: int) -> gl.DistributedLinearLayout:
    """[8 pairs of keys, width]: of the even keys, or of the odd ones"""
    chunk = width // 8
    lanes = [[1, 0], [2, 0], [0, chunk], [0, 2 * chunk], [0, 4 * chunk]]
    return gl.DistributedLinearLayout([*powers(chunk), [4, 0]], lanes, [], [], [8, width])


@gluon.jit
def _even_and_odd(x, WIDTH: gl.constexpr):
    even, odd = gl.split(gl.permute(gl.reshape(x, [8, 2, WIDTH]), (0, 2, 1)))
    LAYOUT: gl.constexpr = _pair_bytes(WIDTH)
    return gl.convert_layout(even, LAYOUT, True), gl.convert_layout(odd, LAYOUT, True)


@gluon.jit
def _unpack_values(stages, stage, start: gl.constexpr, LEVELS: gl.constexpr, PTX: gl.constexpr, DIM: gl.constexpr):
    """Levels of 16 keys' values in pairs, two tensors a stretch."""
    COUNT: gl.constexpr = num_stretches(LEVELS)
    WIDTH: gl.constexpr = DIM // COUNT
    TYPES: gl.constexpr = (gl.float16,) * (2 * COUNT)
    LAYOUT: gl.constexpr = _value_bytes(WIDTH)
    even, odd = _even_and_odd(stages[0].index(stage).slice(start, 16).load(LAYOUT), WIDTH)
    if high_plane(LEVELS):
        EIGHTH: gl.constexpr = DIM // 8
        high = load_high(stages[2].index(stage).slice(start, 16), 16, EIGHTH, WIDTH, LAYOUT)
        high_even, high_odd = _even_and_odd(high, WIDTH)
        PAIRS: gl.constexpr = _pair_bytes(WIDTH)
        byte = gl.arange(0, WIDTH, gl.SliceLayout(0, PAIRS))[None, :]
        pair = gl.arange(0, 8, gl.SliceLayout(1, PAIRS))[:, None]
        if WIDTH >= 32:
            shift = once_in_four(byte, (byte % 4 == 0) & (pair >= 0), EIGHTH)
        else:  # a lane has two bytes of a key: the four of a register are those of two pairs
            shift = once_in_four(byte, (byte % 2 == 0) & (pair % 8 < 4), EIGHTH)
        planes = [even, odd, high_even, high_odd, shift]
        return gl.inline_asm_elementwise(PTX, registers(4 * COUNT, 5), planes, TYPES, True, 4)
    else:
        return gl.inline_asm_elementwise(PTX, registers(4 * COUNT, 2), [even, odd], TYPES, True, 4)


@gluon.jit
def _as_values(first, last, WIDTH: gl.constexpr):
    """Pairs of levels of two bytes each, [8, WIDTH] -> [16 keys, WIDTH columns]."""
    both = gl.join(first, last)  # the last index: which half of a register's four bytes
    CHUNK: gl.constexpr = WIDTH // 8
    if CHUNK >= 4:
        apart = gl.reshape(both, [8, 8, CHUNK // 4, 2, 2, 2])  # pair, chunk, word, byte of its half, odd, half
        return gl.permute(apart, (0, 4, 2, 5, 3, 1)).reshape([16, WIDTH])
    else:  # a lane has two bytes of a key: the four of a register are those of two pairs
        few = gl.reshape(both, [2, 4, 8, 2, 2])  # byte of its half, pair, chunk, odd, pair's highest bit
        return gl.permute(few, (4, 1, 3, 0, 2)).reshape([16, WIDTH])


@gluon.jit
def _load_query(q, row, head, valid, stride_row, stride_head, WIDTH: gl.constexpr, DIM: gl.constexpr):
    """Its stretches as the right of a dot, [columns, 8 lanes], with columns in the order of the keys'."""
    LAYOUT: gl.constexpr = _query(WIDTH)
    line = gl.convert_layout(row * stride_row + head * stride_head, gl.SliceLayout(1, LAYOUT))
    mask = gl.convert_layout(valid, gl.SliceLayout(1, LAYOUT))[:, None]
    place = q + line[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    stretches = ()
    for s in gl.static_range(DIM // WIDTH):
        x = in_order(gl.load(place + s * WIDTH, mask=mask, other=0.0).to(gl.float16), 8, WIDTH)
        stretches = stretches + (gl.convert_layout(gl.permute(x, (1, 0)), RIGHT, True),)
    return stretches


@gluon.jit
def _nothing(V: gl.constexpr, DIM: gl.constexpr):
    """The sums of values and of weights before any key."""
    acc = ()
    for _ in gl.static_range(V):
        acc = acc + (gl.zeros([DIM // V, 8], gl.float32, MMA),)
    return acc, gl.zeros([8, 8], gl.float32, TOTALS)


@gluon.jit
def _score(q, key_stages, value_stages, stage, scale, LEVELS: gl.constexpr, PTX: gl.constexpr, DIM: gl.constexpr):
    """A tile's scores and the scales of its values, 16 keys after the other."""
    COUNT: gl.constexpr = num_stretches(LEVELS)
    LAYOUT: gl.constexpr = key_bytes(DIM // COUNT, 1)
    scores = ()
    value_scales = ()
    for i in gl.static_range(4):
        score = gl.zeros([16, 8], gl.float32, MMA)
        k = unpack(load_codes(key_stages, stage, 16 * i, LEVELS, LAYOUT, DIM), LEVELS, PTX, LAYOUT, DIM)
        for s in gl.static_range(COUNT):
            score = mma_v2(gl.convert_layout(in_order(k[s], 16, DIM // COUNT), LEFT, True), q[s], score)
        key_scale = key_stages[1].index(stage).slice(16 * i, 16).load(KEYS).to(gl.float32)
        scores = scores + (score * (key_scale * scale)[:, None],)
        value_scales = value_scales + (value_stages[1].index(stage).slice(16 * i, 16).load(KEYS),)
    return scores, value_scales


@gluon.jit
def _fold(weights):
    """[16 keys, 8 lanes] -> [8, 8 lanes]"""
    return gl.convert_layout(gl.sum(gl.reshape(weights, [2, 8, 8]), 0), TOTALS, True)


@gluon.jit
def _grow(total, decay, weights):
    return total * gl.convert_layout(decay, gl.SliceLayout(0, TOTALS), True)[None, :] + weights


@gluon.jit
def _times(acc, factor, COUNT: gl.constexpr):
    scaled = ()
    for s in gl.static_range(COUNT):
        scaled = scaled + (acc[s] * factor[None, :],)
    return scaled


@gluon.jit
def _as_right(weights):
    """Weights [16, 8 lanes] as the right of a dot: in float16, squares of 8 x 8 turned over within the warp."""
    x = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [weights.to(gl.float16)], gl.float16, False, 2
    )
    return gl.convert_layout(gl.permute(gl.reshape(x, [2, 8, 8]), (0, 2, 1)).reshape([16, 8]), RIGHT, True)


@gluon.jit
def _scan_codes(
    acc, peak, total, q, position, coded, scale,
    KEY_LEVELS: gl.constexpr, KEY_PTX: gl.constexpr, VALUE_LEVELS: gl.constexpr, VALUE_PTX: gl.constexpr,
    AT: gl.constexpr, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Online softmax over the coded keys of tiles begin, begin + step ..: sums of values, peaks, sums of weights.

    While a tile is worked on, the next one's bytes and the numbers of the blocks after that are on their way.
    """
    begin, end, step, top, bottom, stop, records, table, stride_record = coded
    V: gl.constexpr = num_stretches(VALUE_LEVELS)
    lane_key = gl.arange(0, 16, KEYS)
    key_stages, value_stages = stages(KEY_LEVELS, 2, DIM), stages(VALUE_LEVELS, 2, DIM)
    stage = 0
    blocks = find_blocks(table, begin, stop)
    copy_tile(blocks, key_stages, value_stages, 0, 0, records, stride_record, KEY_LEVELS, VALUE_LEVELS, AT, DIM, 1)
    blocks = find_blocks(table, begin + step, stop)
    for tile in range(begin, end, step):
        start = tile * 64
        copy_tile(
            blocks, key_stages, value_stages, 1 - stage, 1 - stage, records, stride_record,
            KEY_LEVELS, VALUE_LEVELS, AT, DIM, 1,
        )  # fmt: skip
        blocks = find_blocks(table, tile + 2 * step, stop)
        async_copy.wait_group(1)
        scores, value_scales = _score(q, key_stages, value_stages, stage, scale, KEY_LEVELS, KEY_PTX, DIM)
        if some_hidden(start, top, bottom, FIRST, RECENT, WINDOW):
            seen = ()
            read = ()
            for i in gl.static_range(4):
                key = start + 16 * i + lane_key
                seen = seen + (hide(scores[i], key[:, None], position[None, :], FIRST, RECENT, WINDOW),)
                read = read + (only_read(value_scales[i], key, stop, FIRST),)
            scores, value_scales = seen, read
        highest = gl.maximum(gl.maximum(scores[0], scores[1]), gl.maximum(scores[2], scores[3]))
        peak, base, decay = raise_peak(peak, highest, 0)
        acc = _times(acc, decay, V)
        folded = ()
        for i in gl.static_range(4):
            weights = gl.exp2(scores[i] - base[None, :])
            folded = folded + (_fold(weights),)
            given = _as_right(weights * value_scales[i].to(gl.float32)[:, None])
            v = _unpack_values(value_stages, stage, 16 * i, VALUE_LEVELS, VALUE_PTX, DIM)
            grown = ()
            for s in gl.static_range(V):
                x = gl.permute(_as_values(v[2 * s], v[2 * s + 1], DIM // V), (1, 0))
                grown = grown + (mma_v2(gl.convert_layout(x, LEFT, True), given, acc[s]),)
            acc = grown
        total = _grow(total, decay, (folded[0] + folded[1]) + (folded[2] + folded[3]))
        stage = 1 - stage
    async_copy.wait_group(0)
    return acc, peak, total


@gluon.jit
def _score_uncoded(
    q, page, number, start, top, bottom,
    COUNT: gl.constexpr, FIRST: gl.constexpr, RECENT: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Keys come from memory straight to the registers of a dot's left side."""
    WIDTH: gl.constexpr = DIM // COUNT
    LAYOUT: gl.constexpr = key_bytes(WIDTH, 1)
    key = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    place = page + key * DIM + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    held = is_held(start + key, number, top, bottom, FIRST, RECENT)
    scores = gl.zeros([16, 8], gl.float32, MMA)
    for s in gl.static_range(COUNT):
        k = gl.load(place + s * WIDTH, mask=held, other=0.0).to(gl.float16)
        scores = mma_v2(gl.convert_layout(in_order(k, 16, WIDTH), LEFT, True), q[s], scores)
    return scores


@gluon.jit
def _add_uncoded(
    acc, given, page, number, start, top, bottom,
    COUNT: gl.constexpr, FIRST: gl.constexpr, RECENT: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Values too: of even keys, and of the odd ones beside them."""
    WIDTH: gl.constexpr = DIM // COUNT
    PAIRS: gl.constexpr = _pair_bytes(WIDTH)
    key = 2 * gl.arange(0, 8, gl.SliceLayout(1, PAIRS))[:, None]
    place = page + key * DIM + gl.arange(0, WIDTH, gl.SliceLayout(0, PAIRS))[None, :]
    even = is_held(start + key, number, top, bottom, FIRST, RECENT)
    odd = is_held(start + key + 1, number, top, bottom, FIRST, RECENT)
    grown = ()
    for s in gl.static_range(COUNT):
        x = gl.load(place + s * WIDTH, mask=even, other=0.0).to(gl.float16)
        y = gl.load(place + s * WIDTH + DIM, mask=odd, other=0.0).to(gl.float16)
        both = gl.reshape(gl.join(x, y), [8, 8, WIDTH // 8, 2])  # pair, chunk, column of it, odd
        v = gl.permute(both, (2, 1, 0, 3)).reshape([WIDTH, 16])
        grown = grown + (mma_v2(gl.convert_layout(v, LEFT, True), given, acc[s]),)
    return grown


@gluon.jit
def _scan_uncoded(
    acc, peak, total, q, position, uncoded, scale,
    K: gl.constexpr, V: gl.constexpr, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr,
    DIM: gl.constexpr,
):  # fmt: skip
    """The same over uncoded keys, tiles of 16 of them, of the first and of the recent ones, in pages that are read."""
    first, num_first, recent, num_uncoded, step, top, bottom, pages, page_of, table, kv_head, strides = uncoded
    stride_page, stride_part, stride_page_head = strides
    offset = kv_head * stride_page_head
    lane_key = gl.arange(0, 16, KEYS)[:, None]
    for i in range(num_uncoded):
        tile = gl.where(i < num_first, first + i * step, recent + (i - num_first) * step)
        start = tile * 16
        number = gl.load(page_of + gl.load(table + tile)).to(gl.int64)
        page = pages + number * stride_page + offset
        scores = _score_uncoded(q, page, number, start, top, bottom, K, FIRST, RECENT, DIM) * scale
        scores = hide_uncoded(scores, start + lane_key, position[None, :], FIRST, RECENT, WINDOW)
        peak, base, decay = raise_peak(peak, scores, 0)
        weights = gl.exp2(scores - base[None, :])
        total = _grow(total, decay, _fold(weights))
        acc = _times(acc, decay, V)
        page += stride_part
        acc = _add_uncoded(acc, _as_right(weights), page, number, start, top, bottom, V, FIRST, RECENT, DIM)
    return acc, peak, total


@gluon.jit
def mix(
    q, row, head, valid, position, stride_row, stride_q_head, coded, uncoded, scale,
    KEY_LEVELS: gl.constexpr, KEY_PTX: gl.constexpr, VALUE_LEVELS: gl.constexpr, VALUE_PTX: gl.constexpr,
    AT: gl.constexpr, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """What these lanes take from their share of the keys: sums of values, peaks, and sums of weights in eight parts."""
    K: gl.constexpr = num_stretches(KEY_LEVELS)
    V: gl.constexpr = num_stretches(VALUE_LEVELS)
    asked = _load_query(q, row, head, valid, stride_row, stride_q_head, DIM // K, DIM)
    peak = gl.full([8], float("-inf"), gl.float32, LANES)
    acc, total = _nothing(V, DIM)
    if coded[0] < coded[1]:
        acc, peak, total = _scan_codes(
            acc, peak, total, asked, position, coded, scale,
            KEY_LEVELS, KEY_PTX, VALUE_LEVELS, VALUE_PTX, AT, FIRST, RECENT, WINDOW, DIM,
        )  # fmt: skip
    if FIRST + RECENT > 0:
        acc, peak, total = _scan_uncoded(
            acc, peak, total, asked, position, uncoded, scale, K, V, FIRST, RECENT, WINDOW, DIM
        )
    return acc, peak, total


@gluon.jit
def write_result(acc, factor, out, line, valid, V: gl.constexpr, DIM: gl.constexpr):
    WIDTH: gl.constexpr = DIM // V
    LAYOUT: gl.constexpr = _result(WIDTH)
    LINES: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    column = gl.arange(0, WIDTH, gl.SliceLayout(1, LAYOUT))[:, None]
    place = out + gl.convert_layout(line * DIM, LINES, True)[None, :] + column
    mask = gl.convert_layout(valid, LINES, True)[None, :] & (column >= 0)
    for s in gl.static_range(V):
        x = (acc[s] * factor[None, :]).to(out.dtype.element_ty)
        x = gl.permute(gl.reshape(x, [WIDTH // 8, 8, 8]), (1, 0, 2)).reshape([WIDTH, 8])
        gl.store(place + s * WIDTH, gl.convert_layout(x, LAYOUT, True), mask=mask)
