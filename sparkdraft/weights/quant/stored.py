"""A matrix as its file holds it: floats, or integers with what says what they mean.

Every quantised format has a class that is a `Quantised`, which is all that a loader knows of it. Kernels that keep a
matrix in its format look for the class they know (`keep_matrix` of a kernels' module).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Quantised(Protocol):
    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the matrix that is meant, however it is packed."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in] in 'dtype': what every kernel on these weights must agree with."""

    def take(self, ids: Tensor) -> Quantised:
        """Chosen output rows, in the order given."""


Stored = Tensor | Quantised


def as_float(part: Stored, dtype: torch.dtype = torch.float32) -> Tensor:
    return part.to(dtype) if isinstance(part, Tensor) else part.dequantize(dtype)


def take_rows(part: Stored, ids: Tensor) -> Stored:
    return part[ids] if isinstance(part, Tensor) else part.take(ids)
