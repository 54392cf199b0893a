"""The activations of kernels/ops.py inside a kernel: the end of whichever matmul makes gate and up."""

from __future__ import annotations

import triton
import triton.language as tl

from sparkdraft.kernels.ops import CLAMPED_SLOPE

_SLOPE = tl.constexpr(CLAMPED_SLOPE)


@triton.jit
def activate(gate, up, ACT: tl.constexpr, LIMIT: tl.constexpr):
    """ACT, LIMIT: the fields of an `Activation`. float32 in, float32 out; NaN stays NaN.

    Each is gate times a sigmoid, as the tanh of gelu_tanh is one too: (1 + tanh(a)) / 2 = sigmoid(2 a). An exp that
    overflows divides to zero.
    """
    if ACT == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    elif ACT == "gelu_tanh":
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
        return gate / (1.0 + tl.exp(-inner)) * up
    else:
        tl.static_assert(ACT == "clamped_swiglu")
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return (up + 1.0) * (gate / (1.0 + tl.exp(-_SLOPE * gate)))
