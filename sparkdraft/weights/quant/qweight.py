"""Integers of 4 and 8 bits in words of 32, with inputs along the first dimension: GPTQ, AutoRound and AWQ.

              GPTQ, AutoRound                            AWQ (gemm)
    qweight   int32 [in / 8, out], field i: input 8r+i   int32 [in, out / 8], field i: output 8c + ORDER[i]
    scales    [in / group, out]                          the same
    qzeros    int32 [in / group, out / 8], in order      the same, by ORDER
    g_idx     int32 [in], the group of each input        none

W = (code - zero) * scale. The shapes say which of the two a matrix is. The bytes do not say whether qzeros of GPTQ hold
zero points or zero points less one: the config does (`checkpoint_format`, `packing_format`), and the mean of the codes
tells whether it is right. Scales may be negative.

Files with `desc_act` have groups of inputs that are not neighbours. What reads the matrix would have to be given its
inputs in another order; that order can be moved neither into the residual, which other matrices read, nor into heads
that share values. So such a matrix is decoded exactly when it is loaded (`Permuted`), and kernels keep its floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.plane_layout import CodeForm
from sparkdraft.weights.quant.coded import Coded
from sparkdraft.weights.quant.stated import NOTHING, Said
from sparkdraft.weights.quant.stored import Quantised
from sparkdraft.weights.quant.unpack import as_coded, by_expert, fields, kind
from sparkdraft.weights.quant.unread import Size, Unread, experts_of

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ: which of eight outputs each field of a word is
BACK = (0, 4, 1, 5, 2, 6, 3, 7)  # the field of each of the eight outputs


@dataclass(frozen=True, slots=True)
class Permuted:
    """A matrix whose groups are of inputs that are not neighbours. It is kept in the order of its groups."""

    sorted: Coded
    place: Tensor  # int64 [in]: the column of 'sorted' that each input has

    @property
    def shape(self) -> tuple[int, int]:
        return self.sorted.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.sorted.dequantize(dtype)[:, self.place]

    def take(self, ids: Tensor) -> Permuted:
        return Permuted(self.sorted.take(ids), self.place)


class QWeight:
    name = "GPTQ, AutoRound and AWQ of 4 and 8 bits"

    def states(self, quantization: Mapping[str, Any]) -> bool:
        return quantization.get("quant_method") in ("gptq", "awq", "auto-round")

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        stem = tensor.removesuffix(".qweight")
        if stem == tensor or dtypes[tensor] != "I32":
            return None
        order = [f"{stem}.g_idx"] if f"{stem}.g_idx" in dtypes else []
        return f"{stem}.weight", (tensor, f"{stem}.scales", f"{stem}.qzeros", *order)

    def read(self, what: str, *tensors: Tensor, said: Said = NOTHING) -> Quantised:
        def read(what: str, qweight: Tensor, scales: Tensor, qzeros: Tensor, order: Tensor | None = None) -> Quantised:
            return _read(what, said, qweight, scales, qzeros, order)

        return by_expert(read, what, tensors)

    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        qweight, scales, qzeros, *order = tensors
        count = experts_of(qweight)
        groups, out = scales.shape[-2:]
        bits = 32 * qzeros.shape[-1] // out
        is_awq = qweight.shape[-1] * 8 == out
        width = qweight.shape[-2] * (1 if is_awq else 32 // bits)
        zeros = not said.symmetric and (is_awq or said.zero_less_one is not None)
        form = size_grouped(order[0] if order else None, bits, width, groups, scales.scale, zeros)
        return Size(out * (count or 1), width, form)


def _read(what: str, said: Said, qweight: Tensor, scales: Tensor, qzeros: Tensor, order: Tensor | None) -> Quantised:
    if qweight.dim() != 2 or scales.dim() != 2 or qzeros.dim() != 2 or qzeros.dtype != torch.int32:
        _refuse(what, qweight, scales, qzeros)
    groups, out = scales.shape
    bits = 32 * qzeros.shape[1] // out if out else 0
    is_awq = qweight.shape[1] * 8 == out
    if bits not in (4, 8) or qzeros.shape != (groups, out * bits // 32) or not (is_awq or qweight.shape[1] == out):
        _refuse(what, qweight, scales, qzeros)
    if is_awq:
        codes = _in_order(fields(qweight, 4)).t()
        stored = _in_order(fields(qzeros, 4)).t()
    else:
        codes = fields(qweight.t(), bits)
        stored = fields(qzeros, bits).t()
    width = codes.shape[1]
    if not groups or width % groups:
        _refuse(what, qweight, scales, qzeros)
    zeros = _zeros(what, said, codes, stored, bits, is_awq)
    return grouped_by(what, order, codes, bits, scales.t(), zeros)


def grouped_by(
    what: str,
    order: Tensor | None,  # int [in]: the group of each input
    codes: Tensor,  # uint8 [out, in]
    bits: int,
    scale: Tensor,  # [out, groups]
    zeros: Tensor | None,  # as scale
) -> Quantised:
    """As it is, if the groups are of neighbours."""
    width = codes.shape[1]
    group = width // scale.shape[1]
    at = _columns(what, order, width, group)
    if at is None:
        return as_coded(codes, bits, group, scale, zeros)
    return Permuted(as_coded(codes[:, at], bits, group, scale, zeros), torch.argsort(at))


def size_grouped(order: Unread | None, bits: int, width: int, groups: int, scale: str, zeros: bool) -> CodeForm | None:
    """Of what `grouped_by` returns; None where groups are not of neighbours."""
    group = width // groups
    if order is not None:
        found = order.read()
        rows = found if found.dim() == 2 else found.unsqueeze(0)  # of each expert
        if any(_columns("g_idx", row, width, group) is not None for row in rows):
            return None
    return CodeForm("int4" if bits == 4 else "int8", bits, group, scale, "f32" if zeros else "")


def _in_order(codes: Tensor) -> Tensor:
    """[rows, out] as AWQ's words have the outputs, to their own order."""
    return codes.unflatten(1, (-1, 8))[:, :, BACK].flatten(1)


