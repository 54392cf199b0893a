"""The rotation of kernels/turboquant/vectors.py inside a kernel: signs, then Hadamard's sums in the same order.

Results of attention over codes are rotated; `join` and `turn_back` rotate them back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.attention.paged import LOG2E
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.kernels.turboquant.vectors import Rotation
from sparkdraft.weights.constants import device_constant


@triton.jit
def whole(left, right, ROWS: tl.constexpr, DIM: tl.constexpr):
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), [ROWS, DIM])


@triton.jit
def hadamard(x, ROWS: tl.constexpr, DIM: tl.constexpr, STEPS: tl.constexpr):
    """Sums and differences of neighbours go to the left and to the right half: after log2(DIM) steps all is in place.

    The additions are those of vectors.py, in its order.
    """
    for _ in tl.static_range(STEPS):
        low, high = tl.split(tl.reshape(x, [ROWS, DIM // 2, 2]))
        x = whole(low + high, low - high, ROWS, DIM)
    return x


@triton.jit
def flip(x, signs):
    return tl.where(signs < 0, -x, x)


@device_constant
def signs(dim: int, device: torch.device) -> Tensor:
    """float32 [dim]."""
    return Rotation(dim).signs.to(device=device, dtype=torch.float32)


@triton.jit(do_not_specialize=["sinks", "query_start", "seqs", "shares"])
def join(
    parts, lse, signs, sinks, out, query_start, seqs, shares,
    HEADS: tl.constexpr, DIM: tl.constexpr, STEPS: tl.constexpr,
    SHARES: tl.constexpr, LINES: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The mean of a line's parts weighted by 2 ** lse, rotated back. Where lse = -inf no part was written.

    A kernel of its own even for few rows: `attend`, in layouts of its codes, would take longer for it than this launch.
    """
    dim = tl.arange(0, DIM)
    sign = tl.load(signs + dim)[None, :]
    enter(PDL)
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    real = line < tl.load(query_start + seqs).to(tl.int64) * HEADS
    place = line[:, None] * shares + tl.arange(0, SHARES)[None, :]
    exists = real[:, None] & (tl.arange(0, SHARES) < shares)[None, :]
    power = tl.load(lse + place, mask=exists, other=float("-inf"))  # [LINES, SHARES]
    peak = tl.max(power, 1)
    if SINKS:
        sink = tl.load(sinks + line % HEADS) * LOG2E
        peak = tl.maximum(peak, sink)
    weight = tl.exp2(power - tl.where(peak == float("-inf"), 0.0, peak)[:, None])
    total = tl.sum(weight, 1)
    if SINKS:
        total += tl.exp2(sink - peak)
    mask = (power > float("-inf"))[:, :, None]
    part = tl.load(parts + place[:, :, None] * DIM + dim[None, None, :], mask=mask, other=0.0)
    mixed = tl.sum(part * weight[:, :, None], 1) / tl.where(total == 0.0, 1.0, total)[:, None]
    back = flip(hadamard(mixed, LINES, DIM, STEPS), sign) * DIM**-0.5
    tl.store(out + line[:, None] * DIM + dim[None, :], back.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["query_start", "seqs"])
def turn_back(
    mixed, out, signs, query_start, seqs,
    HEADS: tl.constexpr, DIM: tl.constexpr, STEPS: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part, rotated back in place; mixed and out may be the same memory in two dtypes."""
    dim = tl.arange(0, DIM)[None, :]
    sign = tl.load(signs + dim)
    enter(PDL)
    line = (tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES))[:, None]
    real = line < tl.load(query_start + seqs).to(tl.int64) * HEADS
    x = tl.load(mixed + line * DIM + dim, mask=real, other=0.0).to(tl.float32)
    back = flip(hadamard(x, LINES, DIM, STEPS), sign) * DIM**-0.5
    tl.store(out + line * DIM + dim, back.to(out.dtype.element_ty), mask=real)
