"""Where a block of drafts is cut: after the draft from which on none is expected to pay for its row.

A draft is committed if it and all before it are accepted; that chance is its survival. At a rate of r tokens a second
the first k drafts are worth their rows' time t where their survivals add up to more than r t: the rule by which
speculation/depth.py chooses depths, applied to one block that exists. Cutting changes no text, because only the
target's own samples are committed. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

# What a block leaves of older blocks' weight: in the mean over all requests, and in that of one. A text may turn hard
# within a few blocks, each of which then costs its draft for nothing. What is averaged are expectations, not outcomes,
# so ten blocks are enough.
USUAL, OWN = 0.985, 0.9
TRUST = 4.0  # how many blocks the mean over all requests is worth to a new request; it fades as blocks do


def survivals(chances: Sequence[float]) -> list[float]:
    """By draft, the chance that it and all before it are accepted."""
    reached, found = 1.0, []
    for chance in chances:
        reached *= chance
        found.append(reached)
    return found


def best_cuts(survival: Sequence[float], worth: Sequence[float], depths: Sequence[int]) -> list[tuple[float, int]]:
    """For each depth that the block might have: the tokens that its step is expected to commit, and the drafts that it
    keeps. worth[k]: what the rows of k drafts cost, in tokens. depths: ascending."""
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
    """What blocks were expected to bring once they are cut, by depth: decayed means of tokens and of drafts kept."""

    def __init__(self, num_depths: int, memory: float) -> None:
        self.weight, self._memory, self._trust = 0.0, memory, TRUST
        self.tokens, self.kept = [0.0] * num_depths, [0.0] * num_depths  # decayed sums

    def begin(self, tokens: Sequence[float], depths: Sequence[int], weight: float) -> None:
        """As if so many blocks had been seen that brought these tokens by depth, and were not cut."""
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
        """Tokens and drafts kept, by depth, leaning on the profile of all requests, which has seen a block."""
        lean, total = self._trust / usual.weight, self.weight + self._trust
        tokens = [(own + lean * all_) / total for own, all_ in zip(self.tokens, usual.tokens, strict=True)]
        kept = [(own + lean * all_) / total for own, all_ in zip(self.kept, usual.kept, strict=True)]
        return tokens, kept
