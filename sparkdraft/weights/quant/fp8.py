"""8-bit floats (e4m3fn): one scale per tensor, per output row, per block of 128 x 128 or per 32 columns (MXFP8).

    X.weight            float8_e4m3fn [out, in]
    X.weight_scale      [] or [1]; [out] or [out, 1]; [ceil(out / 128), ceil(in / 128)]; uint8 [out, in / 32]
    X.weight_scale_inv  the same under another name, of `quant_method: fp8`: it multiplies too

ModelOpt, compressed-tensors (float-quantized, naive-quantized, mxfp8-quantized) and the files of Qwen and DeepSeek have
these tensors. Activations are not quantised, so scales of inputs are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

import torch
from torch import Tensor

from sparkdraft.weights.plane_layout import CodeForm
from sparkdraft.weights.quant.base import (
    Size,
    Unread,
    WeightFormat,
    damaged,
    experts_of,
    has_nan,
    is_single,
    kind,
    per_row,
)
from sparkdraft.weights.quant.stated import NOTHING, Said
from sparkdraft.weights.quant.stored import Coded, Quantised

SCALES = ("_scale_inv", "_scale", "_weight_scale")
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
BLOCK = (128, 128)


class Fp8(WeightFormat):
    name = "FP8 (e4m3)"
    methods = ("fp8", "modelopt", "compressed-tensors")

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        if dtypes[tensor] != "F8_E4M3" or not tensor.endswith((".weight", "_proj")):
            return None
        scales = [tensor + scale for scale in SCALES if tensor + scale in dtypes]
        return tensor, (tensor, *(scales or [tensor + "_scale"]))

    def read(self, what: str, *tensors: Tensor, said: Said = NOTHING) -> Quantised:
        if len(tensors) > 2:
            raise damaged(what, "has both a weight_scale and a weight_scale_inv")
        return super().read(what, *tensors, said=said)

    def read_matrix(self, what: str, tensors: Sequence[Tensor], said: Said) -> Coded:
        codes, scale = tensors
        if codes.dim() != 2:
            raise damaged(what, f"is {kind(codes)}, and a matrix has two dimensions")
        (out, width), block = codes.shape, said.block or BLOCK
        raw = codes.view(torch.uint8)
        if has_nan(raw):
            raise damaged(what, "holds weights that are no numbers (0x7f or 0xff of e4m3)")
        tiles = (-(-out // block[0]), -(-width // block[1]))
        if scale.dtype in EXPONENTS and tuple(scale.shape) == (out, width // 32) and width % 32 == 0:
            return Coded("e4m3", raw, 32, scale.view(torch.uint8))
        if is_single(scale.shape, out):
            return Coded("e4m3", raw, width, None, None, per_row(scale, out))
        if tuple(scale.shape) == tiles:
            group = gcd(block[1], width)  # the last block may be narrower
            columns = torch.arange(width // group) * group // block[1]
            rows = torch.arange(out) // block[0]
            return Coded("e4m3", raw, group, scale[rows][:, columns].contiguous())
        read = f"one scale, one per row ({out}) or one per block {tiles} are read"
        raise damaged(what, f"is {kind(codes)} and its scales are {kind(scale)}; {read}")

    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        codes, scale = tensors[:2]
        count, block = experts_of(codes), said.block or BLOCK
        out, width = codes.shape[-2:]
        shape, rows = scale.of_expert(count), out * (count or 1)
        if is_single(shape, out):
            return Size(rows, width, CodeForm("e4m3", 8, 0, row_scale=True))
        exponents = scale.scale == "e8m0" and shape == (out, width // 32)
        return Size(rows, width, CodeForm("e4m3", 8, 32 if exponents else gcd(block[1], width), scale.scale))
