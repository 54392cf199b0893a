"""What the last program of a group does for all of them, in the same launch.

Each program stores its result and counts itself; the last one finds that all others have, reads what they stored, and
sets the counter back to 0. The launches of a stream share their counters. Captured graphs hold the counters' address
and replay on that stream too; two streams at a time would need counters for each.

Sums are written out as halves of halves, because the order of `tl.sum` follows a layout, which differs between kernels.
For the same reason a product that is summed is rounded first (`square`), or is an fma by name: the compiler fuses a
product and a sum in one kernel and not in the next.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.weights.constants import device_constant

MOST_GROUPS = 1 << 16  # of a launch


@device_constant
def counters(device: torch.device) -> Tensor:
    return torch.zeros((MOST_GROUPS,), dtype=torch.int32, device=device)


@triton.jit
def is_last(counter, count):
    """Return whether this is the last of 'count' programs to come here. It must read what others stored past the L1
    (".cg")."""
    tl.debug_barrier()  # all threads of the program have stored before one of them says so
    ended = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    last = ended == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def square(value):
    """value * value, rounded: an fma that adds 0 is not fused with another sum."""
    return tl.fma(value, value, 0.0)


@triton.jit
def sum_rows(value, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Sums [WIDTH] of [COUNT, WIDTH]: the second half is added to the first, and so on. COUNT is a power of two."""
    if COUNT > 1:
        value = sum_rows(tl.sum(tl.reshape(value, [2, COUNT // 2, WIDTH]), 0), COUNT // 2, WIDTH)
    else:
        value = tl.reshape(value, [WIDTH])
    return value


@triton.jit
def sum_columns(value, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Sums [COUNT] of [COUNT, WIDTH], likewise."""
    if WIDTH > 1:
        value = sum_columns(tl.sum(tl.reshape(value, [COUNT, 2, WIDTH // 2]), 1), COUNT, WIDTH // 2)
    else:
        value = tl.reshape(value, [COUNT])
    return value
