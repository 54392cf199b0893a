"""4- and 8-bit integers in words of 32 bits, inputs along the first dimension: GPTQ, AutoRound and AWQ.

              GPTQ, AutoRound                            AWQ (gemm)
    qweight   int32 [in / 8, out], field i: input 8r+i   int32 [in, out / 8], field i: output 8c + ORDER[i]
    scales    [in / group, out]                          the same
    qzeros    int32 [in / group, out / 8], in order      the same, by ORDER
    g_idx     int32 [in], the group of each input        none

W = (code - zero) * scale; scales may be negative. The shapes tell GPTQ from AWQ. Whether GPTQ's qzeros hold zero points
or zero points minus one is in the config only (`checkpoint_format`, `packing_format`), and the mean of the codes shows
whether the config is right.

In files with `desc_act` the inputs of a group are not neighbours, and a kernel would have to permute its inputs. Such a
matrix is decoded exactly when it is loaded (`Permuted`), and kernels keep its floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.quant.base import Size, Unread, WeightFormat, experts_of, fields, grouped, grouped_form, kind
from sparkdraft.weights.quant.stated import NOTHING, Said
from sparkdraft.weights.quant.stored import Quantised

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ: which of eight outputs each field of a word is
BACK = (0, 4, 1, 5, 2, 6, 3, 7)  # the field of each of the eight outputs


class QWeight(WeightFormat):
    name = "GPTQ, AutoRound and AWQ of 4 and 8 bits"
    methods = ("gptq", "awq", "auto-round")

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        stem = tensor.removesuffix(".qweight")
        if stem == tensor or dtypes[tensor] != "I32":
            return None
        order = [f"{stem}.g_idx"] if f"{stem}.g_idx" in dtypes else []
        return f"{stem}.weight", (tensor, f"{stem}.scales", f"{stem}.qzeros", *order)

    def read_matrix(self, what: str, tensors: Sequence[Tensor], said: Said) -> Quantised:
        qweight, scales, qzeros, *order = tensors
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
        if not groups or codes.shape[1] % groups:
            _refuse(what, qweight, scales, qzeros)
        zeros = _zeros(what, said, codes, stored, bits, is_awq)
        return grouped(what, order[0] if order else None, codes, bits, scales.t(), zeros)

    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        qweight, scales, qzeros, *order = tensors
        count = experts_of(qweight)
        groups, out = scales.shape[-2:]
        bits = 32 * qzeros.shape[-1] // out
        is_awq = qweight.shape[-1] * 8 == out
        width = qweight.shape[-2] * (1 if is_awq else 32 // bits)
        zeros = not said.symmetric and (is_awq or said.zero_less_one is not None)
        form = grouped_form(order[0] if order else None, bits, width, groups, scales.scale, zeros)
        return Size(out * (count or 1), width, form)


def _in_order(codes: Tensor) -> Tensor:
    """Put AWQ's outputs [rows, out] into their own order."""
    return codes.unflatten(1, (-1, 8))[:, :, BACK].flatten(1)


def _zeros(what: str, said: Said, codes: Tensor, stored: Tensor, bits: int, is_awq: bool) -> Tensor | None:
    """Zero points [out, groups]; None: the middle, of a symmetric matrix."""
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
    """Weights average zero. A mean of one whole step means that the config names the wrong convention."""
    mean = float(codes.float().mean() - zeros.float().mean())
    other = mean + 1 if less_one else mean - 1
    if abs(mean) > 0.75 and abs(other) < 0.25:
        raise UserError(
            f"{what} has zero points that the config ({said.by}) mislabels: codes less zero points average {mean:.2f}, "
            f"and {other:.2f} by the other convention (stored {'as they are' if less_one else 'less one'}): quantise "
            "it again with a newer tool, or correct the label in the config."
        )


def _refuse(what: str, qweight: Tensor, scales: Tensor, qzeros: Tensor) -> NoReturn:
    raise UserError(
        f"{what} has qweight {kind(qweight)}, scales {kind(scales)} and qzeros {kind(qzeros)}, which are neither "
        "GPTQ's nor AWQ's of 4 or 8 bits: use the same model in one of those, or in 16 bits."
    )
