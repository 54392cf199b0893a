"""Lines of a weight times rows of x: the one place where kernels read a weight, however it is stored.

    weight [out, in]     some lines          a tile is [lines, BLOCK_K] of floats, or [lines, PLANE] of coded words
    x [rows, in]         some rows           a tile is [rows, BLOCK_K], or [rows, PLANE] for each plane of the words
    sum                  W tile . x tile^T, added up over 'in' in order  ->  float32 [lines, rows]

A number depends on its own line and row alone. Floats are multiplied as they are (LEVELS "plain"). Codes become numbers
in registers (dequantise.py). A group's scale multiplies the float32 sum of its group; that of e2m1 multiplies the
weights, which is exact too. An offset multiplies the sum of x over its group, which a dot with ones makes.

With SLICES the warps of a program share 'in' instead of its lines: each takes every so many-th tile, as a batch of dots
of its own, and their sums are added at the end, in order. So a program may have as few as 16 lines, and a small matrix
fills the GPU without a second pass over parts (SPLIT).
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparkdraft.kernels.cuda.linear.dequantise import (
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
from sparkdraft.kernels.cuda.runtime.ending import sum_rows
from sparkdraft.weights.plane_layout import SIZES


@triton.jit
def _load(place, inside):
    """Return what is not inside is 0; None: all is. A weight is read once, and shall not displace x in the L2."""
    if inside is None:
        return tl.load(place, eviction_policy="evict_first")
    else:
        return tl.load(place, mask=inside, other=0, eviction_policy="evict_first")


# A tile has the shape [lines or rows, columns]; with slices, [SLICES, lines or rows, columns].


@triton.jit
def _tile(first, k, step, SLICES: tl.constexpr):
    """Places of a tile from where its lines or rows begin; slices lie 'step' apart."""
    if SLICES == 1:
        return first[:, None] + k[None, :]
    else:
        return first[None, :, None] + (tl.arange(0, SLICES) * step)[:, None, None] + k[None, None, :]


@triton.jit
def _by_column(k, step, SLICES: tl.constexpr):
    """Numbers of a tile's columns, from its first slice's first on."""
    return k[None, :] if SLICES == 1 else (tl.arange(0, SLICES) * step)[:, None, None] + k[None, None, :]


@triton.jit
def _by_line(value, SLICES: tl.constexpr):
    """For a tile, from a number per line or row; with slices, [SLICES, lines] or [lines]."""
    if SLICES == 1:
        return value[:, None]
    else:
        return value[None, :, None] if len(value.shape) == 1 else value[:, :, None]


@triton.jit
def _load_x(x_tile, real, column, first, IN: tl.constexpr, EVEN: tl.constexpr):
    """A tile of x from a column on; rows that are not 'real' and, unless all is EVEN, columns past the end are 0."""
    if EVEN:
        return tl.load(x_tile + first, mask=real, other=0.0, eviction_policy="evict_last")
    else:
        return tl.load(x_tile + first, mask=real & (column < IN - first), other=0.0, eviction_policy="evict_last")


@triton.jit
def _dot(weight, x, acc, PRECISION: tl.constexpr, SLICES: tl.constexpr):
    return tl.dot(weight, tl.trans(x) if SLICES == 1 else tl.permute(x, (0, 2, 1)), acc, input_precision=PRECISION)


@triton.jit
def _zeros(LINES: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr):
    return tl.zeros([LINES, ROWS] if SLICES == 1 else [SLICES, LINES, ROWS], tl.float32)


@triton.jit
def sweep(
    x_rows, real, weight, scale, offset, row_scale, line, good, part,
    LEVELS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr, IN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    SLICES: tl.constexpr = 1,
):  # fmt: skip
    """float32 [lines, rows], 0 where not 'real', of the weight's lines 'line' (int64).

    x_rows: where rows of x begin. good: which lines are read; None: all. row_scale: float32 per line, or None. SPLIT:
    'in' is cut into so many parts, of which this is one. SLICES: of a program's own part.
    """
    if LEVELS == "plain":
        acc = _plain(x_rows, real, weight + line * IN, good, part, IN, PRECISION, BLOCK_K, SPLIT, SLICES)
    else:
        acc = _coded(
            x_rows, real, weight, scale, offset, line, good, part,
            LEVELS, PLANE, GROUP, SCALE, OFFSET, PACKED, IN, PRECISION, SPLIT, SLICES,
        )  # fmt: skip
    if SLICES > 1:
        LINES: tl.constexpr = line.shape[0]
        ROWS: tl.constexpr = x_rows.shape[0]
        acc = tl.reshape(sum_rows(tl.reshape(acc, [SLICES, LINES * ROWS]), SLICES, LINES * ROWS), [LINES, ROWS])
    if row_scale is not None:
        acc *= tl.load(row_scale + line)[:, None]
    return acc


@triton.jit
def _plain(
    x_rows, real, lines, good, part,
    IN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = BLOCK_K * SLICES
    EACH: tl.constexpr = ((IN + STEP - 1) // STEP + SPLIT - 1) // SPLIT * STEP  # columns of a part
    EVEN: tl.constexpr = IN % STEP == 0
    k = tl.arange(0, BLOCK_K)
    weight_tile, x_tile = _tile(lines, k, BLOCK_K, SLICES), _tile(x_rows, k, BLOCK_K, SLICES)
    real, column = _by_line(real, SLICES), _by_column(k, BLOCK_K, SLICES)
    read = None if good is None else _by_line(good, SLICES)
    acc = _zeros(lines.shape[0], x_rows.shape[0], SLICES)
    begin = 0 if SPLIT == 1 else part * EACH
    end = IN if SPLIT == 1 else tl.minimum(begin + EACH, IN)
    for first in tl.range(begin, end, STEP):
        if EVEN:
            w = _load(weight_tile + first, read)
        else:
            inside = column < IN - first
            w = _load(weight_tile + first, inside if read is None else read & inside)
        acc = _dot(w, _load_x(x_tile, real, column, first, IN, EVEN), acc, PRECISION, SLICES)
    return acc


@triton.jit
def _tiles(tile, TILES: tl.constexpr, SLICES: tl.constexpr):
    """Numbers of the tiles of all slices, [SLICES, 1] if there are several; one past the end counts as the last."""
    if SLICES == 1:
        return tl.minimum(tile, TILES - 1)
    else:
        return tl.minimum(tile + tl.arange(0, SLICES), TILES - 1)[:, None]


@triton.jit
def _word(lines, column, good, KIND: tl.constexpr, GROUP: tl.constexpr):
    """The 32-bit word that holds the number of a column's group."""
    return _load(lines + column // GROUP * group_bytes(KIND) // 4 * STRIP, good)


@triton.jit
def _of_lines(place, SLICES: tl.constexpr):
    return place if SLICES == 1 else place[None, :]


@triton.jit
def _number(word, column, KIND: tl.constexpr, GROUP: tl.constexpr):
    return group_number(word, column // GROUP * group_bytes(KIND) % 4, KIND)


@triton.constexpr_function
def _one_word(kind: str, group: int, tile: int) -> bool:
    """Return whether all numbers of a tile lie in one word, so that the next tile's can be fetched ahead."""
    return kind != "" and 4 * group % (tile * SIZES[kind]) == 0


@triton.constexpr_function
def _line_words(kind: str, group: int, columns: int) -> int:
    """32-bit words of a line's scales or offsets."""
    return ((columns + group - 1) // group * SIZES[kind] + 3) // 4 if kind else 0


@triton.jit
def _factor(
    word, column, LINES: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, PACKED: tl.constexpr,
    INSIDE: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Return what `plane` multiplies e2m1 by: the scale of a column's group if it is multiplied INSIDE, else 1."""
    if INSIDE:
        return _by_line(scale_factor(word, column // GROUP % 4, SCALE, PACKED), SLICES)
    else:
        return _by_line(tl.full([LINES], SCALED if PACKED else 1.0, tl.int32 if PACKED else tl.float32), SLICES)


@triton.jit
def _coded(
    x_rows, real, weight, scale, offset, line, good, part,
    LEVELS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr, IN: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    LINES: tl.constexpr = line.shape[0]
    ROWS: tl.constexpr = x_rows.shape[0]
    TYPE: tl.constexpr = x_rows.dtype.element_ty
    COUNT: tl.constexpr = planes_of(LEVELS)
    TILE: tl.constexpr = COUNT * PLANE
    TILES: tl.constexpr = (IN + TILE - 1) // TILE
    EACH: tl.constexpr = ((TILES + SLICES - 1) // SLICES + SPLIT - 1) // SPLIT * SLICES  # tiles of a part
    EVEN: tl.constexpr = IN % (TILE * SLICES) == 0
    INSIDE: tl.constexpr = LEVELS == "e2m1" and (SCALE == "e8m0" or SCALE == "e5m3") and OFFSET == ""
    UNIT: tl.constexpr = unit(LEVELS, PACKED)
    APART: tl.constexpr = (SCALE != "" or OFFSET != "") and not INSIDE  # groups are summed apart
    WHOLE: tl.constexpr = GROUP != 0 and (GROUP % TILE == 0 or TILE % GROUP == 0)
    ONE_SCALE: tl.constexpr = _one_word(SCALE, GROUP, TILE)
    ONE_OFFSET: tl.constexpr = _one_word(OFFSET, GROUP, TILE)
    AHEAD: tl.constexpr = ONE_SCALE and not INSIDE  # what becomes a side of a dot, Triton itself fetches ahead
    k = tl.arange(0, PLANE)
    word_tile = _tile(weight + line_of_strip(line, TILES, PLANE), k, STRIP * PLANE, SLICES)
    x_tile = _tile(x_rows, k, TILE, SLICES)
    real, columns = _by_line(real, SLICES), _by_column(k, TILE, SLICES)
    read = None if good is None else _by_line(good, SLICES)
    good = None if good is None else _of_lines(good, SLICES)
    acc = _zeros(LINES, ROWS, SLICES)
    begin = 0 if SPLIT == 1 else part * EACH
    end = TILES if SPLIT == 1 else tl.minimum(begin + EACH, TILES)
    if SCALE != "":
        scales = _of_lines(scale + line_of_strip(line, _line_words(SCALE, GROUP, TILES * TILE), 1), SLICES)
    if OFFSET != "":
        offsets = _of_lines(offset + line_of_strip(line, _line_words(OFFSET, GROUP, TILES * TILE), 1), SLICES)
        ones = tl.full([LINES, PLANE] if SLICES == 1 else [SLICES, LINES, PLANE], 1.0, TYPE)
    first = _tiles(begin, TILES, SLICES) * TILE  # a last part may have no tiles
    if AHEAD:
        next_scale = _word(scales, first, good, SCALE, GROUP)
    if ONE_OFFSET:
        next_offset = _word(offsets, first, good, OFFSET, GROUP)
    for tile in tl.range(begin, end, SLICES):
        if EVEN or SLICES == 1:
            words = _load(word_tile + tile * (STRIP * PLANE), read)
        else:
            inside = columns < (TILES - tile) * TILE
            words = _load(word_tile + tile * (STRIP * PLANE), inside if read is None else read & inside)
        following = _tiles(tile + SLICES, TILES, SLICES) * TILE
        if AHEAD:
            scale_word = next_scale
            next_scale = _word(scales, following, good, SCALE, GROUP)
        elif ONE_SCALE:
            scale_word = _word(scales, _tiles(tile, TILES, SLICES) * TILE, good, SCALE, GROUP)
        if ONE_OFFSET:
            offset_word = next_offset
            next_offset = _word(offsets, following, good, OFFSET, GROUP)
        sums, total = _zeros(LINES, ROWS, SLICES), _zeros(LINES, ROWS, SLICES)  # of a group, and of x in it
        for number in tl.static_range(COUNT):
            column = _tiles(tile, TILES, SLICES) * TILE + number * PLANE
            value = _load_x(x_tile, real, columns, tile * TILE + number * PLANE, IN, EVEN)
            factor = None
            if SCALE != "" and not ONE_SCALE:
                scale_word = _word(scales, column, good, SCALE, GROUP)
            if LEVELS == "e2m1":
                word = scale_word if INSIDE else None
                factor = _factor(word, column, LINES, GROUP, SCALE, PACKED, INSIDE, SLICES)
            w = plane(words, factor, number, LEVELS, TYPE, PACKED)
            if APART:
                sums = _dot(w, value, sums, PRECISION, SLICES)
                if OFFSET != "":
                    total = _dot(ones, value, total, PRECISION, SLICES)
                if not WHOLE or number == COUNT - 1 or (number + 1) * PLANE % GROUP == 0:
                    if SCALE != "":
                        acc += sums * _by_line(_number(scale_word, column, SCALE, GROUP) * UNIT, SLICES)
                    else:
                        acc += sums * UNIT
                    sums = _zeros(LINES, ROWS, SLICES)
                    if OFFSET != "":
                        if not ONE_OFFSET:
                            offset_word = _word(offsets, column, good, OFFSET, GROUP)
                        acc += total * _by_line(_number(offset_word, column, OFFSET, GROUP), SLICES)
                        total = _zeros(LINES, ROWS, SLICES)
            else:
                acc = _dot(w, value, acc, PRECISION, SLICES)
    if not APART and UNIT != 1.0:
        acc *= UNIT
    return acc
