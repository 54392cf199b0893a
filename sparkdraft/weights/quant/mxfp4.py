"""Floats of 4 bits in groups of 32 with a power of two each (OCP's MXFP4), as gpt-oss's files hold their experts.

    X_blocks  uint8 [experts, out, in / 32, 16]: byte j of a group has weight 2j in its low and 2j + 1 in its high bits
    X_scales  uint8 [experts, out, in / 32]: a group's weights are times 2 ** (scale - 127)

A weight is a sign, two bits of exponent and one of mantissa, so it is exact in every float of 16 bits or more.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.plane_layout import CodeForm
from sparkdraft.weights.quant.coded import Coded
from sparkdraft.weights.quant.stated import NOTHING, Said
from sparkdraft.weights.quant.stored import QuantisedExperts
from sparkdraft.weights.quant.unread import Size, Unread

GROUP = 32
BLOCKS, SCALES = "_blocks", "_scales"


def mxfp4(blocks: Tensor, scales: Tensor) -> Coded:
    """One matrix, of uint8 blocks [out, groups, 16] and scales [out, groups]: the bytes are in `Coded`'s own order."""
    return Coded("e2m1", blocks.flatten(1), GROUP, scales)


class Mxfp4Experts:
    name = "MXFP4 experts as gpt-oss has them"

    def states(self, quantization: Mapping[str, Any]) -> bool:
        return quantization.get("quant_method") == "mxfp4"

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        stem = tensor.removesuffix(BLOCKS)
        return (stem, (tensor, stem + SCALES)) if stem != tensor and dtypes[tensor] == "U8" else None

    def read(self, what: str, *tensors: Tensor, said: Said = NOTHING) -> QuantisedExperts:
        blocks, scales = tensors
        packed = blocks.dim() == 4 and blocks.shape[3] == GROUP // 2
        if not packed or scales.shape != blocks.shape[:3] or scales.dtype != torch.uint8:
            kind = str(scales.dtype).removeprefix("torch.")
            raise UserError(
                f"{what} has blocks of shape {tuple(blocks.shape)} and scales of {tuple(scales.shape)} of {kind}; "
                f"uint8 [experts, out, groups, {GROUP // 2}] and one uint8 per group are read: fetch the file again."
            )
        return QuantisedExperts([mxfp4(*expert) for expert in zip(blocks, scales, strict=True)])

    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        *rows, groups, half = tensors[0].shape
        return Size(prod(rows), groups * half * 2, CodeForm("e2m1", 4, GROUP, "e8m0"))
