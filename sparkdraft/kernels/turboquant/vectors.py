"""A vector as codes and a float16 scale: rotated, brought to length 1, each coordinate rounded to its nearest level.

Rounding shortens a vector. The scale makes up for that at no cost to the reader: the decoded vector's inner product
with the vector is the vector's with itself, so attention scores do not shrink on average. Subtracting a fixed centre
first spends the bits on what differs between vectors; a softmax does not change when all keys lose the same vector.
Where a centre comes from and where codes are kept is left to the KV format.

    x - centre  ->  rotate  ->  blocks of unit length  ->  codes [..., dim], scale [..., blocks]
    scale * levels[codes]  ->  rotate back  ->  + centre
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdraft.kernels.turboquant.codebook import codebook
from sparkdraft.kernels.turboquant.codes import pack, unpack
from sparkdraft.kernels.turboquant.layout import check_bits
from sparkdraft.kernels.turboquant.rotation import Rotation

LARGEST_SCALE = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class Encoded:
    """Vectors of shape [..., dim], encoded."""

    planes: tuple[Tensor, ...]  # uint8 [..., bytes] each, as codes.py packs them
    scale: Tensor  # float16 [..., blocks]


class VectorFormat:
    """How vectors of one width are kept. Knows no memory of its own, only the tables, on one device."""

    def __init__(self, dim: int, bits: int, device: torch.device | None = None) -> None:
        check_bits(bits)
        self.dim, self.bits = dim, bits
        self.rotation = Rotation(dim, device)
        self.width = self.rotation.width
        self.codebook = codebook(self.width, bits)
        self.levels = self._table(self.codebook.levels, device)  # float64 [2**bits], of a unit vector
        self._thresholds = self._table(self.codebook.thresholds, device)

    @property
    def num_blocks(self) -> int:
        return self.dim // self.width

    def encode(self, x: Tensor, centre: Tensor | None = None) -> Encoded:
        """x: [..., dim]; centre: whatever broadcasts to it, such as [kv_heads, dim] for keys [rows, kv_heads, dim]."""
        return self.encode_rotated(self.rotate(x, centre))

    def rotate(self, x: Tensor, centre: Tensor | None = None) -> Tensor:  # [..., dim] -> [..., dim]
        """What is rounded to codes, in float32 or better: uncoded rows beside codes are kept like this too."""
        wide = x if x.dtype == torch.float64 else x.float()
        return self.rotation.forward(wide if centre is None else wide - centre)

    def encode_rotated(self, rotated: Tensor) -> Encoded:
        y = self._blocks(rotated)
        length = y.norm(dim=-1, keepdim=True)  # [..., blocks, 1]
        unit = y / length.where(length > 0, 1)
        codes = torch.bucketize(unit, self._thresholds.to(unit.dtype))
        level = self.levels.to(unit.dtype)[codes]
        inner = (level * unit).sum(-1)  # positive, as a level has its coordinate's sign; 0 for the zero vector alone
        scale = length.squeeze(-1) * (1 / inner.where(inner > 0, 1))
        return Encoded(pack(codes.flatten(-2), self.bits), scale.clamp(max=LARGEST_SCALE).half())

    def decode(self, encoded: Encoded, centre: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """[..., dim], computed in float32 or better."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scaled = self.unit(encoded, wide) * encoded.scale.to(wide).unsqueeze(-1)
        x = self.rotation.inverse(scaled.flatten(-2))
        return (x if centre is None else x + centre).to(dtype)

    def unit(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        """The levels, [..., blocks, width]: rotated, and without their scale."""
        return self._blocks(self.levels.to(dtype)[unpack(encoded.planes, self.bits).int()])

    def _blocks(self, x: Tensor) -> Tensor:  # [..., dim] -> [..., blocks, width]
        return x.unflatten(-1, (self.num_blocks, self.width))

    def _table(self, values: tuple[float, ...], device: torch.device | None) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device) * self.width**-0.5
