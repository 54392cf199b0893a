"""Random quantised weights for shapes, of a usual size and a mean of 0."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.weights.plane_layout import CodeForm
from sparkdraft.weights.quant.stored import Coded

SPREAD = 0.02  # standard deviation of the weights, about
FORMS = ("mxfp4", "int4", "nvfp4", "fp8")


def form_of(form: str, width: int) -> CodeForm:
    """What `random_coded` makes of a matrix of that width."""
    if form == "int4":
        return CodeForm("int4", 4, _int4_group(width), "f16")
    return {
        "mxfp4": CodeForm("e2m1", 4, 32, "e8m0"),
        "nvfp4": CodeForm("e2m1", 4, 16, "e5m3", row_scale=True),
        "fp8": CodeForm("e4m3", 8, 0, row_scale=True),
    }[form]


def random_coded(form: str, out: int, width: int, generator: torch.Generator) -> Coded:
    """A matrix [out, width] in a format of FORMS, on the generator's device."""
    device = generator.device
    if form == "fp8":
        codes = torch.randn((out, width), generator=generator, device=device, dtype=torch.bfloat16).mul_(16)
        return Coded(
            "e4m3", codes.to(torch.float8_e4m3fn).view(torch.uint8), width, None, None,
            torch.full((out,), SPREAD / 16, device=device),
        )  # fmt: skip
    codes = torch.randint(256, (out, width // 2), generator=generator, device=device, dtype=torch.uint8)
    if form == "mxfp4":
        return Coded("e2m1", codes, 32, torch.full((out, width // 32), 120, dtype=torch.uint8, device=device))
    if form == "nvfp4":
        scale = torch.ones((out, width // 16), device=device).to(torch.float8_e4m3fn)
        return Coded("e2m1", codes, 16, scale, None, torch.full((out,), SPREAD / 2.9, device=device))
    assert form == "int4", form
    group = _int4_group(width)
    scale = torch.full((out, width // group), SPREAD / 4.2, dtype=torch.float16, device=device)
    return Coded("int4", _centred(codes), group, scale)


def _centred(codes: Tensor) -> Tensor:
    """INT4 codes, two per byte, whose mean is 0, which that of -8 to 7 is not: -8 becomes 0. A matrix that adds the
    same to all of its outputs makes all rows alike, layer by layer, so that 16 of them reach 20 experts where
    independent rows reach 82."""
    for nibble, zero in ((0x0F, 0x08), (0xF0, 0x80)):
        codes[codes & nibble == 0] |= zero
    return codes


def _int4_group(width: int) -> int:
    return next(size for size in (128, 64, 32, 16) if width % size == 0)
