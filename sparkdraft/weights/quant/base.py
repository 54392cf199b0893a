"""The base of quantised formats of safetensors files (`WeightFormat`), and their shared parts.

A format finds its matrices by the names and types of a file's tensors, reads them into `Coded`, and computes their size
in memory from shapes alone, so that a plan need not read them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.plane_layout import CodeForm
from sparkdraft.weights.quant.stated import NOTHING, Said
from sparkdraft.weights.quant.stored import Coded, Permuted, Quantised, QuantisedExperts

# Types of scales as safetensors spells them, and as weights/plane_layout.py does.
SCALES = {"F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E4M3": "e5m3", "U8": "e8m0", "F8_E8M0": "e8m0"}


def damaged(what: str, why: str) -> UserError:
    return UserError(f"{what} {why}: fetch the file again.")


class Unread(NamedTuple):
    """A tensor of a file before it is read."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it
    read: Callable[[], Tensor]  # for small tensors, whose values decide the size

    @property
    def scale(self) -> str:
        return SCALES.get(self.dtype, "f32")

    def of_expert(self, experts: int) -> tuple[int, ...]:
        """The shape of one expert's part. experts: how many there are; 0: it is one matrix."""
        is_each = experts and len(self.shape) > 0 and self.shape[0] in (1, experts)
        return self.shape[1:] if is_each else self.shape


class Size(NamedTuple):
    rows: int  # over all experts
    width: int
    form: CodeForm | None  # None: it is decoded into floats


class WeightFormat(ABC):
    name: str  # in words, for messages
    methods: tuple[str, ...]  # the values of `quant_method` that describe weights of this format

    def states(self, quantization: Mapping[str, Any]) -> bool:
        """True if a `quantization_config` describes weights of this format."""
        return str(quantization.get("quant_method")).lower() in self.methods

    @abstractmethod
    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        """If a matrix of this format begins at the tensor: its name, X.weight (of experts stored together, X), and all
        tensors that it consists of. dtypes: the type of every tensor of the file, as safetensors spells it."""

    def read(self, what: str, *tensors: Tensor, said: Said = NOTHING) -> Quantised:
        """The matrix, or the matrices of all experts, from those tensors. what: file and name, for errors."""
        if tensors[0].dim() != 3:
            return self.read_matrix(what, tensors, said)
        experts = enumerate(_by_expert(what, tensors))
        return QuantisedExperts([self.read_matrix(f"{what}, expert {i}", parts, said) for i, parts in experts])

    @abstractmethod
    def read_matrix(self, what: str, tensors: Sequence[Tensor], said: Said) -> Quantised: ...

    @abstractmethod
    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        """The size of what `read` would return, without reading it."""


def _by_expert(what: str, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors of each expert. A scale that all experts share lacks the dimension of experts."""
    count = len(tensors[0])
    for tensor in tensors[1:]:
        if tensor.dim() and len(tensor) not in (1, count):
            beside = f"a tensor beside it has shape {tuple(tensor.shape)}, which begins with another number"
            raise damaged(what, f"holds {count} experts and {beside}")
    for number in range(count):
        yield [t[number] if t.dim() and len(t) == count else t.squeeze(0) if t.dim() else t for t in tensors]


def experts_of(codes: Unread) -> int:
    """The number of experts in a tensor of codes; 0: it is one matrix."""
    return codes.shape[0] if len(codes.shape) == 3 else 0


def is_single(shape: Sequence[int], out: int) -> bool:
    """True if scales are one number, or one per output row."""
    return prod(shape) == 1 or tuple(shape) in ((out,), (out, 1))


def per_row(scale: Tensor, out: int) -> Tensor:
    """Expand a number, or one per output row, to float32 [out]."""
    return scale.float().reshape(-1).expand(out).contiguous()


def has_nan(e4m3: Tensor) -> bool:
    """True if bytes of 8-bit floats hold 0x7f or 0xff."""
    return bool(((e4m3 & 0x7F) == 0x7F).any())


def kind(tensor: Tensor) -> str:
    """Shape and type, for errors."""
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def fields(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [..., words] to uint8 [..., words * 32 / bits], the lowest bits of each word first."""
    as_bytes = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)  # little-endian, as the files are
    if bits == 8:
        return as_bytes
    assert bits == 4, bits
    return torch.stack((as_bytes & 15, as_bytes >> 4), dim=-1).flatten(-2)


def pairs(codes: Tensor) -> Tensor:
    """Pack 4-bit codes, uint8 [out, in], two to a byte as `Coded` has them: [out, in / 2]."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


# Integers in groups, W = (code - zero) * scale: GPTQ, AWQ and pack-quantized.


def grouped(
    what: str,
    order: Tensor | None,  # int [in]: the group of each input (g_idx)
    codes: Tensor,  # uint8 [out, in]
    bits: int,
    scale: Tensor,  # [out, groups]
    zeros: Tensor | None,  # [out, groups]; None: the middle, 8 or 128
) -> Quantised:
    """The matrix as `Coded`, or as `Permuted` where the inputs of a group are not neighbours."""
    width = codes.shape[1]
    group = width // scale.shape[1]
    at = _columns(what, order, width, group)
    codes = codes if at is None else codes[:, at]
    middle = 1 << (bits - 1)
    packed = pairs(codes) if bits == 4 else codes ^ 128  # the same byte less 128, as a signed one
    offset = None if zeros is None else (middle - zeros.float()) * scale.float()
    if offset is not None and not offset.any():
        offset = None
    coded = Coded("int4" if bits == 4 else "int8", packed.contiguous(), group, scale.contiguous(), offset)
    return coded if at is None else Permuted(coded, torch.argsort(at))


def grouped_form(order: Unread | None, bits: int, width: int, groups: int, scale: str, zeros: bool) -> CodeForm | None:
    """The form of what `grouped` returns; None: a `Permuted`, which is decoded into floats."""
    group = width // groups
    if order is not None:
        found = order.read()
        rows = found if found.dim() == 2 else found.unsqueeze(0)  # one per expert
        if any(_columns("g_idx", row, width, group) is not None for row in rows):
            return None
    return CodeForm("int4" if bits == 4 else "int8", bits, group, scale, "f32" if zeros else "")


def _columns(what: str, order: Tensor | None, width: int, group: int) -> Tensor | None:
    """The inputs in the order of their groups; None if that is their own order."""
    if order is None or order.numel() == 0 or bool((order == -1).all()):
        return None
    if order.shape != (width,):
        raise damaged(what, f"has a g_idx of {kind(order)} for {width} inputs")
    at = torch.argsort(order.long(), stable=True)
    if not torch.equal(order.long()[at], torch.arange(width) // group):
        raise UserError(f"{what} has a g_idx whose groups do not have {group} inputs each: such files are not read.")
    return None if torch.equal(at, torch.arange(width)) else at
