"""A weight matrix in memory: a `Linear`, or an `ExpertLinear` with one matrix per expert.

A format is a property of one matrix, so a model may mix formats. Kernels never ask what a matrix is, only what it can
do: `tiles` serves kernels that read it tile by tile, `rows` gives some of its rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkdraft.weights.plane_layout import PlaneLayout
from sparkdraft.weights.quant.stored import Stored


@dataclass(frozen=True, slots=True)
class WeightTiles:
    """A matrix [out, in] for kernels that read it tile by tile."""

    codes: Tensor  # [out, in] of floats in the activations' type; with a layout, int16 in its order (weights/planes.py)
    layout: PlaneLayout | None = None  # None: floats
    scale: Tensor | None = None  # int32: numbers of groups, of the layout's types
    offset: Tensor | None = None
    row_scale: Tensor | None = None  # float32 [out], multiplies each output
    bias: Tensor | None = None  # [out]
    lines: int = 0  # with a layout: out

    @property
    def shape(self) -> tuple[int, int]:
        return (self.lines, self.layout.width) if self.layout else (self.codes.shape[0], self.codes.shape[1])

    @property
    def format(self) -> str:
        """The name under which launches are tuned."""
        return self.layout.name if self.layout else f"{8 * self.codes.element_size()}bit"

    @property
    def line_bits(self) -> int:
        """Bits read per weight, rounded up."""
        return -(-8 * self.layout.row_bytes // self.layout.width) if self.layout else 8 * self.codes.element_size()


class Linear(ABC):
    """A matrix W [out, in]. A format defines `linear`; the other methods have a plain form here."""

    __slots__ = ()

    rounded: str = ""  # why its numbers differ from those of the quantised file; "": they do not
    nbytes: int
    tiles: WeightTiles | None = None  # None: only its own `linear` reads it
    parts: Sequence[Linear] = ()  # the matrices that it is stacked of, where each is kept separately

    @abstractmethod
    def linear(self, x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
        """x W^T."""

    def linear_float32(self, x: Tensor) -> Tensor:  # [rows, in] -> float32 [rows, out], for logits
        return self.linear(x).float()

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual [rows, out] += linear(x), in place."""
        residual += self.linear(x)

    def rows(self, ids: Tensor | None = None) -> Stored | None:
        """Chosen output rows, or all, in a form that can be kept again; None: this matrix cannot give them."""
        return None


class DenseLinear(Linear):
    """Floats of one type."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias
        self.nbytes = weight.nbytes
        self.tiles = WeightTiles(weight, bias=bias)

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def linear_float32(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype != torch.float32:
            y = torch.mm(x, self.weight.t(), out_dtype=torch.float32)  # not rounded on the way, not written twice
            return y if self.bias is None else y.add_(self.bias)
        return self.linear(x).float()

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.addmm_(x, self.weight.t())
        if self.bias is not None:
            residual += self.bias

    def rows(self, ids: Tensor | None = None) -> Tensor:
        return self.weight if ids is None else self.weight[ids]


class StackedLinear(Linear):
    """Matrices that read the same input but are kept in different formats, such as a GGUF's 4-bit q and 6-bit v."""

    def __init__(self, parts: list[Linear]) -> None:
        self.parts, self.nbytes = parts, sum(p.nbytes for p in parts)

    def linear(self, x: Tensor) -> Tensor:
        return torch.cat([p.linear(x) for p in self.parts], dim=-1)


class ExpertLinear(ABC):
    """A matrix W [out, in] per expert."""

    count: int
    nbytes: int  # of all experts together
    floats: Tensor | None = None  # [experts, out, in], contiguous, where they are kept as floats
    tiles: WeightTiles | None = None  # [experts * out, in], for kernels that read them tile by tile
    bias: Tensor | None = None  # [experts, out]
    rounded: str = ""  # as in `Linear`

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


class CannotKeep(Exception):
    """These kernels have no form for a matrix; the message says why. The loader then keeps it as floats."""


ToFloats = Callable[[Stored], Tensor]  # in the activations' type, on the model's device


def keep_floats(parts: Sequence[Stored], bias: Tensor | None, floats: ToFloats) -> Linear:
    """One matrix stacked of the parts, as floats."""
    # One part is not copied: a tied head shares the memory of its embedding.
    return DenseLinear(floats(parts[0]) if len(parts) == 1 else stacked(parts, floats), bias)


def stacked(parts: Sequence[Stored], floats: ToFloats, into: Tensor | None = None) -> Tensor:
    """The parts as the rows of one matrix, each copied straight to its place: temporaries fragment a GPU's memory."""
    rows, width = [part.shape[0] for part in parts], parts[0].shape[1]
    assert all(part.shape[1] == width for part in parts), [part.shape for part in parts]
    if into is None:
        into = floats(torch.zeros(0)).new_empty(sum(rows), width)
    for part, place in zip(parts, into.split(rows), strict=True):
        # A transposed matrix goes to the GPU as it lies in the file and is transposed there.
        place.copy_(part if isinstance(part, Tensor) and part.is_contiguous() else floats(part))
    return into


def keep_float_experts(experts: Sequence[Sequence[Stored]], bias: Tensor | None, floats: ToFloats) -> ExpertLinear:
    """experts: for each, the parts that its matrix is stacked of. Converts one expert at a time."""
    rows, width = sum(part.shape[0] for part in experts[0]), experts[0][0].shape[1]
    kept = floats(torch.zeros(0)).new_empty(len(experts), rows, width)
    for number, parts in enumerate(experts):
        stacked(parts, floats, kept[number])
    return DenseExperts(kept, bias)
