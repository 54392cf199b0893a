"""How sure a drafter is of each draft, as a chance: a small logistic fit that learns from what the target accepts.

What is known of a draft before it is verified is its gap: how far its score stands above the others
(engine/sampler.py). The chance that it is accepted, if all before it were, is sigmoid(slope * gap + base + its
position's own offset). The fit begins with a guess and follows the target's decisions: each parameter moves by its
share of the error over the information that it has gathered so far, as in a Kalman filter without its cross terms, so
that it settles and still follows a text that changes. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparkdraft.kernels.ops import WIDEST

# What the guess is worth, in observations of an even chance; and the most that is remembered.
PRIOR, MEMORY = 4.0, 60.0
OWN_PRIOR = 8.0  # of a position's own offset: positions differ little


class Confidence:
    """The fit of one kind of gap."""

    def __init__(self, max_depth: int, slope: float, base: float) -> None:
        self.slope, self.base = slope, base
        self.own = [0.0] * max_depth
        self._known = [PRIOR, PRIOR]  # information about slope and base
        self._known_own = [OWN_PRIOR] * max_depth

    def chances(self, gaps: Sequence[float]) -> list[float]:
        """For each draft of a block, the chance that it is accepted if all before it were."""
        slope, base = self.slope, self.base
        return [
            1 / (1 + math.exp(-(slope * bounded(gap) + base + own))) for gap, own in zip(gaps, self.own, strict=False)
        ]

    def learn(self, gaps: Sequence[float], drafted: int, accepted: int) -> None:
        """After a step that verified the first 'drafted' of a block: drafts behind the first refused say nothing."""
        known, most = self._known, MEMORY
        for position in range(min(accepted + 1, drafted)):
            gap = bounded(gaps[position])
            chance = 1 / (1 + math.exp(-(self.slope * gap + self.base + self.own[position])))
            error, doubt = (position < accepted) - chance, chance * (1 - chance)
            known[0] = min(known[0] + doubt * gap * gap, most * WIDEST)
            known[1] = min(known[1] + doubt, most)
            self._known_own[position] = min(self._known_own[position] + doubt, most)
            # The three share one error; a third each would settle too slowly, all of it would swing.
            self.slope += error * gap / known[0] / 2
            self.base += error / known[1] / 2
            self.own[position] += error / self._known_own[position] / 2


def bounded(gap: float) -> float:
    """A gap within its bounds; one that is not a number counts as the least sure."""
    return min(gap, WIDEST) if gap > -WIDEST else -WIDEST
