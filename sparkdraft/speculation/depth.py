"""Chooses how many tokens to draft for each request, every step, so that tokens a second are highest.

A step that drafts d tokens commits 1 + p1 + p1 p2 + ... + p1..pd of them on average. The controller learns the p's (for
each request, leaning on what all requests showed) and the times of steps (by depth, batch and context), and takes the
depths whose quotient is largest, which may be 0. No tensors.

Where the drafter says how sure it is of each draft, a block is cut before it is verified (speculation/cut.py), and its
depth is chosen by what cut blocks bring and cost. In a batch all drafts are verified together, and what one request's
drafts add depends on how many the others have (Price.beside). So several answers to that are tried, and the one at
which the whole batch writes the most tokens a second is taken.

A request at depth 0 is paused. It would never learn that its text has become easy, so it probes: one step with a small
draft. A probe that costs x plain steps more than a plain step does, and is followed by x / 0.015 plain tokens, loses
1.5 % on any machine: x = 0.63 (two CPU cores, depth 1) asks for 42 tokens, x = 0.13 (a GPU, depth 3) for 9. The wait
doubles from 16 tokens to 32 and no further unless the budget asks for more: longer waits would save less than that 1.5
% and lose the 50 tokens within which drafting shall come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from sparkdraft.kernels.ops import MOST_SURE
from sparkdraft.speculation.costs import (
    Offer,
    Price,
    Reads,
    StepCosts,
    best_depths,
    conditional_acceptance,
    expected_tokens,
    for_batch,
    start_curve,
)
from sparkdraft.speculation.cut import OWN, USUAL, Confidence, Profile, best_cuts, survivals

TRUST = 6.0  # how many observations the shared prior is worth to a new request
FIRST_WAIT = 16  # tokens between pausing and the first probe
MEMORY = 0.985  # what a step leaves of older steps' counts: about 65 steps are remembered
RECENT = 0.7  # what a request leaves of older requests' counts: text is most like the text before it
SURPRISE = 8.0  # squared deviations after which the text is taken to have changed
FADE = 0.85  # what a step leaves of older surprise
BUDGET = 0.015  # share of time that probing may cost
LIKELY = 1.5  # tokens expected with one draft: above, a probe that goes well is no sign that the text has changed
LONG_WAIT = 32  # tokens between probes, where doubling ends
MAX_PROBE = 4
HOPED = 0.97  # chance of each draft with which drafting must pay somewhere, or a batch does not even probe
PLAIN_FIRST = 2  # plain steps that are timed in a bucket before anything drafts there
# The slope and base that a fit of gaps begins with: of greedy text, and of sampled text.
FIRST_FIT = {False: (0.78, -0.25), True: (0.57, -0.96)}
DOUBT = 4.0  # drafts as promised that a request is taken to have had before its first

Bucket = tuple[int, int]  # log2 of the batch, log4 of the context in units of 256 tokens


def depth_choices(
    max_depth: int, fixed: int | None = None, chosen: Sequence[int] | None = None, chain: bool = False
) -> list[int]:
    """The depths that steps run at. Any other is rounded up to one.

    They double up to max_depth: those between would gain 0.3 %, and the first steps of a new depth cost as much as five
    later ones. fixed: a depth that the user asked for; chosen: those to choose from instead. A chain drafter pays a
    pass for each draft and drafts a few ids at most, so there every depth is one.
    """
    if chain and not chosen:
        return list(range(max_depth + 1))
    doubling = [d for d in (0, 1, 3, 7, 15, 31) if d < max_depth]
    return sorted({0, *(chosen or doubling), max_depth, fixed or 0})


def bucket_of(num_seqs: int, context: int) -> Bucket:
    return (num_seqs - 1).bit_length(), (max(context - 1, 0) // 256).bit_length() + 1 >> 1


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
    paused: Bucket | None = None  # the bucket it was paused in; in another the question is asked again
    waited: int = 0  # plain tokens since it was paused or probed last
    wait: int = FIRST_WAIT
    probe: int = 0  # depth of the probe that must follow a probe that went well
    price: float = 0.0  # of the probe under way, in tokens that plain steps would have written meanwhile
    spent: float = 0.0  # on this run of probes, less what they brought
    block: Block | None = None  # the block that is being verified, if its gaps are known
    profiles: dict[int, Profile] = field(default_factory=dict)  # of its blocks so far, by what others have
    promised: float = 0.0  # decayed sum of the chances of drafts that were compared, and of those accepted
    held: float = 0.0

    def rests(self, bucket: Bucket) -> bool:
        """Paused, with nothing to decide; it looks again now and then, because costs are still learnt."""
        return self.paused == bucket and not self.probe and self.waited < self.wait and self.waited % FIRST_WAIT != 0

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


def _fair(state: DepthState) -> float:
    """Multiplies a request's chances: its drafts have kept more or less than was promised."""
    return min((state.held + DOUBT) / (state.promised + DOUBT), 1.1)


