"""Writing to the compressed cache: vectors are normed, turned by RoPE, rotated, coded and packed; queries are rotated
too.

A program takes one row and one head of queries, keys or values. Codes are those of kernels/turboquant/vectors.py, but
for coordinates on the border between two levels to the last bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparkdraft.kernels.cuda.attention.turboquant.levels import high_plane, num_stretches
from sparkdraft.kernels.cuda.attention.turboquant.rotation import flip, hadamard
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.kernels.turboquant.vectors import LARGEST_SCALE

HALF_MAX = tl.constexpr(LARGEST_SCALE)


@triton.jit
def _nearest(unit, LEVELS: tl.constexpr):
    """The code of each coordinate as it is kept, and the length of its level, whose sign is the coordinate's."""
    HALF: tl.constexpr = len(LEVELS) // 2
    steps = tl.zeros(unit.shape, tl.int32)
    level = tl.full(unit.shape, LEVELS[HALF], tl.float32)
    for i in tl.static_range(HALF, 2 * HALF - 1):
        above = tl.abs(unit) > (LEVELS[i] + LEVELS[i + 1]) / 2
        steps += above.to(tl.int32)
        level = tl.where(above, LEVELS[i + 1], level)
    return tl.where(unit > 0, HALF + steps, steps), level


@triton.jit
def _put_plane(codes, target, kept, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Codes below 2 ** WIDTH, [DIM], as bytes: no two share a bit, so a sum packs them."""
    STRETCHES: tl.constexpr = 8 // WIDTH
    apart = tl.reshape(codes, [STRETCHES, DIM // STRETCHES]) << (tl.arange(0, STRETCHES) * WIDTH)[:, None]
    tl.store(target + tl.arange(0, DIM // STRETCHES), tl.sum(apart, 0).to(tl.uint8), mask=kept)


@triton.jit
def _put_vector(
    x, record, offset, kept, page, has_page,
    LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, LEVELS: tl.constexpr,
    DIM: tl.constexpr, STEPS: tl.constexpr, HAS_PAGES: tl.constexpr,
):  # fmt: skip
    """x: float32 [1, DIM] with its signs flipped. Into a record's planes, and where it has one into its page."""
    turned = tl.reshape(hadamard(x, 1, DIM, STEPS) * DIM**-0.5, [DIM])
    if HAS_PAGES:
        column = tl.arange(0, DIM)
        clamped = tl.clamp(turned, -HALF_MAX, HALF_MAX)  # float16 ends there
        tl.store(page + offset * DIM + column, clamped.to(page.dtype.element_ty), mask=has_page)
    length = tl.sqrt_rn(tl.sum(turned * turned, 0))
    unit = tl.div_rn(turned, tl.where(length > 0, length, 1.0))
    codes, level = _nearest(unit, LEVELS)
    inner = tl.sum(level * tl.abs(unit), 0)  # 0 of the zero vector alone
    scale = tl.minimum(tl.div_rn(length, tl.where(inner > 0, inner, 1.0)), HALF_MAX)
    WIDTH: tl.constexpr = 8 // num_stretches(LEVELS)
    _put_plane(codes & (2**WIDTH - 1), record + LOW + offset * (DIM * WIDTH // 8), kept, DIM, WIDTH)
    if high_plane(LEVELS):
        _put_plane(codes >> WIDTH, record + HIGH + offset * (DIM // 8), kept, DIM, 1)
    tl.store((record + SCALE).to(tl.pointer_type(tl.float16), bitcast=True) + offset, scale.to(tl.float16), mask=kept)


@triton.jit
def _turn(x, head, norm, angles, eps, NORM: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr):
    """Norm and RoPE of a head of queries or keys, as `_rope_write` of elementwise.py does them."""
    DTYPE: tl.constexpr = head.dtype.element_ty
    column = tl.arange(0, DIM)[None, :]
    turns = column < 2 * HALF
    # A column of the first half turns with that of the second; those past both are left as they are.
    other = tl.where(column < HALF, column + HALF, tl.where(turns, column - HALF, column))
    y = tl.load(head + other).to(tl.float32)
    cos = tl.load(angles + column % HALF, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(angles + HALF + column % HALF, mask=turns, other=0.0).to(tl.float32)
    if NORM:
        gain, other_gain = tl.load(norm + column).to(tl.float32), tl.load(norm + other).to(tl.float32)
        rms = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x, y = (x * rms * gain).to(DTYPE).to(tl.float32), (y * rms * other_gain).to(DTYPE).to(tl.float32)
    turned = x * cos + tl.where(column < HALF, -y, y) * sin
    return tl.where(turns, turned, x).to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["slots", "num_slots", "positions"])
def write(
    q, k, v, records, pages, page_of, signs, centre, slots, num_slots,
    positions, table, q_norm, k_norm, stride_table, max_position, eps,
    stride_q_row, stride_q_head, stride_k_row, stride_k_head, stride_v_row, stride_v_head,
    stride_record, stride_record_head, stride_page, stride_part, stride_page_head,
    KEY_LEVELS: tl.constexpr, VALUE_LEVELS: tl.constexpr, AT: tl.constexpr,
    DIM: tl.constexpr, STEPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HAS_PAGES: tl.constexpr, CENTRED: tl.constexpr,
    ROPE: tl.constexpr, HALF: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, V_NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The second program index counts the heads of queries, then those of keys, then those of values."""
    column = tl.arange(0, DIM)[None, :]
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sign = tl.load(signs + column)
    enter(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    angles = table
    if ROPE:
        position = tl.load(positions + row).to(tl.int64)
        angles += tl.minimum(tl.maximum(position, 0), max_position - 1) * stride_table  # a padding row may hold any
    if number < HEADS:
        query = q + row * stride_q_row + number * stride_q_head
        x = tl.load(query + column).to(tl.float32)
        if ROPE:
            x = _turn(x, query, q_norm, angles, eps, Q_NORM, HALF, DIM)
        place = query + column
        if q.dtype.element_ty == tl.bfloat16:  # its rotation lies there in float16, which has as many bytes
            place = place.to(tl.pointer_type(tl.float16), bitcast=True)
        turned = hadamard(flip(x, sign), 1, DIM, STEPS) * DIM**-0.5
        tl.store(place, turned.to(place.dtype.element_ty))
        return
    kept = (slot >= 0) & (slot < num_slots)  # and no return: what follows need not wait to know
    is_key = number < HEADS + KV_HEADS
    head = number - HEADS - tl.where(is_key, 0, KV_HEADS)
    block, offset = slot // BLOCK_SIZE, (slot % BLOCK_SIZE).to(tl.int32)
    record = records + block * stride_record + head * stride_record_head
    has_page = False
    if HAS_PAGES:
        page = tl.load(page_of + block, mask=kept, other=-1).to(tl.int64)
        has_page = page >= 0
        pages += page * stride_page + head * stride_page_head
    if is_key:
        key = k + row * stride_k_row + head * stride_k_head
        x = tl.load(key + column).to(tl.float32)
        if ROPE:
            x = _turn(x, key, k_norm, angles, eps, K_NORM, HALF, DIM)
        if CENTRED:
            x -= tl.load(centre + head * DIM + column)
        x = flip(x, sign)
        _put_vector(x, record, offset, kept, pages, has_page, AT[0], AT[1], AT[4], KEY_LEVELS, DIM, STEPS, HAS_PAGES)
    else:
        x = tl.load(v + row * stride_v_row + head * stride_v_head + column).to(tl.float32)
        if V_NORM:
            x = (x * tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]).to(v.dtype.element_ty).to(tl.float32)
        x = flip(x, sign)
        if HAS_PAGES:
            pages += stride_part
        _put_vector(x, record, offset, kept, pages, has_page, AT[2], AT[3], AT[5], VALUE_LEVELS, DIM, STEPS, HAS_PAGES)
