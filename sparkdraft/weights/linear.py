"""The ways in which a weight matrix is kept: as floats, or as the integers that its file holds. All are a `Linear`.

A format is a property of one matrix, so a model may mix them, and so may one stacked matrix. Kernels never ask what a
matrix is, only what it can do: `tiles` for kernels that read it tile by tile, `rows` for whoever wants some of its
rows. How a matrix is kept is decided by the kernels that will read it (`keep_matrix` of a kernels' module), when it is
loaded (weights/loader.py). A drafter never inherits its target's format.
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
    """A matrix [out, in] for kernels that read it tile by tile: what they load, and how it lies."""

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
        """The name under which launches are tuned: what matters is how many bytes are read and how they are decoded."""
        return self.layout.name if self.layout else f"{8 * self.codes.element_size()}bit"

    @property
    def line_bits(self) -> int:
        """Bits that are read per weight, rounded up."""
        return -(-8 * self.layout.row_bytes // self.layout.width) if self.layout else 8 * self.codes.element_size()


class Linear(ABC):
    """A matrix W [out, in]. A format must have `linear`; what it leaves out has a plain form here."""

    __slots__ = ()

    rounded: str = ""  # why its numbers are not those of the quantised file; "": they are
    nbytes: int
    tiles: WeightTiles | None = None  # for kernels that read it tile by tile; None: only its own `linear` reads it
    parts: Sequence[Linear] = ()  # matrices that it is stacked of, if each is kept by itself

    @abstractmethod
    def linear(self, x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
        """x W^T."""

    def linear_float32(self, x: Tensor) -> Tensor:  # [rows, in] -> float32 [rows, out], for logits
        return self.linear(x).float()

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual [rows, out] += linear(x), in place, which may spare a pass over the residual."""
        residual += self.linear(x)

    def rows(self, ids: Tensor | None = None) -> Stored | None:
        """Chosen output rows, or all, in a form that can be kept again; None: they cannot be taken out of this one."""
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


class CannotKeep(Exception):
    """These kernels have no form for a matrix; the message says why. The loader then keeps it as floats."""


ToFloats = Callable[[Stored], Tensor]  # in the activations' type, on the model's device


def keep_floats(parts: Sequence[Stored], bias: Tensor | None, floats: ToFloats) -> Linear:
    """One matrix stacked of the parts, as floats."""
    # a tied head is its embedding
    return DenseLinear(floats(parts[0]) if len(parts) == 1 else stacked(parts, floats), bias)


def stacked(parts: Sequence[Stored], floats: ToFloats, into: Tensor | None = None) -> Tensor:
    """The parts as the rows of one matrix. Each is copied to its place, not made beside it: a GPU's memory would keep
    the gaps between what was made for a moment and what stays."""
    rows, width = [part.shape[0] for part in parts], parts[0].shape[1]
    assert all(part.shape[1] == width for part in parts), [part.shape for part in parts]
    if into is None:
        into = floats(torch.zeros(0)).new_empty(sum(rows), width)
    for part, place in zip(parts, into.split(rows), strict=True):
        # A matrix that lies turned around in the file goes to a GPU as it lies, and is turned there.
        place.copy_(part if isinstance(part, Tensor) and part.is_contiguous() else floats(part))
    return into
