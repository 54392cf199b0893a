"""What the depth controller (speculation/depth.py) remembers of each request, and of the last step. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sparkdraft.speculation.cut import Profile

Bucket = tuple[int, int]  # log2 of the batch, log4 of the context in units of 256 tokens

TRUST = 6.0  # how many observations the shared prior is worth to a new request
FIRST_WAIT = 16  # tokens between parking and the first probe


class Mixed(NamedTuple):
    """A step whose requests drafted to different depths."""

    deepest: int
    num: int  # requests
    alike: int  # the depth at which all of them alike would cost about as much
    share: float  # the time of this step over that one's


NOT_MIXED = Mixed(0, 0, 0, 1.0)


@dataclass(slots=True)
class Block:
    """A block of drafts on its way: how sure the drafter is of each, as gaps and as chances."""

    gaps: Sequence[float]
    drawn: bool
    chances: list[float]


@dataclass(slots=True)
class DepthState:
    """What one request has shown; the controller alone writes it."""

    taken: list[float]  # by position: decayed count of drafts accepted
    tried: list[float]  # by position: decayed count of drafts that were compared at all
    trust: float = TRUST
    surprise: float = 0.0  # decayed sum of accepted minus expected, and its variance
    variance: float = 0.0
    tokens: list[float] = field(default_factory=list)  # expected tokens by depth; empty when an observation came since
    parked: Bucket | None = None  # the bucket it was parked in; in another the question is asked again
    waited: int = 0  # plain tokens since it was parked or probed last
    wait: int = FIRST_WAIT
    probe: int = 0  # depth of the probe that must follow a probe that went well
    price: float = 0.0  # of the probe under way, in tokens that plain steps would have written meanwhile
    spent: float = 0.0  # on this run of probes, less what they brought
    block: Block | None = None  # the block that is being verified, if its gaps are known
    profiles: dict[int, Profile] = field(default_factory=dict)  # of its blocks so far, by what others have
    promised: float = 0.0  # decayed sum of the chances of drafts that were compared, and of those accepted
    held: float = 0.0

    def rests(self, bucket: Bucket) -> bool:
        """Parked, and nothing to decide; costs are still learnt while it rests, so it looks again now and then."""
        return self.parked == bucket and not self.probe and self.waited < self.wait and self.waited % FIRST_WAIT != 0

    def profile(self, level: int) -> Profile | None:
        """Of its blocks beside others that have 'level' drafts each, or as near to that as it has any."""
        nearest = min(self.profiles, key=lambda known: abs(known - level), default=None)
        return None if nearest is None else self.profiles[nearest]

    def forget(self) -> None:
        """The text has changed: what was learnt, and what other requests showed, counts as one observation each."""
        keep = 1 / max(self.tried[0], 1.0)
        self.taken = [n * keep for n in self.taken]
        self.tried = [n * keep for n in self.tried]
        self.trust, self.surprise, self.variance = 1.0, 0.0, 0.0
        self.promised = self.held = 0.0
        for profile in self.profiles.values():
            profile.forget()
