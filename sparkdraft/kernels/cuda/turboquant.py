"""The compressed KV cache on the GPU: vectors are coded as they are written, and attended to without being decoded.

Codes and exact rows both lie in rotated space (kernels/turboquant/store.py). So the query is rotated once and not the
keys, a key's scale multiplies its finished score, a value's scale its weight, and the sum is rotated back once. Which
blocks have an exact page, and what a centre is, is left to the caller; cutting the work is as in attention.py.

    keys of a row at p   | first |............ coded ............| recent .. p |     its own border, whatever its tile
    shares of a tile     | 1 2 .. S 1 2 .. S : units of the coded keys |   0: exact tiles, ascending
    a byte of a plane    codes that lie a stretch apart: bytes [keys, dim / 2] are two tiles of levels, each multiplied
                         by the same stretch of the query; 2 bits a byte are four

A row's bits hang on nothing but its own q and keys, as attention.py has it: tiles lie on an absolute grid, coded ones
come first, a tile that a row does not see adds exact zeros, rotations only add in pairs, and nothing else is summed
across lanes but by `dot`. All tiles are masked: without a mask the compiler would round scores otherwise.

Levels are found by PRMT, which looks four nibbles up in eight bytes at once: about two integer instructions a
coordinate, against four and a gather for a table in memory, or fifteen for a tree of selects. An H200 has about three
a coordinate while the codes come from memory, so this is what decides the speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.attention import (
    JOIN_ELEMENTS,
    MOST_SPLITS,
    SUM_LANES,
    Gpu,
    Launch,
    Tile,
    _choose_cuts,
    _count_tiles,
    _find_sequence,
    _first_key,
    _gpu,
    _key_range,
)
from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.pdl import enter
from sparkdraft.kernels.turboquant.codebook import codebook
from sparkdraft.kernels.turboquant.layout import PLANES
from sparkdraft.kernels.turboquant.rotation import Rotation
from sparkdraft.kernels.turboquant.store import CodedLayer, RecordLayout
from sparkdraft.kernels.turboquant.vectors import LARGEST_SCALE
from sparkdraft.kernels.view import AttentionView

TQ_DIMS = (64, 128, 256)
HALF_MAX = tl.constexpr(LARGEST_SCALE)

# Rotation


@triton.jit
def _halves(x, ROWS: tl.constexpr, DIM: tl.constexpr):
    """[ROWS, DIM] -> its left and its right columns."""
    return tl.split(tl.permute(tl.reshape(x, [ROWS, 2, DIM // 2]), (0, 2, 1)))


@triton.jit
def _whole(left, right, ROWS: tl.constexpr, DIM: tl.constexpr):
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), [ROWS, DIM])


@triton.jit
def _hadamard(x, ROWS: tl.constexpr, DIM: tl.constexpr, STEPS: tl.constexpr):
    """Sums and differences of neighbours go to the left and to the right half: after log2(DIM) steps all is in place.

    These are the additions of rotation.py, in its order.
    """
    for _ in tl.static_range(STEPS):
        low, high = tl.split(tl.reshape(x, [ROWS, DIM // 2, 2]))
        x = _whole(low + high, low - high, ROWS, DIM)
    return x


@triton.jit
def _flip(x, signs):
    return tl.where(signs < 0, -x, x)


# Levels


class _Ptx:
    """Instructions on 32 bits, each into a register of its own."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, operation: str, *operands: str | int) -> str:
        name = f"r{len(self.lines)}"
        kind = "u32" if operation in ("mul.lo", "sub") else "b32"
        self.lines.append(f"{operation}.{kind} {name}, {', '.join(map(str, operands))};")
        return name

    def text(self, results: list[str]) -> str:
        moves = [f"mov.b32 ${i}, {name};" for i, name in enumerate(results)]
        return "\n".join(["{", f".reg .b32 r<{len(self.lines)}>;", *self.lines, *moves, "}"])


def _each(nibble: int) -> int:
    return nibble * 0x11111111


def _lookup(ptx: _Ptx, index: str, table: list[int]) -> list[str]:
    """Bytes of a table of 8, for the nibbles of the low half of a word and for those of its high half."""
    words = [int.from_bytes(bytes(table[i : i + 4]), "little") for i in (0, 4)]
    return [ptx("prmt", *words, half) for half in (index, ptx("shr", index, 16))]


def _spread(ptx: _Ptx, word: str) -> list[str]:
    """A byte of ones for every nibble whose highest bit is set, in the order of `_lookup`."""
    up = ptx("shl", word, 4)
    return [ptx("prmt", word, up, order) for order in (0x9D8C, 0xBFAE)]  # 8 + i: the sign of byte i, eight times


