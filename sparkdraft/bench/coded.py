"""Random quantised weights for shapes: codes that are all equally likely, and scales of a usual size."""

from __future__ import annotations

import torch

from sparkdraft.weights.quant.coded import Coded

SPREAD = 0.02  # standard deviation of the weights, about
BYTES = {"mxfp4": 17 / 32, "int4": 66 / 128, "nvfp4": 9 / 16, "fp8": 1.0}  # per weight, by the name of a format


def random_coded(form: str, out: int, width: int, generator: torch.Generator) -> Coded:
    """A matrix [out, width] in a format of BYTES, on the generator's device."""
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
    group = next(size for size in (128, 64, 32, 16) if width % size == 0)
    scale = torch.full((out, width // group), SPREAD / 4.6, dtype=torch.float16, device=device)
    return Coded("int4", codes, group, scale)
