"""Two drafters in one engine, of which one drafts at a time: they race, and the faster one stays
(drafters/race_score.py).

To the engine they are one drafter. Both observe every committed row, so each of them can draft in any step, and the
other one in the next: the text is the target's in any case. Both are in the plan, with weights, keys and values. Once
the race is decided the loser observes nothing more; its memory is not given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sparkdraft.cache.formats import KVFormat
from sparkdraft.core import UserError
from sparkdraft.drafters import pairs
from sparkdraft.drafters.caps import DrafterCaps
from sparkdraft.drafters.drafter import Anchors, CommittedRows, DraftBytes, Drafter, Pick, ReadsTarget
from sparkdraft.drafters.mtp_config import has_head
from sparkdraft.drafters.registry import DraftSource, default_drafter, find_drafter, find_head
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.weights.checkpoint import Checkpoint
from sparkdraft.weights.hub_repo import cached_snapshot
from sparkdraft.weights.linear import Linear
from sparkdraft.weights.plane_layout import StoredBytes

RACE = "race"  # what a user calls it: alone, or with the name of the drafter that shall race the model's own head


@dataclass(frozen=True, slots=True)
class RaceSource:
    """Drafters to be loaded, all of them."""

    racers: tuple[DraftSource, ...]

    @property
    def caps(self) -> DrafterCaps:
        return together([racer.caps for racer in self.racers])

    def asked(self, weights: str, vocabulary: str, target: ModelConfig) -> RaceSource:
        """As DraftSource.asked, of all of them."""
        return RaceSource(tuple(racer.asked(weights, vocabulary, target) for racer in self.racers))


def together(racers: Sequence[DrafterCaps]) -> DrafterCaps:
    """All that several drafters need. Where they are shown different parts of the context, each is shown all of it."""
    return DrafterCaps(
        name=RACE,
        taps=tuple(dict.fromkeys(tap for caps in racers for tap in caps.taps)),
        max_depth=max(caps.max_depth for caps in racers),
        kv=tuple(spec for caps in racers for spec in caps.kv),
        num_weights=sum(caps.num_weights for caps in racers),
        chain=any(caps.chain for caps in racers),
        own_head=any(caps.own_head for caps in racers),
        borrowed=tuple(spec for caps in racers for spec in caps.borrowed),
        reads_back=max(caps.reads_back for caps in racers),
        num_read=sum(caps.num_read or caps.num_weights for caps in racers),
        sees=racers[0].sees if all(caps.sees == racers[0].sees for caps in racers) else None,
        num_in_target=sum(caps.num_in_target for caps in racers),
        matrices=tuple(matrix for caps in racers for matrix in caps.matrices),
        stored=_stored(racers),
    )


def _stored(racers: Sequence[DrafterCaps]) -> StoredBytes | None:
    """What a GPU keeps of all of them; None: floats."""
    if all(caps.stored is None for caps in racers):
        return None
    parts = [caps.stored or StoredBytes(0, caps.num_weights) for caps in racers]
    return StoredBytes(sum(part.quantised for part in parts), sum(part.floats for part in parts))


class Racers:
    """A drafter (drafters/drafter.py) that is several."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = list(drafters)
        self.caps = together([drafter.caps for drafter in drafters])
        self.names = [drafter.caps.name for drafter in drafters]
        self.active, self.decided = 0, False

    @property
    def turn(self) -> int:
        """A number for what runs now: what was recorded in another turn must not be replayed."""
        return self.active + len(self.drafters) * self.decided

    def observe(self, rows: CommittedRows) -> None:
        for number, drafter in enumerate(self.drafters):
            if drafter.caps.kv and (number == self.active or not self.decided):
                drafter.observe(replace(rows, hidden=self._own(rows.hidden, drafter)))

    def propose(self, anchors: Anchors, depth: int, pick: Pick) -> Tensor:
        drafter = self.drafters[self.active]
        hidden = self._own(anchors.hidden, drafter) if drafter.caps.chain and anchors.hidden is not None else None
        return drafter.propose(replace(anchors, hidden=hidden), depth, pick)

    def reach(self, depth: int) -> int:
        return max(drafter.reach(min(depth, drafter.caps.max_depth)) for drafter in self.drafters)

    def reads(self, depth: int) -> DraftBytes:
        drafter = self.drafters[self.active]
        return drafter.reads(min(depth, drafter.caps.max_depth))

    @property
    def matrices(self) -> list[Linear]:
        return [matrix for drafter in self.drafters for matrix in drafter.matrices]

    def read_from(self, kv: KVFormat) -> None:
        for drafter in self.drafters:
            if isinstance(drafter, ReadsTarget):
                drafter.read_from(kv)

    def _own(self, hidden: Tensor, drafter: Drafter) -> Tensor:
        """Of [rows, taps of all, hidden], its own taps."""
        places = [self.caps.taps.index(tap) for tap in drafter.caps.taps]
        if places == [*range(places[0], places[0] + len(places))]:
            return hidden[:, places[0] : places[0] + len(places)]
        return hidden[:, places]


def turn_of(drafter: Drafter) -> int:
    return drafter.turn if isinstance(drafter, Racers) else 0


def find_racers(model: str, asked: str, target: ModelConfig, checkpoint: Checkpoint) -> RaceSource:
    """asked: 'race', or 'race:' and a drafter's folder or hub id. Raises UserError where there are not two."""
    named = asked.partition(":")[2]
    if named:
        pairs.check_pair(named, target)
        found = [find_drafter(named, target)]
    else:
        found = _known(model, target)
    if has_head(checkpoint.names()):
        found.append(find_head(checkpoint, target))
    kinds = list({source.caps.name: source for source in reversed(found)}.values())[::-1]
    if len(kinds) < 2:
        there = f"only {kinds[0].caps.name}" if kinds else "none"
        raise UserError(
            f"a race needs two kinds of drafters for {model}, and {there} is there: name one with --drafter race:NAME "
            "beside the MTP head in the model's file, fetch one with `sparkdraft pull`, or leave --drafter out"
        )
    return RaceSource(tuple(kinds[:2]))


def _known(model: str, target: ModelConfig) -> list[DraftSource]:
    """The package's drafter, and published ones that are in the hub's cache, the best first."""
    if own := default_drafter(model):
        return [find_drafter(own, target)]
    match = pairs.match(model, target)
    folders = [cached_snapshot(known.repo) for known in match.target.published] if match else []
    return [find_drafter(str(folder), target) for folder in folders if folder is not None]
