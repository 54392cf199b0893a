"""The largest number of each of many rows.

A row is read once by as many programs as fill the GPU; a second kernel takes the best of their bests. Torch's own
argmax leaves most of the GPU idle. Few rows never have their logits written (linear/few_tokens.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.runtime.pdl import enter

PARTS, BLOCK = 16, 2048  # of a row; elements that a program reads at a time


@triton.jit
def _best_of_part(
    logits, best, best_id, stride_row, vocab, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """The largest logit of one part of one row, and its id; the lowest wins a tie, NaN never wins."""
    enter(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    each = tl.cdiv(vocab, PARTS)
    end = tl.minimum((part + 1) * each, vocab)
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.full([BLOCK], 0, tl.int32)
    for first in range(part * each, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride_row + column, mask=column < end, other=float("-inf")).to(tl.float32)
        larger = value > peak
        place = tl.where(larger, column, place)
        peak = tl.where(larger, value, peak)
    top = tl.max(peak, 0)
    target = row * PARTS + part
    tl.store(best + target, top)
    tl.store(best_id + target, tl.min(tl.where(peak == top, place, vocab), 0))


@triton.jit
def _best_of_row(best, best_id, out, PARTS: tl.constexpr, PDL: tl.constexpr):
    """The parts are in order, so the lowest id wins a tie again."""
    enter(PDL)
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    _, place = tl.max(tl.load(best + row * PARTS + part), 0, return_indices=True)
    tl.store(out + row, tl.load(best_id + row * PARTS + place).to(tl.int64))


def argmax(logits: Tensor) -> Tensor:  # [rows, vocabulary] -> int64 [rows]
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    out = torch.empty((rows,), dtype=torch.int64, device=logits.device)
    if rows:
        best = torch.empty((rows, PARTS), dtype=torch.float32, device=logits.device)
        best_id = torch.empty((rows, PARTS), dtype=torch.int32, device=logits.device)
        run(
            _best_of_part, (rows, PARTS), logits, best, best_id, logits.stride(0), vocab,
            PARTS=PARTS, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        run(_best_of_row, (rows,), best, best_id, out, PARTS=PARTS, num_warps=1)
    return out
