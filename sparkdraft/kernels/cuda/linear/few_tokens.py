"""The weight matmuls of small batches, 1 to 16 tokens, fused with what stands around them: norm, gate, residual,
argmax.

They are bound by reading the weight once, so a program takes a strip of the weight's rows, keeps several tiles of it in
flight and does everything else at its end. A token's result has the same bits whatever tokens are beside it. sweep.py
alone knows how a weight is stored, tuned/ which tile runs.

    weight [out, in]     | program 0: BLOCK_N lines | program 1 | ...        a tile is [BLOCK_N, BLOCK_K]
    x [rows, in]         | all rows, padded to 8 or 16 |                     a tile is [ROWS, BLOCK_K]
    a program's dot      W tile . x tile^T, added up over 'in' in order  ->  [BLOCK_N, ROWS]

The weight is the dot's left side, so BLOCK_N and the warps alone decide which tensor core instruction runs (64 lines
and 4 warps: wgmma on Hopper, else mma.sync). Only the padding of a launch depends on the rows, and changes no row's
bits. Where strips do not fill the GPU, a tile may split 'in' into a fixed number of parts, a program each: the last of
a strip to end adds up all parts, in order (ending.py). Or a tile has few lines, and its program's warps share 'in'
(sweep.py, SLICES). `wide_linear` runs the same kernel for more rows of a coded weight, in blocks of rows.

A norm costs its reader next to nothing: its writer (`add_linear`) leaves x * gain and the sum of squares of each strip,
and the reader multiplies its float32 sums by 1 / rms. x * gain is rounded once; in float16 it overflows past 65504,
where the unfused norm would not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.linear.sweep import sweep
from sparkdraft.kernels.cuda.runtime import pdl, tuned
from sparkdraft.kernels.cuda.runtime.ending import MOST_GROUPS, counters, is_last, square, sum_columns, sum_rows
from sparkdraft.kernels.cuda.runtime.gpu import Gpu, gpu_of
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.kernels.ops import CLAMPED_SLOPE, SILU, Activation, Norm, Normed
from sparkdraft.weights.linear import WeightTiles

MOST_TOKENS = 16
EIGHT_ROWS, EIGHT_ROWS_OF_WGMMA = True, False  # switches of `padded_tokens`
KERNEL, WIDE = "few_rows", "wide_rows"  # in the tables of tuned tiles
_SLOPE = tl.constexpr(CLAMPED_SLOPE)


@triton.jit
def _sweep(
    x, weight, scale, offset, row_scale, line, row, rows, stride_x, part,
    LEVELS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr, IN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    SLICES: tl.constexpr,
):  # fmt: skip
    """The weight's rows 'line' times rows of x: float32 [BLOCK_N, ROWS]. Places in a weight may pass 2 ** 31."""
    return sweep(
        x + row.to(tl.int64) * stride_x, row < rows, weight, scale, offset, row_scale, line.to(tl.int64), None, part,
        LEVELS, PLANE, GROUP, SCALE, OFFSET, PACKED, IN, PRECISION, BLOCK_K, SPLIT, SLICES,
    )  # fmt: skip


