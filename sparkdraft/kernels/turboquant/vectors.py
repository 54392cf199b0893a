"""A vector as codes and a float16 scale: rotated, brought to length 1, each coordinate rounded to its nearest level.

    x - centre  ->  rotate  ->  blocks of unit length  ->  codes [..., dim], scale [..., blocks]
    scale * levels[codes]  ->  rotate back  ->  + centre

Rounding shortens a vector. The scale makes up for that at no cost to the reader: the decoded vector's inner product
with the original is the original's with itself, so attention scores do not shrink on average. Subtracting a fixed
centre first spends the bits on what differs between vectors; a softmax does not change when all keys lose the same
vector.

Codes of 2 to 5 bits are kept as planes of bytes: 3 bits are a plane of 2 and one of 1, 5 bits one of 4 and one of 1. No
code straddles a byte, so unpacking is a shift and a mask. The codes of a byte lie a whole stretch apart: a kernel
unpacks one load of bytes into contiguous stretches of a vector, and multiplies each by the same stretch of the query.

    4 bits, dim d     byte j:  low nibble code j, high nibble code j + d/2
    2 bits            byte j:  codes j, j + d/4, j + 2d/4, j + 3d/4, from the lowest bits up
    1 bit             byte j:  codes j, j + d/8, ..., j + 7d/8

A code is kept as its sign, the highest bit, and its distance from the middle: levels are symmetric, so a kernel looks
up half of them and adds the sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdraft.kernels.turboquant.codebook import codebook
from sparkdraft.kernels.turboquant.layout import PLANES, check_bits
from sparkdraft.kernels.turboquant.rotation import Rotation


def pack(codes: Tensor, bits: int) -> tuple[Tensor, ...]:  # integers [..., dim] -> uint8 [..., bytes] a plane
    check_bits(bits)
    planes, shift = [], 0
    codes = from_middle(codes, bits)
    for width in PLANES[bits]:
        planes.append(pack_plane((codes >> shift) & (2**width - 1), width))
        shift += width
    return tuple(planes)


def unpack(planes: tuple[Tensor, ...], bits: int) -> Tensor:  # -> uint8 [..., dim]
    check_bits(bits)
    widths = PLANES[bits]
    codes, shift = unpack_plane(planes[0], widths[0]), widths[0]
    for plane, width in zip(planes[1:], widths[1:], strict=True):
        codes = codes | (unpack_plane(plane, width) << shift)
        shift += width
    return from_middle(codes, bits)


def from_middle(codes: Tensor, bits: int) -> Tensor:
    """Codes that number the levels from the lowest up, to such as are kept, and back again."""
    half = 2 ** (bits - 1)
    return codes.where(codes >= half, half - 1 - codes)


def pack_plane(codes: Tensor, width: int) -> Tensor:  # [..., dim] below 2**width -> uint8 [..., dim * width / 8]
    stretches = codes.to(torch.uint8).chunk(8 // width, dim=-1)
    plane = stretches[0].clone()
    for i, stretch in enumerate(stretches[1:], 1):
        plane |= stretch << (i * width)
    return plane


def unpack_plane(plane: Tensor, width: int) -> Tensor:  # uint8 [..., bytes] -> uint8 [..., bytes * 8 / width]
    return torch.cat([(plane >> (i * width)) & (2**width - 1) for i in range(8 // width)], dim=-1)


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
