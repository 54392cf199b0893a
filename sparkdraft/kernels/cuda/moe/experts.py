"""A mixture of experts: the matmuls of all tokens with the experts chosen for them, and the sum of their results.

A pair is a token and one of its experts (routing.py). The numbers of tokens, choices and experts decide which way a
batch goes:

    so few tokens that hardly two share an expert        a program per pair and strip of gate_up; then one per token and
                                                         strip of down, which takes the lines of all of the token's
                                                         experts at once, and adds their results up at its end
    more                                                 pairs are sorted by expert and cut into blocks of 16 to 128;
                                                         a program per block and strip of gate_up, one of down, and a
                                                         third kernel that adds up the results of each token

As in few_tokens.py a weight is the dot's left side, and pairs are its right, padded to 8 at least. In batches of up to
MOST_TOKENS tokens of a 16 bit type, a token's result has the same bits in any batch:

    gate_up      one kernel with one tile serves both ways
    down         both ways run the same tensor core instruction (`_same_instruction`) over the same slices of 'in'
    sum          in float32 by fma, in the token's order of choice
    squares      for the next norm, of the same strips in both ways, added up by the same tree (`_tree`)

Beyond that a block's size follows the number of tokens, and results between down and sum are kept in x's type, which is
half the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import rms_norm
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.linear.few_tokens import (
    Launch,
    Tile,
    activate,
    check_gain,
    check_weight,
    constants,
    fit_stages,
    load_squares,
    norm_scale,
    padded_tokens,
    parts_of,
    prepare,
    runs_wgmma,
    step_of,
)
from sparkdraft.kernels.cuda.linear.sweep import sweep
from sparkdraft.kernels.cuda.moe.routing import FIELDS, MOST_CHOICES, Blocks, cut
from sparkdraft.kernels.cuda.runtime import pdl, tuned
from sparkdraft.kernels.cuda.runtime.ending import square
from sparkdraft.kernels.cuda.runtime.gpu import Gpu, gpu_of
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.kernels.ops import Activation, Norm, Normed, Routing
from sparkdraft.weights.linear import ExpertLinear, WeightTiles

SPARSE = 4  # pairs are taken one by one where there are this many experts for each
SUM_BLOCK = 512  # columns that a program of the sum takes
GATE_UP, DOWN, ROW_DOWN = "experts_gate_up", "experts_down", "experts_row_down"  # in the tables of tuned tiles
FEW_GATE_UP, FEW_DOWN = "experts_few_gate_up", "experts_few_down"  # of up to few_tokens.MOST_TOKENS rows
FEW = (FEW_GATE_UP, FEW_DOWN, ROW_DOWN)  # whose tiles are kept by a row's choices; others by the pairs of a block


@triton.jit
def _pairs(ids, order, table, BLOCK_M: tl.constexpr):
    """This program's expert, or -1; its pairs, and which lanes have one. table None: the program is its only pair."""
    lane = tl.arange(0, BLOCK_M)
    if table is None:
        expert = tl.load(ids + tl.program_id(0))
        pair, real = tl.zeros([BLOCK_M], tl.int32) + tl.program_id(0), lane < 1
    else:
        entry = table + tl.program_id(0) * FIELDS
        expert = tl.load(entry)
        place = tl.load(entry + 1) + lane
        real = (place < tl.load(entry + 2)) & (expert >= 0)
        pair = tl.load(order + place, mask=real, other=0)
    return expert.to(tl.int64), pair.to(tl.int64), real


