"""A vector as codes and a float16 scale: rotated, brought to length 1, each coordinate rounded to its nearest level.

    x - centre  ->  rotate  ->  blocks of unit length  ->  codes [..., dim], scale [..., blocks]
    scale * levels[codes]  ->  rotate back  ->  + centre

The rotation flips signs at random and applies Hadamard's transform, which spreads a vector evenly over its coordinates.
It is orthogonal, so attention may rotate its query instead of the keys. A width that is no power of two is rotated in
equal blocks, each with its own scale: 80 is 5 blocks of 16, 96 is 3 of 32, 576 is 9 of 64.

The scale is chosen so that the decoded vector's inner product with the original is the original's with itself: rounding
does not shrink attention scores on average. A fixed centre is subtracted from keys first, so that the bits describe
what differs between vectors; a softmax does not see it.

Codes of 2 to 5 bits are kept as planes of bytes: 3 bits are a plane of 2 and one of 1, 5 bits one of 4 and one of 1. No
code straddles a byte. The codes of a byte lie a stretch apart, so a kernel unpacks bytes into contiguous stretches.

    4 bits, dim d     byte j:  low nibble code j, high nibble code j + d/2
    2 bits            byte j:  codes j, j + d/4, j + 2d/4, j + 3d/4, from the lowest bits up
    1 bit             byte j:  codes j, j + d/8, ..., j + 7d/8

A code is kept as its sign, the highest bit, and its distance from the middle, because levels are symmetric.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdraft.kernels.turboquant.codebook import codebook
from sparkdraft.kernels.turboquant.layout import PLANES, block_width, check_bits

SEED = 5  # among small numbers, the one whose signs spread a constant vector best


class Rotation:
    """x -> H D x / sqrt(width) in each block of the last axis, in float32 or better: D flips signs, H is Hadamard's."""

    def __init__(self, dim: int, device: torch.device | None = None) -> None:
        self.width = block_width(dim)
        self.signs = torch.tensor(signs(dim), dtype=torch.float64)
        # Scale and signs in one table; on the device from the start, since a capture may send nothing.
        table = self.signs * self.width**-0.5
        self._tables = {t: table.to(device=device, dtype=t) for t in (torch.float32, torch.float64)}

    def forward(self, x: Tensor) -> Tensor:  # [..., dim] -> [..., dim]
        x = _wide(x)
        return self._hadamard(x * self._tables[x.dtype])

    def inverse(self, y: Tensor) -> Tensor:  # [..., dim] -> [..., dim]
        y = _wide(y)
        return self._hadamard(y) * self._tables[y.dtype]

    def _hadamard(self, x: Tensor) -> Tensor:
        """Sums and differences of pairs ever further apart: width * log2(width) additions."""
        shape, step = x.shape, 1
        while step < self.width:
            low, high = x.reshape(-1, 2, step).unbind(1)
            x = torch.stack((low + high, low - high), dim=1)
            step *= 2
        return x.reshape(shape)


def signs(dim: int) -> list[float]:
    return [1.0 - 2.0 * _bit(SEED, i) for i in range(dim)]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _bit(seed: int, index: int) -> int:
    """A random bit by splitmix64, spelt out because it is part of the format."""
    mask = 2**64 - 1
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) >> 63


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
    """Codes that number the levels from the lowest up, as they are kept, or the reverse."""
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

    planes: tuple[Tensor, ...]  # uint8 [..., bytes] each, as `pack` makes them
    scale: Tensor  # float16 [..., blocks]


class VectorFormat:
    """How vectors of one width are encoded: tables only, on one device."""

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
        """x: [..., dim]; centre: broadcast to it."""
        return self.encode_rotated(self.rotate(x, centre))

    def rotate(self, x: Tensor, centre: Tensor | None = None) -> Tensor:  # [..., dim] -> [..., dim]
        """The vector before it is rounded, in float32 or better; uncoded tokens are kept in this form."""
        return self.rotation.forward(x if centre is None else _wide(x) - centre)

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
