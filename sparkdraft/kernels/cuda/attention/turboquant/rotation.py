"""The rotation of kernels/turboquant/rotation.py inside a kernel: signs, then Hadamard's sums in the same order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.turboquant.rotation import Rotation
from sparkdraft.weights.constants import device_constant


@triton.jit
def whole(left, right, ROWS: tl.constexpr, DIM: tl.constexpr):
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), [ROWS, DIM])


@triton.jit
def hadamard(x, ROWS: tl.constexpr, DIM: tl.constexpr, STEPS: tl.constexpr):
    """Sums and differences of neighbours go to the left and to the right half: after log2(DIM) steps all is in place.

    These are the additions of rotation.py, in its order.
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
    return Rotation(dim).matrix()[0].sign().to(device=device, dtype=torch.float32)  # Hadamard's first row is all ones
