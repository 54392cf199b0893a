"""What a step costs at each depth, and the depths at which a batch writes the most tokens a second.

Costs are learnt from steps that ran, and interpolated for depths that were never tried. A curve of costs never falls: a
step with more drafts cannot be cheaper. speculation/depth.py keeps one curve per bucket of batch size and context. No
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

REDRAW = 8  # a mean of this many steps moves little with each: the curve is redrawn after as many more
LATE = 1.5  # a step slower than this times the belief counts as this slow: something else ran
# Tokens of one text share experts: n of them read as many as n ** 0.7 unrelated tokens do.
OWN_ROWS = 0.7

LEVELS = (1, 3)  # assumed numbers of drafts of each other request, beside the most that it can have
# One level stands for all where drafts beside few others cost at most STRAIGHT times as much as beside many, or where
# the difference is less than this share of a plain step.
STRAIGHT, NOTHING = 1.1, 0.002

INHERIT = 0.9  # how much of a position's departure from the prior the next position expects for itself
MARGIN = 1.03  # what a request must be promised before it begins to draft; it stops as soon as drafts would lose

# The weights that a step of so many tokens reads, if each of them chooses its experts independently.
Reads = Callable[[float], float]


class StepCosts:
    """Seconds of a step per depth, in one bucket: decayed means, and a borrowed shape for depths not seen yet."""

    def __init__(self, shape: list[float]) -> None:
        self.shape = shape
        self.seconds = [0.0] * len(shape)
        self.weight = [0.0] * len(shape)  # observations in each mean; 0 if none
        self.drafting: dict[int, float] = {}  # by depth: seconds of a step before it verifies, where they were timed
        self._curve: list[float] = []
        self._prices: dict[int, Price] = {}
        self._age = 0  # observations since the curve was drawn

    def learn(self, depth: int, seconds: float) -> None:
        believed, weight = self.seconds[depth], self.weight[depth]
        self._age += 1
        if weight < REDRAW or self._age >= REDRAW:
            self._curve = []
        # A step can be late by accident, but not early: if it took half the mean, the mean was the accident.
        if not weight or seconds < believed / 2:
            self.seconds[depth], self.weight[depth] = seconds, 1.0
            return
        excess, self.weight[depth] = min(seconds / believed, LATE) - 1, min(weight + 1, 50)
        self.seconds[depth] *= 1 + excess / self.weight[depth]
        if weight >= 4:
            # A well-known depth that is slow now means that the machine is slower, or the context longer, for all
            # depths. Without this, depths not used lately would look cheap and would be chosen for it.
            self.seconds = [s * (1 + 0.1 * excess) for s in self.seconds]

    def learn_part(self, verified: int, drafted: int, draft: float, verify: float) -> None:
        """Learns from a step whose two parts were timed apart; it verified at most as many tokens as it drafted."""
        known = self.drafting.get(drafted)
        self.drafting[drafted] = draft if known is None else known + (min(draft, LATE * known) - known) / 8
        self.learn(verified, verify + (draft if verified == drafted else self.drafting_at(verified)))

    def drafting_at(self, depth: int) -> float:
        depths = sorted(self.drafting)
        return interpolate(depths, [self.drafting[d] for d in depths], depth)

    def curve(self) -> list[float]:
        """The cost per depth, which never falls. Between depths seen, the correction of the borrowed shape is
        interpolated."""
        if not self._curve:
            seen = [d for d, weight in enumerate(self.weight) if weight]
            factor = [self.seconds[d] / self.shape[d] for d in seen]
            values = [s * interpolate(seen, factor, d) for d, s in enumerate(self.shape)] if seen else self.shape
            self._curve = never_falling(values, [max(weight, 0.1) for weight in self.weight])
            self._prices, self._age = {}, 0
        return self._curve

    def price(self, num: int) -> Price:
        curve = self.curve()
        if num not in self._prices:
            drafting = [self.drafting_at(d) for d in range(len(curve))] if len(self.drafting) > 1 else []
            self._prices[num] = Price.of(curve, num, drafting)
        return self._prices[num]


@dataclass(frozen=True)
class Price:
    """The time of a step in parts: the plain step, the fixed cost of drafting, drafting deeper, and verifying.

    Verifying is a cost of all drafts of the step together. In a model with experts the first drafts are expensive and
    those beside many others nearly free, because most experts are read already.
    """

    num: int  # requests in the step
    plain: float
    fixed: float
    rows: list[float]  # per depth, for one request: its share of a step in which all draft that deep
    uniform: list[float]  # per depth, a step in which all requests draft that deep; at 0 it includes the fixed part
    verify: list[float]  # per number of drafts of each request: what verifying all of them costs
    deeper: list[float]  # per depth, for one request: what drafting costs beyond the fixed part, before verifying

    @classmethod
    def of(cls, curve: list[float], num: int, drafting: Sequence[float] = ()) -> Price:
        """drafting: by depth, the part of the curve that is spent before verifying; empty if it is not known."""
        slope = (curve[3] - curve[1]) / 2 if len(curve) > 3 else 0.0
        fixed = max(curve[1] - curve[0] - slope, 0.0)
        over = [max(seconds - curve[0] - fixed, 0.0) for seconds in curve]
        verify = over
        if drafting:
            apart = [seconds - draft for seconds, draft in zip(curve, drafting, strict=True)]
            verify = [max(seconds - apart[0], 0.0) for seconds in never_falling(apart, [1.0] * len(apart))]
        begun, deeper = curve[0] + fixed, [(both - last) / num for both, last in zip(over, verify, strict=True)]
        return cls(num, curve[0], fixed, [s / num for s in over], [begun + s for s in over], verify, deeper)

    def verifying(self, drafts: float) -> float:
        """The seconds that verifying so many drafts takes, over all requests."""
        each = min(drafts / self.num, len(self.verify) - 1.0)
        low = min(int(each), len(self.verify) - 2)
        return self.verify[low] + (self.verify[low + 1] - self.verify[low]) * (each - low)

    @cached_property
    def beside(self) -> dict[int, list[float]]:
        """Seconds of verifying k drafts of one request, given the assumed drafts of each other request (the key). Where
        drafts are no cheaper beside many others, one number of them stands for all."""
        deepest = len(self.verify) - 1
        levels = sorted({min(level, deepest) for level in (*LEVELS, deepest)}) if self.num > 1 else [0]
        found = {}
        for level in levels:
            others = (self.num - 1) * level
            before = self.verifying(others)
            found[level] = [self.verifying(others + own) - before for own in range(1 + deepest)]
        few, many, middle = found[levels[0]][deepest], found[levels[-1]][deepest], levels[len(levels) // 2]
        return found if few > STRAIGHT * many + NOTHING * self.plain else {middle: found[middle]}

    def own(self, depths: Sequence[int], kept: Sequence[float], level: int) -> list[float]:
        """For each depth, the cost of one request that keeps so many of its drafts on average, if each other request
        has 'level' drafts."""
        costs, deeper, found = self.beside[level], self.deeper, []
        last = len(costs) - 2
        for depth, mean in zip(depths, kept, strict=True):
            low = min(int(mean), last)
            part = costs[low] + (costs[low + 1] - costs[low]) * (mean - low)
            found.append(max(deeper[depth] + part, 0.0))
        return found

    def step(self, deeper: float, kept: float) -> float:
        """The seconds of a step that verifies 'kept' drafts. deeper: the sum of what its depths cost."""
        return self.plain + self.fixed + deeper + self.verifying(kept)

    def can_pay(self, choice: Sequence[int], acceptance: float) -> bool:
        """Return whether some depth would beat plain steps if each draft were accepted with this probability."""
        tokens, reached = 1.0, 1.0
        for depth, seconds in enumerate(self.uniform):
            if depth:
                reached *= acceptance
                tokens += reached
                if depth in choice and tokens * self.plain > seconds:
                    return True
        return False

    def probe_depth(self, probes: Sequence[int]) -> int:
        """The deepest of these depths that costs little more than the shallowest."""
        allowed = 1.25 * (self.fixed + self.rows[probes[0]])
        return max(d for d in probes if d == probes[0] or self.fixed + self.rows[d] <= allowed)


def start_curve(max_depth: int, num: int, reads: Reads) -> list[float]:
    """The assumed cost by depth before anything is measured, in plain steps: a little for drafting and for each token,
    and the weights that are read in addition (experts)."""
    plain = reads(num)
    own = (num * (1 + depth) ** OWN_ROWS for depth in range(1, max_depth + 1))
    return [1.0] + [1.1 + 0.03 * depth + (reads(rows) / plain - 1) for depth, rows in enumerate(own, 1)]


def for_batch(curve: list[float], times: int) -> list[float]:
    """The estimated cost by depth with 'times' as many requests: that of measured steps with as many tokens."""
    if times == 1:
        return curve
    last = len(curve) - 1
    slope = (curve[last] - curve[last // 2]) / max(last - last // 2, 1)
    wide = [curve[min(d, last)] + slope * max(d - last, 0) for d in range(times - 1, times * len(curve), times)]
    return [max(wide[0] - Price.of(curve, 1).fixed, curve[0]), *wide[1:]]  # the first of these has no drafts


def interpolate(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    """Piecewise linear through the points, constant outside them."""
    if x <= xs[0]:
        return ys[0]
    for i in range(1, len(xs)):
        if x <= xs[i]:
            return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[-1]


def never_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls (isotonic regression)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, count
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] > mean:
            before, before_weight, before_count = pools.pop()
            mean = (mean * total + before * before_weight) / (total + before_weight)
            total, count = total + before_weight, count + before_count
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]


# ---- choosing depths


class Offer(NamedTuple):
    """The expected tokens and cost of one request's steps, for each depth that may be chosen."""

    tokens: Sequence[float]
    kept: Sequence[float]  # drafts that are verified
    rows: Sequence[float]  # seconds of its own drafts, given the assumed drafts of other requests


