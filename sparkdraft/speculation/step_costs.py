"""The cost of a step per depth: learnt from steps that ran, interpolated for depths that were never tried.

A curve never falls: a step with more drafts cannot be cheaper. speculation/depth.py keeps one curve per bucket of
batch size and context, and asks it for prices. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

REDRAW = 8  # a mean of this many steps moves little with each: the curve is redrawn after as many more
LATE = 1.5  # a step slower than this times the belief counts as this slow: something else ran
# Rows of one text share experts: n of them reach as many as n ** 0.7 rows that have nothing to do with each other.
OWN_ROWS = 0.7

LEVELS = (1, 3)  # drafts that each other request of a batch is supposed to have, beside the most that it can have
# Rows cost alike where drafts beside few others cost at most this much more than beside many, or where the difference
# is this small a part of a plain step.
STRAIGHT, NOTHING = 1.1, 0.002

Reads = Callable[[float], float]  # of so many rows that choose experts independently: weights that a step reads


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
        """A step whose two parts were timed apart: it drafted to one depth and verified that many, or fewer."""
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

    Verifying is a cost of all drafts of the step together, not so much per request. Where rows read more experts the
    first drafts are dear and those beside many others nearly free, because most experts are read already.
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
        """What so many drafts of all requests cost to verify."""
        each = min(drafts / self.num, len(self.verify) - 1.0)
        low = min(int(each), len(self.verify) - 2)
        return self.verify[low] + (self.verify[low + 1] - self.verify[low]) * (each - low)

    @cached_property
    def beside(self) -> dict[int, list[float]]:
        """What verifying k drafts of one request costs, by how many drafts each other request has. Where drafts are no
        cheaper beside many others, one number of them stands for all."""
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
        """For each depth, the cost of one request that drafts so deep and keeps so many of the drafts, on average,
        beside others that have 'level' of them each."""
        costs, deeper, found = self.beside[level], self.deeper, []
        last = len(costs) - 2
        for depth, mean in zip(depths, kept, strict=True):
            low = min(int(mean), last)
            part = costs[low] + (costs[low + 1] - costs[low]) * (mean - low)
            found.append(max(deeper[depth] + part, 0.0))
        return found

    def step(self, deeper: float, kept: float) -> float:
        """A step that drafts, of whose drafts so many are kept; deeper: the sum of what its depths cost."""
        return self.plain + self.fixed + deeper + self.verifying(kept)

    def can_pay(self, choice: Sequence[int], acceptance: float) -> bool:
        """Whether some depth would beat plain steps if all drafted to it and each draft were accepted with this
        probability."""
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
    """By depth, what steps of so many requests are taken to cost before anything is measured, in plain steps: a little
    for drafting at all and for each row, and as much as more weights are read. A dense model reads all of them in any
    case; of a mixture of experts drafts read more."""
    plain = reads(num)
    own = (num * (1 + depth) ** OWN_ROWS for depth in range(1, max_depth + 1))
    return [1.0] + [1.1 + 0.03 * depth + (reads(rows) / plain - 1) for depth, rows in enumerate(own, 1)]


def for_batch(curve: list[float], times: int) -> list[float]:
    """Estimated cost per depth of steps with 'times' as many requests: that of the measured steps with as many rows."""
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
    """The nearest sequence that never falls: neighbours in the wrong order get their weighted mean (isotonic
    regression)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, count
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] > mean:
            before, before_weight, before_count = pools.pop()
            mean = (mean * total + before * before_weight) / (total + before_weight)
            total, count = total + before_weight, count + before_count
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]
