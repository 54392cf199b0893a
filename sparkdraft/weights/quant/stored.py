"""A matrix as its file holds it: floats, or integers with what says what they mean.

Every quantised format has a class that is a `Quantised`, which is all that a loader knows of it. Kernels that keep a
matrix in its format look for the class they know (`keep_matrix` of a kernels' module).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Quantised(Protocol):
    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in] of the matrix that is meant, however it is packed."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in] in 'dtype': what every kernel on these weights must agree with."""

    def take(self, ids: Tensor) -> Quantised:
        """Chosen output rows, in the order given."""


Stored = Tensor | Quantised


@dataclass(frozen=True, slots=True)
class QuantisedExperts:
    """The matrices of a layer's experts, which a file holds together, as one `Quantised` [experts, out, in]."""

    experts: Sequence[Quantised]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.experts), *self.experts[0].shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.stack([each.dequantize(dtype) for each in self.experts])

    def take(self, ids: Tensor) -> QuantisedExperts:
        """Chosen output rows of every expert."""
        return QuantisedExperts([each.take(ids) for each in self.experts])


def as_float(part: Stored, dtype: torch.dtype = torch.float32) -> Tensor:
    return part.to(dtype) if isinstance(part, Tensor) else part.dequantize(dtype)


def take_rows(part: Stored, ids: Tensor) -> Stored:
    return part[ids] if isinstance(part, Tensor) else part.take(ids)
