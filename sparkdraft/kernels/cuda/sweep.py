"""Lines of a weight times rows of x: the one place where kernels read a weight, however it is stored.

    weight [out, in]     some lines          a tile is [lines, BLOCK_K] of floats, or [lines, PLANE] of coded words
    x [rows, in]         some rows           a tile is [rows, BLOCK_K], or [rows, PLANE] for each plane of the words
    sum                  W tile . x tile^T, added up over 'in' in order  ->  float32 [lines, rows]

'in' is gone through in order, so a number depends on its own line and row alone. Floats of x's own type are multiplied
as they are (LEVELS "plain"). Codes (weights/plane_layout.py) become numbers in registers (decode.py). A group's scale
multiplies the float32 sum of its group, which rounds nothing; that of e2m1 multiplies the weights, which is exact too.
An offset multiplies the sum of x over its group, which a dot with ones makes in the layout of the other sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparkdraft.kernels.cuda.decode import (
    SCALED,
    STRIP,
    group_bytes,
    group_number,
    line_of_strip,
    plane,
    planes_of,
    scale_factor,
    unit,
)
from sparkdraft.weights.plane_layout import SIZES


@triton.jit
def _load(place, inside):
    """What lies outside is 0; inside None: nothing does. A weight is read once, and shall not displace x in the L2."""
    if inside is None:
        return tl.load(place, eviction_policy="evict_first")
    else:
        return tl.load(place, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def sweep(
    x_rows, real, weight, scale, offset, row_scale, line, good, part,
    LEVELS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr, IN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """float32 [lines, rows], 0 where not 'real', of the weight's lines 'line' (int64).

    x_rows: where rows of x begin. good: which lines are read; None: all. row_scale: float32 per line, or None. SPLIT:
    'in' is cut into so many parts, of which this is one.
    """
    if LEVELS == "plain":
        acc = _plain(x_rows, real, weight + line * IN, good, part, IN, PRECISION, BLOCK_K, SPLIT)
    else:
        acc = _coded(
            x_rows, real, weight, scale, offset, line, good, part,
            LEVELS, PLANE, GROUP, SCALE, OFFSET, PACKED, IN, PRECISION, SPLIT,
        )  # fmt: skip
    if row_scale is not None:
        acc *= tl.load(row_scale + line)[:, None]
    return acc


@triton.jit
def _plain(
    x_rows, real, lines, good, part,
    IN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = ((IN + BLOCK_K - 1) // BLOCK_K + SPLIT - 1) // SPLIT * BLOCK_K  # columns of a part
    EVEN: tl.constexpr = IN % BLOCK_K == 0
    k = tl.arange(0, BLOCK_K)
    weight_tile = lines[:, None] + k[None, :]
    x_tile = x_rows[:, None] + k[None, :]
    acc = tl.zeros([lines.shape[0], x_rows.shape[0]], tl.float32)
    begin = 0 if SPLIT == 1 else part * EACH
    end = IN if SPLIT == 1 else tl.minimum(begin + EACH, IN)
    for first in tl.range(begin, end, BLOCK_K):
        if EVEN:
            w = _load(weight_tile + first, None if good is None else good[:, None])
            value = tl.load(x_tile + first, mask=real[:, None], other=0.0, eviction_policy="evict_last")
        else:
            inside = (k < IN - first)[None, :]
            w = _load(weight_tile + first, inside if good is None else good[:, None] & inside)
            value = tl.load(x_tile + first, mask=real[:, None] & inside, other=0.0, eviction_policy="evict_last")
        acc = tl.dot(w, tl.trans(value), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _word(lines, column, good, KIND: tl.constexpr, GROUP: tl.constexpr):
    """The 32-bit word that holds the number of a column's group."""
    return _load(lines + column // GROUP * group_bytes(KIND) // 4 * STRIP, good)


@triton.jit
def _number(word, column, KIND: tl.constexpr, GROUP: tl.constexpr):
    return group_number(word, column // GROUP * group_bytes(KIND) % 4, KIND)


@triton.constexpr_function
def _one_word(kind: str, group: int, tile: int) -> bool:
    """Whether all numbers of a tile lie in one word, so that the next tile's can be fetched ahead."""
    return kind != "" and 4 * group % (tile * SIZES[kind]) == 0


@triton.constexpr_function
def _line_words(kind: str, group: int, columns: int) -> int:
    """32-bit words of a line's scales or offsets."""
    return ((columns + group - 1) // group * SIZES[kind] + 3) // 4 if kind else 0


@triton.jit
def _coded(
    x_rows, real, weight, scale, offset, line, good, part,
    LEVELS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr, IN: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = x_rows.dtype.element_ty
    COUNT: tl.constexpr = planes_of(LEVELS)
    TILE: tl.constexpr = COUNT * PLANE
    TILES: tl.constexpr = (IN + TILE - 1) // TILE
    EACH: tl.constexpr = (TILES + SPLIT - 1) // SPLIT  # tiles of a part
    EVEN: tl.constexpr = IN % TILE == 0
    INSIDE: tl.constexpr = LEVELS == "e2m1" and (SCALE == "e8m0" or SCALE == "e5m3") and OFFSET == ""
    UNIT: tl.constexpr = unit(LEVELS, PACKED)
    APART: tl.constexpr = (SCALE != "" or OFFSET != "") and not INSIDE  # groups are summed apart
    WHOLE: tl.constexpr = GROUP != 0 and (GROUP % TILE == 0 or TILE % GROUP == 0)
    ONE_SCALE: tl.constexpr = _one_word(SCALE, GROUP, TILE)
    ONE_OFFSET: tl.constexpr = _one_word(OFFSET, GROUP, TILE)
    AHEAD: tl.constexpr = ONE_SCALE and not INSIDE  # what becomes a side of a dot, Triton itself fetches ahead
    k = tl.arange(0, PLANE)
    word_tile = weight + line_of_strip(line, TILES, PLANE)[:, None] + k[None, :]
    x_tile = x_rows[:, None] + k[None, :]
    acc = tl.zeros([line.shape[0], x_rows.shape[0]], tl.float32)
    begin = 0 if SPLIT == 1 else part * EACH
    end = TILES if SPLIT == 1 else tl.minimum(begin + EACH, TILES)
    if SCALE != "":
        scales = scale + line_of_strip(line, _line_words(SCALE, GROUP, TILES * TILE), 1)
    if OFFSET != "":
        offsets = offset + line_of_strip(line, _line_words(OFFSET, GROUP, TILES * TILE), 1)
        ones = tl.full([line.shape[0], PLANE], 1.0, TYPE)
    first = 0 if SPLIT == 1 else tl.minimum(begin, TILES - 1) * TILE  # a last part may have no tiles
    if AHEAD:
        next_scale = _word(scales, first, good, SCALE, GROUP)
    if ONE_OFFSET:
        next_offset = _word(offsets, first, good, OFFSET, GROUP)
    for tile in tl.range(begin, end):
        words = _load(word_tile + tile * (STRIP * PLANE), None if good is None else good[:, None])
        following = tl.minimum(tile + 1, end - 1) * TILE
        if AHEAD:
            scale_word = next_scale
            next_scale = _word(scales, following, good, SCALE, GROUP)
        elif ONE_SCALE:
            scale_word = _word(scales, tile * TILE, good, SCALE, GROUP)
        if ONE_OFFSET:
            offset_word = next_offset
            next_offset = _word(offsets, following, good, OFFSET, GROUP)
        sums = tl.zeros([line.shape[0], x_rows.shape[0]], tl.float32)  # of a group
        total = tl.zeros([line.shape[0], x_rows.shape[0]], tl.float32)  # of x in it
        for number in tl.static_range(COUNT):
            column = tile * TILE + number * PLANE
            if EVEN:
                value = tl.load(x_tile + column, mask=real[:, None], other=0.0, eviction_policy="evict_last")
            else:
                inside = (k < IN - column)[None, :]
                value = tl.load(x_tile + column, mask=real[:, None] & inside, other=0.0, eviction_policy="evict_last")
            factor = None
            if SCALE != "" and not ONE_SCALE:
                scale_word = _word(scales, column, good, SCALE, GROUP)
            if LEVELS == "e2m1":
                if INSIDE:
                    factor = scale_factor(scale_word, column // GROUP % 4, SCALE, PACKED)[:, None]
                else:
                    factor = tl.full([line.shape[0], 1], SCALED if PACKED else 1.0, tl.int32 if PACKED else tl.float32)
            w = plane(words, factor, number, LEVELS, TYPE, PACKED)
            if APART:
                sums = tl.dot(w, tl.trans(value), sums, input_precision=PRECISION)
                if OFFSET != "":
                    total = tl.dot(ones, tl.trans(value), total, input_precision=PRECISION)
                if not WHOLE or number == COUNT - 1 or (number + 1) * PLANE % GROUP == 0:
                    if SCALE != "":
                        acc += sums * (_number(scale_word, column, SCALE, GROUP) * UNIT)[:, None]
                    else:
                        acc += sums * UNIT
                    sums = tl.zeros([line.shape[0], x_rows.shape[0]], tl.float32)
                    if OFFSET != "":
                        if not ONE_OFFSET:
                            offset_word = _word(offsets, column, good, OFFSET, GROUP)
                        acc += total * _number(offset_word, column, OFFSET, GROUP)[:, None]
                        total = tl.zeros([line.shape[0], x_rows.shape[0]], tl.float32)
            else:
                acc = tl.dot(w, tl.trans(value), acc, input_precision=PRECISION)
    if not APART and UNIT != 1.0:
        acc *= UNIT
    return acc
