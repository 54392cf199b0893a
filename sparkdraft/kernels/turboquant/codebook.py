"""Lloyd-Max codebooks: the levels that a coordinate of a random unit vector is rounded to, at 2 to 5 bits.

The coordinate of a rotated unit vector, times sqrt(dim), has the density (1 - x^2 / dim)^((dim - 3) / 2), so levels
need no data. Each of the best levels is the mean of its cell, and cells meet halfway; Newton's method solves that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from sparkdraft.kernels.turboquant.layout import check_bits

TAIL = 12.0  # in standard deviations: beyond it the density is below a float64's last digit
NODES = 96  # of the quadrature in each cell
STEPS = 50  # Newton takes about six

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Codebook:
    dim: int
    bits: int
    levels: tuple[float, ...]  # 2**bits of them, ascending, symmetric; times 1 / sqrt(dim) for a unit vector
    distortion: float  # E|u - u'|^2 of a unit vector u and its nearest levels u'

    @property
    def thresholds(self) -> tuple[float, ...]:  # 2**bits - 1 borders of cells
        return tuple((a + b) / 2 for a, b in zip(self.levels, self.levels[1:], strict=False))


@lru_cache
def codebook(dim: int, bits: int) -> Codebook:
    """Levels are symmetric, so only the positive half is solved for."""
    check_bits(bits)
    assert dim >= 4, f"a coordinate in {dim} dimensions has no density that falls off"
    half = _start(dim, bits)
    for _ in range(STEPS):
        step = _newton_step(half, dim)
        half = half - step
        if np.abs(step).max() < 1e-13:
            break
    else:
        raise AssertionError(f"no codebook found for {bits} bits in {dim} dimensions: the last step was {step}")
    x, weight = _cells(_edges(half, dim), dim)
    distortion = float(((x - half[:, None]) ** 2 * weight).sum() / weight.sum())
    return Codebook(dim, bits, tuple(float(c) for c in (*-half[::-1], *half)), distortion)


def _start(dim: int, bits: int) -> Array:
    """A first guess: quantiles of a normal of sqrt(3) times the width, which is right for many bits."""
    count = 2**bits
    wide = NormalDist(0, math.sqrt(3))
    quantiles = [wide.inv_cdf((i + 0.5) / count) for i in range(count // 2, count)]
    half = np.array(quantiles) * min(1.0, 0.9 * math.sqrt(dim) / quantiles[-1])
    for _ in range(20):  # Lloyd's own iteration, slow but safe, brings them near
        half = _means(half, dim)[0]
    return half


def _newton_step(half: Array, dim: int) -> Array:
    """J^-1 (c - g) for levels c and the means g of their cells, where J is the derivative of c - g by c."""
    means, mass = _means(half, dim)
    edges = _edges(half, dim)
    density = _density(edges, dim)
    by_low = density[:-1] * (means - edges[:-1]) / mass  # what a cell's mean gains as its lower edge moves
    by_high = density[1:] * (edges[1:] - means) / mass
    by_low[0] = by_high[-1] = 0.0  # the first edge is 0 and the last the tail: neither moves
    jacobian = np.eye(len(half)) - np.diag(by_low + by_high) / 2 - np.diag(by_low[1:], -1) / 2
    jacobian -= np.diag(by_high[:-1], 1) / 2
    step: Array = np.linalg.solve(jacobian, half - means).astype(np.float64)
    return step


def _means(half: Array, dim: int) -> tuple[Array, Array]:
    """The mean of each cell, and its mass."""
    x, weight = _cells(_edges(half, dim), dim)
    mass = weight.sum(1)
    return (x * weight).sum(1) / mass, mass


def _edges(half: Array, dim: int) -> Array:
    return np.concatenate(([0.0], (half[1:] + half[:-1]) / 2, [min(math.sqrt(dim), TAIL)]))


def _cells(edges: Array, dim: int) -> tuple[Array, Array]:
    """Points in each cell, and their weight in an integral over the density: [cells, NODES]."""
    nodes, weights = _quadrature()
    length = np.diff(edges)[:, None] / 2
    x = (edges[1:] + edges[:-1])[:, None] / 2 + length * nodes
    return x, length * weights * _density(x, dim)


def _density(x: Array, dim: int) -> Array:
    """The density of a coordinate times sqrt(dim), up to a constant."""
    with np.errstate(divide="ignore"):
        return np.exp((dim - 3) / 2 * np.log1p(-np.minimum(x * x / dim, 1.0)))


@lru_cache
def _quadrature() -> tuple[Array, Array]:
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    return nodes, weights