@triton.jit
def _add_parts(acc, sums, counters, strip, part, rows, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    """Leaves a part of a strip's sums for the program that ends last, which gets all, added in order: (sums, True)."""
    lane, column = tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    place = sums + strip.to(tl.int64) * (SPLIT * BLOCK_N * ROWS) + lane[:, None] * ROWS + column[None, :]
    real = (column < rows)[None, :]
    tl.store(place + part * (BLOCK_N * ROWS), acc, mask=real)
    last = is_last(counters + strip, SPLIT)
    if last:
        acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
        for each in tl.static_range(SPLIT):
            acc += tl.load(place + each * (BLOCK_N * ROWS), mask=real, other=0.0, cache_modifier=".cg")
    return acc, last


@triton.jit
def load_squares(squares, row, real, PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """[ROWS, BLOCK_P], loaded before the sweep and summed after it."""
    part = tl.arange(0, BLOCK_P)
    mask = real[:, None] & (part < PARTS)[None, :]
    return tl.load(squares + row[:, None] * PARTS + part[None, :], mask=mask, other=0.0)


@triton.jit
def norm_scale(squares, eps, IN: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr):
    """1 / rms of each row."""
    return tl.rsqrt(sum_columns(squares, ROWS, BLOCK_P) / IN + eps)


@triton.jit
def activate(gate, up, ACT: tl.constexpr, LIMIT: tl.constexpr):
    """ACT, LIMIT: the fields of an `Activation`. float32 in, float32 out; NaN stays NaN.

    Each is gate times a sigmoid; the tanh of gelu_tanh is one too: (1 + tanh(a)) / 2 = sigmoid(2 a). An exp that
    overflows divides to zero.
    """
    if ACT == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    elif ACT == "gelu_tanh":
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
        return gate / (1.0 + tl.exp(-inner)) * up
    else:
        tl.static_assert(ACT == "clamped_swiglu")
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return (up + 1.0) * (gate / (1.0 + tl.exp(-_SLOPE * gate)))


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, squares, weight, scale, offset, row_scale, bias, out, gain, scaled, new_squares, sums, counters,
    rows, stride_x, stride_out, eps,
    LEVELS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PARTS: of the squares of x; 0: no norm. ADD: to what is there, and prepare it for the norm of 'gain'."""
    enter(PDL)
    strip, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    column = strip * BLOCK_N + tl.arange(0, BLOCK_N)
    line = tl.minimum(column, OUT - 1)  # the last program may reach past the weight: it reads a row twice
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    target = out + row.to(tl.int64)[None, :] * stride_out + column[:, None]
    mask = (row < rows)[None, :] & (column < OUT)[:, None]
    if ADD:  # read before the sweep, so that nobody waits for it at the end; used, even to widen it, only there
        before = tl.load(target, mask=mask, other=0.0)
        if gain is not None:
            factor = tl.load(gain + line)
    if PARTS > 0:
        parts = load_squares(squares, row, row < rows, PARTS, BLOCK_P)
    acc = _sweep(
        x, weight, scale, offset, row_scale, line, row, rows, stride_x, part,
        LEVELS, PLANE, GROUP, SCALE, OFFSET, PACKED, IN, PRECISION, BLOCK_K, SPLIT, SLICES,
    )  # fmt: skip
    if SPLIT > 1:
        acc, last = _add_parts(acc, sums, counters, strip, part, rows, SPLIT, BLOCK_N, ROWS)
        if not last:
            return
    factors = norm_scale(parts, eps, IN, ROWS, BLOCK_P)[None, :] if PARTS > 0 else 1.0
    if BIAS:
        acc = tl.fma(acc, factors, tl.load(bias + line).to(tl.float32)[:, None])
    elif PARTS > 0:
        acc = acc * factors
    if ADD:
        acc += before.to(tl.float32)
    value = acc.to(out.dtype.element_ty)
    tl.store(target, value, mask=mask)
    if gain is not None:
        wide = value.to(tl.float32)
        product = (wide * factor.to(tl.float32)[:, None]).to(scaled.dtype.element_ty)
        tl.store(scaled + row[None, :] * OUT + column[:, None], product, mask=mask)
        total = sum_rows(tl.where(mask, square(wide), 0.0), BLOCK_N, ROWS)
        tl.store(new_squares + row * (tl.num_programs(0) // SPLIT) + strip, total, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _gated(
    x, squares, weight, scale, offset, row_scale, out, rows, stride_x, eps,
    LEVELS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr, INTER: tl.constexpr, IN: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A program's lines are those of gate and up of the same columns in turn: g0 u0 g1 u1 ...
    enter(PDL)
    COLUMNS: tl.constexpr = BLOCK_N // 2
    lane = tl.arange(0, BLOCK_N)
    line = tl.minimum(tl.program_id(0) * COLUMNS + lane // 2, INTER - 1) + (lane % 2) * INTER
    row = tl.arange(0, ROWS)
    parts = load_squares(squares, row, row < rows, PARTS, BLOCK_P)
    acc = _sweep(
        x, weight, scale, offset, row_scale, line, row, rows, stride_x, 0,
        LEVELS, PLANE, GROUP, SCALE, OFFSET, PACKED, IN, PRECISION, BLOCK_K, 1, SLICES,
    )  # fmt: skip
    acc = acc * norm_scale(parts, eps, IN, ROWS, BLOCK_P)[None, :]
    gate, up = tl.split(tl.permute(tl.reshape(acc, [COLUMNS, 2, ROWS]), (0, 2, 1)))  # [COLUMNS, ROWS]
    value = activate(gate, up, ACT, LIMIT)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    target = out + row.to(tl.int64)[None, :] * INTER + column[:, None]
    tl.store(target, value.to(out.dtype.element_ty), mask=(row < rows)[None, :] & (column < INTER)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _argmax(
    x, squares, weight, scale, offset, row_scale, best, best_id, rows, stride_x, eps,
    LEVELS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The largest logit of this program's columns and its column, for every row."""
    enter(PDL)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = tl.minimum(column, OUT - 1)
    row = tl.arange(0, ROWS)
    parts = load_squares(squares, row, row < rows, PARTS, BLOCK_P)
    logits = _sweep(
        x, weight, scale, offset, row_scale, line, row, rows, stride_x, 0,
        LEVELS, PLANE, GROUP, SCALE, OFFSET, PACKED, IN, PRECISION, BLOCK_K, 1, SLICES,
    )  # fmt: skip
    logits = logits * norm_scale(parts, eps, IN, ROWS, BLOCK_P)[None, :]
    seen = (column < OUT)[:, None] & (logits == logits)  # NaN never wins
    peak, place = tl.max(tl.where(seen, logits, float("-inf")), 0, return_indices=True)  # the lowest wins a tie
    target = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(best + target, peak, mask=row < rows)
    tl.store(best_id + target, tl.program_id(0) * BLOCK_N + place, mask=row < rows)


@triton.jit
def _pick(best, best_id, out, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row: the best of the programs' bests, which are in order of columns, so the lowest wins a tie."""
    enter(PDL)
    part = tl.arange(0, BLOCK)
    start = tl.program_id(0) * PARTS
    value = tl.load(best + start + part, mask=part < PARTS, other=float("-inf"))
    _, place = tl.max(value, 0, return_indices=True)
    tl.store(out + tl.program_id(0), tl.load(best_id + start + place).to(tl.int64))


@triton.jit
def _prepare(x, gain, scaled, squares, stride_x, DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row that is not prepared for its norm."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    factor = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    enter(PDL)
    value = tl.load(x + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled + row * DIM + column, (value * factor).to(scaled.dtype.element_ty), mask=inside)
    tl.store(squares + row, tl.sum(value * value, 0))


@dataclass(frozen=True, slots=True)
class Tile:
    block_n: int  # rows of the weight that a program takes; of a gated pair, half are gate's and half up's
    block_k: int
    warps: int
    stages: int  # at most: as many as fit into shared memory are used
    split: int = 1  # parts of 'in', a program each, which `linear` and its like take
    slices: int = 1  # parts of a program's 'in', shared among its warps


@dataclass(frozen=True, slots=True)
class Launch:
    tile: Tile
    programs: int  # strips of the weight
    stages: int


def _choose(out: int, in_: int, itemsize: int, sms: int) -> Tile:
    """The widest strip that still gives half of the SMs a program, and a step over 'in' that needs no mask."""
    widest = 64 if itemsize == 2 else 32
    block_n = next((n for n in (64, 32) if n <= widest and out >= 0.45 * n * sms), 16)
    block_k = 128 if itemsize == 2 and in_ % 128 == 0 and in_ > 1024 else 64
    return Tile(block_n, block_k, 4, 8)


def _choose_coded(out: int, in_: int, step: int, itemsize: int, sms: int, offset: bool = False) -> Tile:
    """Two warps run mma.sync on every GPU, with all warps over the lines, so that a weight is decoded once. (Triton
    gives wgmma's left side a shared memory without a swizzle.) As many parts of 'in' as fill the GPU. offset: sums of x
    take registers too."""
    block_n = (32 if offset else 64) if itemsize == 2 and out >= 64 else 16
    split = min(4 * sms // triton.cdiv(out, block_n), in_ // step // 4, 8)
    return Tile(block_n, step, 2, 6, max(split, 1))


def runs_wgmma(lines: int, warps: int, gpu: Gpu, slices: int = 1) -> bool:
    """Return whether a dot of so many lines of 16 bit numbers is Hopper's instruction; otherwise it is mma.sync."""
    return gpu.wgmma and lines >= 64 and warps % 4 == 0 and slices == 1


def padded_tokens(rows: int, lines: int, warps: int, gpu: Gpu, slices: int = 1) -> int:
    """Columns of the dot of few rows: 8 are the fewest that tensor cores take, and 16 serve all.

    Both are mma.sync over 8 columns, once or twice, so a row has the same bits. Where 16 are one wgmma or tcgen05.mma,
    8 would be an mma.sync, whose sums may differ in the last bit: EIGHT_ROWS_OF_WGMMA allows it.
    """
    wide = runs_wgmma(lines, warps, gpu) or (gpu.tcgen05 and lines >= 64 and warps in (4, 8))
    eight = EIGHT_ROWS and (EIGHT_ROWS_OF_WGMMA or not wide or slices > 1)  # batches of dots are mma.sync
    return 8 if rows <= 8 and eight else MOST_TOKENS


def fit_stages(tile: Tile, programs: int, weight_bits: int, x_bytes: int, gpu: Gpu, rows: int = MOST_TOKENS) -> int:
    """Stages whose buffers fit beside those of the other programs that share an SM."""
    buffer = (tile.block_n * weight_bits // 8 + rows * x_bytes) * tile.block_k * tile.slices
    # wgmma reads from shared memory, so one more tile of each is held; mma.sync reads registers.
    held = buffer if x_bytes == 2 and runs_wgmma(tile.block_n, tile.warps, gpu, tile.slices) else 0
    for beside in range(min(triton.cdiv(programs, gpu.sms), max(12 // tile.warps, 3) if gpu.roomy else 3), 0, -1):
        room = min(gpu.shared, (gpu.shared + 1024) // beside - 1024) - held
        buffers = room // buffer
        if buffers >= 2:
            break
    return max(min(tile.stages, buffers + 1), 2)


@lru_cache(maxsize=4096)
def _launch(
    shape: tuple[int, int], format_: str, weight_bits: int, x_bytes: int, lines: int, gpu: Gpu, step: int = 0
) -> Launch:
    """How to cut the work; 'lines' of the weight make a column of the result. step: columns of a coded tile, or 0."""
    out, in_ = shape
    found = tuned.find(gpu, tuned.Key(KERNEL, format_, shape))
    rule = (
        _choose_coded(out, in_, step, x_bytes, gpu.sms, "offset" in format_)
        if step
        else _choose(out, in_, x_bytes, gpu.sms)
    )
    tile = Tile(*found) if found else rule
    assert not step or tile.block_k == step, f"a tile of {format_} has {step} columns, not {tile.block_k}"
    programs = triton.cdiv(out // lines, tile.block_n // lines)
    return Launch(tile, programs, fit_stages(tile, programs * tile.split, weight_bits, x_bytes, gpu))


def run_kernel(kernel, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    """All launches of matmuls; tests replace it."""
    kernel[grid](*arguments, **options)


def check_weight(weight: WeightTiles, x: Tensor) -> None:
    codes, layout = weight.codes, weight.layout
    assert x.stride(1) == 1 and codes.is_contiguous(), (x.stride(), codes.stride())
    assert codes.dtype == (torch.int16 if layout else x.dtype), (x.dtype, codes.dtype)
    scale = weight.row_scale
    assert scale is None or (scale.dtype == torch.float32 and scale.is_contiguous()), scale.dtype


def constants(weight: WeightTiles, x: Tensor) -> dict[str, object]:
    """How a sweep reads the weight."""
    _, _, _, plane, group, scale, offset = weight.layout or (0, 0, 0, 0, 0, "", "")
    return {
        "LEVELS": weight.layout.levels if weight.layout else "plain", "PLANE": plane, "GROUP": group,
        "SCALE": scale, "OFFSET": offset, "IN": weight.shape[1],
        "PACKED": x.dtype == torch.bfloat16 and x.device.type != "cpu",  # not in Triton's interpreter
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }  # fmt: skip


def step_of(weight: WeightTiles) -> int:
    return weight.layout.tile if weight.layout else 0


def start(x: Tensor, weight: WeightTiles, lines: int = 1) -> tuple[Launch, dict[str, object]]:
    """Checks the arguments; returns the launch, and the constants and options that all kernels take."""
    rows, in_ = x.shape
    assert 0 < rows <= MOST_TOKENS, f"{rows} rows: these kernels take 1 to {MOST_TOKENS}"
    assert weight.shape[1] == in_ and weight.shape[0] % lines == 0, (x.shape, weight.shape, lines)
    check_weight(weight, x)
    launch = _launch(
        weight.shape, weight.format, weight.line_bits, x.element_size(), lines, gpu_of(x.device), step_of(weight)
    )
    tile = launch.tile
    padded = padded_tokens(rows, tile.block_n, tile.warps, gpu_of(x.device), tile.slices)
    return launch, constants(weight, x) | _options(launch, padded, x.device)


def _options(launch: Launch, rows: int, device: torch.device) -> dict[str, object]:
    tile, on = launch.tile, pdl.active(device)
    return {
        "ROWS": rows, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "SLICES": tile.slices, "PDL": on,
        "num_warps": tile.warps, "num_stages": launch.stages, **pdl.options(on),
    }  # fmt: skip


def _run_linear(
    x: Tensor, squares: Tensor | None, eps: float, weight: WeightTiles, out: Tensor, launch: Launch,
    options: dict[str, object], add: bool = False, left: tuple[Tensor, Tensor, Tensor] | None = None, blocks: int = 1,
) -> None:  # fmt: skip
    """left: a norm's gain, and where x * gain and the squares go. blocks: of rows."""
    split, sums, counts = launch.tile.split, None, None
    if split > 1:
        counts = counters(x.device)
        assert launch.programs <= MOST_GROUPS and blocks == 1, (launch.programs, blocks)
        size = (launch.programs, split, launch.tile.block_n * MOST_TOKENS)
        sums = torch.empty(size, dtype=torch.float32, device=x.device)
    norm = {"PARTS": 0, "BLOCK_P": 1} if squares is None else parts_of(squares)
    run_kernel(
        _linear, (launch.programs * split, blocks), x, squares, weight.codes, weight.scale, weight.offset,
        weight.row_scale, weight.bias, out, *(left or (None, None, None)), sums, counts,
        x.shape[0], x.stride(0), out.stride(0), eps, OUT=weight.shape[0], **norm, BIAS=weight.bias is not None,
        ADD=add, SPLIT=split, **options,
    )  # fmt: skip


def check_gain(gain: Tensor, dim: int, dtype: torch.dtype) -> None:
    assert gain.shape == (dim,) and gain.is_contiguous(), (gain.shape, gain.stride(), dim)
    assert gain.dtype in (dtype, torch.float32), (gain.dtype, dtype)


def prepare(normed: Normed) -> tuple[Tensor, Tensor]:
    """x * gain [rows, dim] and the parts of its sums of squares [rows, parts], computed where they are missing."""
    x, (gain, _), scaled, squares, _ = normed
    if scaled is not None and squares is not None:
        assert squares.is_contiguous() and squares.dtype == torch.float32, (squares.stride(), squares.dtype)
        return scaled, squares
    rows, dim = x.shape
    assert x.stride(1) == 1, x.stride()
    check_gain(gain, dim, x.dtype)
    scaled = torch.empty((rows, dim), dtype=x.dtype, device=x.device)
    squares = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block, on = triton.next_power_of_2(dim), pdl.active(x.device)
    warps = min(max(block // 512, 1), 16)
    run_kernel(
        _prepare, (rows,), x, gain, scaled, squares, x.stride(0),
        DIM=dim, BLOCK=block, PDL=on, num_warps=warps, **pdl.options(on),
    )  # fmt: skip
    return scaled, squares


def parts_of(squares: Tensor) -> dict[str, int]:
    return {"PARTS": squares.shape[1], "BLOCK_P": triton.next_power_of_2(squares.shape[1])}


def linear(x: Tensor, weight: WeightTiles) -> Tensor:  # [rows, in] -> [rows, out]
    launch, options = start(x, weight)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _run_linear(x, None, 0.0, weight, out, launch, options)
    return out


def norm_linear(normed: Normed, weight: WeightTiles, dtype: torch.dtype | None = None) -> Tensor:
    x, squares = prepare(normed)
    launch, options = start(x, weight)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype or x.dtype, device=x.device)
    _run_linear(x, squares, normed.norm.eps, weight, out, launch, options)
    return out


def add_linear(residual: Tensor, x: Tensor, weight: WeightTiles, then: Norm) -> Normed:
    """x must not share memory with the residual."""
    rows, out = x.shape[0], weight.shape[0]
    assert residual.stride(1) == 1 and residual.shape == (rows, out), (residual.shape, residual.stride(), weight.shape)
    check_gain(then.gain, out, x.dtype)
    launch, options = start(x, weight)
    scaled = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    squares = torch.empty((rows, launch.programs), dtype=torch.float32, device=x.device)
    left = then.gain, scaled, squares
    _run_linear(x, None, 0.0, weight, residual, launch, options, True, left)
    return Normed(residual, then, scaled, squares)


def norm_gated(normed: Normed, weight: WeightTiles, activation: Activation = SILU) -> Tensor:
    x, squares = prepare(normed)
    launch, options = start(x, weight, lines=2)
    rows, inter = x.shape[0], weight.shape[0] // 2
    out = torch.empty((rows, inter), dtype=x.dtype, device=x.device)
    run_kernel(
        _gated, (launch.programs,), x, squares, weight.codes, weight.scale, weight.offset, weight.row_scale, out,
        rows, x.stride(0), normed.norm.eps,
        ACT=activation.kind, LIMIT=activation.limit, INTER=inter, **parts_of(squares), **options,
    )  # fmt: skip
    return out


def norm_argmax(normed: Normed, weight: WeightTiles) -> Tensor:
    x, squares = prepare(normed)
    launch, options = start(x, weight)
    rows, parts, device, on = x.shape[0], launch.programs, x.device, pdl.active(x.device)
    out = torch.empty((rows,), dtype=torch.int64, device=device)
    best = torch.empty((rows, parts), dtype=torch.float32, device=device)
    best_id = torch.empty((rows, parts), dtype=torch.int32, device=device)
    run_kernel(
        _argmax, (parts,), x, squares, weight.codes, weight.scale, weight.offset, weight.row_scale, best, best_id,
        rows, x.stride(0), normed.norm.eps, OUT=weight.shape[0], **parts_of(squares), **options,
    )  # fmt: skip
    block = triton.next_power_of_2(parts)
    warps = min(max(block // 512, 1), 8)
    run_kernel(_pick, (rows,), best, best_id, out, PARTS=parts, BLOCK=block, PDL=on, num_warps=warps, **pdl.options(on))
    return out


# More rows of a coded weight


def block_tokens(rows: int) -> int:
    """Rows of a block: as many as leave room in shared memory for several tiles of them."""
    return 32 if rows <= 32 else 64


def tile_keys(weight: WeightTiles) -> list[tuned.Key]:
    """All that launches with this matrix look up."""
    wide = {block_tokens(rows) for rows in (MOST_TOKENS + 1, 64)} if weight.layout else ()
    return [
        tuned.Key(KERNEL, weight.format, weight.shape),
        *(tuned.Key(WIDE, weight.format, (*weight.shape, rows)) for rows in sorted(wide)),
    ]


@lru_cache(maxsize=4096)
def _wide_launch(
    shape: tuple[int, int], format_: str, weight_bits: int, x_bytes: int, rows: int, blocks: int, gpu: Gpu, step: int
) -> Launch:
    found = tuned.find(gpu, tuned.Key(WIDE, format_, (*shape, rows)))
    tile = Tile(*found) if found else Tile(64 if x_bytes == 2 else 32, step, 2 if rows <= 32 else 4, 4)
    programs = triton.cdiv(shape[0], tile.block_n)
    return Launch(tile, programs, fit_stages(tile, programs * blocks, weight_bits, x_bytes, gpu, rows))


def wide_linear(x: Tensor, weight: WeightTiles, out: Tensor, add: bool = False) -> None:
    """out [rows, out] = linear(x, weight), or is increased by it."""
    (rows, in_), size = x.shape, block_tokens(x.shape[0])
    assert rows > 0 and weight.layout and weight.shape[1] == in_ and out.stride(1) == 1, (x.shape, weight.shape)
    check_weight(weight, x)
    blocks = triton.cdiv(rows, size)
    launch = _wide_launch(
        weight.shape, weight.format, weight.line_bits, x.element_size(), size, blocks, gpu_of(x.device), step_of(weight)
    )
    options = constants(weight, x) | _options(launch, size, x.device)
    _run_linear(x, None, 0.0, weight, out, launch, options, add, blocks=blocks)
