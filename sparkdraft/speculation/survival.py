"""What drafts are likely to survive: for each request the chance of each draft that it and all before it are accepted.

A request counts how often each position was accepted where it was reached. It leans on what other requests of its kind
show (greedy or drawn text, drafts of a model or of the request's own text), and on a first guess before there are any.
Text that changes is forgotten faster than counts fade.

Where the drafter says how sure it is of a draft (its gap, engine/sampler.py), the chance is sigmoid(slope * gap + base
+ the offset of its position), times a share by which the request's drafts have kept more or less than was promised. The
fit follows the target's decisions: each parameter moves by its share of the error over the information that it has
gathered, as in a Kalman filter without its cross terms. The gaps of a request's last blocks are kept, because blocks
differ: those that are sure are worth drafting for, and the others are cut.

All requests lie in arrays, a slot each, so that a step of many is learnt at once. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkdraft.kernels.ops import MOST_SURE, WIDEST

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TRUST = 8.0  # how many observations the shared prior is worth to a new request
MEMORY = 0.985  # what a step leaves of older steps' counts: about 65 steps are remembered
RECENT = 0.7  # what a long request leaves of older requests' counts: text is most like the text before it
NEAR = 0.6  # weight of a position over that of the next, in what later ones expect for themselves
GUESS = 12.0  # and the first guess to the prior, until it fades
SHIFT = 3.0  # observations that a shift leans on
LONG = 10.0  # steps that a long request counts for
MOST = LONG / (1 - RECENT)
SURPRISE = 8.0  # squared deviations after which the text is taken to have changed
FADE = 0.85  # what a step leaves of older surprise
BLOCKS = 16  # of a request, whose gaps are kept
LEAN = 4.0  # weight of other requests' blocks, which stand for those not seen yet
FEW = 3.0  # blocks of a kind
DOUBT = 4.0  # drafts as promised that a request is taken to have had before its first
MOST_FAIR = 1.1
# The slope and base that a fit of gaps begins with: of greedy text, and of drawn text.
FIRST_FIT = {False: (0.78, -0.25), True: (0.57, -0.96)}
# The first guess counts as so many observations of an even chance; at most so many are remembered.
FIRST, REMEMBERED = 4.0, 60.0
FIRST_OWN = 8.0  # of a position's own offset: positions differ little


class Kind(NamedTuple):
    """A class of requests that learn from each other."""

    start: float  # the acceptance that it begins with
    drawn: bool
    by_model: bool  # a pass of the drafter makes the drafts; else they are copied from the text
    finds_gaps: bool  # and how sure each is


class Confidence:
    """Turns gaps into chances, for each kind. It learns from what the target accepts."""

    def __init__(self, max_depth: int, kinds: Sequence[Kind]) -> None:
        first = np.array([FIRST_FIT[kind.drawn] for kind in kinds])
        self.slope, self.base = first[:, 0].copy(), first[:, 1].copy()
        self.own = np.zeros((len(kinds), max_depth))
        self._known = np.full((2, len(kinds)), FIRST)  # information about slope and base
        self._known_own = np.full((len(kinds), max_depth), FIRST_OWN)

    def chances(self, kind: Ints, gaps: Floats) -> Floats:
        """The chance of each draft that it is accepted if all before it were. kind: [seqs]; gaps: [seqs, ..., depth];
        NaN stays."""
        shape = (-1, *[1] * (gaps.ndim - 1))
        own = self.own[kind].reshape(len(kind), *[1] * (gaps.ndim - 2), -1)
        score = self.slope[kind].reshape(shape) * bounded(gaps) + self.base[kind].reshape(shape) + own
        return np.asarray(1 / (1 + np.exp(-score)))

    def learn(self, kind: int, gaps: Floats, right: NDArray[np.bool_], compared: NDArray[np.bool_]) -> None:
        """Learns from the drafts [blocks, depth] that were compared: right, or the first of its block that was not."""
        chance = self.chances(np.full(len(gaps), kind), gaps)
        gap = bounded(gaps)
        error, doubt = np.where(compared, [right - chance, chance * (1 - chance)], 0.0)
        gap = np.where(compared, gap, 0.0)
        known, own = self._known[:, kind], self._known_own[kind]
        known += (doubt * gap * gap).sum(), doubt.sum()
        known[:] = np.minimum(known, (REMEMBERED * WIDEST, REMEMBERED))
        own[:] = np.minimum(own + doubt.sum(0), REMEMBERED)
        # The three share one error; a third each would settle too slowly, all of it would swing.
        self.slope[kind] += (error * gap).sum() / known[0] / 2
        self.base[kind] += error.sum() / known[1] / 2
        self.own[kind] += error.sum(0) / own / 2


class Survival:
    def __init__(self, max_depth: int, kinds: Sequence[Kind]) -> None:
        self.max_depth = max_depth
        self.fits = Confidence(max_depth, kinds)
        self.finds_gaps = np.array([kind.finds_gaps for kind in kinds])
        self.some_gaps = bool(self.finds_gaps.any())
        self.start = np.repeat([[kind.start] for kind in kinds], max_depth, axis=1)
        self.prior, self._prior_is_old = self.start.copy(), False  # [kinds, depth]
        self._positions = np.arange(max_depth)
        self._usual = self._state(len(kinds))  # of all requests of a kind
        self._usual.trust[:] = GUESS
        self._own = self._state(0)
        self._free: list[int] = []
        # By kind, the requests that have drafted: those that still run, and those that have ended.
        self._num_open, self._num_closed = np.zeros((2, len(kinds)), np.int64)

    def open(self, kind: int) -> int:
        """A slot for a request."""
        if not self._free:
            size = len(self._own.kind)
            self._own = self._own.grown(self._state(max(size, 8)))
            self._free = list(range(len(self._own.kind) - 1, size - 1, -1))
        slot = self._free.pop()
        for mine, fresh in zip(self._own, self._state(1), strict=True):
            mine[slot] = fresh[0]
        self._own.kind[slot], self._own.usual[slot] = kind, self.prior[kind]
        return slot

    def close(self, slot: int) -> None:
        """Forgets a request. What others of its kind have shown fades by what it has added, as far as they are older:
        those that ran beside it are not."""
        kind = self._own.kind[slot]
        self._free.append(slot)
        if not self._own.counts[slot, 1, 0]:
            return
        beside = self._num_open[kind] + self._num_closed[kind] - self._own.before[slot]
        left = RECENT ** (min(self._own.counts[slot, 1, 0], LONG) / LONG / beside)
        self._num_open[kind] -= 1
        self._num_closed[kind] += 1
        self._usual.counts[kind] *= left
        self._usual.trust[kind] = max(self._usual.trust[kind] * left, 1.0)

    # ---- what is expected

    def kind(self, slots: Ints) -> Ints:
        return np.asarray(self._own.kind[slots])

    def is_new(self, slots: Ints) -> NDArray[np.bool_]:
        """Whether hardly any draft of a request's kind was ever verified."""
        return np.asarray(self._usual.counts[self._own.kind[slots], 1, 0] < FEW)

    def tried(self, slots: Ints) -> Floats:
        return np.asarray(self._own.counts[slots, 1, 0])

    def chances(self, slots: Ints) -> Floats:
        """[slots, depth]: the chance of each position, once it is reached."""
        own = self._own
        if self._prior_is_old:
            usual, trust = self._usual.counts, self._usual.trust
            self.prior[:], self._prior_is_old = blend(usual[:, 0], usual[:, 1], self.start, trust), False
        counts = own.counts[slots]
        own.usual[slots] = chances = blend(counts[:, 0], counts[:, 1], self.prior[own.kind[slots]], own.trust[slots])
        return chances

    def expected(self, slots: Ints) -> tuple[Floats, Floats]:
        """[slots, blocks, depth]: survivals of a request's last blocks, as they are judged now, and the weight of each
        block; of one mean block where gaps are not found. Drafts that were not made do as well as usual."""
        usual, weights = self.chances(slots)[:, None], np.ones((len(slots), 1))
        if self.some_gaps:
            gaps = self._own.gaps[slots]
            weights = np.where(np.isnan(gaps[:, :, 0]), LEAN / BLOCKS, 1.0)
            gaps = np.where(np.isnan(gaps[:, :, :1]), self._usual.gaps[self._own.kind[slots]], gaps)
            weights /= weights.sum(1, keepdims=True)
            usual = np.where(np.isnan(gaps), usual, self.fair(slots)[:, None, None] * self._sure(slots, gaps))
        return np.asarray(np.minimum(usual, MOST_SURE).cumprod(2)), weights

    def fair(self, slots: Ints) -> Floats:
        """Multiplies a request's chances: its drafts have kept more or less than was promised."""
        kept = self._own.kept[slots] + DOUBT
        return np.asarray(np.minimum(kept[:, 1] / kept[:, 0], MOST_FAIR))

    def expect(self, slots: Ints, gaps: Floats) -> Floats:
        """Blocks [slots, depth] are being verified, or some of their drafts: their survivals. NaN: it was not made."""
        own = self._own
        sure = np.minimum(self.fair(slots)[:, None] * self._sure(slots, gaps), MOST_SURE)
        chances = np.where(np.isnan(gaps), own.usual[slots], sure)
        own.block[slots, 0], own.block[slots, 1] = gaps, chances
        return np.asarray(chances.cumprod(1))

    # ---- what happened

    def take_blocks(self, slots: Ints) -> Floats:
        """[slots, 2, depth]: gaps and chances of the blocks that were verified; NaN: the drafter said nothing."""
        blocks = self._own.block[slots]
        self._own.block[slots] = np.nan
        return np.asarray(blocks)

    def learn(self, slots: Ints, drafted: Ints, accepted: Ints, blocks: Floats) -> None:
        """After steps of the same requests: drafted and accepted [steps, slots], and the blocks of each step. Drafts
        behind the first refused are neither taken nor refused."""
        own, position, age = self._own, self._positions, np.arange(len(drafted))[::-1, None]
        drafted, accepted = drafted[..., None], accepted[..., None]
        right, compared = position < accepted, position < np.minimum(accepted + 1, drafted)
        counts = np.array((right, compared), float).transpose(1, 2, 0, 3)  # [steps, slots, 2, depth]
        chances = own.usual[slots][None]
        memory, kinds = MEMORY**age, own.kind[slots]
        if self.some_gaps:
            gaps, sure = blocks[:, :, 0], blocks[:, :, 1]
            known = ~np.isnan(sure[..., :1])
            chances = np.where(known, sure, chances)
            # drafts that were cut count with their chance, or only sure ones would ever count
            cut = known & (position >= drafted) & (accepted == drafted)
            reached = np.where(position < drafted, 1.0, chances).cumprod(2)
            counts[:, :, 0] += np.where(cut, reached, 0.0)
            counts[:, :, 1] += np.where(cut, reached / np.maximum(chances, 1e-9), 0.0)
            told = compared & known
            kept = np.array(((chances * told).sum(2), (right & known).sum(2)))  # [2, steps, slots]
            own.kept[slots] = MEMORY ** len(drafted) * own.kept[slots] + (memory * kept).sum(1).T
            self._learn_gaps(slots, kinds, gaps, right, told)
        before = own.counts[slots]
        own.counts[slots] = MEMORY ** len(drafted) * before + (memory[..., None, None] * counts).sum(0)
        for slot in slots[(before[:, 1, 0] == 0) & (own.counts[slots, 1, 0] > 0)]:  # its first drafts
            own.before[slot] = self._num_closed[own.kind[slot]]
            self._num_open[own.kind[slot]] += 1
        share = LONG / np.maximum(before[:, 1:, :1], LONG)
        for kind in set(kinds.tolist()):
            usual = self._usual.counts[kind]
            usual += (share * counts)[:, kinds == kind].sum((0, 1))
            # The last LONG steps of a few requests, or of as many as run: fewer would rise and fall by chance.
            most = MOST * max(self._num_open[kind], 1)
            usual *= most / max(usual[1, 0], most)
        self._prior_is_old = True
        excess, doubt = (right - chances) * compared, chances * (1 - chances) * compared
        self._watch(slots, excess.sum(2), doubt.sum(2), age)

    def forget(self, slots: Ints) -> None:
        """The text has changed: what was learnt, and what other requests showed, counts as one observation each."""
        own = self._own
        own.counts[slots] /= np.maximum(own.counts[slots, 1, 0], 1.0)[:, None, None]
        own.trust[slots] = 1.0
        own.surprise[slots] = own.kept[slots] = 0.0
        own.gaps[slots, 1:] = np.nan

    # ---- the parts

    def _state(self, size: int) -> State:
        depth = self.max_depth
        gaps = np.full((size, BLOCKS if self.some_gaps else 1, depth), np.nan)
        usual, block = np.zeros((size, depth)), np.full((size, 2, depth), np.nan)
        pairs = np.zeros((2, size, 2))
        counts, trust = np.zeros((size, 2, depth)), np.full(size, TRUST)
        kind, before = np.zeros((2, size), np.int64)
        return State(kind, before, counts, trust, pairs[0], pairs[1], gaps, usual, block)

    def _sure(self, slots: Ints, gaps: Floats) -> Floats:
        return self.fits.chances(self._own.kind[slots], gaps)

    def _learn_gaps(
        self, slots: Ints, kinds: Ints, gaps: Floats, right: NDArray[np.bool_], told: NDArray[np.bool_]
    ) -> None:
        """Keeps the newest blocks, and fits the chances of all kinds to what became of them."""
        made = ~np.isnan(gaps[:, :, 0]).any(0)
        self._own.gaps[slots[made]] = newest(gaps[::-1, made].swapaxes(0, 1), self._own.gaps[slots[made]])
        for kind in set(kinds[made].tolist()):
            mine = made & (kinds == kind)
            size = (-1, self.max_depth)
            blocks = gaps[::-1, mine].reshape(size)
            self._usual.gaps[kind] = newest(blocks, self._usual.gaps[kind])
            compared = told[::-1, mine].reshape(size) & ~np.isnan(blocks)
            self.fits.learn(kind, blocks, right[::-1, mine].reshape(size), compared)

    def _watch(self, slots: Ints, excess: Floats, doubt: Floats, age: Ints) -> None:
        """Compares steps with what was expected; text that changed is forgotten faster than memory fades. excess:
        [steps, slots], accepted drafts minus expected ones; doubt: its variance."""
        fade, surprise = FADE**age, self._own.surprise[slots] * (FADE ** len(age), FADE ** (2 * len(age)))
        surprise[:, 0] += (excess * fade).sum(0)
        surprise[:, 1] += (doubt * fade**2).sum(0)
        self._own.surprise[slots] = surprise
        # the half: one refusal of a sure thing is no change
        changed = surprise[:, 0] ** 2 > SURPRISE * (surprise[:, 1] + 0.5)
        if changed.any():
            self.forget(slots[changed])


