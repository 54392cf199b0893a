"""What a model asks of the kernels, as far as tiles depend on it, so that they can say whether these were measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparkdraft.weights.experts import ExpertLinear
from sparkdraft.weights.linear import Linear, WeightTiles


class AskedExperts(NamedTuple):
    gate_up: ExpertLinear
    down: ExpertLinear
    top_k: int


@dataclass(frozen=True, slots=True)
class Asked:
    matrices: Sequence[WeightTiles]
    experts: Sequence[AskedExperts]
    head_dims: frozenset[int]  # of attention to keys and values that are not coded
    coded_dims: frozenset[int]  # of attention to coded ones
    recurrent: frozenset[tuple[int, int, int]]  # value heads, key and value dimensions
    itemsize: int  # bytes of an activation
    most_rows: int  # of a step


def all_tiles(matrices: Iterable[Linear]) -> list[WeightTiles]:
    """Those of the matrices, and of the parts that a stacked one is kept in."""
    found: list[WeightTiles] = []
    for matrix in matrices:
        found += [matrix.tiles] if matrix.tiles else all_tiles(matrix.parts)
    return found
