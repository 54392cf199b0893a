"""Programmatic dependent launch: a kernel begins while its predecessor still runs, and reads only weights until then.

A kernel calls `enter`, or `enter_with` its weights, before it touches anything that another kernel writes or reads: it
lets its own successor start, asks L2 for the first of its weights, and waits until its predecessor has ended and its
writes are seen. A predecessor has ended only after it waited for its own, so the order of a stream holds as long as
every kernel that is launched with `options` enters so, on all its paths; what to fetch is left to the kernels.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ENABLED = False  # kernels one after the other, until overlapping them has been seen to be right and faster on a GPU
FETCH = tl.constexpr(256)  # bytes that one instruction asks L2 for


@triton.jit
def fetch(pointer):
    """Ask L2 for the FETCH bytes at each pointer, which must lie on 16 bytes and be readable; waits for nothing."""
    tl.static_assert(FETCH == 256)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0;",
        "=r,l", [pointer.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def enter(PDL: tl.constexpr):
    """Let the next kernel in and wait for the one before: the first line of a kernel without weights."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def enter_with(weight, line, IN: tl.constexpr, PIECES: tl.constexpr, PDL: tl.constexpr):
    """The same, and in between ask for the first PIECES of the rows 'line' of the weight [.., IN]."""
    if PDL:
        gdc_launch_dependents()
        if PIECES > 0:
            STEP: tl.constexpr = FETCH // (weight.dtype.element_ty.primitive_bitwidth // 8)
            piece = tl.arange(0, PIECES) * STEP
            fetch(weight + line.to(tl.int64)[:, None] * IN + piece[None, :])
        gdc_wait()


@lru_cache
def _capable(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def active(device: torch.device) -> bool:
    """Whether a launch on this device may overlap its neighbours; never under Triton's interpreter (CPU tensors)."""
    return ENABLED and _capable(device)


def options(on: bool) -> dict[str, bool]:
    """Options of a launch whose kernel is compiled with PDL=on; older versions of Triton do not know the option."""
    return {"launch_pdl": True} if on else {}