def _float16(ptx: _Ptx, index: str, positive: str | None, levels: list[float]) -> list[str]:
    """Two stretches of four levels: those of the low nibbles, two registers, then those of the high nibbles.

    index: nibbles that number the levels; positive: nibbles whose highest bit is clear where a level is negated.
    """
    bits = np.array(levels, np.float16).view(np.uint16)
    small = ptx("and", index, _each(7)) if len(bits) > 8 else index
    upper = _spread(ptx, index) if len(bits) > 8 else []
    planes = []
    for shift in (0, 8):
        table = [int(b) >> shift & 255 for b in bits]
        found = _lookup(ptx, small, (table[:8] * 4)[:8])
        if upper:
            other = _lookup(ptx, small, table[8:])
            pairs = zip(found, other, upper, strict=True)
            found = [ptx("or", ptx("and", a, ptx("not", m)), ptx("and", b, m)) for a, b, m in pairs]
        planes.append(found)
    if positive is not None:
        signs = [ptx("and", ptx("not", mask), 0x80808080) for mask in _spread(ptx, positive)]
        planes[1] = [ptx("or", a, b) for a, b in zip(planes[1], signs, strict=True)]
    return [ptx("prmt", low, high, order) for order in (0x6240, 0x7351) for low, high in zip(*planes, strict=True)]


def _four_bits(ptx: _Ptx, low: str, high: str | None, levels: list[float]) -> list[str]:
    """Levels are symmetric, so half of them are looked up, by a code that counts from the middle, and given signs."""
    if high is None:
        negative = ptx("and", ptx("not", low), _each(8))
        below = ptx("sub", negative, ptx("shr", negative, 3))  # 7 in every negative nibble
        return _float16(ptx, ptx("and", ptx("xor", low, below), _each(7)), low, levels[8:])
    below = ptx("mul.lo", ptx("and", ptx("not", high), _each(1)), 15)
    return _float16(ptx, ptx("xor", low, below), ptx("shl", high, 3), levels[16:])


def _two_bits(ptx: _Ptx, low: str, high: str | None, levels: list[float]) -> list[str]:
    """The stretches 0 and 2 of a byte lie in its two nibbles, and after a shift 1 and 3."""
    index = [ptx("and", word, _each(3)) for word in (low, ptx("shr", low, 2))]
    if high is not None:
        upper = [ptx("and", word, _each(4)) for word in (ptx("shl", high, 2), high)]
        index = [ptx("or", a, b) for a, b in zip(index, upper, strict=True)]
    even, odd = (_float16(ptx, word, None, levels) for word in index)
    return [*even[:2], *odd[:2], *even[2:], *odd[2:]]


@lru_cache
def _level_ptx(levels: tuple[float, ...]) -> str:
    """PTX that takes 4 bytes of a plane, and of the plane of high bits and of its masks, to float16 a stretch.

    The masks say which columns' high bits lie further up in a byte, by 1 and by 2: these are moved down.
    """
    ptx, bits = _Ptx(), len(levels).bit_length() - 1
    stretches = 8 // PLANES[bits][0]
    low, high = f"${2 * stretches}", None
    if len(PLANES[bits]) > 1:
        high = f"${2 * stretches + 1}"
        for i in range(1 if stretches == 4 else 2):
            moved, mask = ptx("shr", high, i + 1), f"${2 * stretches + 2 + i}"  # strays fall on bits nobody reads
            high = ptx("or", ptx("and", high, ptx("not", mask)), ptx("and", moved, mask))
    unpack = _two_bits if stretches == 4 else _four_bits
    return ptx.text(unpack(ptx, low, high, [float(level) for level in levels]))


@triton.constexpr_function
def _stretches(levels: tuple[float, ...]) -> int:
    return 8 // PLANES[len(levels).bit_length() - 1][0]


@triton.constexpr_function
def _has_high(levels: tuple[float, ...]) -> bool:
    return len(PLANES[len(levels).bit_length() - 1]) > 1


@triton.constexpr_function
def _registers(outputs: int, inputs: int) -> str:
    return ",".join(["=r"] * outputs + ["r"] * inputs)


@triton.jit
def _pick(low, high, PLACE: tl.constexpr, LEVELS: tl.constexpr):
    """The levels of one stretch, by selects: for the interpreter, which knows no PTX."""
    WIDTH: tl.constexpr = 8 // _stretches(LEVELS)
    code = (low >> (PLACE * WIDTH)) & (2**WIDTH - 1)
    if _has_high(LEVELS):
        code |= ((high >> (PLACE * WIDTH)) & 1) << WIDTH
    level = tl.zeros(code.shape, tl.float16)
    for i in tl.static_range(len(LEVELS)):
        level = tl.where(code == i, tl.full(code.shape, LEVELS[i], tl.float16), level)
    return level


