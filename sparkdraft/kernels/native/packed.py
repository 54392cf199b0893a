"""Weights as the C++ matmuls read them: integers in groups of 32, repacked, those of the file or rounded to 8 bits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from sparkdraft.kernels.native.library import c
from sparkdraft.kernels.native.recording import empty
from sparkdraft.weights.linear import BiasedLinear, CannotKeep, Linear, StackedLinear, ToFloats
from sparkdraft.weights.quant.group import GROUP, GroupQuant
from sparkdraft.weights.quant.stored import Stored, as_float


def keep_matrix(parts: Sequence[Stored], bias: Tensor | None, floats: ToFloats) -> Linear:
    """One matrix stacked of the parts, as integers."""
    width = parts[0].shape[1]
    if width % GROUP:
        raise CannotKeep(f"width {width} is no multiple of {GROUP}")
    groups = [_grouped(part) for part in parts]
    alike = len({group.bits for group in groups}) == 1
    kept = PackedLinear.pack(groups) if alike else StackedLinear([PackedLinear.pack([group]) for group in groups])
    return kept if bias is None else BiasedLinear(kept, bias)


def keep_table(part: Stored, floats: ToFloats) -> Tensor | GroupQuant:
    """A table that `embed` looks rows up in."""
    return floats(part) if part.shape[1] % GROUP else _grouped(part)


def _grouped(part: Stored) -> GroupQuant:
    return part if isinstance(part, GroupQuant) else GroupQuant.from_float(as_float(part))


class _Matrix(ctypes.Structure):
    """Mirrors 'Matrix' of matmul.cpp."""

    _fields_ = [(name, c_int64) for name in ("data", "groups", "out_features", "bits")]


class PackedLinear(Linear):
    """Weights in the order in which matmul.cpp reads them. Several matrices that read the same input make one."""

    __slots__ = ("_data", "_handle", "_matrix", "in_features", "nbytes", "out_features")

    def __init__(self, bits: int, in_features: int, out_features: int) -> None:
        groups, lanes = in_features // GROUP, c.sd_lanes()
        padded = -(-out_features // lanes) * lanes
        self.in_features, self.out_features = in_features, out_features
        self.nbytes = padded * groups * (20 if bits == 4 else 34)
        self._data = torch.zeros(self.nbytes, dtype=torch.uint8)
        self._matrix = _Matrix(self._data.data_ptr(), groups, out_features, bits)
        self._handle = ctypes.addressof(self._matrix)

    @staticmethod
    def pack(parts: list[GroupQuant]) -> PackedLinear:
        bits, width = parts[0].bits, parts[0].shape[1]
        assert all(p.bits == bits and p.shape[1] == width for p in parts), [(p.bits, p.shape) for p in parts]
        packed = PackedLinear(bits, width, sum(p.shape[0] for p in parts))
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

    def linear(self, x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
        rows, out = x.shape[0], self.out_features
        y = empty(rows, out)
        c.sd_linear(self._handle, x.data_ptr(), x.stride(0), rows, y.data_ptr(), out, 0)
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual += x W^T, in place."""
        c.sd_linear(*(self._handle, x.data_ptr(), x.stride(0), x.shape[0], residual.data_ptr(), residual.stride(0), 1))


def place(t: Tensor | None) -> tuple[int | None, int, int]:
    """Address, and strides in bytes of an output and of a group."""
    if t is None:
        return None, 0, 0
    size = t.element_size()
    return t.data_ptr(), t.stride(0) * size, t.stride(1) * size