def _zeros(what: str, said: Said, codes: Tensor, stored: Tensor, bits: int, is_awq: bool) -> Tensor | None:
    """Zero points [out, groups], None for the middle of a symmetric matrix."""
    middle = 1 << (bits - 1)
    same = int(stored[0, 0]) if bool((stored == stored[0, 0]).all()) else None
    if said.symmetric:
        if same in (middle - 1, middle):
            return None
        raise UserError(
            f"{what} has zero points of its own, though the config ({said.by}) says that it is symmetric: fetch "
            "config.json and weights of one model."
        )
    if not is_awq and said.zero_less_one is None:
        if same in (middle - 1, middle) and said.symmetric is None:
            return None
        raise UserError(
            f"{what} has zero points, and no config says whether they are stored less one (checkpoint_format gptq) or "
            "not (gptq_v2): add the quantization_config of the tool that wrote the file."
        )
    less_one = bool(said.zero_less_one) and not is_awq
    zeros = stored.int() + int(less_one)
    _check_mean(what, said, codes, zeros, less_one)
    return zeros


def _check_mean(what: str, said: Said, codes: Tensor, zeros: Tensor, less_one: bool) -> None:
    """Weights are as often above zero as below: a mean of one whole step is the other convention."""
    mean = float(codes.float().mean() - zeros.float().mean())
    other = mean + 1 if less_one else mean - 1
    if abs(mean) > 0.75 and abs(other) < 0.25:
        raise UserError(
            f"{what} has zero points that the config ({said.by}) mislabels: codes less zero points average {mean:.2f}, "
            f"and {other:.2f} by the other convention (stored {'as they are' if less_one else 'less one'}): quantise "
            "it again with a newer tool, or correct the label in the config."
        )


def _columns(what: str, order: Tensor | None, width: int, group: int) -> Tensor | None:
    """The inputs in the order of their groups, None if that is their own order."""
    if order is None or order.numel() == 0 or bool((order == -1).all()):
        return None
    if order.shape != (width,):
        raise UserError(f"{what} has a g_idx of {kind(order)} for {width} inputs: fetch the file again.")
    at = torch.argsort(order.long(), stable=True)
    if not torch.equal(order.long()[at], torch.arange(width) // group):
        raise UserError(f"{what} has a g_idx whose groups do not have {group} inputs each: such files are not read.")
    return None if torch.equal(at, torch.arange(width)) else at


def _refuse(what: str, qweight: Tensor, scales: Tensor, qzeros: Tensor) -> NoReturn:
    raise UserError(
        f"{what} has qweight {kind(qweight)}, scales {kind(scales)} and qzeros {kind(qzeros)}, which are neither "
        "GPTQ's nor AWQ's of 4 or 8 bits: use the same model in one of those, or in 16 bits."
    )