def best_depths(
    offers: Sequence[Offer], rest: Sequence[bool], price: Price, choice: Sequence[int], others: int
) -> tuple[list[int], float]:
    """The depths that maximise tokens a second over the batch, and that rate. 'others' more requests write one token
    each.

    At the best rate r, drafts that take t seconds pay if they bring more than r * t tokens, for each request by itself.
    So this begins with the rate of the best common depth, lets each request choose, computes the new rate and repeats.
    """
    num, begun = len(offers), price.plain + price.fixed
    plain_rate = (num + others) / price.plain
    least = plain_rate * (MARGIN if all(rest) else 1.0)
    if num + others == 1:
        tokens, _, rows = offers[0]
        rate, best = max((tokens[i] / (begun + rows[i]), i) for i in range(1, len(choice)))
        return ([choice[best]], rate) if rate > least else ([0], plain_rate)

    deeper = [price.deeper[depth] for depth in choice]
    tokens = [sum(each) for each in zip(*(own.tokens for own in offers), strict=True)]
    kept = [sum(each) for each in zip(*(own.kept for own in offers), strict=True)]
    common = [(others + tokens[i]) / price.step(num * deeper[i], kept[i]) for i in range(1, len(choice))]
    rate = max(plain_rate, *common)
    for _ in range(4):
        chosen = [_best_choice(own, rate, rests) for own, rests in zip(offers, rest, strict=True)]
        reached = plain_rate
        if any(chosen):
            picked = [(own.tokens[i], own.kept[i], deeper[i]) for own, i in zip(offers, chosen, strict=True)]
            brought, verified, drafting = (sum(each) for each in zip(*picked, strict=True))
            reached = (others + brought) / price.step(drafting, verified)
        if reached <= rate * 1.001:
            break
        rate = reached
    return ([choice[i] for i in chosen], reached) if reached > least else ([0] * num, plain_rate)


def _best_choice(offer: Offer, rate: float, rests: bool) -> int:
    plain, *net = [tokens - rate * seconds for tokens, seconds in zip(offer.tokens, offer.rows, strict=True)]
    best = max(net)
    return 1 + net.index(best) if best > plain * (MARGIN if rests else 1.0) else 0


def expected_tokens(chances: Sequence[float]) -> list[float]:
    """The tokens that a step commits on average, by depth from 0. chances: of each position, once it is reached."""
    total, reached, tokens = 1.0, 1.0, [1.0]
    for chance in chances:
        reached *= chance
        total += reached
        tokens.append(total)
    return tokens


def conditional_acceptance(
    taken: Sequence[float], tried: Sequence[float], prior: Sequence[float], trust: float
) -> list[float]:
    """The acceptance of each position: its counts, blended with the prior, which is shifted by most of the departure of
    the position before."""
    chances, departure = [], 0.0
    for hits, count, usual in zip(taken, tried, prior, strict=True):
        base = usual + INHERIT * departure
        base = 0.0 if base < 0.0 else 1.0 if base > 1.0 else base
        chance = (hits + trust * base) / (count + trust)
        departure = chance - usual
        chances.append(chance)
    return chances
