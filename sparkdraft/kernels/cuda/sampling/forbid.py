"""The masks of grammars: what they forbid is written, nothing is read but the bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.runtime.pdl import enter

BLOCK = 4096  # columns of a program


@triton.jit(do_not_specialize=["which"])
def _forbid_bits(
    logits, masks, which, stride_row, stride_mask, columns, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    enter(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.load(which + row).to(tl.int64)
    if number >= 0:
        column = part * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        byte = tl.load(masks + number * stride_mask + column // 8, mask=inside, other=255).to(tl.int32)
        forbidden = (byte >> (column % 8)) & 1 == 0
        tl.store(logits + row * stride_row + column, float("-inf"), mask=inside & forbidden)


def forbid_bits(logits: Tensor, masks: Tensor, which: Tensor) -> None:
    rows, columns = logits.shape
    assert logits.stride(1) == masks.stride(1) == 1 and masks.dtype == torch.uint8, (logits.stride(), masks.dtype)
    assert len(which) == rows and which.is_contiguous() and 8 * masks.shape[1] >= columns, (rows, masks.shape)
    if rows:
        run(
            _forbid_bits, (rows, triton.cdiv(columns, BLOCK)), logits, masks, which, logits.stride(0),
            masks.stride(0), columns, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
