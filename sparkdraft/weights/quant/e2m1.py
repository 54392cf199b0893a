"""Floats of 4 bits (e2m1), two to a byte, the earlier in the low bits: NVFP4 of two tools, and MXFP4.

    NVFP4 of ModelOpt:            X.weight uint8 [out, in / 2], X.weight_scale e4m3 [out, in / 16],
                                  X.weight_scale_2 float32 []: it multiplies
    NVFP4 of compressed-tensors:  X.weight_packed, X.weight_scale alike, X.weight_global_scale float32 [1]: it divides
    MXFP4:                        X.weight_packed or X.weight uint8, X.weight_scale uint8 [out, in / 32]: exponents

The name decides in which direction the scale of a tensor goes; a wrong direction makes weights of thousands, which
checks.py sees. MXFP4 of gpt-oss's experts has other names and is read by mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.plane_layout import CodeForm
from sparkdraft.weights.quant.coded import Coded
from sparkdraft.weights.quant.stated import NOTHING, Said
from sparkdraft.weights.quant.stored import Quantised
from sparkdraft.weights.quant.unpack import by_expert, kind, per_row
from sparkdraft.weights.quant.unread import Size, Unread

NVFP4_GROUP, MXFP4_GROUP = 16, 32
NVFP4 = CodeForm("e2m1", 4, NVFP4_GROUP, "e5m3", row_scale=True)
MXFP4 = CodeForm("e2m1", 4, MXFP4_GROUP, "e8m0")


class Nvfp4ModelOpt:
    name = "NVFP4 of ModelOpt"

    def states(self, quantization: Mapping[str, Any]) -> bool:
        return str(quantization.get("quant_method")).lower().startswith("modelopt")

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        if dtypes[tensor] != "U8" or not tensor.endswith((".weight", "_proj")):
            return None
        scale = f"{tensor}_scale" if tensor.endswith(".weight") else f"{tensor}_weight_scale"
        if dtypes.get(scale) != "F8_E4M3":
            return None
        return tensor, (tensor, scale, f"{scale}_2")

    def read(self, what: str, *tensors: Tensor, said: Said = NOTHING) -> Quantised:
        return by_expert(_multiplied, what, tensors)

    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        return _size(tensors[0], NVFP4)


class Nvfp4Packed:
    name = "NVFP4 of compressed-tensors"

    def states(self, quantization: Mapping[str, Any]) -> bool:
        return quantization.get("quant_method") in ("compressed-tensors", "auto-round")

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        stem = tensor.removesuffix("_packed")
        if stem == tensor or dtypes[tensor] != "U8" or dtypes.get(f"{stem}_scale") != "F8_E4M3":
            return None
        return stem, (tensor, f"{stem}_scale", f"{stem}_global_scale")

    def read(self, what: str, *tensors: Tensor, said: Said = NOTHING) -> Quantised:
        return by_expert(_divided, what, tensors)

    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        return _size(tensors[0], NVFP4)


class Mxfp4Packed:
    name = "MXFP4"

    def states(self, quantization: Mapping[str, Any]) -> bool:
        return quantization.get("quant_method") in ("compressed-tensors", "auto-round")

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        stem = tensor.removesuffix("_packed")
        if dtypes[tensor] != "U8" or not stem.endswith(".weight"):
            return None
        if dtypes.get(f"{stem}_scale") not in ("U8", "F8_E8M0"):
            return None
        return stem, (tensor, f"{stem}_scale")

    def read(self, what: str, *tensors: Tensor, said: Said = NOTHING) -> Quantised:
        return by_expert(_exponents, what, tensors)

    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        return _size(tensors[0], MXFP4)


def _size(codes: Unread, form: CodeForm) -> Size:
    *experts, out, half = codes.shape
    return Size(prod(experts) * out, 2 * half, form)


def _multiplied(what: str, codes: Tensor, scale: Tensor, whole: Tensor) -> Coded:
    return _nvfp4(what, codes, scale, whole, whole.float())


def _divided(what: str, codes: Tensor, scale: Tensor, whole: Tensor) -> Coded:
    return _nvfp4(what, codes, scale, whole, 1 / whole.float())


def _nvfp4(what: str, codes: Tensor, scale: Tensor, whole: Tensor, factor: Tensor) -> Coded:
    _check(what, codes, scale, NVFP4_GROUP)
    if whole.numel() != 1 or not bool(torch.isfinite(factor).all()) or float(factor) <= 0:
        raise UserError(
            f"{what} has a scale of the whole tensor of {kind(whole)}, which must be one positive number: fetch the "
            "file again."
        )
    if bool(((scale.view(torch.uint8) & 127) == 127).any()):
        raise UserError(f"{what} has block scales that are no numbers (0x7f or 0xff of e4m3): fetch the file again.")
    return Coded("e2m1", codes, NVFP4_GROUP, scale, None, per_row(factor, codes.shape[0]))


def _exponents(what: str, codes: Tensor, scale: Tensor) -> Coded:
    _check(what, codes, scale, MXFP4_GROUP)
    exponents = scale.view(torch.uint8)
    if bool((exponents == 255).any()):
        raise UserError(f"{what} has block scales that are no numbers (0xff): fetch the file again.")
    return Coded("e2m1", codes, MXFP4_GROUP, exponents)


def _check(what: str, codes: Tensor, scale: Tensor, group: int) -> None:
    shape = (codes.shape[0], 2 * codes.shape[-1] // group)
    if codes.dim() != 2 or 2 * codes.shape[1] % group or tuple(scale.shape) != shape:
        raise UserError(
            f"{what} is {kind(codes)} and its block scales are {kind(scale)}; scales of {shape}, one per {group} "
            "columns, are read: fetch the file again."
        )