@triton.jit
def _gate_up(
    x, squares, weight, scale, offset, row_scale, bias, ids, order, table, out, stride_x, eps,
    LEVELS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr, INTER: tl.constexpr, IN: tl.constexpr,
    TOP_K: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, INTER]. Lines are those of gate and up of the same columns in turn. PARTS 0: x is normed already."""
    enter(PDL)
    expert, pair, real = _pairs(ids, order, table, BLOCK_M)
    if expert < 0:
        return
    HALF: tl.constexpr = BLOCK_N // 2
    lane = tl.arange(0, BLOCK_N)
    line = tl.minimum(tl.program_id(1) * HALF + lane // 2, INTER - 1) + (lane % 2) * INTER
    row = pair // TOP_K
    if PARTS > 0:
        parts = load_squares(squares, row, real, PARTS, BLOCK_P)
    acc = sweep(
        x + row * stride_x, real, weight, scale, offset, row_scale, expert * (2 * INTER) + line, None, 0,
        LEVELS, PLANE, GROUP, SCALE, OFFSET, PACKED, IN, PRECISION, BLOCK_K, 1, SLICES,
    )  # fmt: skip
    factors = norm_scale(parts, eps, IN, BLOCK_M, BLOCK_P)[None, :] if PARTS > 0 else 1.0
    if bias is not None:
        acc = tl.fma(acc, factors, tl.load(bias + expert * (2 * INTER) + line).to(tl.float32)[:, None])
    elif PARTS > 0:
        acc = acc * factors
    gate, up = tl.split(tl.permute(tl.reshape(acc, [HALF, 2, BLOCK_M]), (0, 2, 1)))  # [HALF, BLOCK_M]
    value = activate(gate, up, ACT, LIMIT)
    column = tl.program_id(1) * HALF + tl.arange(0, HALF)
    target = out + pair[None, :] * INTER + column[:, None]
    tl.store(target, value.to(out.dtype.element_ty), mask=real[None, :] & (column < INTER)[:, None])


@triton.jit
def _down(
    x, weight, scale, offset, row_scale, bias, order, table, out,
    LEVELS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, OUT]: x [pairs, IN] times the expert of each pair."""
    enter(PDL)
    expert, pair, real = _pairs(None, order, table, BLOCK_M)
    if expert < 0:
        return
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = tl.minimum(column, OUT - 1)
    acc = sweep(
        x + pair * IN, real, weight, scale, offset, row_scale, expert * OUT + line, None, 0,
        LEVELS, PLANE, GROUP, SCALE, OFFSET, PACKED, IN, PRECISION, BLOCK_K, 1, SLICES,
    )  # fmt: skip
    if bias is not None:
        acc += tl.load(bias + expert * OUT + line).to(tl.float32)[:, None]
    target = out + pair[None, :] * OUT + column[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=real[None, :] & (column < OUT)[:, None])


@triton.jit
def _in_order(
    share, part, total, FIRST: tl.constexpr, TOP_K: tl.constexpr, COUNT: tl.constexpr, STRIP: tl.constexpr
):  # fmt: skip
    """total [STRIP] + share * part, [STRIP, COUNT] both, one after the other: choices from FIRST on, below TOP_K."""
    if COUNT == 1:
        if FIRST < TOP_K:
            total = tl.fma(tl.reshape(share, [STRIP]), tl.reshape(part, [STRIP]), total)
    else:
        HALF: tl.constexpr = COUNT // 2
        share_a, share_b = tl.split(tl.permute(tl.reshape(share, [STRIP, 2, HALF]), (0, 2, 1)))
        part_a, part_b = tl.split(tl.permute(tl.reshape(part, [STRIP, 2, HALF]), (0, 2, 1)))
        total = _in_order(share_a, part_a, total, FIRST, TOP_K, HALF, STRIP)
        total = _in_order(share_b, part_b, total, FIRST + HALF, TOP_K, HALF, STRIP)
    return total


