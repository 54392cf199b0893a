"""The rotation that spreads a vector evenly over its coordinates: flip signs at random, then Hadamard.

It is orthogonal, so inner products stay what they were: attention may rotate its query instead of the keys. The signs
matter: without them a constant or a slow wave would fall into one coordinate. They come from a fixed seed and are part
of the format. A width that is no power of two is rotated in equal blocks, each to be scaled by itself (vectors.py).

    dim  64, 128, 256, 512    one block
    dim  80, 96, 192, 576     5 of 16, 3 of 32, 3 of 64, 9 of 64: the largest power of two that divides it
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.kernels.turboquant.layout import block_width

SEED = 5  # of small numbers the one whose signs spread a constant vector best, at every width


class Rotation:
    """x -> H D x / sqrt(width) in each block of the last axis, in float32 or better."""

    def __init__(self, dim: int, device: torch.device | None = None, seed: int = SEED) -> None:
        self.dim, self.width = dim, block_width(dim)
        signs = [1.0 - 2.0 * _bit(seed, i) for i in range(dim)]
        # Scale and signs in one table; on the device from the start, since nothing may be sent while a graph records.
        table = torch.tensor(signs, dtype=torch.float64) * self.width**-0.5
        self._tables = {t: table.to(device=device, dtype=t) for t in (torch.float32, torch.float64)}

    def forward(self, x: Tensor) -> Tensor:  # [..., dim] -> [..., dim]
        x = _wide(x)
        return self._hadamard(x * self._tables[x.dtype])

    def inverse(self, y: Tensor) -> Tensor:  # [..., dim] -> [..., dim]
        y = _wide(y)
        return self._hadamard(y) * self._tables[y.dtype]

    def matrix(self) -> Tensor:
        """float64 [dim, dim], forward(x) = matrix @ x: for tests, and for hardware that would rather multiply."""
        hadamard = torch.ones(1, 1, dtype=torch.float64)
        while len(hadamard) < self.width:
            hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), hadamard)
        blocks = torch.block_diag(*[hadamard] * (self.dim // self.width))
        return blocks * self._tables[torch.float64].cpu()

    def _hadamard(self, x: Tensor) -> Tensor:
        """Sums and differences of pairs ever further apart: width * log2(width) additions."""
        shape, step = x.shape, 1
        while step < self.width:
            low, high = x.reshape(-1, 2, step).unbind(1)
            x = torch.stack((low + high, low - high), dim=1)
            step *= 2
        return x.reshape(shape)


def _wide(x: Tensor) -> Tensor:
    """Half precision would lose in the butterflies what the codes could still tell."""
    return x if x.dtype == torch.float64 else x.float()


def _bit(seed: int, index: int) -> int:
    """One random bit a (seed, index): splitmix64, spelt out so that no library's generator is part of the format."""
    mask = 2**64 - 1
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) >> 63