@triton.jit
def _levels(low, high, by_one, by_two, LEVELS: tl.constexpr, PTX: tl.constexpr):
    """Bytes [keys, dim / stretches] of the planes -> float16 levels of that shape, a stretch each."""
    FOUR: tl.constexpr = _stretches(LEVELS) == 4
    HIGH: tl.constexpr = _has_high(LEVELS)
    if len(PTX) > 0:
        if FOUR:
            if HIGH:
                return tl.inline_asm_elementwise(
                    PTX, _registers(8, 3), [low, high, by_one],
                    dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=False, pack=4,
                )  # fmt: skip
            else:
                return tl.inline_asm_elementwise(
                    PTX, _registers(8, 1), [low],
                    dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=False, pack=4,
                )  # fmt: skip
        elif HIGH:
            return tl.inline_asm_elementwise(
                PTX, _registers(4, 4), [low, high, by_one, by_two],
                dtype=(tl.float16, tl.float16), is_pure=False, pack=4,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                PTX, _registers(4, 1), [low], dtype=(tl.float16, tl.float16), is_pure=False, pack=4
            )
    else:
        high = high >> ((by_one & 1) + (by_two & 2)).to(tl.uint8)
        if FOUR:
            return (
                _pick(low, high, 0, LEVELS),
                _pick(low, high, 1, LEVELS),
                _pick(low, high, 2, LEVELS),
                _pick(low, high, 3, LEVELS),
            )
        else:
            return _pick(low, high, 0, LEVELS), _pick(low, high, 1, LEVELS)


# Write


@triton.jit
def _nearest(unit, LEVELS: tl.constexpr):
    """The code of each coordinate, and the length of its level, whose sign is the coordinate's."""
    HALF: tl.constexpr = len(LEVELS) // 2
    steps = tl.zeros(unit.shape, tl.int32)
    level = tl.full(unit.shape, LEVELS[HALF], tl.float32)
    for i in tl.static_range(HALF, 2 * HALF - 1):
        above = tl.abs(unit) > (LEVELS[i] + LEVELS[i + 1]) / 2
        steps += above.to(tl.int32)
        level = tl.where(above, LEVELS[i + 1], level)
    return tl.where(unit > 0, HALF + steps, HALF - 1 - steps), level


