"""Integers of compressed-tensors: int-quantized (8 bits), which train/export.py also writes, and pack-quantized.

int-quantized
X.weight             int8 [out, in]
X.weight_scale       [] or [1]; [out] or [out, 1]; [out, in / group]
X.weight_zero_point  int8, as the scales: W = (code - zero) * scale; asymmetric matrices alone

pack-quantized (4 and 8 bits)
X.weight_packed      int32 [out, in / 8]: field i of a word is input 8c + i, the signed integer plus 8
X.weight_scale       [out, in / group], or [out, 1]
X.weight_shape       int64 [2]: out and in
X.weight_zero_point  int32 [out / 8, in / group], packed along the outputs, plus 8; asymmetric matrices alone
X.weight_g_idx       int32 [in], the group of each input, where inputs were sorted (gptq.py explains)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.plane_layout import CodeForm
from sparkdraft.weights.quant.base import (
    Size,
    Unread,
    WeightFormat,
    damaged,
    experts_of,
    fields,
    grouped,
    grouped_form,
    is_single,
    kind,
    per_row,
)
from sparkdraft.weights.quant.stated import NOTHING, Said
from sparkdraft.weights.quant.stored import GROUP, Coded, Quantised

SCALE, ZERO, ORDER = "_scale", "_zero_point", "_g_idx"  # X.weight_scale beside X.weight
# How compressed-tensors' config describes what train/export.py writes.
INT8_GROUPS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


class Int8(WeightFormat):
    name = "compressed-tensors' int-quantized weights of 8 bits"
    methods = ("compressed-tensors",)

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        if dtypes[tensor] != "I8" or not tensor.endswith(".weight"):
            return None
        return tensor, (tensor, tensor + SCALE, *([tensor + ZERO] if tensor + ZERO in dtypes else []))

    def read_matrix(self, what: str, tensors: Sequence[Tensor], said: Said) -> Coded:
        codes, scale, *more = tensors
        zeros = more[0] if more and bool(more[0].any()) else None  # some symmetric files have zeros of them
        out, width = codes.shape if codes.dim() == 2 else (0, 0)
        by_row = is_single(scale.shape, out)
        groups = 1 if by_row else scale.shape[-1]
        whole = bool(width) and groups > 0 and width % groups == 0
        alike = not more or more[0].shape == scale.shape
        if not whole or not scale.is_floating_point() or not alike or not (by_row or scale.shape == (out, groups)):
            raise UserError(
                f"{what} has shape {tuple(codes.shape)} and scales of {kind(scale)}; one scale, one per row or one per "
                "group of columns of equal size are read: export the checkpoint again."
            )
        raw = codes.view(torch.uint8)
        if by_row:
            offset = None if zeros is None else -per_row(zeros, out).unsqueeze(1)
            return Coded("int8", raw, width, None, offset, per_row(scale, out))
        offset = None if zeros is None else -zeros.float() * scale.float()
        return Coded("int8", raw, width // groups, scale, offset)

    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        codes, scale, *zeros = tensors
        count = experts_of(codes)
        out, width = codes.shape[-2:]
        shape, rows = scale.of_expert(count), out * (count or 1)
        offset = "f32" if zeros and not said.symmetric and bool(zeros[0].read().any()) else ""
        if is_single(shape, out):
            return Size(rows, width, CodeForm("int8", 8, 0, "", offset, row_scale=True))
        return Size(rows, width, CodeForm("int8", 8, width // shape[-1], scale.scale, offset))


class PackQuantized(WeightFormat):
    name = "compressed-tensors' pack-quantized weights of 4 and 8 bits"
    methods = ("compressed-tensors",)

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        stem = tensor.removesuffix("_packed")
        if stem == tensor or dtypes[tensor] != "I32":
            return None
        more = [stem + part for part in (ZERO, ORDER) if stem + part in dtypes]
        return stem, (tensor, f"{stem}_scale", f"{stem}_shape", *more)

    def read_matrix(self, what: str, tensors: Sequence[Tensor], said: Said) -> Quantised:
        packed, scale, shape, *more = tensors
        out, width = map(int, shape.tolist()) if shape.numel() == 2 else (0, 0)
        if packed.dim() != 2 or packed.shape[0] != out or not width:
            raise damaged(what, f"is {kind(packed)} and its weight_shape says {shape.tolist()}")
        bits = next((bits for bits in (4, 8) if -(-width * bits // 32) == packed.shape[1]), 0)
        if not bits:
            raise UserError(
                f"{what} has {32 * packed.shape[1] / width:.3g} bits per weight, and 4 and 8 are read: use the same "
                "model in one of those, or in 16 bits."
            )
        scale = scale.reshape(out, -1) if scale.numel() == out else scale
        groups = scale.shape[-1]
        if scale.dim() != 2 or scale.shape[0] != out or width % groups or width % 2:
            read = "whole groups of equal size, one scale each, are read"
            raise damaged(what, f"has shape {(out, width)} and scales of {kind(scale)}; {read}")
        codes = fields(packed, bits)[:, :width]
        zeros = next((_zeros(what, part, out, groups, bits) for part in more if part.dim() == 2), None)
        order = next((part for part in more if part.dim() == 1), None)
        return grouped(what, order, codes, bits, scale, zeros)

    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        packed, scale, shape, *more = tensors
        count = experts_of(packed)
        out, width = map(int, shape.read().reshape(-1, 2)[0].tolist())
        bits = 8 if packed.shape[-1] == -(-width // 4) else 4
        own = scale.of_expert(count)
        groups = own[-1] if len(own) == 2 else 1
        zeros = any(len(part.of_expert(count)) == 2 for part in more) and not said.symmetric
        order = next((part for part in more if len(part.of_expert(count)) == 1), None)
        return Size(out * (count or 1), width, grouped_form(order, bits, width, groups, scale.scale, zeros))


def _zeros(what: str, part: Tensor, out: int, groups: int, bits: int) -> Tensor:
    """Zero points [out, groups], on the scale of the codes."""
    if part.dtype == torch.int8 and part.shape == (out, groups):
        return part.int() + (1 << (bits - 1))
    if part.dtype != torch.int32 or part.shape != (-(-out * bits // 32), groups):
        read = f"int32 {(-(-out * bits // 32), groups)} is read"
        raise damaged(what, f"has a weight_zero_point of {kind(part)}, and {read}")
    return fields(part.t(), bits)[:, :out].t().int()
