"""Programmatic dependent launch: a kernel is set up while its predecessor still runs, which saves half a microsecond.

A kernel calls `enter` before it touches anything that another kernel writes or reads; it returns when the predecessor
has ended. Since that one waited for its own predecessor, the order of a stream holds as long as every kernel that is
launched with `options` enters on all its paths. Letting the successor in earlier is slower on an H200: its programs
gather on few SMs, and take bandwidth that the predecessor needs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

ENABLED = True  # tests compare with kernels launched one after the other


@triton.jit
def enter(PDL: tl.constexpr):
    """Waits for the kernel before: the first line of a kernel, but for loads of weights."""
    if PDL:
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
