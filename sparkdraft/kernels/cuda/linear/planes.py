"""Quantised matrices that stay quantised on a GPU: how these kernels keep them, and their matmuls of many tokens.

Up to MIDDLE tokens run the sweep of few_tokens.py, in blocks of 32 or 64. Beyond that, a slice of the weight at a time
is turned into floats of x's type, in a scratch small enough to stay in the L2, and cuBLAS multiplies with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.linear.dequantise import STRIP, group_bytes, group_number, line_of_strip, plane, planes_of
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.weights.linear import (
    CannotKeep,
    ExpertLinear,
    Linear,
    StackedLinear,
    ToFloats,
    WeightTiles,
    keep_float_experts,
    keep_floats,
)
from sparkdraft.weights.planes import Planes, empty, fill, has_row_scale, pack, plan_layout
from sparkdraft.weights.quant.stored import Coded, GroupQuant, Stored

MIDDLE = 256  # rows; beyond, cuBLAS earns what the scratch costs
SCRATCH = 16 << 20  # bytes


class PlaneLinear(Linear):
    def __init__(self, planes: Planes, bias: Tensor | None = None) -> None:
        self.planes, self.bias = planes, bias
        self.nbytes = planes.nbytes + (0 if bias is None else bias.nbytes)
        self.tiles: WeightTiles = tiles_of(planes, bias)

    def linear(self, x: Tensor) -> Tensor:
        if 0 < x.shape[0] <= few_tokens.MOST_TOKENS:
            return few_tokens.linear(x, self.tiles)
        return self._multiply(x, x.dtype)

    def linear_float32(self, x: Tensor) -> Tensor:
        return self._multiply(x, torch.float32)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        if 0 < x.shape[0] <= MIDDLE:
            few_tokens.wide_linear(x, self.tiles, residual, add=True)
        elif x.shape[0]:
            self._by_slices(residual, x, add=True)

    def rows(self, ids: Tensor | None = None) -> Coded:
        return (self.planes if ids is None else self.planes.take(ids)).coded()

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty((x.shape[0], self.tiles.shape[0]), dtype=dtype, device=x.device)
        if x.shape[0] > MIDDLE:
            self._by_slices(out, x, add=False)
        elif x.shape[0]:
            few_tokens.wide_linear(x, self.tiles, out)
        return out

    def _by_slices(self, out: Tensor, x: Tensor, add: bool) -> None:
        rows, width = self.tiles.shape
        step = max(SCRATCH // (width * x.element_size()) // 64 * 64, 64)
        scratch = torch.empty((min(step, rows), width), dtype=x.dtype, device=x.device)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            weight, target = to_floats(self.planes.part(first, last), scratch[: last - first]), out[:, first:last]
            if add:
                target.addmm_(x, weight.t())
            elif out.dtype == x.dtype:
                torch.mm(x, weight.t(), out=target)
            elif x.is_cuda:
                target.copy_(torch.mm(x, weight.t(), out_dtype=out.dtype))
            else:
                target.copy_(F.linear(x.to(out.dtype), weight.to(out.dtype)))
        if self.bias is not None:
            out += self.bias


class PlaneExperts(ExpertLinear):
    """A matrix per expert, all of one layout."""

    def __init__(self, planes: Planes, count: int, bias: Tensor | None = None) -> None:
        self.planes, self.count, self.bias = planes, count, bias
        self.nbytes = planes.nbytes + (0 if bias is None else bias.nbytes)
        self.tiles = tiles_of(planes)

    def expert(self, number: int) -> PlaneLinear:
        out = self.planes.shape[0] // self.count
        part = self.planes.part(number * out, (number + 1) * out)
        return PlaneLinear(part, None if self.bias is None else self.bias[number])


def tiles_of(planes: Planes, bias: Tensor | None = None) -> WeightTiles:
    return WeightTiles(planes.codes, planes.layout, planes.scale, planes.offset, planes.row_scale, bias, planes.out)


# ---- how a matrix is kept


def keep_matrix(parts: Sequence[Stored], bias: Tensor | None, floats: ToFloats) -> Linear:
    """Floats as floats, codes as codes. Parts of different formats stay apart."""
    if all(isinstance(part, Tensor) for part in parts):
        return keep_floats(parts, bias, floats)
    coded, device = [as_coded(part) for part in parts], _device(floats)
    if all(isinstance(part, Coded) for part in coded) and len({plan_layout([part]) for part in coded}) == 1:  # type: ignore[list-item]
        return PlaneLinear(pack(coded, device), bias)  # type: ignore[arg-type]
    biases = [None] * len(parts) if bias is None else bias.split([part.shape[0] for part in parts])
    return StackedLinear(
        [
            PlaneLinear(pack([part], device), own) if isinstance(part, Coded) else keep_floats([part], own, floats)
            for part, own in zip(coded, biases, strict=True)
        ]
    )


def keep_experts(experts: Sequence[Sequence[Stored]], bias: Tensor | None, floats: ToFloats) -> ExpertLinear:
    """One expert at a time is repacked."""
    if all(isinstance(part, Tensor) for parts in experts for part in parts):
        return keep_float_experts(experts, bias, floats)
    made: Planes | None = None
    for number, parts in enumerate(experts):
        coded = [as_coded(part) for part in parts]
        if not all(isinstance(part, Coded) for part in coded):
            raise CannotKeep("some of its experts are floats and others are quantised")
        layout, out = plan_layout(coded), sum(part.shape[0] for part in parts)  # type: ignore[arg-type]
        if made is None:
            by_row = any(has_row_scale(part) for part in coded)  # type: ignore[arg-type]
            made = empty(layout, len(experts) * out, _device(floats), by_row)
        elif made.layout != layout:
            raise CannotKeep(f"its experts have different formats ({made.layout.name} and {layout.name})")
        fill(made, coded, number * out)  # type: ignore[arg-type]
    assert made is not None, "a layer of no experts"
    return PlaneExperts(made, len(experts), bias)


@dataclass(frozen=True, slots=True)
class CodedTable:
    """A table of codes that rows are looked up in (`embed`), as floats of one type."""

    coded: Coded
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.coded.shape

    def take(self, ids: Tensor) -> CodedTable:
        return CodedTable(self.coded.take(ids), self.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.coded.dequantize(dtype or self.dtype)


def keep_table(part: Stored, floats: ToFloats) -> Stored:
    if not isinstance(part, Coded | GroupQuant):
        return floats(part)
    coded, sample = as_coded(part), floats(torch.zeros(1))
    assert isinstance(coded, Coded)
    return CodedTable(coded.to(sample.device), sample.dtype)


def as_coded(part: Stored) -> Tensor | Coded:
    """Floats stay floats. Raises CannotKeep for a format that has no `Coded` form."""
    if isinstance(part, Tensor | Coded):
        return part
    if isinstance(part, CodedTable):
        return part.coded
    if isinstance(part, GroupQuant):
        return group_coded(part)
    raise CannotKeep(f"{type(part).__name__} has no form on a GPU")


def group_coded(part: GroupQuant) -> Coded:
    """The same numbers: integers from 0 to 15 become integers from -8 on, and the offset takes the difference."""
    out = part.q.shape[0]
    if part.bits == 8:
        return Coded("int8", part.q.reshape(out, -1).view(torch.uint8), 32, part.scale)
    codes = torch.cat((part.q & 15, part.q >> 4), -1).reshape(out, -1)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    assert part.offset is not None
    offset = part.offset.float() + 8 * part.scale.float()
    if not offset.any():
        return Coded("int4", packed, 32, part.scale)
    narrow = offset.half()
    return Coded("int4", packed, 32, part.scale, narrow if torch.equal(narrow.float(), offset) else offset)


def _device(floats: ToFloats) -> torch.device:
    return floats(torch.zeros(1)).device


# ---- back to floats


@triton.jit
def _to_floats(
    weight, scale, offset, row_scale, out, lines, words_scale, words_offset,
    LEVELS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    IN: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of some lines: all in float32, rounded at its end."""
    enter(PDL)
    COUNT: tl.constexpr = planes_of(LEVELS)
    TILE: tl.constexpr = COUNT * PLANE
    TILES: tl.constexpr = (IN + TILE - 1) // TILE
    line = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    real = line < lines
    k = tl.arange(0, PLANE)
    tile = tl.program_id(1)
    place = weight + line_of_strip(line, TILES, PLANE)[:, None] + tile * (STRIP * PLANE) + k[None, :]
    words = tl.load(place, mask=real[:, None], other=0)
    for number in tl.static_range(COUNT):
        column = tile * TILE + number * PLANE
        value = plane(words, None, number, LEVELS, tl.float32, False)
        if SCALE != "":
            byte = column // GROUP * group_bytes(SCALE)
            word = tl.load(scale + line_of_strip(line, words_scale, 1) + byte // 4 * STRIP, mask=real, other=0)
            value = value * group_number(word, byte % 4, SCALE)[:, None]
        if OFFSET != "":
            byte = column // GROUP * group_bytes(OFFSET)
            word = tl.load(offset + line_of_strip(line, words_offset, 1) + byte // 4 * STRIP, mask=real, other=0)
            value = value + group_number(word, byte % 4, OFFSET)[:, None]
        if row_scale is not None:
            value = value * tl.load(row_scale + line, mask=real, other=0.0)[:, None]
        target = out + line[:, None] * IN + column + k[None, :]
        inside = real[:, None] & (k < IN - column)[None, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=inside)


def to_floats(planes: Planes, out: Tensor) -> Tensor:
    (rows, width), layout = planes.shape, planes.layout
    assert out.is_contiguous() and out.shape == (rows, width), (out.shape, out.stride(), planes.shape)
    run(
        _to_floats, (triton.cdiv(rows, 32), layout.tiles),
        planes.codes, planes.scale, planes.offset, planes.row_scale, out, rows,
        layout.group_words(layout.scale), layout.group_words(layout.offset),
        LEVELS=layout.levels, PLANE=layout.plane, GROUP=layout.group, SCALE=layout.scale, OFFSET=layout.offset,
        IN=width, BLOCK_N=32, num_warps=4,
    )  # fmt: skip
    return out
