"""Integers of 8 bits: what compressed-tensors calls int-quantized, and train/export.py writes.

X.weight             int8 [out, in]
X.weight_scale       [] or [1]; [out] or [out, 1]; [out, in / group]
X.weight_zero_point  int8, as the scales: W = (code - zero) * scale; asymmetric matrices alone
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.plane_layout import CodeForm
from sparkdraft.weights.quant.coded import Coded
from sparkdraft.weights.quant.group import GROUP
from sparkdraft.weights.quant.stated import NOTHING, Said
from sparkdraft.weights.quant.stored import Quantised
from sparkdraft.weights.quant.unpack import by_expert, kind, per_row
from sparkdraft.weights.quant.unread import Size, Unread, experts_of, is_single

SCALE, ZERO = "_scale", "_zero_point"  # X.weight_scale beside X.weight
# How compressed-tensors states what train/export.py writes, as the weights of a group of its config.
INT8_GROUPS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


class Int8:
    name = "compressed-tensors' int-quantized weights of 8 bits"

    def states(self, quantization: Mapping[str, Any]) -> bool:
        return quantization.get("quant_method") == "compressed-tensors"

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        if dtypes[tensor] != "I8" or not tensor.endswith(".weight"):
            return None
        return tensor, (tensor, tensor + SCALE, *([tensor + ZERO] if tensor + ZERO in dtypes else []))

    def read(self, what: str, *tensors: Tensor, said: Said = NOTHING) -> Quantised:
        return by_expert(_read, what, tensors)

    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        codes, scale, *zeros = tensors
        count = experts_of(codes)
        out, width = codes.shape[-2:]
        shape, rows = scale.of_expert(count), out * (count or 1)
        offset = "f32" if zeros and not said.symmetric and bool(zeros[0].read().any()) else ""
        if is_single(shape, out):
            return Size(rows, width, CodeForm("int8", 8, 0, "", offset, row_scale=True))
        return Size(rows, width, CodeForm("int8", 8, width // shape[-1], scale.scale, offset))


def _read(what: str, codes: Tensor, scale: Tensor, zeros: Tensor | None = None) -> Coded:
    out, width = codes.shape if codes.dim() == 2 else (0, 0)
    by_row = scale.numel() == 1 or tuple(scale.shape) in ((out,), (out, 1))
    groups = 1 if by_row else scale.shape[-1]
    whole = bool(width) and groups > 0 and width % groups == 0
    alike = zeros is None or zeros.shape == scale.shape
    if not whole or not scale.is_floating_point() or not alike or not (by_row or scale.shape == (out, groups)):
        raise UserError(
            f"{what} has shape {tuple(codes.shape)} and scales of {kind(scale)}; one scale, one per row or one per "
            "group of columns of equal size are read: export the checkpoint again."
        )
    raw = codes.view(torch.uint8)
    zeros = None if zeros is None or not bool(zeros.any()) else zeros  # some symmetric files have zeros of them
    if by_row:
        offset = None if zeros is None else -per_row(zeros, out).unsqueeze(1)
        return Coded("int8", raw, width, None, offset, per_row(scale, out))
    offset = None if zeros is None else -zeros.float() * scale.float()
    return Coded("int8", raw, width // groups, scale, offset)
