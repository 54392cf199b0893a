"""Which of several drafters writes more tokens a second: they draft in turns, and the one that was faster stays.

Turns are short, so that all of them draft for the same texts, batches and contexts. A step counts with all that it
wrote and with all of its time, whatever depth the controller chose for it: a drafter that is parked writes as plain
decoding does. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TURN = 16  # steps of a drafter in a row
ENOUGH = 256  # steps of each that decide: tokens per step vary by two thirds of their mean, so by 4 % over these


@dataclass(slots=True)
class Tally:
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class RaceScore:
    def __init__(self, names: Sequence[str], turn: int = TURN, enough: int = ENOUGH) -> None:
        assert len(set(names)) == len(names) > 1, names
        self.names, self.turn, self.enough = list(names), turn, enough
        self.tallies = {name: Tally() for name in names}
        self.winner = ""  # until it is known

    @property
    def drafts(self) -> str:
        """Whose turn it is."""
        counted = sum(tally.steps for tally in self.tallies.values())
        return self.winner or self.names[counted // self.turn % len(self.names)]

    def add(self, name: str, tokens: int, seconds: float) -> bool:
        """Count a step. Returns whether it has decided the race."""
        if self.winner or not seconds:
            return False
        tally = self.tallies[name]
        tally.steps, tally.tokens, tally.seconds = tally.steps + 1, tally.tokens + tokens, tally.seconds + seconds
        if min(each.steps for each in self.tallies.values()) < self.enough:
            return False
        self.winner = max(self.names, key=lambda each: self.tallies[each].rate)
        return True

    def reset(self) -> None:
        """The steps so far were not a user's. What is decided stays."""
        if not self.winner:
            self.tallies = {name: Tally() for name in self.names}

    def describe(self) -> str:
        rates = ", ".join(f"{name} {tally.rate:.1f} tok/s" for name, tally in self.tallies.items())
        steps = min(tally.steps for tally in self.tallies.values())
        if self.winner:
            return f"{self.winner} won: {rates}, over {steps} steps each or more"
        return f"under way, {steps} of {self.enough} steps each" + (f": {rates}" if steps else "")

    def as_dict(self) -> dict[str, Any]:
        rates = {
            name: {"steps": tally.steps, "tokens": tally.tokens, "tok_s": round(tally.rate, 2)}
            for name, tally in self.tallies.items()
        }
        return {"winner": self.winner or None, "drafters": rates}
