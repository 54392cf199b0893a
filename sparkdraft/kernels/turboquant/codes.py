"""Integers of 2 to 5 bits as planes of bytes: 3 bits are a plane of 2 and one of 1, 5 bits one of 4 and one of 1.

No code straddles a byte, so unpacking is a shift and a mask. A byte holds codes that lie a whole stretch apart, not
neighbours: a kernel unpacks one load of bytes into contiguous stretches of a vector, and multiplies each by the same
stretch of the query without reordering anything.

    4 bits, dim d     byte j:  low nibble code j, high nibble code j + d/2
    2 bits            byte j:  codes j, j + d/4, j + 2d/4, j + 3d/4, from the lowest bits up
    1 bit             byte j:  codes j, j + d/8, ..., j + 7d/8

A code is kept as its sign, the highest bit, and its distance from the middle: levels are symmetric, so a kernel looks
up half of them and adds the sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.kernels.turboquant.layout import PLANES, check_bits


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
