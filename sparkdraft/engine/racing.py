"""The drafters of an engine: mostly one. Several race (drafters/race.py): they take turns, and the faster one stays."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sparkdraft.drafters.race import Racers
from sparkdraft.drafters.race_score import RaceScore
from sparkdraft.engine.proposer import Proposer
from sparkdraft.speculation.depth import depth_choices

log = logging.getLogger(__name__)


class Model(NamedTuple):
    """A drafter, as far as depths depend on it."""

    name: str
    max_depth: int
    chain: bool

    def choices(self, fixed: int | None, named: Sequence[int] | None) -> list[int]:
        """The depths that its steps run at."""
        return depth_choices(self.max_depth, min(fixed or 0, self.max_depth), self.among(named), self.chain)

    def among(self, named: Sequence[int] | None) -> list[int] | None:
        """Of the depths that a user named to choose from, those that it can draft."""
        return [depth for depth in named if depth <= self.max_depth] if named else None


def models_of(proposer: Proposer | None) -> list[Model]:
    if proposer is None:
        return []
    if isinstance(proposer.drafter, Racers):
        return [Model(each.caps.name, each.caps.max_depth, each.caps.chain) for each in proposer.drafter.drafters]
    return [Model(proposer.drafter.caps.name, proposer.max_depth, proposer.chain)]


class Racing:
    def __init__(self, racers: Racers) -> None:
        self.racers, self.score = racers, RaceScore(racers.names)
        self._pinned = ""  # the one that drafts whosever turn it is

    def take_turn(self) -> str:
        """Decide who drafts in the coming step. Returns the name."""
        name = self._pinned or self.score.drafts
        self.racers.active = self.racers.names.index(name)
        return name

    def each_in_turn(self) -> Iterator[str]:
        """All of them, one after the other: each drafts until the next is asked for."""
        for name in self.racers.names:
            self._pinned = name
            yield self.take_turn()
        self._pinned = ""

    def count(self, name: str, tokens: int, seconds: float) -> None:
        """A step that this one could draft in. seconds: 0 if its time says nothing."""
        if not self._pinned and self.score.add(name, tokens, seconds):
            self.racers.decided = True
            log.warning("the race of drafters is over, %s", self.score.describe())
