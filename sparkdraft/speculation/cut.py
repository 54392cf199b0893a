"""Truncates a block of drafts where verifying more costs more than it gains.

Before a draft is verified, one thing is known of it: its gap, which is how far its score stands above the others
(engine/sampler.py). The chance that it is accepted, if all before it were, is sigmoid(slope * gap + base + the offset
of its position). The fit begins with a guess and follows the target's decisions: each parameter moves by its share of
the error over the information that it has gathered, as in a Kalman filter without its cross terms.

A draft is committed if it and all before it are accepted; that chance is its survival. At a rate of r tokens a second
the first k drafts, which take t seconds to verify, pay if their survivals add up to more than r * t. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparkdraft.kernels.ops import WIDEST

# The first guess counts as so many observations of an even chance; at most so many are remembered.
PRIOR, REMEMBERED = 4.0, 60.0
OWN_PRIOR = 8.0  # of a position's own offset: positions differ little
# What a block leaves of older blocks' weight, in the mean over all requests and in that of one. Ten blocks are enough
# for one request: means are over expectations, and text may turn hard within a few blocks.
USUAL, OWN = 0.985, 0.9
TRUST = 4.0  # how many blocks the mean over all requests is worth to a new request; it fades as blocks do


# ---- the chance of each draft


class Confidence:
    """Turns gaps into chances, of greedy or of sampled text. It learns from what the target accepts."""

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
        """Learns from a step that verified the first 'drafted' drafts. Those after the first refused one say
        nothing."""
        known, most = self._known, REMEMBERED
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
    """The gap within its bounds; NaN counts as the least sure."""
    return min(gap, WIDEST) if gap > -WIDEST else -WIDEST


# ---- where to cut


def survivals(chances: Sequence[float]) -> list[float]:
    """The chance of each draft that it and all before it are accepted."""
    reached, found = 1.0, []
    for chance in chances:
        reached *= chance
        found.append(reached)
    return found


def best_cuts(survival: Sequence[float], worth: Sequence[float], depths: Sequence[int]) -> list[tuple[float, int]]:
    """For each depth that the block might have, ascending: the expected tokens of its step, and how many drafts to
    verify. worth[k]: the cost of verifying k drafts, in tokens."""
    found, wanted = [], iter(depths)
    depth = next(wanted)
    tokens, best, kept, kept_tokens = 1.0, 1.0 - worth[0], 0, 1.0
    for number in range(len(survival) + 1):
        if number:
            tokens += survival[number - 1]
            if tokens - worth[number] > best:
                best, kept, kept_tokens = tokens - worth[number], number, tokens
        if number == depth:
            found.append((kept_tokens, kept))
            depth = next(wanted, -1)
    return found


class Profile:
    """Decayed means by depth of what cut blocks are expected to bring: tokens and drafts kept."""

    def __init__(self, num_depths: int, memory: float) -> None:
        self.weight, self._memory, self._trust = 0.0, memory, TRUST
        self.tokens, self.kept = [0.0] * num_depths, [0.0] * num_depths  # decayed sums

    def begin(self, tokens: Sequence[float], depths: Sequence[int], weight: float) -> None:
        """Starts as if 'weight' blocks had brought these tokens by depth, and had not been cut."""
        self.weight, self.tokens, self.kept = weight, [weight * t for t in tokens], [weight * d for d in depths]

    def add(self, cuts: Sequence[tuple[float, int]]) -> None:
        memory = self._memory
        self.weight, self._trust = self.weight * memory + 1, self._trust * memory
        self.tokens = [old * memory + tokens for old, (tokens, _) in zip(self.tokens, cuts, strict=True)]
        self.kept = [old * memory + kept for old, (_, kept) in zip(self.kept, cuts, strict=True)]

    def forget(self) -> None:
        """The text has changed: what was seen counts as half a block."""
        keep = 0.5 / max(self.weight, 0.5)
        self.weight, self._trust = self.weight * keep, self._trust * keep
        self.tokens, self.kept = [t * keep for t in self.tokens], [k * keep for k in self.kept]

    def means(self, usual: Profile) -> tuple[list[float], list[float]]:
        """Tokens and drafts kept, by depth, blended with the profile of all requests (which has seen a block)."""
        lean, total = self._trust / usual.weight, self.weight + self._trust
        tokens = [(own + lean * all_) / total for own, all_ in zip(self.tokens, usual.tokens, strict=True)]
        kept = [(own + lean * all_) / total for own, all_ in zip(self.kept, usual.kept, strict=True)]
        return tokens, kept
