"""4-bit floats (e2m1), two to a byte, the earlier in the low bits: NVFP4 and MXFP4.

    NVFP4 of ModelOpt:            X.weight uint8 [out, in / 2], X.weight_scale e4m3 [out, in / 16],
                                  X.weight_scale_2 float32 []: multiplies
    NVFP4 of compressed-tensors:  X.weight_packed and X.weight_scale alike, X.weight_global_scale float32 [1]: divides
    MXFP4:                        X.weight_packed or X.weight uint8, X.weight_scale uint8 [out, in / 32]: exponents
    MXFP4 of gpt-oss's experts:   X_blocks uint8 [experts, out, in / 32, 16], X_scales uint8 [experts, out, in / 32]

A group of MXFP4 is multiplied by 2 ** (scale - 127). The name of an NVFP4 file's tensors decides whether the scale of
the whole tensor multiplies or divides; the wrong way makes weights of thousands, which formats.py refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from sparkdraft.weights.plane_layout import CodeForm
from sparkdraft.weights.quant.base import Size, Unread, WeightFormat, damaged, has_nan, kind, per_row
from sparkdraft.weights.quant.stated import NOTHING, Said
from sparkdraft.weights.quant.stored import Coded, QuantisedExperts

NVFP4_GROUP, MXFP4_GROUP = 16, 32
NVFP4 = CodeForm("e2m1", 4, NVFP4_GROUP, "e5m3", row_scale=True)
MXFP4 = CodeForm("e2m1", 4, MXFP4_GROUP, "e8m0")
BLOCKS, SCALES = "_blocks", "_scales"


class _Nvfp4(WeightFormat):
    divides = False  # whether the scale of the whole tensor divides

    def read_matrix(self, what: str, tensors: Sequence[Tensor], said: Said) -> Coded:
        codes, scale, whole = tensors
        factor = 1 / whole.float() if self.divides else whole.float()
        _check(what, codes, scale, NVFP4_GROUP)
        if whole.numel() != 1 or not bool(torch.isfinite(factor).all()) or float(factor) <= 0:
            size = kind(whole)
            raise damaged(what, f"has a scale of the whole tensor of {size}, which must be one positive number")
        if has_nan(scale.view(torch.uint8)):
            raise damaged(what, "has block scales that are no numbers (0x7f or 0xff of e4m3)")
        return Coded("e2m1", codes, NVFP4_GROUP, scale, None, per_row(factor, codes.shape[0]))

    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        return _size(tensors[0], NVFP4)


class Nvfp4ModelOpt(_Nvfp4):
    name = "NVFP4 of ModelOpt"

    def states(self, quantization: Mapping[str, Any]) -> bool:
        return str(quantization.get("quant_method")).lower().startswith("modelopt")

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        if dtypes[tensor] != "U8" or not tensor.endswith((".weight", "_proj")):
            return None
        scale = f"{tensor}_scale" if tensor.endswith(".weight") else f"{tensor}_weight_scale"
        return (tensor, (tensor, scale, f"{scale}_2")) if dtypes.get(scale) == "F8_E4M3" else None


class Nvfp4Packed(_Nvfp4):
    name = "NVFP4 of compressed-tensors"
    methods = ("compressed-tensors", "auto-round")
    divides = True

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        stem = tensor.removesuffix("_packed")
        if stem == tensor or dtypes[tensor] != "U8" or dtypes.get(f"{stem}_scale") != "F8_E4M3":
            return None
        return stem, (tensor, f"{stem}_scale", f"{stem}_global_scale")


class Mxfp4Packed(WeightFormat):
    name = "MXFP4"
    methods = ("compressed-tensors", "auto-round")

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        stem = tensor.removesuffix("_packed")
        if dtypes[tensor] != "U8" or not stem.endswith(".weight"):
            return None
        return (stem, (tensor, f"{stem}_scale")) if dtypes.get(f"{stem}_scale") in ("U8", "F8_E8M0") else None

    def read_matrix(self, what: str, tensors: Sequence[Tensor], said: Said) -> Coded:
        codes, scale = tensors
        _check(what, codes, scale, MXFP4_GROUP)
        exponents = scale.view(torch.uint8)
        if bool((exponents == 255).any()):
            raise damaged(what, "has block scales that are no numbers (0xff)")
        return Coded("e2m1", codes, MXFP4_GROUP, exponents)

    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        return _size(tensors[0], MXFP4)


class Mxfp4Experts(WeightFormat):
    name = "MXFP4 experts as gpt-oss has them"
    methods = ("mxfp4",)

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        stem = tensor.removesuffix(BLOCKS)
        return (stem, (tensor, stem + SCALES)) if stem != tensor and dtypes[tensor] == "U8" else None

    def read(self, what: str, *tensors: Tensor, said: Said = NOTHING) -> QuantisedExperts:
        blocks, scales = tensors
        packed = blocks.dim() == 4 and blocks.shape[3] == MXFP4_GROUP // 2
        if not packed or scales.shape != blocks.shape[:3] or scales.dtype != torch.uint8:
            read = f"uint8 [experts, out, groups, {MXFP4_GROUP // 2}] and one uint8 per group are read"
            raise damaged(what, f"has blocks of shape {tuple(blocks.shape)} and scales of {kind(scales)}; {read}")
        experts = zip(blocks, scales, strict=True)
        return QuantisedExperts([self.read_matrix(what, expert, said) for expert in experts])

    def read_matrix(self, what: str, tensors: Sequence[Tensor], said: Said) -> Coded:
        blocks, scales = tensors  # [out, groups, 16] and [out, groups]: the bytes are in `Coded`'s own order
        return Coded("e2m1", blocks.flatten(1), MXFP4_GROUP, scales)

    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        *rows, groups, half = tensors[0].shape
        return Size(prod(rows), groups * half * 2, MXFP4)


def _size(codes: Unread, form: CodeForm) -> Size:
    *experts, out, half = codes.shape
    return Size(prod(experts) * out, 2 * half, form)


def _check(what: str, codes: Tensor, scale: Tensor, group: int) -> None:
    shape = (codes.shape[0], 2 * codes.shape[-1] // group)
    if codes.dim() != 2 or 2 * codes.shape[1] % group or tuple(scale.shape) != shape:
        read = f"scales of {shape}, one per {group} columns, are read"
        raise damaged(what, f"is {kind(codes)} and its block scales are {kind(scale)}; {read}")
