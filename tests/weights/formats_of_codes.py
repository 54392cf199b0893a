"""Random matrices in every format that `Coded` can hold, for tests of whatever keeps or reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.weights.quant.stored import LEVELS, Coded

DTYPES = {"e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn, "f16": torch.float16, "bf16": torch.bfloat16}
DTYPES["f32"] = torch.float32

# levels, group (0: one per row), type of scales, type of offsets, a scale per row
FORMATS: dict[str, tuple[str, int, str, str, bool]] = {
    "mxfp4": ("e2m1", 32, "e8m0", "", False),
    "nvfp4": ("e2m1", 16, "e4m3", "", True),
    "int4 in groups of 128": ("int4", 128, "f16", "", False),
    "int4 in groups of 64": ("int4", 64, "bf16", "", False),
    "int4 in groups of 32": ("int4", 32, "f16", "", True),
    "int4 with offsets": ("int4", 32, "f16", "f16", False),
    "int4 with wide offsets": ("int4", 64, "f16", "f32", False),
    "int4 per row with offsets": ("int4", 0, "f32", "f32", False),
    "fp8 per row": ("e4m3", 0, "f32", "", False),
    "fp8 per tensor": ("e4m3", 0, "", "", True),
    "fp8 in blocks": ("e4m3", 128, "f32", "", False),
    "int8 in groups of 32": ("int8", 32, "f16", "", False),
    "int8 in groups of 16": ("int8", 16, "f16", "", False),
    "int8 with offsets": ("int8", 32, "f16", "f16", False),
    "iq4_nl": ("iq4_nl", 32, "f16", "", False),
    "mxfp8": ("e4m3", 32, "e8m0", "", False),
    "int8 per row with offsets": ("int8", 0, "", "f32", True),
    "int4 with float32 scales": ("int4", 32, "f32", "f32", False),
    "e2m1 with float scales": ("e2m1", 32, "f16", "f16", False),
}


def fitting(width: int) -> list[str]:
    """Formats whose groups a width is a multiple of."""
    return [name for name, (_, group, *_) in FORMATS.items() if width % (group or 16) == 0]


def random_coded(name: str, out: int, width: int, device: str = "cpu") -> Coded:
    """With every code among the first ones, scales of both signs where they have one, and groups of different size."""
    levels, group, scale, offset, by_row = FORMATS[name]
    bits, group = LEVELS[levels].bits, group or width
    codes = torch.randint(256, (out, width * bits // 8), dtype=torch.uint8, device=device)
    codes[0, : min(256, codes.shape[1])] = torch.arange(min(256, codes.shape[1]), device=device).to(torch.uint8)
    if levels == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 0x7E  # not a number
    size = {"int4": 5.0, "e2m1": 3.0, "iq4_nl": 70.0, "int8": 75.0, "e4m3": 100.0}[levels] * width**0.5
    numbers = (torch.rand(out, width // group, device=device) + 0.2) / size
    row_scale = torch.rand(out, device=device) + 0.5 if by_row else None
    if scale in ("f16", "bf16", "f32"):
        numbers = numbers * (torch.rand(numbers.shape, device=device) - 0.3).sign()
    made: Tensor | None = None
    if scale == "e8m0":
        made = (numbers.log2().round() + 127).to(torch.uint8)
    elif scale == "e4m3":
        assert row_scale is not None
        made, row_scale = (numbers * size * 100).to(torch.float8_e4m3fn), row_scale / (100 * size)
    elif scale:
        made = numbers.to(DTYPES[scale])
    elif row_scale is not None:
        row_scale = row_scale / size
    shift = (torch.randn(out, width // group, device=device) / width**0.5).to(DTYPES[offset]) if offset else None
    return Coded(levels, codes, group, made, shift, row_scale)
