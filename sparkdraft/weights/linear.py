"""The ways a weight matrix is kept: as floats, or as the integers its file holds. All answer `linear`.

`linear(x)` is x W^T; `add_to(residual, x)` adds that to the residual stream in place, which spares a pass over it. A
drafter never inherits its target's format: whoever builds a model says which one it wants (weights/loader.py).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    nbytes: int

    def linear(self, x: Tensor) -> Tensor: ...  # [rows, in] -> [rows, out]

    def add_to(self, residual: Tensor, x: Tensor) -> None: ...  # residual [rows, out] += linear(x)


class DenseLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias
        self.nbytes = weight.nbytes

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.addmm_(x, self.weight.t())
        if self.bias is not None:
            residual += self.bias


class BiasedLinear:
    """An integer matrix with a bias, which the integer kernels do not know."""

    def __init__(self, inner: Linear, bias: Tensor) -> None:
        self.inner, self.bias, self.nbytes = inner, bias, inner.nbytes

    def linear(self, x: Tensor) -> Tensor:
        return self.inner.linear(x).add_(self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        self.inner.add_to(residual, x)
        residual += self.bias


class StackedLinear:
    """Matrices that read the same input but are kept in different formats, such as a GGUF's 4-bit q and 6-bit v."""

    def __init__(self, parts: list[Linear]) -> None:
        self.parts, self.nbytes = parts, sum(p.nbytes for p in parts)

    def linear(self, x: Tensor) -> Tensor:
        return torch.cat([p.linear(x) for p in self.parts], dim=-1)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual += self.linear(x)
