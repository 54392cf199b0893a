"""Weights as integers in groups of 32 along the input: the shape that GGUF's Q4_0, Q4_1 and Q8_0 share.

A group g of output row o means  W[o, k] = scale[o, g] * q[o, k] + offset[o, g].  The integers are those of the file,
never rounded again; kernels repack them into the order their machine likes. Float weights can be rounded to this shape
too (`GroupQuant.from_float`), to 8 bits, where the checkpoint itself holds none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32


@dataclass(frozen=True, slots=True)
class GroupQuant:
    """bits 4: q is uint8 [out, groups, 16], byte j holds element j in its low and j + 16 in its high nibble (0..15).
    bits 8: q is int8 [out, groups, 32], and offset is None."""

    bits: int
    q: Tensor
    scale: Tensor  # float16 [out, groups]
    offset: Tensor | None  # float16 [out, groups]

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape[0], self.q.shape[1] * GROUP

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in] in 'dtype': what every kernel on these weights must agree with."""
        q = torch.cat((self.q & 15, self.q >> 4), dim=-1) if self.bits == 4 else self.q
        w = q.float() * self.scale.float().unsqueeze(-1)
        if self.offset is not None:
            w += self.offset.float().unsqueeze(-1)
        return w.flatten(1).to(dtype)

    @staticmethod
    def from_float(weight: Tensor) -> GroupQuant:
        """Round a float matrix [out, in] to 8 bits per weight, symmetric in each group."""
        out, width = weight.shape
        groups = weight.float().contiguous().view(out, width // GROUP, GROUP)
        scale = (groups.abs().amax(-1) / 127).to(torch.float16)
        inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
        q = (groups * inverse.unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8)
        return GroupQuant(8, q, scale, None)

    def take(self, ids: Tensor) -> GroupQuant:
        """Chosen output rows, in the order given."""
        ids = ids.long()
        offset = None if self.offset is None else self.offset[ids]
        return GroupQuant(self.bits, self.q[ids], self.scale[ids], offset)
