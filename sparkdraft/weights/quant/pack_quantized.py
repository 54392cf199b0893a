"""Integers of 4 and 8 bits in words of 32 along the input: compressed-tensors' pack-quantized.

X.weight_packed      int32 [out, in / 8]: field i of a word is input 8c + i, and holds the signed integer plus 8
X.weight_scale       [out, in / group], or [out, 1]
X.weight_shape       int64 [2]: out and in
X.weight_zero_point  int32 [out / 8, in / group], packed along the outputs, plus 8; asymmetric matrices alone
X.weight_g_idx       int32 [in], the group of each input, where inputs were sorted (see qweight.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.quant.qweight import grouped_by, size_grouped
from sparkdraft.weights.quant.stated import NOTHING, Said
from sparkdraft.weights.quant.stored import Quantised
from sparkdraft.weights.quant.unpack import by_expert, fields, kind
from sparkdraft.weights.quant.unread import Size, Unread, experts_of

OPTIONAL = ("_zero_point", "_g_idx")


class PackQuantized:
    name = "compressed-tensors' pack-quantized weights of 4 and 8 bits"

    def states(self, quantization: Mapping[str, Any]) -> bool:
        return quantization.get("quant_method") == "compressed-tensors"

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        stem = tensor.removesuffix("_packed")
        if stem == tensor or dtypes[tensor] != "I32":
            return None
        more = [stem + part for part in OPTIONAL if stem + part in dtypes]
        return stem, (tensor, f"{stem}_scale", f"{stem}_shape", *more)

    def read(self, what: str, *tensors: Tensor, said: Said = NOTHING) -> Quantised:
        return by_expert(_read, what, tensors)

    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        packed, scale, shape, *more = tensors
        count = experts_of(packed)
        out, width = map(int, shape.read().reshape(-1, 2)[0].tolist())
        bits = 8 if packed.shape[-1] == -(-width // 4) else 4
        own = scale.of_expert(count)
        groups = own[-1] if len(own) == 2 else 1
        zeros = any(len(part.of_expert(count)) == 2 for part in more) and not said.symmetric
        order = next((part for part in more if len(part.of_expert(count)) == 1), None)
        return Size(out * (count or 1), width, size_grouped(order, bits, width, groups, scale.scale, zeros))


def _read(what: str, packed: Tensor, scale: Tensor, shape: Tensor, *more: Tensor) -> Quantised:
    out, width = map(int, shape.tolist()) if shape.numel() == 2 else (0, 0)
    if packed.dim() != 2 or packed.shape[0] != out or not width:
        raise UserError(f"{what} is {kind(packed)} and its weight_shape says {shape.tolist()}: fetch the file again.")
    bits = next((bits for bits in (4, 8) if -(-width * bits // 32) == packed.shape[1]), 0)
    if not bits:
        raise UserError(
            f"{what} has {32 * packed.shape[1] / width:.3g} bits per weight, and 4 and 8 are read: use the same model "
            "in one of those, or in 16 bits."
        )
    scale = scale.reshape(out, -1) if scale.numel() == out else scale
    groups = scale.shape[-1]
    if scale.dim() != 2 or scale.shape[0] != out or width % groups or width % 2:
        raise UserError(
            f"{what} has shape {(out, width)} and scales of {kind(scale)}; whole groups of equal size, one scale each, "
            "are read: fetch the file again."
        )
    codes = fields(packed, bits)[:, :width]
    zeros = next((_zeros(what, part, out, groups, bits) for part in more if part.dim() == 2), None)
    order = next((part for part in more if part.dim() == 1), None)
    return grouped_by(what, order, codes, bits, scale, zeros)


def _zeros(what: str, part: Tensor, out: int, groups: int, bits: int) -> Tensor:
    """Zero points [out, groups], on the scale of the codes."""
    if part.dtype == torch.int8 and part.shape == (out, groups):
        return part.int() + (1 << (bits - 1))
    if part.dtype != torch.int32 or part.shape != (-(-out * bits // 32), groups):
        raise UserError(
            f"{what} has a weight_zero_point of {kind(part)}, and int32 {(-(-out * bits // 32), groups)} is read: "
            "fetch the file again."
        )
    return fields(part.t(), bits)[:, :out].t().int()