@triton.jit
def _tree(value, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Sums [COUNT] of [COUNT, WIDTH]: neighbours first, whatever the layout."""
    if WIDTH > 1:
        a, b = tl.split(tl.reshape(value, [COUNT, WIDTH // 2, 2]))
        value = _tree(a + b, COUNT, WIDTH // 2)
    else:
        value = tl.reshape(value, [COUNT])
    return value


@triton.jit
def _finish(
    total, before, factor, out, scaled, squares, row, column, strip, stride_out,
    OUT: tl.constexpr, STRIPS: tl.constexpr, COUNT: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Stores a part of a row, added to 'before' if it is given, and prepared for the norm whose gain is 'factor'."""
    mask = column < OUT
    if before is not None:
        total += before.to(tl.float32)
    value = total.to(out.dtype.element_ty)
    tl.store(out + row * stride_out + column, value, mask=mask)
    if factor is not None:
        wide = value.to(tl.float32)
        product = (wide * factor.to(tl.float32)).to(scaled.dtype.element_ty)
        tl.store(scaled + row * OUT + column, product, mask=mask)
        each = tl.reshape(tl.where(mask, square(wide), 0.0), [COUNT, STRIP])
        tl.store(squares + row * STRIPS + strip, _tree(each, COUNT, STRIP), mask=strip < STRIPS)


@triton.jit
def _row_down(
    x, weight, scale, offset, row_scale, bias, ids, weights, out, gain, scaled, squares, stride_out,
    LEVELS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr, ADD: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, STRIPS: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr, STRIP: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A strip of one row: the lines of all of its experts times x of all of its pairs, of which a line wants one.
    COLUMNS: of the dot, one for each choice."""
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(ids + row * TOP_K) < 0:  # a dead row
        return
    column = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    lane = tl.arange(0, BLOCK_C * STRIP)
    choice = lane // STRIP
    line = tl.minimum(tl.program_id(1) * STRIP + lane % STRIP, OUT - 1)
    good = choice < TOP_K if TOP_K < BLOCK_C else None
    which = row * TOP_K + tl.minimum(choice, TOP_K - 1)
    expert = tl.load(ids + which).to(tl.int64)
    share = tl.load(weights + which)
    before = tl.load(out + row * stride_out + column, mask=column < OUT, other=0.0) if ADD else None
    factor = tl.load(gain + column, mask=column < OUT, other=0.0) if gain is not None else None
    if bias is not None:
        extra = tl.load(bias + expert * OUT + line)
    own = tl.arange(0, COLUMNS)
    acc = sweep(
        x + (row * TOP_K + own) * IN, own < TOP_K, weight, scale, offset, row_scale, expert * OUT + line, good, 0,
        LEVELS, PLANE, GROUP, SCALE, OFFSET, PACKED, IN, PRECISION, BLOCK_K, 1, SLICES,
    )  # fmt: skip
    result = tl.sum(tl.where(choice[:, None] == own[None, :], acc, 0.0), 1)  # exact: one number, and zeros
    if bias is not None:
        result += extra.to(tl.float32)
    result = tl.trans(tl.reshape(result, [BLOCK_C, STRIP]))
    share = tl.trans(tl.reshape(share, [BLOCK_C, STRIP]))
    total = _in_order(share, result, tl.zeros([STRIP], tl.float32), 0, TOP_K, BLOCK_C, STRIP)
    strip = tl.program_id(1) + tl.arange(0, 1)
    _finish(total, before, factor, out, scaled, squares, row, column, strip, stride_out, OUT, STRIPS, 1, STRIP)


@triton.jit
def _sum(
    parts, weights, out, gain, scaled, squares, stride_out,
    ADD: tl.constexpr, OUT: tl.constexpr, STRIPS: tl.constexpr, STRIP: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some columns of one row, added up as `_row_down` does."""
    enter(PDL)
    COUNT: tl.constexpr = BLOCK // STRIP
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(out + row * stride_out + column, mask=column < OUT, other=0.0) if ADD else None
    factor = tl.load(gain + column, mask=column < OUT, other=0.0) if gain is not None else None
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(TOP_K):
        pair = row * TOP_K + number
        part = tl.load(parts + pair * OUT + column, mask=column < OUT, other=0.0).to(tl.float32)
        total = tl.fma(tl.load(weights + pair), part, total)
    strip = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    _finish(total, before, factor, out, scaled, squares, row, column, strip, stride_out, OUT, STRIPS, COUNT, STRIP)


# Host choices


def one_by_one(rows: int, top_k: int, experts: int) -> bool:
    """Return whether pairs are taken one by one."""
    return rows <= few_tokens.MOST_TOKENS and SPARSE * rows * top_k <= experts


def block_size(rows: int, top_k: int, experts: int, coded: bool = False) -> int:
    """Pairs in a block: about twice what an expert has, so that most have one; 16 where rows are few, at most 64 for
    coded weights, whose tiles are wide."""
    if rows <= few_tokens.MOST_TOKENS:
        return 16
    share = rows * top_k / experts
    return next((size for size, most in ((16, 8), (32, 16), (64, 96)) if share <= most), 64 if coded else 128)


def choose(kernel: str, shape: tuple[int, ...], itemsize: int, step: int = 0, like: Tile | None = None) -> Tile:
    """The tile of a shape that was not measured: out, in, and pairs in a block or, of FEW, a row's choices, a power of
    two.

    step: columns of a coded tile, or 0. like: a sliced tile that adds up as this one must.
    """
    _, in_, size = shape
    if like:
        return Tile(16, like.block_k, like.slices, 4, 1, like.slices)
    if kernel in (FEW_GATE_UP, FEW_DOWN):
        size = few_tokens.MOST_TOKENS
    if step:
        if kernel == ROW_DOWN:
            return Tile(max(64 // size, 8), step, 2, 6)
        return Tile(64 if itemsize == 2 else 32, step, *((2, 6) if size <= 32 else (4, 4)))
    if itemsize == 4:
        return Tile(max(128 // size, 8) if kernel == ROW_DOWN else 32, 32, 4, 3)
    block_k = 128 if in_ % 128 == 0 else 64
    if kernel == ROW_DOWN:
        return Tile(max(128 // size, 8), block_k, 4, 8)
    if size <= 32:
        return Tile(64, block_k, 4, 4)
    return Tile(128, 64, 8, 4)


def _same_instruction(tile: Tile, lines: int, gpu: Gpu, coded: bool = False) -> bool:
    """Where a GPU has wgmma, whose sums may differ from mma.sync's in the last bit, all tiles of few rows run it for
    floats, and none for codes or slices."""
    return not gpu.wgmma or tile.slices > 1 or runs_wgmma(lines, tile.warps, gpu) != coded


def tile_keys(gate_up: ExpertLinear, down: ExpertLinear, top_k: int, most_rows: int) -> list[tuned.Key]:
    """All that launches of up to so many rows look up."""
    if gate_up.tiles is None or down.tiles is None:
        return []
    count, coded, choices = gate_up.count, gate_up.tiles.layout is not None, triton.next_power_of_2(top_k)
    few = range(1, min(most_rows, few_tokens.MOST_TOKENS) + 1)
    blocks = {block_size(rows, top_k, count, coded) for rows in range(few.stop, most_rows + 1)}
    kinds = [(GATE_UP, gate_up.tiles, blocks), (DOWN, down.tiles, blocks), (FEW_GATE_UP, gate_up.tiles, {choices})]
    kinds.append((ROW_DOWN, down.tiles, {choices}))  # the strips and slices of FEW_DOWN are those of this tile too
    if not all(one_by_one(rows, top_k, count) for rows in few):
        kinds.append((FEW_DOWN, down.tiles, {choices}))
    return [
        tuned.Key(kernel, tiles.format, (tiles.shape[0] // count, tiles.shape[1], size))
        for kernel, tiles, sizes in kinds
        for size in sorted(sizes)
    ]


def find_tile(kernel: str, shape: tuple[int, ...], format_: str, x_bytes: int, gpu: Gpu, step: int) -> Tile:
    found = tuned.find(gpu, tuned.Key(kernel, format_, shape))
    tile = Tile(*found) if found else choose(kernel, shape, x_bytes, step)
    if kernel == FEW_DOWN:  # a row is added up in the same slices of the same columns, alone or not
        row = find_tile(ROW_DOWN, shape, format_, x_bytes, gpu, step)
        if not adds_up_alike(tile, row):
            tile = choose(kernel, shape, x_bytes, step, row if row.slices > 1 else None)
    return tile


def adds_up_alike(tile: Tile, row: Tile) -> bool:
    """Return whether tiles of FEW_DOWN and ROW_DOWN add up 'in' in the same order."""
    return tile.slices == row.slices and (row.slices == 1 or tile.block_k == row.block_k)


@lru_cache(maxsize=4096)
def _launch(
    kernel: str, shape: tuple[int, int], size: int, programs: int, format_: str, weight_bits: int, x_bytes: int,
    gpu: Gpu, step: int = 0,
) -> Launch:  # fmt: skip
    """size: pairs in a block, or, of FEW, choices of a row, a power of two; programs: by blocks or rows."""
    tile = find_tile(kernel, (*shape, size), format_, x_bytes, gpu, step)
    assert not step or tile.block_k == step, f"a tile of {format_} has {step} columns, not {tile.block_k}"
    assert tile.split == 1, (kernel, shape, tile)
    across, columns = (
        (size, MOST_CHOICES) if kernel == ROW_DOWN else (1, few_tokens.MOST_TOKENS if kernel in FEW else size)
    )
    lines = across * tile.block_n
    assert x_bytes == 4 or kernel not in FEW or _same_instruction(tile, lines, gpu, step > 0), (kernel, shape, tile)
    out, pair = shape[0], 2 if kernel in (GATE_UP, FEW_GATE_UP) else 1
    strips = triton.cdiv(out // pair, tile.block_n // pair)
    wide = replace(tile, block_n=lines)
    return Launch(tile, strips, fit_stages(wide, programs * strips, weight_bits, x_bytes, gpu, columns))


@dataclass(frozen=True, slots=True)
class _Weight:
    """What the kernels read of an `ExpertLinear`."""

    tiles: WeightTiles  # [experts * out, in]
    count: int
    bias: Tensor | None  # [experts, out]

    @classmethod
    def of(cls, experts: ExpertLinear, x: Tensor) -> _Weight:
        tiles, bias = experts.tiles, experts.bias
        assert tiles is not None, "these kernels read experts tile by tile"
        check_weight(tiles, x)
        weight = cls(tiles, experts.count, bias)
        size = (weight.count, weight.shape[0])
        assert bias is None or (bias.shape == size and bias.is_contiguous()), (bias.shape, size)
        return weight

    @property
    def shape(self) -> tuple[int, int]:
        return self.tiles.shape[0] // self.count, self.tiles.shape[1]

    @property
    def arguments(self) -> tuple[Tensor | None, ...]:
        tiles = self.tiles
        return tiles.codes, tiles.scale, tiles.offset, tiles.row_scale, self.bias

    def launch(self, kernel: str, size: int, programs: int, x: Tensor) -> tuple[Launch, dict[str, object]]:
        """How to cut the work, and the constants and options that all of these kernels take."""
        tiles = self.tiles
        launch = _launch(
            kernel, self.shape, size, programs, tiles.format, tiles.line_bits, x.element_size(), gpu_of(x.device),
            step_of(tiles),
        )  # fmt: skip
        tile, on = launch.tile, pdl.active(x.device)
        return launch, constants(tiles, x) | {
            "BLOCK_K": tile.block_k, "SLICES": tile.slices, "PDL": on, "num_warps": tile.warps,
            "num_stages": launch.stages, **pdl.options(on),
        }  # fmt: skip


def _padded(most: int, size: int, tile: Tile, x: Tensor) -> int:
    """Columns of a dot over blocks of 'size' pairs, of which none has more than 'most'."""
    if size > few_tokens.MOST_TOKENS:
        return size
    return padded_tokens(most, tile.block_n, tile.warps, gpu_of(x.device), tile.slices)


def _few_or(many: str, few: str, size: int, rows: int, top_k: int) -> tuple[str, int]:
    """Return which kernel runs, and by which size its tiles are kept."""
    return (few, triton.next_power_of_2(top_k)) if rows <= few_tokens.MOST_TOKENS else (many, size)


def run_gate_up(
    normed: Normed, routing: Routing, gate_up: ExpertLinear, blocks: Blocks | None, activation: Activation
) -> Tensor:  # [pairs, inter]
    rows, top_k = routing.ids.shape
    if rows <= few_tokens.MOST_TOKENS:
        x, squares = prepare(normed)
        norm = parts_of(squares)
    else:
        x, squares, norm = normed.applied(rms_norm), None, {"PARTS": 0, "BLOCK_P": 1}
    weight, pairs = _Weight.of(gate_up, x), rows * top_k
    size, programs = (blocks.size, blocks.most) if blocks else (few_tokens.MOST_TOKENS, pairs)
    launch, options = weight.launch(*_few_or(GATE_UP, FEW_GATE_UP, size, rows, top_k), programs, x)
    order, table = (blocks.order, blocks.table) if blocks else (None, None)
    inter, tile = weight.shape[0] // 2, launch.tile
    assert weight.shape == (2 * inter, x.shape[1]) and x.stride(1) == 1, (weight.shape, x.shape, x.stride())
    out = torch.empty((pairs, inter), dtype=x.dtype, device=x.device)
    few_tokens.run_kernel(
        _gate_up, (programs, launch.programs), x, squares, *weight.arguments, routing.ids, order, table, out,
        x.stride(0), normed.norm.eps, ACT=activation.kind, LIMIT=activation.limit, INTER=inter, TOP_K=top_k, **norm,
        BLOCK_M=_padded(rows if blocks else 1, size, tile, x), BLOCK_N=tile.block_n, **options,
    )  # fmt: skip
    return out


def run_down(
    x: Tensor, rows: int, down: ExpertLinear, blocks: Blocks, dtype: torch.dtype
) -> Tensor:  # [pairs, inter] -> [pairs, hidden]
    weight = _Weight.of(down, x)
    launch, options = weight.launch(*_few_or(DOWN, FEW_DOWN, blocks.size, rows, len(x) // rows), blocks.most, x)
    tile = launch.tile
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    few_tokens.run_kernel(
        _down, (blocks.most, launch.programs), x, *weight.arguments, blocks.order, blocks.table, out,
        OUT=weight.shape[0], BLOCK_M=_padded(rows, blocks.size, tile, x), BLOCK_N=tile.block_n, **options,
    )  # fmt: skip
    return out


class _Target:
    """Where the sums go: a new tensor, or a residual, which few rows leave prepared for a norm."""

    def __init__(self, rows: int, strip: int, strips: int, x: Tensor, residual: Tensor, then: Norm | None) -> None:
        dim = residual.shape[1]
        self.out, self.add, self.then = residual, then is not None, then
        self.gain = self.scaled = self.squares = None
        self.strip, self.strips = strip, strips
        if then is None:
            self.out = torch.empty((rows, dim), dtype=x.dtype, device=x.device)
        elif rows <= few_tokens.MOST_TOKENS:
            check_gain(then.gain, dim, x.dtype)
            self.gain = then.gain
            self.scaled = torch.empty((rows, dim), dtype=x.dtype, device=x.device)
            self.squares = torch.empty((rows, strips), dtype=torch.float32, device=x.device)

    @property
    def arguments(self) -> tuple[object, ...]:
        return self.out, self.gain, self.scaled, self.squares, self.out.stride(0)

    @property
    def constants(self) -> dict[str, object]:
        return {"ADD": self.add, "OUT": self.out.shape[1], "STRIPS": self.strips, "STRIP": self.strip}


def run_row_down(x: Tensor, routing: Routing, down: ExpertLinear, residual: Tensor, then: Norm | None) -> _Target:
    rows, top_k = routing.ids.shape
    weight, choices = _Weight.of(down, x), triton.next_power_of_2(top_k)
    launch, options = weight.launch(ROW_DOWN, choices, rows, x)
    tile = launch.tile
    target = _Target(rows, tile.block_n, launch.programs, x, residual, then)
    columns = padded_tokens(top_k, choices * tile.block_n, tile.warps, gpu_of(x.device), tile.slices)
    few_tokens.run_kernel(
        _row_down, (rows, launch.programs), x, *weight.arguments, routing.ids, routing.weights,
        *target.arguments, **target.constants, TOP_K=top_k, BLOCK_C=choices, COLUMNS=columns, **options,
    )  # fmt: skip
    return target


def run_sum(parts: Tensor, routing: Routing, down: ExpertLinear, residual: Tensor, then: Norm | None) -> _Target:
    """In strips of `run_row_down`."""
    rows, top_k = routing.ids.shape
    dim, on = residual.shape[1], pdl.active(parts.device)
    launch, _ = _Weight.of(down, residual).launch(ROW_DOWN, triton.next_power_of_2(top_k), rows, residual)
    target = _Target(rows, launch.tile.block_n, launch.programs, residual, residual, then)
    few_tokens.run_kernel(
        _sum, (rows, triton.cdiv(dim, SUM_BLOCK)), parts, routing.weights, *target.arguments, **target.constants,
        TOP_K=top_k, BLOCK=SUM_BLOCK, PDL=on, num_warps=4, **pdl.options(on),
    )  # fmt: skip
    return target


def _experts(
    normed: Normed, routing: Routing, gate_up: ExpertLinear, down: ExpertLinear, activation: Activation,
    then: Norm | None,
) -> _Target:  # fmt: skip
    """then: the norm of the residual that the sum is added to; None: the sum is returned by itself."""
    (rows, top_k), residual = routing.ids.shape, normed.x
    assert routing.ids.is_contiguous() and routing.weights.is_contiguous() and top_k <= MOST_CHOICES, routing
    assert residual.shape[0] == rows and residual.stride(1) == 1, (residual.shape, residual.stride(), rows)
    blocks = None
    if not one_by_one(rows, top_k, gate_up.count):
        coded = gate_up.tiles is not None and gate_up.tiles.layout is not None
        blocks = cut(routing, gate_up.count, block_size(rows, top_k, gate_up.count, coded))
    inside = run_gate_up(normed, routing, gate_up, blocks, activation)
    if blocks is None:
        return run_row_down(inside, routing, down, residual, then)
    parts = run_down(inside, rows, down, blocks, torch.float32 if rows <= few_tokens.MOST_TOKENS else inside.dtype)
    return run_sum(parts, routing, down, residual, then)


def norm_experts(
    normed: Normed, routing: Routing, gate_up: ExpertLinear, down: ExpertLinear, activation: Activation
) -> Tensor:
    if not normed.x.shape[0]:
        return torch.empty_like(normed.x)
    return _experts(normed, routing, gate_up, down, activation, None).out


def add_experts(
    normed: Normed, routing: Routing, gate_up: ExpertLinear, down: ExpertLinear, activation: Activation, then: Norm
) -> Normed:
    if not normed.x.shape[0]:
        return Normed(normed.x, then)
    target = _experts(normed, routing, gate_up, down, activation, then)
    return Normed(normed.x, then, target.scaled, target.squares)
