"""Bits out of words: what several formats need to turn their order of codes into that of `Coded`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.quant.coded import Coded
from sparkdraft.weights.quant.stored import Quantised, QuantisedExperts


def fields(words: Tensor, bits: int) -> Tensor:
    """int32 [..., words] to uint8 [..., words * 32 / bits]: the fields of each word, from its lowest bits up."""
    as_bytes = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)  # little-endian, as the files are
    if bits == 8:
        return as_bytes
    assert bits == 4, bits
    return torch.stack((as_bytes & 15, as_bytes >> 4), dim=-1).flatten(-2)


def pairs(codes: Tensor) -> Tensor:
    """Codes of 4 bits, uint8 [out, in], two to a byte as `Coded` has them: [out, in / 2]."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def as_coded(codes: Tensor, bits: int, group: int, scale: Tensor, zeros: Tensor | None) -> Coded:
    """W = (code - zero) * scale. codes: uint8 [out, in], not negative; scale, zeros: [out, in / group]; zeros None: the
    middle, 8 or 128."""
    middle = 1 << (bits - 1)
    packed = pairs(codes) if bits == 4 else codes ^ 128  # the same byte less 128, as a signed one
    offset = None if zeros is None else (middle - zeros.float()) * scale.float()
    if offset is not None and not offset.any():
        offset = None
    return Coded("int4" if bits == 4 else "int8", packed.contiguous(), group, scale.contiguous(), offset)


def by_expert(read: Callable[..., Quantised], what: str, tensors: Sequence[Tensor]) -> Quantised:
    """A matrix, or those of all experts where the first tensor has one dimension more; a scale that all experts share
    has no such dimension."""
    if tensors[0].dim() != 3:
        return read(what, *tensors)
    count = len(tensors[0])
    for tensor in tensors[1:]:
        if tensor.dim() and len(tensor) not in (1, count):
            raise UserError(
                f"{what} holds {count} experts and a tensor beside it has shape {tuple(tensor.shape)}, "
                f"which begins with another number: fetch the file again."
            )

    def of(number: int) -> list[Tensor]:
        return [t[number] if t.dim() and len(t) == count else t.squeeze(0) if t.dim() else t for t in tensors]

    return QuantisedExperts([read(f"{what}, expert {number}", *of(number)) for number in range(count)])


def per_row(scale: Tensor, out: int) -> Tensor:
    """A number, or one per output row, as float32 [out]."""
    return scale.float().reshape(-1).expand(out).contiguous()


def kind(tensor: Tensor) -> str:
    """Shape and type, for errors."""
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
