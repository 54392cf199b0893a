"""A matrix as its file holds it: floats, or quantised in one of the forms below.

`Coded` is the form that all formats of 4 and 8 bits are read into: codes, levels, scales by group.

    W[o, k] = (level(code[o, k]) * scale[o, k // group] + offset[o, k // group]) * row_scale[o]

Scales keep the type that they are stored in, so nothing is rounded. `row_scale` is the scale of a tensor, of a channel,
or of one part of a stacked matrix. `GroupQuant` is the form of GGUF's Q4_0, Q4_1 and Q8_0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sparkdraft.weights.constants import device_constant


class Quantised(Protocol):
    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in], however it is packed."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode to [out, in]; every kernel on these weights must agree with it."""

    def take(self, ids: Tensor) -> Quantised:
        """Chosen output rows, in the order given."""


Stored = Tensor | Quantised


def as_float(part: Stored, dtype: torch.dtype = torch.float32) -> Tensor:
    return part.to(dtype) if isinstance(part, Tensor) else part.dequantize(dtype)


def take_rows(part: Stored, ids: Tensor) -> Stored:
    return part[ids] if isinstance(part, Tensor) else part.take(ids)


class Levels(NamedTuple):
    """The meaning of codes, before their scale."""

    bits: int
    values: tuple[float, ...] | None  # by code; None: the bytes are numbers of 'dtype' already
    dtype: torch.dtype | None = None


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # a sign, two bits of exponent, one of mantissa
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

LEVELS = {
    "int4": Levels(4, tuple(float(code - 8) for code in range(16))),
    "e2m1": Levels(4, (*_E2M1, *(-value for value in _E2M1))),
    "iq4_nl": Levels(4, tuple(map(float, _IQ4_NL))),
    "int8": Levels(8, None, torch.int8),
    "e4m3": Levels(8, None, torch.float8_e4m3fn),
}


@dataclass(frozen=True, slots=True)
class Coded:
    """4 bits: codes are uint8 [out, in / 2], and byte j holds code 2j in its low and 2j + 1 in its high bits.
    8 bits: codes are uint8 [out, in]: the bytes of int8 or float8_e4m3fn."""

    levels: str  # of LEVELS
    codes: Tensor
    group: int  # weights along 'in' that share a scale; 'in' itself where there is one per row or none
    scale: Tensor | None  # [out, in / group]: float8_e4m3fn, float16, bfloat16, float32, or uint8 e for 2 ** (e - 127)
    offset: Tensor | None = None  # [out, in / group]: float16 or float32
    row_scale: Tensor | None = None  # float32 [out]

    @property
    def bits(self) -> int:
        return LEVELS[self.levels].bits

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        out, width = self.shape
        _, values, kind = LEVELS[self.levels]
        if values is None:
            assert kind is not None
            levels = self.codes.view(kind).float()
        else:
            both = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1)
            levels = _level_values(self.levels, both.device)[both.int()]
        w = levels.view(out, -1, self.group)
        if self.scale is not None:
            w = w * scale_values(self.scale).unsqueeze(-1)
        if self.offset is not None:
            w = w + self.offset.float().unsqueeze(-1)
        w = w.view(out, width)
        return (w if self.row_scale is None else w * self.row_scale.unsqueeze(1)).to(dtype)

    def to(self, device: torch.device) -> Coded:
        scale, offset, row_scale = (
            None if part is None else part.to(device) for part in (self.scale, self.offset, self.row_scale)
        )
        return Coded(self.levels, self.codes.to(device), self.group, scale, offset, row_scale)

    def take(self, ids: Tensor) -> Coded:
        ids = ids.long()

        def rows(part: Tensor | None) -> Tensor | None:
            if part is None or part.element_size() > 1:
                return None if part is None else part[ids]
            return part.view(torch.uint8)[ids].view(part.dtype)  # 8-bit floats cannot be indexed everywhere

        codes = rows(self.codes)
        assert codes is not None
        return Coded(self.levels, codes, self.group, rows(self.scale), rows(self.offset), rows(self.row_scale))


@device_constant
def _level_values(levels: str, device: torch.device) -> Tensor:
    """float32 by code, made once per device: a CUDA graph cannot copy numbers to a GPU."""
    return torch.tensor(LEVELS[levels].values, device=device)


def scale_values(scale: Tensor) -> Tensor:
    """Scales as float32; bytes are exponents (OCP's e8m0)."""
    if scale.dtype == torch.uint8:
        exponent = scale.int() - 127
        return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    return scale.float()


@dataclass(frozen=True, slots=True)
class Permuted:
    """A matrix whose groups are of inputs that are not neighbours, kept in the order of its groups."""

    sorted: Coded
    place: Tensor  # int64 [in]: the column of 'sorted' that each input has

    @property
    def shape(self) -> tuple[int, int]:
        return self.sorted.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.sorted.dequantize(dtype)[:, self.place]

    def take(self, ids: Tensor) -> Permuted:
        return Permuted(self.sorted.take(ids), self.place)


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
        ids = ids.long()
        offset = None if self.offset is None else self.offset[ids]
        return GroupQuant(self.bits, self.q[ids], self.scale[ids], offset)


@dataclass(frozen=True, slots=True)
class QuantisedExperts:
    """The matrices of a layer's experts, which a file holds together, as one `Quantised` [experts, out, in]."""

    experts: Sequence[Quantised]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.experts), *self.experts[0].shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.stack([each.dequantize(dtype) for each in self.experts])

    def take(self, ids: Tensor) -> QuantisedExperts:
        """Chosen output rows of every expert."""
        return QuantisedExperts([each.take(ids) for each in self.experts])