class State(NamedTuple):
    """What requests have shown, by slot."""

    kind: Ints
    before: Ints  # requests of its kind that had ended when it drafted first
    counts: Floats  # [slots, 2, depth]: decayed counts of drafts accepted, and of those that were compared at all
    trust: Floats
    surprise: Floats  # [slots, 2]: decayed sum of accepted minus expected, and its variance
    kept: Floats  # [slots, 2]: decayed sum of the chances of drafts that were compared, and of those accepted
    gaps: Floats  # [slots, blocks, depth]: of the last blocks, the newest first; NaN: it was not made
    usual: Floats  # [slots, depth]: the chances that were expected last
    block: Floats  # [slots, 2, depth]: gaps and chances of the block that is being verified; NaN: none is

    def grown(self, more: State) -> State:
        return State(*(np.concatenate(pair) for pair in zip(self, more, strict=True)))


def blend(taken: Floats, tried: Floats, prior: Floats, trust: Floats) -> Floats:
    """The acceptance of each position: its counts, and the prior, shifted by how the positions before it depart from
    it, the nearest most."""
    nearness = _nearness(taken.shape[-1])
    shift = (taken - tried * prior) @ nearness / (tried @ nearness + SHIFT)
    base = np.minimum(np.maximum(prior + shift, 0.0), 1.0)
    trust = trust[..., None]
    return np.asarray((taken + trust * base) / (tried + trust))


@cache
def _nearness(depth: int) -> Floats:
    """[from, to]: the weight of a position in what a later one expects for itself."""
    distance = np.arange(depth) - np.arange(depth)[:, None]
    return np.where(distance > 0, NEAR ** (distance - 1.0), 0.0)


def newest(more: Floats, blocks: Floats) -> Floats:
    """As many blocks as before, [..., blocks, depth], the newest first."""
    return np.concatenate((more, blocks), -2)[..., : blocks.shape[-2], :]


def bounded(gaps: Floats) -> Floats:
    """The gaps within their bounds. NaN stays."""
    return np.minimum(np.maximum(gaps, -WIDEST), WIDEST)
