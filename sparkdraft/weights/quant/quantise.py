"""Rounds a float matrix to 4 or 8 bits when it is loaded (`--weights`), to nearest values, without calibration data.

fp8     e4m3, one scale per output row
int4    groups of 32 with a float16 scale; it may be negative, so that the largest weight is always -8 times it
nvfp4   e2m1 in groups of 16 with an e4m3 scale, and one scale for the tensor, as ModelOpt chooses them

The head, the embedding, routers and norms stay floats.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparkdraft.weights.quant.base import pairs, per_row
from sparkdraft.weights.quant.stored import Coded

GROUP, NVFP4_GROUP = 32, 16
E4M3_MAX, E2M1_MAX = 448.0, 6.0
LEAST_SCALE = 1 / (E4M3_MAX * 512)  # for rows of zeros
# Midpoints between levels of e2m1, and whether they round up: ties go to the code whose last bit is zero.
TIES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def to_fp8(weight: Tensor) -> Coded:
    w = weight.float()
    scale = (w.abs().amax(1) / E4M3_MAX).clamp_(min=LEAST_SCALE)
    codes = (w / scale.unsqueeze(1)).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return Coded("e4m3", codes.view(torch.uint8), weight.shape[1], None, None, scale)


def to_int4(weight: Tensor) -> Coded:
    groups = weight.float().unflatten(1, (-1, GROUP))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = (largest / -8).to(torch.float16)  # [out, groups, 1]
    step = scale.float()
    levels = torch.where(step != 0, groups / step, 0.0).round_().clamp_(-8, 7)
    return Coded("int4", pairs((levels + 8).to(torch.uint8).flatten(1)), GROUP, scale.squeeze(-1))


def to_nvfp4(weight: Tensor) -> Coded:
    groups = weight.float().unflatten(1, (-1, NVFP4_GROUP))
    peaks = groups.abs().amax(-1)
    whole = (peaks.amax() / (E2M1_MAX * E4M3_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
    scale = (peaks / (E2M1_MAX * whole)).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = (scale.float() * whole).unsqueeze(-1)
    scaled = torch.where(step > 0, groups / step, 0.0)
    bounds = torch.tensor([b for b, _ in TIES], device=weight.device)
    lower = torch.nextafter(bounds, torch.zeros_like(bounds))
    bounds = torch.where(torch.tensor([up for _, up in TIES], device=weight.device), lower, bounds)
    codes = torch.bucketize(scaled.abs(), bounds).to(torch.uint8)
    codes |= (scaled < 0).to(torch.uint8) << 3
    return Coded("e2m1", pairs(codes.flatten(1)), NVFP4_GROUP, scale, None, per_row(whole, weight.shape[0]))


QUANTISERS: dict[str, tuple[Callable[[Tensor], Coded], int]] = {  # and a divisor of the width
    "fp8": (to_fp8, 1),
    "int4": (to_int4, GROUP),
    "nvfp4": (to_nvfp4, NVFP4_GROUP),
}
