"""Statistics of speculation: steps, drafts and accepted drafts, of one request or of all.

Everything is computed from one table, (source, drafted, accepted) -> steps, so a total is a sum of tables. In JSON they
have vLLM's names and keep its two invariants, by which tools such as AIPerf check a record: the histogram counts every
drafting step once, and weighted by its index it gives the accepted drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class SpecStats:
    num_plain_steps: int = 0
    steps: Counter[tuple[str, int, int]] = field(default_factory=Counter)  # steps that drafted, per outcome
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def record(self, drafted: int, accepted: int, source: str) -> None:
        """Counts one step of one request. 0 drafted is a plain step."""
        assert 0 <= accepted <= drafted, f"{accepted} accepted of {drafted} drafted"
        if drafted:
            self.steps[source, drafted, accepted] += 1
        else:
            self.num_plain_steps += 1

    def add_time(self, draft: float, verify: float) -> None:
        self.draft_seconds += draft
        self.verify_seconds += verify

    def merge(self, other: SpecStats) -> None:
        self.num_plain_steps += other.num_plain_steps
        self.steps.update(other.steps)
        self.add_time(other.draft_seconds, other.verify_seconds)

    @property
    def num_spec_steps(self) -> int:
        return self.steps.total()

    @property
    def num_draft_tokens(self) -> int:
        return sum(drafted * steps for drafted, _, steps in self._outcomes())

    @property
    def num_accepted_draft_tokens(self) -> int:
        return sum(accepted * steps for _, accepted, steps in self._outcomes())

    @property
    def num_spec_tokens(self) -> int | None:
        """The depth, if all steps that drafted had the same depth."""
        depths = {drafted for drafted, _, _ in self._outcomes()}
        return depths.pop() if len(depths) == 1 else None

    @property
    def sources(self) -> dict[str, list[int]]:
        """Source -> [drafted, accepted]."""
        sums: dict[str, list[int]] = {}
        for (source, drafted, accepted), steps in self.steps.items():
            counts = sums.setdefault(source, [0, 0])
            counts[0] += drafted * steps
            counts[1] += accepted * steps
        return sums

    @property
    def by_drafter(self) -> tuple[int, int]:
        """Steps in which a drafter drafted, and ids that it drafted: n-grams read no weights."""
        own = [(drafted, steps) for (source, drafted, _), steps in self.steps.items() if source != "ngram"]
        return sum(steps for _, steps in own), sum(drafted * steps for drafted, steps in own)

    # ---- lists per position: index 0 is the first draft of a step

    @property
    def acceptance_histogram(self) -> list[int]:
        """Steps per number of accepted drafts, from 0 to the largest depth; empty if no step drafted."""
        counts = [0] * (self._deepest + 1) if self.steps else []
        for _, accepted, steps in self._outcomes():
            counts[accepted] += steps
        return counts

    @property
    def per_position_drafted(self) -> list[int]:
        return self._by_position(lambda drafted, accepted: drafted)

    @property
    def per_position_accepted(self) -> list[int]:
        return self._by_position(lambda drafted, accepted: accepted)

    @property
    def per_position_reached(self) -> list[int]:
        """Steps that drafted this position and accepted every one before it."""
        return self._by_position(lambda drafted, accepted: min(drafted, accepted + 1))

    # ---- rates: None where there is nothing to divide by

    @property
    def mean_acceptance_length(self) -> float | None:
        """Committed ids per drafting step: accepted drafts and the one id that the target adds."""
        mean = _ratio(self.num_accepted_draft_tokens, self.num_spec_steps)
        return None if mean is None else 1 + mean

    @property
    def draft_acceptance_rate(self) -> float | None:
        return _ratio(self.num_accepted_draft_tokens, self.num_draft_tokens)

    def per_position(self) -> list[float | None]:
        """How often position k was accepted where it was reached."""
        return [_ratio(*pair) for pair in zip(self.per_position_accepted, self.per_position_reached, strict=True)]

    def as_dict(self) -> dict[str, object]:
        """For JSON: vLLM's `metrics.speculative_decoding`, then our own fields."""
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": self.acceptance_histogram,
            "num_spec_steps": self.num_spec_steps,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.num_spec_tokens,
            "per_position_drafted": self.per_position_drafted,
            "per_position_accepted": self.per_position_accepted,
            "draft_ms": self.draft_seconds * 1e3,
            "verify_ms": self.verify_seconds * 1e3,
            "sources": self.sources,
        }

    @property
    def _deepest(self) -> int:
        return max((drafted for drafted, _, _ in self._outcomes()), default=0)

    def _outcomes(self) -> Iterator[tuple[int, int, int]]:
        """(drafted, accepted, steps), over all sources."""
        return ((drafted, accepted, steps) for (_, drafted, accepted), steps in self.steps.items())

    def _by_position(self, reach: Callable[[int, int], int]) -> list[int]:
        """Per position, the steps that got at least that far; reach(drafted, accepted) is how far a step got."""
        counts = [0] * self._deepest
        for drafted, accepted, steps in self._outcomes():
            for position in range(reach(drafted, accepted)):
                counts[position] += steps
        return counts


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