@triton.jit
def _put_plane(codes, target, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Codes below 2 ** WIDTH, [DIM], as bytes: no two share a bit, so a sum packs them."""
    STRETCHES: tl.constexpr = 8 // WIDTH
    apart = tl.reshape(codes, [STRETCHES, DIM // STRETCHES]) << (tl.arange(0, STRETCHES) * WIDTH)[:, None]
    tl.store(target + tl.arange(0, DIM // STRETCHES), tl.sum(apart, 0).to(tl.uint8))


@triton.jit
def _put_vector(
    x, record, offset, page, has_page,
    LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, LEVELS: tl.constexpr,
    DIM: tl.constexpr, STEPS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """x: float32 [1, DIM] with its signs flipped. Into a record's planes, and where it has one into its exact page."""
    turned = tl.reshape(_hadamard(x, 1, DIM, STEPS) * DIM**-0.5, [DIM])
    if EXACT:
        column = tl.arange(0, DIM)
        tl.store(page + offset * DIM + column, turned.to(page.dtype.element_ty), mask=has_page)
    length = tl.sqrt_rn(tl.sum(turned * turned, 0))
    unit = tl.div_rn(turned, tl.where(length > 0, length, 1.0))
    codes, level = _nearest(unit, LEVELS)
    inner = tl.sum(level * tl.abs(unit), 0)  # 0 of the zero vector alone
    scale = tl.minimum(tl.div_rn(length, tl.where(inner > 0, inner, 1.0)), HALF_MAX)
    WIDTH: tl.constexpr = 8 // _stretches(LEVELS)
    _put_plane(codes & (2**WIDTH - 1), record + LOW + offset * (DIM * WIDTH // 8), DIM, WIDTH)
    if _has_high(LEVELS):
        _put_plane(codes >> WIDTH, record + HIGH + offset * (DIM // 8), DIM, 1)
    tl.store((record + SCALE).to(tl.pointer_type(tl.float16), bitcast=True) + offset, scale.to(tl.float16))


@triton.jit(do_not_specialize=["slots", "num_slots"])
def _write(
    k, v, records, pages, exact_of, signs, centre, slots, num_slots,
    stride_k_row, stride_k_head, stride_v_row, stride_v_head,
    stride_record, stride_record_head, stride_page, stride_part, stride_page_head,
    KEY_LEVELS: tl.constexpr, VALUE_LEVELS: tl.constexpr, AT: tl.constexpr,
    DIM: tl.constexpr, STEPS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    EXACT: tl.constexpr, CENTRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row, head, and key or value: codes hang on the vector alone."""
    column = tl.arange(0, DIM)[None, :]
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sign = tl.load(signs + column)
    if CENTRED:
        middle = tl.load(centre + head * DIM + column)
    enter(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    block, offset = slot // BLOCK_SIZE, (slot % BLOCK_SIZE).to(tl.int32)
    record = records + block * stride_record + head * stride_record_head
    has_page = False
    if EXACT:
        number = tl.load(exact_of + block).to(tl.int64)
        has_page = number >= 0
        pages += number * stride_page + head * stride_page_head
    if tl.program_id(2) == 0:
        x = tl.load(k + row * stride_k_row + head * stride_k_head + column).to(tl.float32)
        if CENTRED:
            x -= middle
        x = _flip(x, sign)
        _put_vector(x, record, offset, pages, has_page, AT[0], AT[1], AT[4], KEY_LEVELS, DIM, STEPS, EXACT)
    else:
        x = _flip(tl.load(v + row * stride_v_row + head * stride_v_head + column).to(tl.float32), sign)
        if EXACT:
            pages += stride_part
        _put_vector(x, record, offset, pages, has_page, AT[2], AT[3], AT[5], VALUE_LEVELS, DIM, STEPS, EXACT)


# Attention


@triton.jit
def _cut(x, ROWS: tl.constexpr, DIM: tl.constexpr, STRETCHES: tl.constexpr):
    """[ROWS, DIM] -> as many stretches of columns."""
    left, right = _halves(x, ROWS, DIM)
    if STRETCHES == 4:
        a, b = _halves(left, ROWS, DIM // 2)
        c, d = _halves(right, ROWS, DIM // 2)
        return a, b, c, d
    else:
        return left, right


@triton.jit
def _glue(parts, ROWS: tl.constexpr, DIM: tl.constexpr, STRETCHES: tl.constexpr):
    if STRETCHES == 4:
        left = _whole(parts[0], parts[1], ROWS, DIM // 2)
        right = _whole(parts[2], parts[3], ROWS, DIM // 2)
        return _whole(left, right, ROWS, DIM)
    else:
        return _whole(parts[0], parts[1], ROWS, DIM)


@triton.jit
def _hide(x, PTX: tl.constexpr):
    """x, whose origin the compiler does not see: tensor cores then take keys and columns in their order.

    Else it would look for the loads of bytes and the joins behind a dot and interleave what it multiplies to suit
    them, in some tiles and not in others.
    """
    if len(PTX) > 0:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return x


@triton.jit
def _score(q, k, STRETCHES: tl.constexpr):
    scores = tl.dot(q[0], tl.trans(k[0]))
    for s in tl.static_range(1, STRETCHES):
        scores = tl.dot(q[s], tl.trans(k[s]), scores)
    return scores


@triton.jit
def _weigh(scores, seen, peak):
    """Weights of a tile's keys, what earlier weights are worth now, and the new peak of each row."""
    scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen no key yet
    return tl.exp2(scores - base[:, None]), tl.exp2(peak - base)[:, None], new_peak


@triton.jit
def _add(acc, decay, weights, v, STRETCHES: tl.constexpr):
    if STRETCHES == 4:
        return (
            tl.dot(weights, v[0], acc[0] * decay),
            tl.dot(weights, v[1], acc[1] * decay),
            tl.dot(weights, v[2], acc[2] * decay),
            tl.dot(weights, v[3], acc[3] * decay),
        )
    else:
        return tl.dot(weights, v[0], acc[0] * decay), tl.dot(weights, v[1], acc[1] * decay)


@triton.jit
def _add_up(total, decay, weights):
    """The sum of the weights as they are multiplied, by the tensor cores: the order of a `sum` hangs on the layout."""
    return tl.dot(weights, tl.full([weights.shape[1], SUM_LANES], 1.0, tl.float16), total * decay)


@triton.jit
def _load_levels(
    records, line, within,
    LOW: tl.constexpr, HIGH: tl.constexpr, LEVELS: tl.constexpr, PTX: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Of keys whose records begin at 'line' and that lie 'within' them. Any byte is some level: nothing is masked."""
    COLUMNS: tl.constexpr = DIM // _stretches(LEVELS)
    column = tl.arange(0, COLUMNS)[None, :]
    low = tl.load(records + (line + LOW + within * COLUMNS)[:, None] + column)
    high, by_one, by_two = low, low, low
    if _has_high(LEVELS):
        # A byte of high bits serves columns an eighth apart: as many of them as lie in this stretch.
        EIGHTH: tl.constexpr = DIM // 8
        high = tl.load(records + (line + HIGH + within * EIGHTH)[:, None] + column % EIGHTH)
        by_one = tl.where((column // EIGHTH) % 2 == 1, 255, 0).to(tl.uint8)
        by_two = tl.where((column // EIGHTH) // 2 == 1, 255, 0).to(tl.uint8)
    return _levels(low, high, by_one, by_two, LEVELS, PTX)


@triton.jit
def _find_blocks(table, start, stop, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of a tile's keys; tiles begin with a block."""
    lane = tl.arange(0, BLOCK_N)
    return tl.load(table + start // BLOCK_SIZE + lane // BLOCK_SIZE, mask=start + lane < stop, other=0)


@triton.jit
def _load_scales(records, line, within, read, AT: tl.constexpr):
    """float16; 0 of keys that no row takes by their codes: 0 * NaN of a stale block would poison a sum."""
    scales = (records + AT).to(tl.pointer_type(tl.float16), bitcast=True)
    return tl.load(scales + line // 2 + within, mask=read, other=0.0)


@triton.jit
def _scan_codes(
    acc, peak, total, q, position, begin, end, stop, split, splits, records, table, stride_record,
    KEY_LEVELS: tl.constexpr, KEY_PTX: tl.constexpr, VALUE_LEVELS: tl.constexpr, VALUE_PTX: tl.constexpr,
    AT: tl.constexpr, FIRST: tl.constexpr, RECENT: tl.constexpr,
    WINDOW: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    RUN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Online softmax over this program's tiles begin .. end: of each, the keys that a row does not take exactly."""
    # Block numbers and scales are fetched one tile ahead by hand: the compiler has only codes in flight by itself.
    lane = tl.arange(0, BLOCK_N)
    within = lane % BLOCK_SIZE
    start = _first_key(begin, split, splits, BLOCK_N, RUN, SPLIT)
    block = _find_blocks(table, start, stop, BLOCK_SIZE, BLOCK_N)
    line = block.to(tl.int64) * stride_record  # may pass 2**31
    read = (start + lane >= FIRST) & (start + lane < stop)
    key_scale = _load_scales(records, line, within, read, AT[4])
    value_scale = _load_scales(records, line, within, read, AT[5])
    for n in tl.range(begin, end):
        key = _first_key(n, split, splits, BLOCK_N, RUN, SPLIT) + lane
        line = block.to(tl.int64) * stride_record
        start = _first_key(n + 1, split, splits, BLOCK_N, RUN, SPLIT)
        block = _find_blocks(table, start, stop, BLOCK_SIZE, BLOCK_N)
        next_line = block.to(tl.int64) * stride_record
        read = (start + lane >= FIRST) & (start + lane < stop)
        next_key_scale = _load_scales(records, next_line, within, read, AT[4])
        next_value_scale = _load_scales(records, next_line, within, read, AT[5])

        k = _load_levels(records, line, within, AT[0], AT[1], KEY_LEVELS, KEY_PTX, DIM)
        scores = _score(q, k, _stretches(KEY_LEVELS)) * key_scale.to(tl.float32)[None, :]
        seen = (key >= FIRST)[None, :] & (key[None, :] + RECENT <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        weights, decay, peak = _weigh(scores, seen, peak)
        total = _add_up(total, decay, weights.to(tl.float16))
        v = _load_levels(records, line, within, AT[2], AT[3], VALUE_LEVELS, VALUE_PTX, DIM)
        weights *= value_scale.to(tl.float32)[None, :]
        acc = _add(acc, decay, weights.to(tl.float16), v, _stretches(VALUE_LEVELS))
        key_scale, value_scale = next_key_scale, next_value_scale
    return acc, peak, total


@triton.jit
def _load_exact(pages, line, mask, DIM: tl.constexpr, STRETCHES: tl.constexpr):
    COLUMNS: tl.constexpr = DIM // STRETCHES
    place = pages + line[:, None] + tl.arange(0, COLUMNS)[None, :]
    a = tl.load(place, mask=mask[:, None], other=0.0).to(tl.float16)
    b = tl.load(place + COLUMNS, mask=mask[:, None], other=0.0).to(tl.float16)
    if STRETCHES == 4:
        c = tl.load(place + 2 * COLUMNS, mask=mask[:, None], other=0.0).to(tl.float16)
        d = tl.load(place + 3 * COLUMNS, mask=mask[:, None], other=0.0).to(tl.float16)
        return a, b, c, d
    else:
        return a, b


@triton.jit
def _scan_exact(
    acc, peak, total, q, position, low, top, stop, pages, exact_of, table, stride_page, stride_part,
    K_STRETCHES: tl.constexpr, V_STRETCHES: tl.constexpr, FIRST: tl.constexpr, RECENT: tl.constexpr,
    WINDOW: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over the tiles with keys that some row takes exactly: the first, then the recent, ascending."""
    border = tl.maximum(top - RECENT + 1, low)  # the first recent key of any row
    firsts = tl.minimum(tl.cdiv(FIRST, BLOCK_N), tl.cdiv(stop, BLOCK_N))
    skipped = tl.minimum(low // BLOCK_N, firsts)  # behind the window
    others = tl.maximum(border // BLOCK_N, firsts)
    end = firsts + (tl.maximum(tl.cdiv(stop, BLOCK_N) - others, 0) if RECENT > 0 else 0)
    for n in tl.range(skipped, end, num_stages=STAGES):
        key = tl.where(n < firsts, n, n - firsts + others) * BLOCK_N + tl.arange(0, BLOCK_N)
        wanted = (key < stop) & ((key < FIRST) | (key >= border))
        block = tl.load(table + key // BLOCK_SIZE, mask=wanted, other=0)
        page = tl.load(exact_of + block, mask=wanted, other=-1)
        held = page >= 0
        line = page.to(tl.int64) * stride_page + (key % BLOCK_SIZE) * DIM
        scores = _score(q, _load_exact(pages, line, held, DIM, K_STRETCHES), K_STRETCHES)
        recent = key[None, :] + RECENT > position[:, None]
        seen = (key[None, :] <= position[:, None]) & (recent | (key < FIRST)[None, :])
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        weights, decay, peak = _weigh(scores, seen, peak)
        weights = weights.to(tl.float16)
        total = _add_up(total, decay, weights)
        v = _load_exact(pages + stride_part, line, held, DIM, V_STRETCHES)
        acc = _add(acc, decay, weights, v, V_STRETCHES)
    return acc, peak, total


@triton.jit
def _zeros(ROWS: tl.constexpr, DIM: tl.constexpr, STRETCHES: tl.constexpr):
    none = tl.zeros([ROWS, DIM // STRETCHES], tl.float32)
    if STRETCHES == 4:
        return none, none, none, none
    else:
        return none, none


@triton.jit(do_not_specialize=["query_start", "context_len", "block_tables", "stride_table", "seqs"])
def _attend_coded(
    q, records, pages, exact_of, signs, out, lse, query_start, context_len, block_tables, seqs, scale,
    stride_row, stride_q_head, stride_record, stride_record_head, stride_page, stride_part, stride_page_head,
    stride_table,
    KEY_LEVELS: tl.constexpr, KEY_PTX: tl.constexpr, VALUE_LEVELS: tl.constexpr, VALUE_PTX: tl.constexpr,
    AT: tl.constexpr, FIRST: tl.constexpr, RECENT: tl.constexpr,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, STEPS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT_N: tl.constexpr, EXACT_STAGES: tl.constexpr,
    RUN: tl.constexpr, SEARCH: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    EXACT: tl.constexpr = FIRST + RECENT > 0
    K_STRETCHES: tl.constexpr = _stretches(KEY_LEVELS)
    V_STRETCHES: tl.constexpr = _stretches(VALUE_LEVELS)
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

    low, _, _, high = _key_range(context, top, bottom, True, WINDOW, BLOCK_N)
    shares = tl.num_programs(2)
    share = tl.program_id(2)
    line = row * (tl.num_programs(1) * GROUP) + head
    takes_exact, split, splits = True, share, shares
    if SPLIT:
        line = line * shares + share
        if EXACT:  # one share more: the first, which has most to read
            takes_exact, split, splits = share == 0, share - 1, shares - 1
    coded = tl.maximum(high - RECENT, 0)  # where the last row's recent keys begin
    begin = _count_tiles(low // BLOCK_N, split, splits, RUN, SPLIT)
    end = _count_tiles(tl.cdiv(coded, BLOCK_N), split, splits, RUN, SPLIT)
    if SPLIT and EXACT:
        end = tl.where(takes_exact, begin, end)
    if SPLIT:
        idle = begin >= end
        if EXACT:
            idle = idle & (share > 0)
        if idle:
            tl.store(lse + line, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=valid)
            return

    column = tl.arange(0, DIM)[None, :]
    sign = tl.load(signs + column)
    x = tl.load(q + row[:, None] * stride_row + head[:, None] * stride_q_head + column, mask=valid[:, None], other=0.0)
    x = _hadamard(_flip(x.to(tl.float32), sign), BLOCK_M, DIM, STEPS) * scale
    turned = _cut(_hide(x.to(tl.float16), KEY_PTX), BLOCK_M, DIM, K_STRETCHES)
    table = block_tables + seq.to(tl.int64) * stride_table
    acc = _zeros(BLOCK_M, DIM, V_STRETCHES)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, SUM_LANES], tl.float32)  # the same in all its columns
    acc, peak, total = _scan_codes(
        acc, peak, total, turned, position, begin, end, coded, split, splits,
        records + kv_head * stride_record_head, table, stride_record,
        KEY_LEVELS, KEY_PTX, VALUE_LEVELS, VALUE_PTX, AT, FIRST, RECENT, WINDOW, DIM, BLOCK_SIZE, BLOCK_N, RUN, SPLIT,
    )  # fmt: skip
    if EXACT:
        acc, peak, total = _scan_exact(
            acc, peak, total, turned, position, low, top, tl.where(takes_exact, high, 0),
            pages + kv_head * stride_page_head, exact_of, table, stride_page, stride_part,
            K_STRETCHES, V_STRETCHES, FIRST, RECENT, WINDOW, DIM, BLOCK_SIZE, EXACT_N, EXACT_STAGES,
        )  # fmt: skip

    sums = tl.max(total, 1)
    share_of = 1.0 / tl.where(sums == 0.0, 1.0, sums)[:, None]  # a row without keys (padding) gives zeros
    if SPLIT:
        COLUMNS: tl.constexpr = DIM // V_STRETCHES
        for s in tl.static_range(V_STRETCHES):
            place = line[:, None] * DIM + s * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            tl.store(out + place, acc[s] * share_of, mask=valid[:, None])
        tl.store(lse + line, peak + tl.log2(sums), mask=valid)
    else:
        mixed = _glue(acc, BLOCK_M, DIM, V_STRETCHES) * share_of
        back = _flip(_hadamard(mixed, BLOCK_M, DIM, STEPS), sign) * DIM**-0.5
        tl.store(out + line[:, None] * DIM + column, back.to(out.dtype.element_ty), mask=valid[:, None])


@triton.jit(do_not_specialize=["query_start", "seqs", "shares"])
def _join_turned(
    parts, lse, signs, out, query_start, seqs, shares,
    HEADS: tl.constexpr, DIM: tl.constexpr, STEPS: tl.constexpr,
    SHARES: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_join` in attention.py, and rotated back: the mean of a line's parts weighted by 2 ** lse."""
    dim = tl.arange(0, DIM)
    sign = tl.load(signs + dim)[None, :]
    enter(PDL)
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    real = line < tl.load(query_start + seqs).to(tl.int64) * HEADS
    place = line[:, None] * shares + tl.arange(0, SHARES)[None, :]
    exists = real[:, None] & (tl.arange(0, SHARES) < shares)[None, :]
    power = tl.load(lse + place, mask=exists, other=float("-inf"))  # [LINES, SHARES]
    peak = tl.max(power, 1)
    weight = tl.exp2(power - tl.where(peak == float("-inf"), 0.0, peak)[:, None])
    total = tl.sum(weight, 1)
    mask = (power > float("-inf"))[:, :, None]
    part = tl.load(parts + place[:, :, None] * DIM + dim[None, None, :], mask=mask, other=0.0)
    mixed = tl.sum(part * weight[:, :, None], 1) / tl.where(total == 0.0, 1.0, total)[:, None]
    back = _flip(_hadamard(mixed, LINES, DIM, STEPS), sign) * DIM**-0.5
    tl.store(out + line[:, None] * DIM + dim[None, :], back.to(out.dtype.element_ty), mask=real[:, None])


# Launches

# dim -> tiles of few rows a sequence, in order of lanes; then that of a prompt chunk. 99 KB of shared memory hold them.
DECODE_TILES = {
    64: (Tile(16, 64, 4, 4), Tile(32, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    128: (Tile(16, 64, 4, 4), Tile(32, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    256: (Tile(16, 32, 4, 3), Tile(32, 32, 8, 3), Tile(64, 32, 8, 2)),
}
CHUNK_TILES = {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 32, 8, 2)}
MOST_REGISTERS = {(128, 16): 168}  # of a thread, by dim and lanes: three such programs run at once on an SM, else two
EXACT_TILE = Tile(0, 32, 0, 2)  # keys and stages of the exact part, in programs of any height


@dataclass(frozen=True, slots=True)
class Constants:
    """What the kernels are compiled with, of a layer's layout."""

    key_levels: tuple[float, ...]  # of a unit vector
    value_levels: tuple[float, ...]
    offsets: tuple[int, ...]  # of K low, K high, V low, V high, K scales, V scales; -1: no such plane

    def options(self, dim: int, block_size: int) -> dict[str, object]:
        return {
            "KEY_LEVELS": self.key_levels, "VALUE_LEVELS": self.value_levels, "AT": self.offsets,
            "DIM": dim, "STEPS": dim.bit_length() - 1, "BLOCK_SIZE": block_size,
        }  # fmt: skip


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


@lru_cache
def _signs(dim: int, device: torch.device) -> Tensor:
    """float32 [dim]. Sent once, by the run that precedes every capture."""
    return Rotation(dim).matrix()[0].sign().to(device=device, dtype=torch.float32)  # Hadamard's first row is all ones


def _check(layer: CodedLayer) -> None:
    layout, pages = layer.layout, layer.pages
    assert layout.dim in TQ_DIMS, f"head_dim {layout.dim}: the kernels rotate {TQ_DIMS}"
    assert layer.keys.correction == layer.values.correction == "unbiased", "the kernels know one scale"
    assert layer.records.stride(2) == 1 and layer.records.stride(0) % 2 == 0, layer.records.stride()
    assert (pages is None) == (layer.exact_of is None) == (layer.first + layer.recent == 0), "pages serve exact rows"
    assert pages is None or pages.stride()[3:] == (layout.dim, 1), pages.stride()


def tq_write(
    layer: CodedLayer,
    k: Tensor,  # [rows, kv_heads, dim], a strided view of qkv
    v: Tensor,
    slots: Tensor,  # int32 [rows]: block * block_size + offset; a negative slot is not written
) -> None:
    _check(layer)
    assert k.stride(2) == v.stride(2) == 1, (k.stride(), v.stride())
    assert layer.centre is None or layer.centre.is_contiguous()
    rows, kv_heads, dim = k.shape
    layout, records, pages = layer.layout, layer.records, layer.pages
    if not rows:
        return
    run(
        _write, (rows, kv_heads, 2),
        k, v, records, pages, layer.exact_of, _signs(dim, k.device), layer.centre, slots,
        len(records) * layout.block_size,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), *records.stride()[:2],
        *((0, 0, 0) if pages is None else pages.stride()[:3]),
        **_constants(layout).options(dim, layout.block_size),
        EXACT=pages is not None, CENTRED=layer.centre is not None, num_warps=1,
    )  # fmt: skip


def _choose_tile(lanes: int, dim: int) -> tuple[Tile, bool]:
    """The smallest tile that holds all lanes of a sequence, or else the chunk tile and True."""
    few = next((tile for tile in DECODE_TILES[dim] if tile.block_m >= lanes), None)
    return (few, False) if few else (CHUNK_TILES[dim], True)


@lru_cache(maxsize=4096)
def _launch(
    rows: int, seqs: int, heads: int, kv_heads: int, dim: int, max_query: int, most_query: int, keys: int, gpu: Gpu
) -> Launch:
    """As attention._launch: those with max_query <= most_query get the same block_n, unit and splits."""
    group, alike = heads // kv_heads, max_query <= most_query
    tile, search = _choose_tile(max_query * group, dim)
    assert group <= tile.block_m, f"{group} query heads a K/V head: a tile has {tile.block_m} lanes"
    widest, cut_rows = (most_query, most_query * seqs) if alike else (max_query, rows)
    like, like_search = _choose_tile(widest * group, dim)
    tiles = rows // (tile.block_m // group) + seqs if search else seqs
    like_tiles = cut_rows // (like.block_m // group) + seqs if like_search else seqs
    if (dim, like.block_m) in MOST_REGISTERS:
        gpu = replace(gpu, sms=gpu.sms * 3 // 2)
    unit, splits = _choose_cuts(like, like_tiles * kv_heads, cut_rows * heads * dim, keys, like_search, alike, gpu)
    splits = min(splits, MOST_SPLITS - 1)  # the exact share is one more
    return Launch(replace(tile, block_n=like.block_n), tiles, splits, unit, search)


def tq_attention(
    layer: CodedLayer,
    q: Tensor,  # [rows, heads, dim], a strided view of qkv
    view: AttentionView,
    scale: float,
    window: int = 0,  # 0: all keys; else a row sees keys nearer than this
    most_query: int = 0,  # batches of up to so many rows a sequence, in as many sequences, give a row the same bits
) -> Tensor:  # [rows, heads * dim]; rows past query_start[-1] are left unwritten
    """Causal attention: a row takes the first and its most recent keys from exact pages, all others by their codes."""
    _check(layer)
    assert q.stride(2) == 1, q.stride()
    rows, heads, dim = q.shape
    layout, records, pages, device = layer.layout, layer.records, layer.pages, q.device
    seqs, kv_heads = view.context_len.shape[0], records.shape[1]
    out = torch.empty((rows, heads * dim), dtype=q.dtype, device=device)
    if rows == 0 or seqs == 0:
        return out
    keys = min(view.max_context, window + max(view.max_query, most_query)) if window else view.max_context
    launch = _launch(rows, seqs, heads, kv_heads, dim, view.max_query, most_query, keys, _gpu(device))
    tile, split, signs = launch.tile, launch.splits > 1, _signs(dim, device)
    constants = _constants(layout)
    levels = (constants.key_levels, constants.value_levels)
    key_ptx, value_ptx = ("", "") if device.type == "cpu" else map(_level_ptx, levels)  # CPU: the interpreter
    assert tile.block_n % layout.block_size == 0 == EXACT_TILE.block_n % layout.block_size, layout.block_size
    shares = launch.splits + (split and pages is not None)
    parts, lse = out, out  # one share writes its result directly; lse is then not touched
    if split:
        parts = torch.empty((rows, heads, shares, dim), dtype=torch.float32, device=device)
        lse = torch.empty((rows, heads, shares), dtype=torch.float32, device=device)
    run(
        _attend_coded, (launch.tiles, kv_heads, shares),
        q, records, pages, layer.exact_of, signs, parts, lse, view.query_start, view.context_len, view.block_tables,
        seqs, scale * math.log2(math.e) * dim**-0.5,
        q.stride(0), q.stride(1), *records.stride()[:2], *((0, 0, 0) if pages is None else pages.stride()[:3]),
        view.block_tables.stride(0),
        **constants.options(dim, layout.block_size),
        FIRST=layer.first, RECENT=layer.recent, WINDOW=window, GROUP=heads // kv_heads,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, EXACT_N=EXACT_TILE.block_n, EXACT_STAGES=EXACT_TILE.stages,
        RUN=launch.unit // tile.block_n if split else 1, SEARCH=launch.search, SPLIT=split,
        KEY_PTX=key_ptx, VALUE_PTX=value_ptx, num_warps=tile.warps, num_stages=tile.stages,
        maxnreg=MOST_REGISTERS.get((dim, tile.block_m)),
    )  # fmt: skip
    if split:
        padded = triton.next_power_of_2(shares)
        lines = max(JOIN_ELEMENTS // (padded * dim), 1)
        run(
            _join_turned, (triton.cdiv(rows * heads, lines),), parts, lse, signs, out, view.query_start, seqs, shares,
            HEADS=heads, DIM=dim, STEPS=dim.bit_length() - 1, SHARES=padded, LINES=lines, num_warps=4,
        )  # fmt: skip
    return out
