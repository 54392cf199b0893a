"""Floats of 4 bits in groups of 32 with a power of two each (OCP's MXFP4), as gpt-oss's files hold their experts.

    X_blocks  uint8 [experts, out, in / 32, 16]: byte j of a group has weight 2j in its low and 2j + 1 in its high bits
    X_scales  uint8 [experts, out, in / 32]: a group's weights are times 2 ** (scale - 127)

A weight is a sign, two bits of exponent and one of mantissa, so it is exact in every float of 16 bits or more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.quant.stated import NOTHING, Said
from sparkdraft.weights.quant.stored import QuantisedExperts

GROUP = 32
BIAS = 127
BLOCKS, SCALES = "_blocks", "_scales"
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lower three bits; the fourth is the sign


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """One matrix."""

    blocks: Tensor  # uint8 [out, groups, 16]
    scales: Tensor  # uint8 [out, groups]

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], self.blocks.shape[1] * GROUP

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in] in 'dtype': what every kernel on these weights must agree with."""
        levels = torch.tensor([*LEVELS, *(-level for level in LEVELS)], device=self.blocks.device)
        codes = torch.stack((self.blocks & 15, self.blocks >> 4), dim=-1).flatten(2)  # [out, groups, 32]
        values = torch.ldexp(levels[codes.int()], self.scales.int().unsqueeze(-1) - BIAS)
        return values.flatten(1).to(dtype)

    def take(self, ids: Tensor) -> Mxfp4:
        """Chosen output rows, in the order given."""
        ids = ids.long()
        return Mxfp4(self.blocks[ids], self.scales[ids])


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
        return QuantisedExperts([Mxfp4(*expert) for expert in zip(blocks, scales, strict=True)])
