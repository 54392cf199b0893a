"""The weight matmuls of small batches, 1 to 64 rows, fused with what stands around them: norm, gate, residual, argmax.

They are bound by reading the weight once, so a program takes a strip of the weight's rows, keeps several tiles of it
in flight and does everything else on the side; before its predecessor has ended it already asks for its first tiles
(pdl.py). A row's result is the same to the bit whatever rows lie beside it, as drafted text must equal plain text;
batches of more rows, and weights that are not kept as floats, are left to others.

    weight [out, in]     | program 0: BLOCK_N lines | program 1 | ...        a tile is [BLOCK_N, BLOCK_K]
    x [rows, in]         | all rows, padded to 16, 32 or 64 |                a tile is [ROWS, BLOCK_K]
    a program's dot      W tile . x tile^T, added up over 'in' in order  ->  [BLOCK_N, ROWS]

The weight is the dot's left side, so BLOCK_N and the warps alone decide which tensor core instruction runs (64 lines
and 4 warps: wgmma on Hopper, else mma.sync) and the rows only how often. BLOCK_K, which orders the sum of squares, and
BLOCK_N depend on the weight's shape and the GPU, never on the rows; nothing is split over 'in'.

Against the unfused operators the results differ by rounding alone, and are the closer to exact arithmetic: the norm is
x * gain rounded once to the tensor's type, and its scale 1 / rms, one number a row, meets the float32 sum; gate, up,
residual and bias are added in float32. In float16 x * gain overflows past 65504, where the unfused norm would not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda import pdl
from sparkdraft.kernels.cuda.attention import ROOMY_MAJORS
from sparkdraft.kernels.cuda.pdl import enter, enter_with

MOST_ROWS = 64
ROW_TILES = (16, 32, 64)
AHEAD_BYTES = 32 << 10  # of its weight that a program asks L2 for before its predecessor has ended


@triton.jit
def _sweep(
    x, gain, weight, line, rows, stride_x, eps,
    IN: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The weight's rows 'line' times all rows of x, normed if NORM: float32 [BLOCK_N, ROWS]; padding rows give 0."""
    EVEN: tl.constexpr = IN % BLOCK_K == 0
    row = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    weight_tile = weight + line.to(tl.int64)[:, None] * IN + k[None, :]  # may pass 2**31
    x_tile = x + row.to(tl.int64)[:, None] * stride_x + k[None, :]
    real = (row < rows)[:, None]
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    if NORM:
        # The gain is read one step ahead by hand, in the shape of x: loaded where it is used it would be waited for
        # in every step, and would pull the product into the layout of the dot, which all warps compute again.
        gain_tile = tl.broadcast_to((gain + k)[None, :], [ROWS, BLOCK_K])
        gain_next = tl.load(gain_tile, mask=(k < IN)[None, :], other=0.0)
    for first in tl.range(0, IN, BLOCK_K):
        if EVEN:
            w = tl.load(weight_tile + first, eviction_policy="evict_first")
            value = tl.load(x_tile + first, mask=real, other=0.0, eviction_policy="evict_last")
        else:
            inside = (k < IN - first)[None, :]
            w = tl.load(weight_tile + first, mask=inside, other=0.0, eviction_policy="evict_first")
            value = tl.load(x_tile + first, mask=real & inside, other=0.0, eviction_policy="evict_last")
        if NORM:
            wide = value.to(tl.float32)
            value = value * gain_next  # one rounding to the tensor's type
            gain_next = tl.load(gain_tile + first + BLOCK_K, mask=(k < IN - first - BLOCK_K)[None, :], other=0.0)
            squares += tl.sum(wide * wide, 1)
        acc = tl.dot(w, tl.trans(value), acc, input_precision=PRECISION)
    if NORM:
        acc = acc * tl.rsqrt(squares / IN + eps)[None, :]
    return acc


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, gain, weight, bias, out, rows, stride_x, stride_out, eps,
    OUT: tl.constexpr, IN: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = tl.minimum(column, OUT - 1)  # the last program may reach past the weight: it reads a row twice
    enter_with(weight, line, IN, PIECES, PDL)
    row = tl.arange(0, ROWS)
    target = out + row.to(tl.int64)[None, :] * stride_out + column[:, None]
    mask = (row < rows)[None, :] & (column < OUT)[:, None]
    if ADD:  # read before the sweep, so that nobody waits for it at the end; used, even to widen it, only there
        before = tl.load(target, mask=mask, other=0.0)
    acc = _sweep(x, gain, weight, line, rows, stride_x, eps, IN, NORM, PRECISION, ROWS, BLOCK_N, BLOCK_K)
    if BIAS:
        acc += tl.load(bias + line).to(tl.float32)[:, None]
    if ADD:
        acc += before.to(tl.float32)
    tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _gated(
    x, gain, weight, out, rows, stride_x, eps,
    INTER: tl.constexpr, IN: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A program's lines are those of gate and up of the same columns in turn: g0 u0 g1 u1 ...
    COLUMNS: tl.constexpr = BLOCK_N // 2
    lane = tl.arange(0, BLOCK_N)
    line = tl.minimum(tl.program_id(0) * COLUMNS + lane // 2, INTER - 1) + (lane % 2) * INTER
    enter_with(weight, line, IN, PIECES, PDL)
    acc = _sweep(x, gain, weight, line, rows, stride_x, eps, IN, True, PRECISION, ROWS, BLOCK_N, BLOCK_K)
    gate, up = tl.split(tl.permute(tl.reshape(acc, [COLUMNS, 2, ROWS]), (0, 2, 1)))  # [COLUMNS, ROWS]
    value = gate / (1.0 + tl.exp(-gate)) * up
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    target = out + row.to(tl.int64)[None, :] * INTER + column[:, None]
    tl.store(target, value.to(out.dtype.element_ty), mask=(row < rows)[None, :] & (column < INTER)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _argmax(
    x, gain, weight, best, best_id, rows, stride_x, eps,
    OUT: tl.constexpr, IN: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The largest logit of this program's columns and its column, for every row."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = tl.minimum(column, OUT - 1)
    enter_with(weight, line, IN, PIECES, PDL)
    logits = _sweep(x, gain, weight, line, rows, stride_x, eps, IN, True, PRECISION, ROWS, BLOCK_N, BLOCK_K)
    seen = (column < OUT)[:, None] & (logits == logits)  # NaN never wins
    peak, place = tl.max(tl.where(seen, logits, float("-inf")), 0, return_indices=True)  # the lowest wins a tie
    row = tl.arange(0, ROWS)
    target = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(best + target, peak, mask=row < rows)
    tl.store(best_id + target, tl.program_id(0) * BLOCK_N + place, mask=row < rows)


@triton.jit
def _pick(best, best_id, out, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row: the best of the programs' bests. They are in order of columns, so the lowest wins a tie again."""
    enter(PDL)
    part = tl.arange(0, BLOCK)
    start = tl.program_id(0) * PARTS
    value = tl.load(best + start + part, mask=part < PARTS, other=float("-inf"))
    _, place = tl.max(value, 0, return_indices=True)
    tl.store(out + tl.program_id(0), tl.load(best_id + start + place).to(tl.int64))


@dataclass(frozen=True, slots=True)
class Tile:
    block_n: int  # rows of the weight that a program takes; of a gated pair, half are gate's and half up's
    block_k: int
    warps: int
    stages: int  # at most: as many as fit into shared memory are used


@dataclass(frozen=True, slots=True)
class Gpu:
    sms: int
    shared: int  # bytes of shared memory that a program may take
    wgmma: bool


@dataclass(frozen=True, slots=True)
class Launch:
    tile: Tile
    programs: int
    rows: int  # of the tile
    stages: int
    pieces: int  # of each line, asked for ahead (pdl.py)


# (out, in) -> tile for 2-byte weights on GPUs with wgmma and 227 KB of shared memory a program; shapes that are not
# listed follow `_choose`. tests/kernels/test_cuda_few_rows.py compiles every entry, bench/cuda_few_rows.py measures
# and prints new ones.
TUNED: dict[tuple[int, int], Tile] = {
    (6144, 4096): Tile(32, 128, 4, 8),  # Qwen3-8B: qkv
    (4096, 4096): Tile(32, 256, 4, 7),  # o
    (24576, 4096): Tile(64, 128, 4, 5),  # gate_up
    (4096, 12288): Tile(32, 256, 4, 7),  # down
    (151936, 4096): Tile(64, 128, 4, 5),  # head
    (4096, 20480): Tile(32, 256, 4, 7),  # its DFlash drafter: fc
    (10240, 4096): Tile(32, 128, 4, 6),  # context_kv
    (960, 576): Tile(16, 64, 4, 10),  # SmolLM2-135M: qkv
    (576, 576): Tile(16, 64, 4, 10),  # o
    (3072, 576): Tile(32, 64, 4, 10),  # gate_up
    (576, 1536): Tile(16, 128, 4, 13),  # down
    (49152, 576): Tile(64, 64, 4, 6),  # head
}
SMALL_TUNED: dict[tuple[int, int], Tile] = {}  # the same for other GPUs (sm_121), where none has been measured


def tuned(gpu: Gpu) -> dict[tuple[int, int], Tile]:
    return TUNED if gpu.wgmma else SMALL_TUNED


def _choose(out: int, in_: int, itemsize: int, sms: int) -> Tile:
    """The widest strip that still gives nearly every SM a program, and a step over 'in' that needs no mask."""
    widest = 64 if itemsize == 2 else 32
    block_n = next((n for n in (64, 32) if n <= widest and out >= 0.9 * n * sms), 16)
    block_k = 128 if itemsize == 2 and in_ % 128 == 0 and in_ > 1024 else 64
    return Tile(block_n, block_k, 4, 8)


def _stages(tile: Tile, rows: int, programs: int, itemsize: int, norm: bool, gpu: Gpu) -> int:
    """Stages whose buffers fit beside those of the other programs that must share an SM to run all at once."""
    step = tile.block_k * itemsize
    wgmma = gpu.wgmma and itemsize == 2 and tile.block_n >= 64 and tile.warps % 4 == 0
    # wgmma reads from shared memory, so one more tile of each is held; mma.sync reads registers, and only x * gain
    # passes through shared memory once more.
    held = (tile.block_n + rows) * step if wgmma else rows * step * norm
    for beside in range(min(triton.cdiv(programs, gpu.sms), 3), 0, -1):
        room = min(gpu.shared, (gpu.shared + 1024) // beside - 1024) - held
        buffers = room // ((tile.block_n + rows) * step)
        if buffers >= 2:
            break
    return max(min(tile.stages, buffers + 1), 2)


@lru_cache(maxsize=4096)
def _launch(rows: int, out: int, in_: int, itemsize: int, norm: bool, lines: int, gpu: Gpu) -> Launch:
    """How to cut the work. Only Launch.rows and Launch.stages depend on the rows, and neither changes a bit."""
    tile = tuned(gpu).get((out, in_)) if itemsize == 2 else None
    tile = tile or _choose(out, in_, itemsize, gpu.sms)
    row_tile = next(r for r in ROW_TILES if r >= rows)
    programs = triton.cdiv(out // lines, tile.block_n // lines)
    stages = _stages(tile, row_tile, programs, itemsize, norm, gpu)
    pieces = 0
    if in_ * itemsize % 16 == 0:  # rows lie on 16 bytes, as a fetch wants it
        pieces = min(AHEAD_BYTES // tile.block_n, in_ * itemsize) // pdl.FETCH.value
        pieces = 1 << (pieces.bit_length() - 1) if pieces else 0  # a range has a power of two of elements
    return Launch(tile, programs, row_tile, stages, pieces)


@lru_cache
def _gpu(device: torch.device) -> Gpu:
    """What shapes a launch; under Triton's interpreter (CPU tensors), a small GPU."""
    if device.type != "cuda":
        return Gpu(8, 99 << 10, False)
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.multi_processor_count, (227 if found.major in ROOMY_MAJORS else 99) << 10, found.major == 9)


def _run(kernel, grid: tuple[int], *arguments: object, **options: object) -> None:
    """All launches pass here; the bench and the tests take its place to compile without one."""
    kernel[grid](*arguments, **options)


def _prepare(x: Tensor, weight: Tensor, gain: Tensor | None, lines: int) -> tuple[Launch, dict[str, object]]:
    """Check what all functions have in common: the launch, and the constants and options that all kernels take."""
    rows, in_ = x.shape
    assert 0 < rows <= MOST_ROWS, f"{rows} rows: these kernels take 1 to {MOST_ROWS}"
    assert x.stride(1) == 1 and weight.is_contiguous(), (x.stride(), weight.stride())
    assert weight.shape[1] == in_ and weight.dtype == x.dtype, (x.shape, weight.shape, x.dtype, weight.dtype)
    assert gain is None or (gain.shape == (in_,) and gain.dtype == x.dtype and gain.is_contiguous()), gain
    assert weight.shape[0] % lines == 0, (weight.shape, lines)
    launch = _launch(rows, weight.shape[0], in_, x.element_size(), gain is not None, lines, _gpu(x.device))
    tile, on = launch.tile, pdl.active(x.device)
    pieces = 0 if weight.data_ptr() % 16 else launch.pieces
    return launch, {
        "IN": in_, "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "ROWS": launch.rows, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "PIECES": pieces, "PDL": on,
        "num_warps": tile.warps, "num_stages": launch.stages, **pdl.options(on),
    }  # fmt: skip


def _into(
    out: Tensor, x: Tensor, gain: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, add: bool
) -> None:
    assert out.stride(1) == 1 and out.shape == (x.shape[0], weight.shape[0]), (out.shape, out.stride(), weight.shape)
    launch, options = _prepare(x, weight, gain, 1)
    _run(
        _linear, (launch.programs,), x, gain, weight, bias, out, x.shape[0], x.stride(0), out.stride(0), eps,
        OUT=weight.shape[0], NORM=gain is not None, BIAS=bias is not None, ADD=add, **options,
    )  # fmt: skip


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # [rows, in] -> [rows, out]
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    if x.shape[0]:
        _into(out, x, None, 0.0, weight, bias, False)
    return out


def norm_linear(
    x: Tensor,  # [rows, in]
    gain: Tensor,  # [in]
    eps: float,
    weight: Tensor,  # [out, in]
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,  # of the result, for logits whose argmax is that of `norm_argmax`: float32
) -> Tensor:  # [rows, out]: linear(rms_norm(x, gain, eps), weight, bias)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype or x.dtype, device=x.device)
    if x.shape[0]:
        _into(out, x, gain, eps, weight, bias, False)
    return out


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """residual [rows, out] += linear(x, weight, bias), in place; x must be another tensor."""
    if x.shape[0]:
        _into(residual, x, None, 0.0, weight, bias, True)


def norm_gated(
    x: Tensor,  # [rows, in]
    gain: Tensor,  # [in]
    eps: float,
    weight: Tensor,  # [2 * inter, in]: gate, then up
) -> Tensor:  # [rows, inter]: silu(gate) * up
    rows, inter = x.shape[0], weight.shape[0] // 2
    out = torch.empty((rows, inter), dtype=x.dtype, device=x.device)
    if rows:
        launch, options = _prepare(x, weight, gain, 2)
        _run(_gated, (launch.programs,), x, gain, weight, out, rows, x.stride(0), eps, INTER=inter, **options)
    return out


def norm_argmax(
    x: Tensor,  # [rows, in]
    gain: Tensor,  # [in]
    eps: float,
    weight: Tensor,  # [vocabulary, in]
) -> Tensor:  # int64 [rows]: the largest of the float32 logits; the lowest id wins a tie, NaN never wins
    rows, device = x.shape[0], x.device
    out = torch.empty((rows,), dtype=torch.int64, device=device)
    if not rows:
        return out
    launch, options = _prepare(x, weight, gain, 1)
    parts, on = launch.programs, pdl.active(device)
    best = torch.empty((rows, parts), dtype=torch.float32, device=device)
    best_id = torch.empty((rows, parts), dtype=torch.int32, device=device)
    _run(_argmax, (parts,), x, gain, weight, best, best_id, rows, x.stride(0), eps, OUT=weight.shape[0], **options)
    block = triton.next_power_of_2(parts)
    warps = min(max(block // 512, 1), 8)
    _run(_pick, (rows,), best, best_id, out, PARTS=parts, BLOCK=block, PDL=on, num_warps=warps, **pdl.options(on))
    return out
