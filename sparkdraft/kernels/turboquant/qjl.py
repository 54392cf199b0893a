"""One more bit a coordinate: the signs of what the codes missed, which make inner products unbiased by themselves.

The residual is rotated once more, with signs of its own, and only the sign of each coordinate and its length are kept
(a quantised Johnson-Lindenstrauss transform). It is an option for comparison and off everywhere: for the same bits a
softmax is served better by finer levels, since it suffers from the variance that this adds and hardly from the bias
that it removes. Who adds it to the scores is left to the caller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdraft.kernels.turboquant.codes import pack_plane, unpack_plane
from sparkdraft.kernels.turboquant.rotation import SEED, Rotation


@dataclass(frozen=True, slots=True)
class ResidualSigns:
    """Of vectors [..., dim]."""

    plane: Tensor  # uint8 [..., dim / 8]: a set bit is a coordinate that is not negative
    length: Tensor  # float16 [..., blocks]


class ResidualFormat:
    def __init__(self, dim: int, device: torch.device | None = None) -> None:
        # Signs of its own: in the codes' own coordinates a residual is no longer random.
        self.rotation = Rotation(dim, device, seed=SEED + 1)
        self.width = self.rotation.width
        self.nbytes = dim // 8 + 2 * (dim // self.width)

    def encode(self, residual: Tensor) -> ResidualSigns:
        """residual: a vector minus its decoded self, [..., dim]."""
        y = self._blocks(self.rotation.forward(residual))
        return ResidualSigns(pack_plane((y >= 0).flatten(-2), 1), y.norm(dim=-1).half())

    def scores(self, q: Tensor, signs: ResidualSigns) -> Tensor:
        """What to add to q . decoded: q [..., rows, dim], signs of [..., keys, dim] -> [..., rows, keys]."""
        turned = self._blocks(self.rotation.forward(q))
        plane = self._blocks(unpack_plane(signs.plane, 1).to(turned.dtype)) * 2 - 1
        dots = torch.einsum("...rbw,...kbw->...rkb", turned, plane)
        # For a random direction s, E[sign(s . r) (s . q)] = sqrt(2 / pi) (q . r) / |r|.
        length = signs.length.to(turned.dtype) * math.sqrt(math.pi / 2 / self.width)
        return (dots * length.unsqueeze(-3)).sum(-1)

    def _blocks(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.width))
