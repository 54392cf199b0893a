"""An RMS norm, and a residual stream that one is about to read.

Whoever writes the stream knows which norm reads it next, and may leave on the way what that norm needs (on a GPU, where
a kernel's end is cheap and a pass of its own is not); whoever reads it takes that, or works it out itself.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """y = x / rms(x) * gain."""

    gain: Tensor  # [dim]
    eps: float


class Normed(NamedTuple):
    """What norm(x) will be, once it is needed."""

    x: Tensor  # [rows, dim]
    norm: Norm
    scaled: Tensor | None = None  # x * gain, rounded once to the tensor's type
    squares: Tensor | None = None  # float32 [rows, parts]: parts of the sum of x * x
