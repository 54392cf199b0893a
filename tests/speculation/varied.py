"""Blocks of drafts that differ as real ones do, with confidences to match: what cutting them gains can be computed.

The constants were fitted to 3,915 greedy blocks of the embedded drafter (drafted_blocks.npz).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sparkdraft.kernels.ops import WIDEST
from sparkdraft.operate.bench.synthetic import BASE, SLOPE, Acceptance, Outcomes, Table

# How sure the drafter is of a draft is normal around a mean that falls from the first draft to the fifteenth, with one
# deviation for a block and one for a draft in it.
FALL, BLOCK_DEVIATION, DRAFT_DEVIATION = 4.9, 3.3, 1.7
DRAWN_PER_BLOCK = 16  # blocks drawn for each that is taken, so that those taken have the mean asked for


@dataclass(frozen=True)
class VariedAcceptance(Acceptance):
    """Blocks that differ as real ones do. The length is the mean of uncut blocks."""

    @cached_property
    def shift(self) -> float:
        """The shift of all confidences that gives the mean length asked for."""
        low, high = -60.0, 60.0
        for _ in range(30):
            middle = (low + high) / 2
            short = 1 + self._draw(8192, np.random.default_rng(0), middle)[1].mean() < self.length
            low, high = (middle, high) if short else (low, middle)
        return (low + high) / 2

    def outcomes(self, steps: int, streams: int, seed: int = 0) -> Outcomes:
        """Draw more blocks than needed, sort them by accepted drafts and take every n-th, so that the mean is close to
        the one asked for even for few steps. Each stream gets one of 'streams' neighbours, as in `table`."""
        rng, count = np.random.default_rng(seed), steps * streams
        gaps, accepted = self._draw(count * DRAWN_PER_BLOCK, rng, self.shift)
        order = rng.permutation(len(accepted))
        order = order[np.argsort(accepted[order], kind="stable")]
        taken = order[DRAWN_PER_BLOCK // 2 :: DRAWN_PER_BLOCK].reshape(steps, streams)
        taken = rng.permuted(rng.permuted(taken, axis=1), axis=0)
        return Outcomes(accepted[taken], gaps[taken])

    def describe(self) -> str:
        return (
            f"blocks of {self.depth} drafts that vary as the embedded drafter's do, with the gaps that it would give; "
            f"mean length of whole blocks {self.length:g}"
        )

    def _draw(self, count: int, rng: np.random.Generator, shift: float) -> tuple[NDArray[np.float32], Table]:
        """Return the gaps [count, depth] and the number of accepted drafts."""
        mean = shift - FALL * np.arange(self.depth) / 14
        block = rng.normal(0, BLOCK_DEVIATION, (count, 1))
        gaps = np.clip(mean + block + rng.normal(0, DRAFT_DEVIATION, (count, self.depth)), -WIDEST, WIDEST)
        right = rng.random((count, self.depth)) < 1 / (1 + np.exp(-(SLOPE * gaps + BASE)))
        return gaps.astype(np.float32), right.cumprod(1).sum(1, dtype=np.int32)
