"""The matrices of a layer's experts, one per expert. Every way to keep them is an `ExpertLinear`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from sparkdraft.weights.linear import DenseLinear, Linear, ToFloats, WeightTiles, stacked
from sparkdraft.weights.quant.stored import Stored


class ExpertLinear(ABC):
    """A matrix W [out, in] per expert. Kernels ask what it can do, never what it is."""

    count: int
    nbytes: int  # of all experts together
    floats: Tensor | None = None  # [experts, out, in], contiguous, where they are kept as floats
    tiles: WeightTiles | None = None  # [experts * out, in], for kernels that read them tile by tile
    bias: Tensor | None = None  # [experts, out]
    rounded: str = ""  # as that of a `Linear`

    @abstractmethod
    def expert(self, number: int) -> Linear:
        """The matrix of one expert."""


class DenseExperts(ExpertLinear):
    """Floats of one type."""

    def __init__(self, floats: Tensor, bias: Tensor | None = None) -> None:
        self.floats, self.bias, self.count = floats, bias, len(floats)
        self.nbytes = floats.nbytes + (0 if bias is None else bias.nbytes)
        self.tiles = WeightTiles(floats.flatten(0, 1))

    def expert(self, number: int) -> Linear:
        assert self.floats is not None
        return DenseLinear(self.floats[number], None if self.bias is None else self.bias[number])


def keep_float_experts(experts: Sequence[Sequence[Stored]], bias: Tensor | None, floats: ToFloats) -> ExpertLinear:
    """experts: for each, the parts that its matrix is stacked of. One expert at a time is turned into floats."""
    rows, width = sum(part.shape[0] for part in experts[0]), experts[0][0].shape[1]
    kept = floats(torch.zeros(0)).new_empty(len(experts), rows, width)
    for number, parts in enumerate(experts):
        stacked(parts, floats, kept[number])
    return DenseExperts(kept, bias)