class DepthController:
    def __init__(
        self, max_depth: int, acceptance: float = 0.7, depths: Sequence[int] = (), reads: Reads = lambda rows: 1.0
    ) -> None:
        """depths: those to choose from, 0 among them; none: all up to max_depth. reads: what steps read of the target's
        weights, in any unit; costs begin with it."""
        assert max_depth >= 1 and 0 < acceptance < 1, f"max_depth {max_depth}, acceptance {acceptance}"
        self.max_depth = max_depth
        self.depths = list(depths) or list(range(max_depth + 1))
        self.probes = [d for d in self.depths if 0 < d <= MAX_PROBE] or self.depths[1:2]
        self.start = [acceptance] * max_depth
        self.prior = self.start
        self.taken = [0.0] * max_depth  # over closed requests, decayed
        self.tried = [0.0] * max_depth
        self.costs: dict[Bucket, StepCosts] = {}
        self._reads = reads
        self._unmeasured: dict[int, StepCosts] = {}  # by log2 of the batch
        self.mixed = NOT_MIXED  # of the last choice
        self.fits = {drawn: Confidence(max_depth, *first) for drawn, first in FIRST_FIT.items()}
        self.usual: dict[int, Profile] = {}  # of all requests' blocks, by what others have
        self._unseen = Profile(len(self.depths), OWN)  # of a request without a block
        self._price: Price | None = None  # of the last choice, and the tokens a second that it promised
        self._rate, self._level = 0.0, 0

    def open(self) -> DepthState:
        return DepthState([0.0] * self.max_depth, [0.0] * self.max_depth)

    def close(self, state: DepthState) -> None:
        """Folds a request into the shared prior; a long one counts no more than some ten steps."""
        if not state.tried[0]:
            return
        share = min(1.0, 10 / state.tried[0])
        self.taken = [RECENT * old + share * new for old, new in zip(self.taken, state.taken, strict=True)]
        self.tried = [RECENT * old + share * new for old, new in zip(self.tried, state.tried, strict=True)]
        self.prior = conditional_acceptance(self.taken, self.tried, self.start, TRUST)

    def choose(self, states: Sequence[DepthState], contexts: Sequence[int], others: int = 0) -> list[int]:
        """Depths for one step over these requests; contexts in tokens, of which the longest picks the bucket. others:
        requests of this step whose depth is not chosen here."""
        if not states:
            return []
        num = len(states) + others
        bucket = bucket_of(num, max(contexts))
        if (self.costs and not self.knows_plain(num, max(contexts))) or all(state.rests(bucket) for state in states):
            self.mixed = NOT_MIXED
            return [0] * len(states)
        costs = self._costs(bucket)
        price = costs.price(num)
        if not self.could_pay(num, max(contexts)):
            return self._pause_all(states, bucket)
        rest = [s.paused is not None or not s.tried[0] for s in states]
        found = []
        for level in price.beside:
            offers = self._offers(states, price, level)
            found.append((*best_depths(offers, rest, price, self.depths, others), level))
        depths, self._rate, self._level = max(found, key=lambda one: one[1])
        self._price = price
        drafting = any(depths)
        for state, depth in zip(states, depths, strict=True):
            if depth:
                state.paused, state.probe, state.spent = None, 0, 0.0
            elif state.paused is None:
                state.paused, state.waited, state.wait = bucket, 0, self._first_wait(state, price, num)
            else:
                state.paused = bucket
        self._add_probes(states, depths, price, drafting, num)
        self.verifies(depths, num)
        return depths

    def cut(self, state: DepthState, gaps: Sequence[float], drawn: bool) -> int:
        """How many drafts of a block to verify, given how sure the drafter is of each (gaps) and whether the text is
        sampled (drawn). A probe is not cut: it is made to learn."""
        survival, whole = self.expect(state, gaps, drawn), len(gaps)
        return whole if state.paused is not None else best_cuts(survival, self._worth(self._level), [whole])[0][1]

    def cut_terms(self, states: Sequence[DepthState | None]) -> list[float]:
        """The numbers by which the device cuts blocks (kernels/ops.py, CutTerms): the cost of drafts in tokens, two
        fits, and a number for each sequence. None: one that is not cut."""
        fair = [-1.0 if state is None or state.paused is not None else _fair(state) for state in states]
        fits = [number for fit in self.fits.values() for number in (fit.slope, fit.base, *fit.own)]
        return [*(self._worth(self._level) if max(fair) > 0 else [0.0] * (self.max_depth + 1)), *fits, *fair]

    def expect(self, state: DepthState, gaps: Sequence[float], drawn: bool) -> list[float]:
        """A block is being verified, or some of it. By draft, the chance that it is committed."""
        fair = _fair(state)
        chances = [min(fair * chance, MOST_SURE) for chance in self.fits[drawn].chances(gaps)]
        state.block = Block(gaps, drawn, chances)
        tokens, survival = self._tokens(state), survivals(chances)
        for depth in range(len(survival), self.max_depth):  # drafts that were not made do as well as usual
            before = tokens[depth] - tokens[depth - 1]
            survival.append(survival[-1] * (tokens[depth + 1] - tokens[depth]) / before if before > 1e-9 else 0.0)
        assert self._price
        for level in self._price.beside:
            cuts = best_cuts(survival, self._worth(level), self.depths)
            if level not in state.profiles:  # the request was alone, say, and now it is not
                state.profiles[level] = copy(state.profile(level) or self._unseen)
            state.profiles[level].add(cuts)
            self._usual(level).add(cuts)
        return survival

    def verifies(self, depths: Sequence[int], num_seqs: int) -> None:
        """The step that is measured next verifies so many drafts of each request. Where they differ, this finds the
        depth at which all of them alike would cost about the same."""
        price, deepest, mean = self._price, max(depths), sum(depths) / num_seqs
        if not deepest or price is None:  # without a choice nothing is known to compare with
            self.mixed = NOT_MIXED
            return
        alike = max(round(mean), 1)
        drafting = sum(price.deeper[depth] for depth in depths) / num_seqs
        share = price.step(drafting * price.num, mean * price.num) / price.uniform[alike]
        self.mixed = Mixed(deepest, num_seqs, alike, share)

    def record(self, state: DepthState, drafted: int, accepted: int) -> None:
        """After a step. Drafts behind the first refused are neither taken nor refused."""
        block, state.block = state.block, None
        if drafted == 0 and block is None:
            state.waited += 1
            return
        assert 0 <= accepted <= drafted <= self.max_depth, f"{accepted} accepted of {drafted}, at most {self.max_depth}"
        if block:
            self._learn_block(state, block, drafted, accepted)
        if state.paused is not None:
            self._probed(state, drafted, accepted)
        else:
            self._surprised(state, drafted, accepted, block)
        state.taken = [n * MEMORY for n in state.taken]
        state.tried = [n * MEMORY for n in state.tried]
        state.trust = max(state.trust * MEMORY, 1.0)  # the prior fades too, or it would outweigh rare acceptances
        for position in range(accepted):
            state.taken[position] += 1
            state.tried[position] += 1
        if accepted < drafted:
            state.tried[accepted] += 1
        elif block:  # drafts that were cut count with their chance, or only sure ones would ever count
            reached = 1.0
            for position in range(drafted, len(block.chances)):
                state.tried[position] += reached
                reached *= block.chances[position]
                state.taken[position] += reached
        state.tokens = []

    def measured(
        self, depth: int, num_seqs: int, context: int, seconds: float, drafted: int = 0, draft: float | None = None
    ) -> None:
        """Wall time of a whole step without prompts: its deepest draft, its requests, their longest context.

        draft: the part of the time before verifying, None if it was not timed; drafted: the depth of that part.
        """
        assert 0 <= depth <= self.max_depth and seconds > 0, f"depth {depth} of {self.max_depth}, {seconds} s"
        bucket = bucket_of(num_seqs, context)
        if bucket not in self.costs:
            self.costs[bucket] = StepCosts(self._borrowed(bucket))
        share, mixed = 1.0, self.mixed
        if (mixed.deepest, mixed.num) == (depth, num_seqs):
            depth, share = mixed.alike, mixed.share
            self.mixed = NOT_MIXED  # a later step, whose depths are not chosen here, may look like this one
        if draft is not None:
            self.costs[bucket].learn_part(depth, max(drafted, depth), draft, max(seconds / share - draft, 1e-9))
        else:
            self.costs[bucket].learn(depth, seconds / share)

    def knows_plain(self, num_seqs: int, context: int) -> bool:
        """Whether plain steps were timed here. Until then nothing drafts, because what drafting gains is measured
        against them. (Where nothing at all was timed, it drafts.)"""
        bucket = bucket_of(num_seqs, context)
        return bucket in self.costs and self.costs[bucket].weight[0] >= PLAIN_FIRST

    def could_pay(self, num_seqs: int, context: int) -> bool:
        """Whether any text would gain by drafts in such a batch; where tokens are dear, even certain drafts lose."""
        costs = self._costs(bucket_of(num_seqs, context))
        return costs.price(num_seqs).can_pay(self.depths, HOPED)

    def _worth(self, level: int) -> list[float]:
        """By number of drafts, what verifying them costs in tokens, at the rate of the last choice."""
        assert self._price, "a block was drafted before any depth was chosen"
        return [self._rate * seconds for seconds in self._price.beside[level]]

    def _pause_all(self, states: Sequence[DepthState], bucket: Bucket) -> list[int]:
        """No acceptance pays for drafts in this batch: nobody drafts, and nobody probes."""
        for state in states:
            state.paused, state.probe, state.spent = bucket, 0, 0.0
        self.mixed = NOT_MIXED
        return [0] * len(states)

    def _costs(self, bucket: Bucket) -> StepCosts:
        """Before anything is measured drafting costs something, so that plain steps are tried too."""
        if bucket in self.costs:
            return self.costs[bucket]
        size = bucket[0]
        if size not in self._unmeasured:
            self._unmeasured[size] = StepCosts(start_curve(self.max_depth, 1 << size, self._reads))
        return self._unmeasured[size]

    def _tokens(self, state: DepthState) -> list[float]:
        if not state.tokens:
            chances = conditional_acceptance(state.taken, state.tried, self.prior, state.trust)
            state.tokens = expected_tokens(chances)
        return state.tokens

    def _offers(self, states: Sequence[DepthState], price: Price, level: int) -> list[Offer]:
        """Return what each request's blocks bring and cost by depth: as they were cut, once any block was."""
        if not self.usual:
            rows, tokens = price.own(self.depths, self.depths, level), [self._tokens(state) for state in states]
            return [Offer([each[d] for d in self.depths], self.depths, rows) for each in tokens]
        usual = self._usual(level)
        means = [(state.profile(level) or self._unseen).means(usual) for state in states]
        return [Offer(tokens, kept, price.own(self.depths, kept, level)) for tokens, kept in means]

    def _usual(self, level: int) -> Profile:
        found = self.usual.get(level)
        if found is None:  # begun, or the first blocks of the first text alone would decide whether it is drafted
            found, usual = Profile(len(self.depths), USUAL), expected_tokens(self.prior)
            found.begin([usual[depth] for depth in self.depths], self.depths, TRUST)
            self.usual[level] = found
        return found

    def _learn_block(self, state: DepthState, block: Block, drafted: int, accepted: int) -> None:
        self.fits[block.drawn].learn(block.gaps, drafted, accepted)
        state.promised = MEMORY * state.promised + sum(block.chances[: min(accepted + 1, drafted)])
        state.held = MEMORY * state.held + accepted

    def _borrowed(self, bucket: Bucket) -> list[float]:
        """A bucket never measured looks like the nearest that was: only the ratios within a bucket matter."""
        if not self.costs:
            return self._costs(bucket).shape
        # The batch bends the curve more than the context; of two as near, the larger makes drafting dearer.
        nearest = min(self.costs, key=lambda b: (2 * abs(b[0] - bucket[0]) + abs(b[1] - bucket[1]), -b[0], -b[1]))
        return for_batch(self.costs[nearest].curve(), 1 << max(bucket[0] - nearest[0], 0))

    def _first_wait(self, state: DepthState, price: Price, num: int) -> int:
        """What a probe of all would cost, less what it is expected to bring, within the budget. A request alone waits
        half of that; in a batch all pay for each probe."""
        depth = price.probe_depth(self.probes)
        cost = (price.fixed / num + price.rows[depth]) * num / price.plain - (self._tokens(state)[depth] - 1)
        return min(max(round(cost / BUDGET / (2 if num == 1 else 1)), FIRST_WAIT), 4 * LONG_WAIT)

    def _add_probes(
        self, states: Sequence[DepthState], depths: list[int], price: Price, drafting: bool, num: int
    ) -> None:
        """Paused requests whose time has come draft a little; those past half their wait join, to share the cost."""
        paused = [i for i, state in enumerate(states) if state.paused is not None]
        if not any(states[i].probe or states[i].waited >= states[i].wait for i in paused):
            return
        usual = price.probe_depth(self.probes)
        probing = [i for i in paused if states[i].probe or 2 * states[i].waited >= states[i].wait]
        for i in probing:
            depths[i] = states[i].probe or usual
        share = 0.0 if drafting else price.fixed / len(probing)
        for i in probing:
            states[i].price = (share + price.rows[depths[i]]) * num / price.plain

    def _probed(self, state: DepthState, drafted: int, accepted: int) -> None:
        """A probe that went well is followed by another at once, until choose() leaves depth 0 or one fails. Not by a
        deeper one: if that fails, its price keeps the request from trying again for twice as long."""
        state.spent = max(state.spent + state.price - accepted, 0.0)
        if accepted >= state.price:
            if not state.probe and self._tokens(state)[1] < LIKELY:
                state.forget()
            state.probe = drafted
        else:
            state.wait = max(min(2 * state.wait, LONG_WAIT), round(state.spent / BUDGET))
            state.waited, state.probe, state.spent = 0, 0, 0.0

    def _surprised(self, state: DepthState, drafted: int, accepted: int, block: Block | None) -> None:
        """Compares the step with what was expected; text that changed is forgotten faster than memory fades."""
        tokens = self._tokens(state)
        reached, excess, variance = 1.0, 0.0, 0.0
        for position in range(min(accepted + 1, drafted)):
            usual = (tokens[position + 1] - tokens[position]) / reached if reached > 1e-9 else 0.0
            reached *= usual
            chance = block.chances[position] if block else usual  # drafts that were kept are better than usual
            excess += (position < accepted) - chance
            variance += chance * (1 - chance)
        state.surprise = FADE * state.surprise + excess
        state.variance = FADE**2 * state.variance + variance
        if state.surprise**2 > SURPRISE * (state.variance + 0.5):  # the half: one refusal of a sure thing is no change
            state.forget()
