"""Weights as the C++ matmuls read them: repacked integers in groups of 32, those of the file or rounded to 8 bits; or
floats, for a router and for other widths. Codes of other formats are in leveled.py."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64
from itertools import pairwise

import torch
from torch import Tensor

from sparkdraft.kernels.native.graph import empty
from sparkdraft.kernels.native.library import c
from sparkdraft.weights.linear import Linear, StackedLinear, ToFloats
from sparkdraft.weights.quant.stored import GROUP, GroupQuant, Stored


def keep_float_matrix(parts: Sequence[Stored], bias: Tensor | None, floats: ToFloats) -> Linear:
    return FloatLinear(torch.cat([floats(part) for part in parts]), bias)


class Matrix(ctypes.Structure):
    """Mirrors 'Matrix' of matmul.h."""

    _fields_ = [(name, c_int64) for name in ("data", "width", "out_features", "bits", "bias", "levels")]


class NativeLinear(Linear):
    """A matrix that matmul.cpp reads."""

    __slots__ = ("_handle", "_kept", "in_features", "matrix", "nbytes", "out_features", "rounded")

    def __init__(self, data: Tensor, bits: int, shape: tuple[int, int], bias: Tensor | None, levels: int = 0) -> None:
        """levels: the address of a `Levels` of leveled.py."""
        self.out_features, self.in_features = shape
        self.rounded = ""
        bias = None if bias is None else bias.float().contiguous()
        assert bias is None or bias.shape == shape[:1], (bias.shape, shape)
        self._kept = data, bias
        self.nbytes = data.nbytes + (0 if bias is None else bias.nbytes)
        places = [0 if t is None else t.data_ptr() for t in self._kept]
        self.matrix = Matrix(places[0], self.in_features, self.out_features, bits, places[1], levels)
        self._handle = ctypes.addressof(self.matrix)

    def linear(self, x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
        y = empty(x.shape[0], self.out_features)
        self.write(y, x)
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        self.write(residual, x, add=True)

    def write(self, y: Tensor, x: Tensor, add: bool = False) -> None:
        """y's rows may be columns of a wider tensor."""
        places = (x.data_ptr(), x.stride(0), x.shape[0], y.data_ptr(), y.stride(0))
        c.sd_linear(self._handle, *places, int(add))


class FloatLinear(NativeLinear):
    """float32, as they are."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight.float().contiguous()  # [out, in]
        super().__init__(self.weight, 32, (weight.shape[0], weight.shape[1]), bias)

    def rows(self, ids: Tensor | None = None) -> Tensor:
        return self.weight if ids is None else self.weight[ids]


class PackedLinear(NativeLinear):
    """Integers in the order in which matmul.cpp reads them."""

    __slots__ = ()

    @staticmethod
    def pack(parts: Sequence[GroupQuant], bias: Tensor | None = None) -> PackedLinear:
        bits, width, lanes = parts[0].bits, parts[0].shape[1], c.sd_lanes()
        assert all(p.bits == bits and p.shape[1] == width for p in parts), [(p.bits, p.shape) for p in parts]
        out = sum(p.shape[0] for p in parts)
        padded = -(-out // lanes) * lanes
        data = torch.zeros(padded * (width // GROUP) * (20 if bits == 4 else 34), dtype=torch.uint8)
        packed = PackedLinear(data, bits, (out, width), bias)
        first = 0
        for part in parts:
            packed._fill(first, part)
            first += part.shape[0]
        return packed

    def _fill(self, first: int, part: GroupQuant) -> None:
        assert part.q.stride(2) == 1, part.q.stride()
        assert part.offset is None or part.bits == 4, "8-bit weights have no offset"
        places = [x for t in (part.q, part.scale, part.offset) for x in place(t)]
        c.sd_pack(self._handle, first, part.shape[0], *places)


class PackedParts(StackedLinear):
    """Matrices of different forms that read the same input: each writes its own columns."""

    def __init__(self, parts: Sequence[NativeLinear]) -> None:
        super().__init__(list(parts))
        self.rounded = next((part.rounded for part in parts if part.rounded), "")
        ends = [sum(p.out_features for p in parts[:i]) for i in range(len(parts) + 1)]
        self._columns = [(part, slice(*span)) for part, span in zip(parts, pairwise(ends), strict=True)]
        self._width = ends[-1]

    def linear(self, x: Tensor) -> Tensor:
        y = empty(x.shape[0], self._width)
        for part, columns in self._columns:
            part.write(y[:, columns], x)
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        for part, columns in self._columns:
            part.write(residual[:, columns], x, add=True)


def place(t: Tensor | None) -> tuple[int | None, int, int]:
    """Address, and strides in bytes of an output and of a group."""
    if t is None:
        return None, 0, 0
    size = t.element_size()
    return t.data_ptr(), t.stride(0) * size, t.stride(1) * size
