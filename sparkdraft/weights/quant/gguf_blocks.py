"""The blocks of GGUF's quantised types, along the input; d and dmin are float16.

    Q4_0  Q4_1  Q8_0      32 weights, as GroupQuant has them
    Q5_0  Q5_1            32 weights: d, (minimum,) 32 fifth bits, 16 bytes; byte i has weights i and i + 16
    Q4_K  Q5_K            256: d, dmin, 12 bytes of scales, (32 bytes of fifth bits,) 128 bytes; groups of 32 with
                          W = d * sc * q - dmin * m
    Q6_K                  256: 128 bytes, 64 of upper bits, 16 int8 scales, d; groups of 16 with W = d * s * (q - 32)
    IQ4_NL  IQ4_XS        32 and 256: as Q4_0, but codes stand for sixteen levels; XS has scales of 6 bits per group

All but the first three become a `Coded`. The gguf package reads the types that are not here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparkdraft.weights.plane_layout import GGUF_FORMS
from sparkdraft.weights.quant.base import pairs
from sparkdraft.weights.quant.stored import GROUP, Coded, GroupQuant

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, BF16 = 0, 1, 2, 3, 6, 7, 8, 30
Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS = 12, 13, 14, 20, 23
# type -> (elements, bytes) of a block
BLOCKS = {
    F32: (1, 4), F16: (1, 2), BF16: (1, 2), 28: (1, 8), Q4_0: (32, 18), Q4_1: (32, 20), Q8_0: (32, 34),
    Q5_0: (32, 22), Q5_1: (32, 24), Q4_K: (256, 144), Q5_K: (256, 176), Q6_K: (256, 210), IQ4_NL: (32, 18),
    IQ4_XS: (256, 136),
}  # fmt: skip


def read_blocks(raw: Tensor, kind: int, rows: int) -> GroupQuant | Coded | None:
    """Read a matrix from its bytes; None: the type is not supported here."""
    if kind not in READERS:
        return None
    return READERS[kind](raw.view(rows, -1, BLOCKS[kind][1]))  # [out, blocks, bytes]


def _half(part: Tensor) -> Tensor:
    """View two bytes as float16 [out, blocks]."""
    return part.contiguous().view(torch.float16).squeeze(-1)


def _halves(part: Tensor) -> Tensor:
    """Split bytes into weights i (low bits) and i + 16 (high bits) of a group, in order."""
    return torch.cat((part & 15, part >> 4), -1)


def _q4_0(blocks: Tensor) -> GroupQuant:
    """The integers stay mapped from the file; the scales are copied to be contiguous."""
    scale = _half(blocks[..., :2])
    return GroupQuant(4, blocks[..., 2:], scale, scale * -8)  # a power of two: exact


def _q4_1(blocks: Tensor) -> GroupQuant:
    return GroupQuant(4, blocks[..., 4:], _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q8_0(blocks: Tensor) -> GroupQuant:
    return GroupQuant(8, blocks[..., 2:].view(torch.int8), _half(blocks[..., :2]), None)


def _five_bits(upper: Tensor, lower: Tensor) -> Tensor:
    """Join 5-bit codes to uint8 [out, blocks, 32]. upper: 4 bytes of fifth bits; lower: 16 bytes."""
    bits = upper.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return _halves(lower) | bits.flatten(-2) << 4


def _q5_0(blocks: Tensor) -> Coded:
    codes = _five_bits(blocks[..., 2:6], blocks[..., 6:]) - 16  # wraps to a signed byte
    return Coded("int8", codes.flatten(1), GROUP, _half(blocks[..., :2]))


def _q5_1(blocks: Tensor) -> Coded:
    codes = _five_bits(blocks[..., 4:8], blocks[..., 8:])
    return Coded("int8", codes.flatten(1), GROUP, _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset of each group of 32, float32 [out, groups], from 6 bits each in 12 bytes."""
    b = blocks[..., 4:16].int()
    low, middle, high = b[..., :4], b[..., 4:8], b[..., 8:]
    scales = torch.cat((low & 63, high & 15 | (low >> 6) << 4), -1)
    least = torch.cat((middle & 63, high >> 4 | (middle >> 6) << 4), -1)
    d, dmin = (_half(blocks[..., at : at + 2]).float().unsqueeze(-1) for at in (0, 2))
    return (d * scales.float()).flatten(1), -(dmin * least.float()).flatten(1)


def _group_pairs(part: Tensor) -> Tensor:
    """Unpack [out, blocks, 256]: 32 bytes hold one group in their low bits and the next in their high bits."""
    lines = part.unflatten(-1, (-1, 32))
    return torch.stack((lines & 15, lines >> 4), -2).flatten(-3)


def _q4_k(blocks: Tensor) -> Coded:
    scale, offset = _k_scales(blocks)
    # Levels begin at -8, so 8 scales are added to the offset, in float32: weights are off by 1e-7 of those.
    return Coded("int4", pairs(_group_pairs(blocks[..., 16:]).flatten(1)), GROUP, scale, offset + 8 * scale)


def _q5_k(blocks: Tensor) -> Coded:
    upper = blocks[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1) & 1
    codes = _group_pairs(blocks[..., 48:]) | upper.flatten(-2) << 4
    return Coded("int8", codes.flatten(1), GROUP, *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> Coded:
    lower = blocks[..., :128].unflatten(-1, (2, 64))
    upper = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8) & 3
    codes = torch.cat((lower & 15, lower >> 4), -1) | upper.flatten(-2) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scale = _half(blocks[..., 208:]).float().unsqueeze(-1) * scales
    return Coded("int8", (codes - 32).flatten(1), GROUP // 2, scale.flatten(1))


def _iq4_nl(blocks: Tensor) -> Coded:
    return Coded("iq4_nl", pairs(_halves(blocks[..., 2:]).flatten(1)), GROUP, _half(blocks[..., :2]))


def _iq4_xs(blocks: Tensor) -> Coded:
    upper = blocks[..., 2:4].contiguous().view(torch.int16).int() >> torch.arange(0, 16, 2) & 3
    lower = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2).int()
    scale = _half(blocks[..., :2]).float().unsqueeze(-1) * ((lower | upper << 4) - 32).float()
    codes = _halves(blocks[..., 8:].unflatten(-1, (-1, 16)))
    return Coded("iq4_nl", pairs(codes.flatten(1)), GROUP, scale.flatten(1))


READERS: dict[int, Callable[[Tensor], GroupQuant | Coded]] = {
    Q4_0: _q4_0, Q4_1: _q4_1, Q8_0: _q8_0, Q5_0: _q5_0, Q5_1: _q5_1, Q4_K: _q4_k, Q5_K: _q5_k, Q6_K: _q6_k,
    IQ4_NL: _iq4_nl, IQ4_XS: _iq4_xs,
}  # fmt: skip
NAMES = {kind: read.__name__.removeprefix("_") for kind, read in READERS.items()}  # as plane_layout.GGUF_FORMS has them
FORMS = {kind: GGUF_FORMS[name] for kind, name in NAMES.items()}
