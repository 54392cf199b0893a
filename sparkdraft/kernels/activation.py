"""The activations of a gated MLP: what becomes of its gate and up projections before down. No torch."""

from __future__ import annotations

from typing import NamedTuple

CLAMPED_SLOPE = 1.702  # of the sigmoid in "clamped_swiglu"


class Activation(NamedTuple):
    """silu             silu(gate) * up
    gelu_tanh        gelu(gate) * up, by its tanh approximation
    clamped_swiglu   (up + 1) * gate * sigmoid(1.702 * gate), gate at most 'limit', up within +-'limit' (gpt-oss)
    """

    kind: str = "silu"
    limit: float = 0.0


SILU = Activation("silu")
GELU_TANH = Activation("gelu_tanh")
