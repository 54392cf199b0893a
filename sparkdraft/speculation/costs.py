"""The cost table: seconds of a step by the number of tokens that it packs, and of the drafter's own pass.

A step is its packed tokens: one per request, the drafts, and a prompt's part. Requests that draft to different depths
cost what their tokens cost together. Steps that ran are kept as means that decay, on a grid of token numbers, for each
kind of batch (`bucket_of`). Between measured points the correction of a borrowed shape is interpolated: that of the
nearest batch that was measured, or, before anything was, the weights that a step reads. A curve never falls. No torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Bucket = tuple[int, int]  # log2 of the batch, log4 of the context in units of 256 tokens

# Numbers of tokens at which costs are kept: all up to 16, where one more may cost a GPU nothing, then four per octave.
GRID = [*range(1, 17), *(quarter << octave for octave in range(2, 12) for quarter in (5, 6, 7, 8))]
_GRID = np.array(GRID, float)
REDRAW = 8  # a mean of this many steps moves little with each: the curve is redrawn after as many more
LATE, EARLY = 1.5, 0.5  # times the belief that a step counts as at most and at least: something else ran, or waited
INSTANT = 1e-9  # seconds of a pass at least: ratios are taken
REMEMBERED = 50.0  # steps that a mean weighs at most
DRIFT = 0.1  # share of a well-known point's change that all points follow: the machine is slower
# Tokens of one text share experts: n of them read as many as n ** 0.7 unrelated tokens do.
OWN_ROWS = 0.7
ROW, PASS = 0.03, 0.1  # assumed costs of a token and of the drafter, in plain steps, before anything is measured
PLAIN_FIRST = 2  # plain steps that are timed in a bucket before anything drafts there

# The weights that a step of so many tokens reads, if each of them chooses its experts independently.
Reads = Callable[[float], float]


class Curve:
    """Seconds by number of tokens: decayed means at the points of the grid, and a shape for points not seen yet."""

    def __init__(self, shape: Floats) -> None:
        self.shape = shape
        self.mean = shape.tolist()
        self.weight = [0.0] * len(GRID)  # observations in each mean; 0 if none
        self._drawn: Floats | None = None
        self._age = 0  # observations since the curve was drawn

    def at(self, tokens: ArrayLike) -> Floats:
        return np.asarray(np.interp(np.asarray(tokens, float), _GRID, self.values()))

    def learn(self, tokens: float, seconds: float) -> None:
        """Learns from a step. One between two points of the grid corrects both, each by its nearness."""
        low = min(bisect_right(GRID, tokens), len(GRID)) - 1
        high = min(low + 1, len(GRID) - 1)
        part = (tokens - GRID[low]) / (GRID[high] - GRID[low]) if high > low else 0.0
        values = self.values()
        believed = (1 - part) * float(values[low]) + part * float(values[high])
        self._age += 1
        if self.weight[low if part < 0.5 else high] < REDRAW or self._age >= REDRAW:
            self._drawn = None
        for point, share in ((low, 1 - part), (high, part)):
            if share:
                self._correct(point, share, seconds / believed, float(values[point]))

    def _correct(self, point: int, share: float, ratio: float, believed: float) -> None:
        weight = self.weight[point]
        # If a second step takes half of the first, the first was an accident: it compiled something.
        if not weight or (ratio < EARLY and weight < 2):
            self.mean[point], self.weight[point] = believed * ratio, share
            return
        excess = share * (min(max(ratio, EARLY), LATE) - 1)
        self.weight[point] = min(weight + share, REMEMBERED)
        self.mean[point] *= 1 + excess / self.weight[point]
        if weight >= 4:
            # Without this, points not visited lately would look cheap on a machine that has become slower, or in a
            # longer context, and would be chosen for it.
            self.mean = [seconds * (1 + DRIFT * excess) for seconds in self.mean]

    def values(self) -> Floats:
        """The seconds at each point of the grid, which never fall."""
        if self._drawn is None:
            self._drawn, self._age = self._draw(), 0
        return self._drawn

    def _draw(self) -> Floats:
        seen = [point for point, weight in enumerate(self.weight) if weight]
        if not seen:
            return self.shape
        factor = np.array([self.mean[point] / self.shape[point] for point in seen])
        drawn = self.shape * np.interp(_GRID, _GRID[seen], factor)
        last = seen[-1]
        middle = bisect_right(GRID, GRID[last] / 2) - 1
        rise = self.shape[last] - self.shape[middle]
        if middle >= 0 and rise > 0:  # past the last point seen it rises as the shape does, as steeply as before it
            steep = max(drawn[last] - drawn[middle], 0.0) / rise
            drawn[last:] = drawn[last] + steep * (self.shape[last:] - self.shape[last])
        if (drawn[1:] >= drawn[:-1]).all():
            return np.asarray(drawn)
        return np.array(never_falling(drawn.tolist(), [max(weight, 0.1) for weight in self.weight]))


class StepCosts:
    """What steps of one bucket cost: before the target runs, drafting, and verifying."""

    def __init__(self, shape: Floats) -> None:
        self.verify = Curve(shape)
        self.draft: Curve | None = None  # by the tokens of one pass of the drafter
        self.before, self.num_before = 0.0, 0  # seconds before the target runs where nobody drafts; steps in that mean
        self.num_plain = 0  # plain steps that were timed


class CostTable:
    def __init__(self, reads: Reads = lambda rows: 1.0, chain: bool = False) -> None:
        """reads: what steps read of the target's weights, in any unit; costs begin with it. chain: the drafter makes a
        pass for each draft, not one for all."""
        self.buckets: dict[Bucket, StepCosts] = {}
        self.untimed = False  # the parts of steps are not known: drafting is a part of what tokens cost
        self._reads, self._chain = reads, chain
        self._unmeasured: dict[int, StepCosts] = {}  # by log2 of the batch

    def at(self, bucket: Bucket) -> StepCosts:
        """The costs of a bucket: its own, or what is believed of it so far."""
        if bucket in self.buckets:
            return self.buckets[bucket]
        if self.buckets:
            return self.buckets[self._nearest(bucket)]
        size = bucket[0]
        if size not in self._unmeasured:
            self._unmeasured[size] = StepCosts(first_shape(1 << size, self._reads))
        return self._unmeasured[size]

    def learn(
        self,
        bucket: Bucket,
        tokens: int,
        verify: float,
        draft: float | None,
        drafting: int = 0,
        depth: int = 0,
        is_plain: bool = False,
    ) -> None:
        """Learns from a step of so many packed tokens. draft: the seconds before the target ran, None if they are a
        part of 'verify'. drafting: the requests that the drafter drafted for, to this depth; 0: it did not run.
        is_plain: it had a token of each request and nothing else."""
        if bucket not in self.buckets:
            self.buckets[bucket] = StepCosts(self.at(bucket).verify.values())
        costs = self.buckets[bucket]
        costs.verify.learn(tokens, verify)
        costs.num_plain += is_plain
        if draft is None:
            self.untimed = True
        elif not drafting:
            costs.num_before = min(costs.num_before + 1, REDRAW)
            costs.before += (draft - costs.before) / costs.num_before
        else:
            if costs.draft is None:
                known = self._draft_of(bucket)
                costs.draft = Curve(known.values() if known else first_shape(1, lambda rows: 1.0))
            tokens, passes = (drafting, depth) if self._chain else (drafting * (1 + depth), 1)
            costs.draft.learn(tokens, max(draft, INSTANT) / passes)

    def plain(self, bucket: Bucket, tokens: float) -> float:
        """The seconds of a step that does not draft."""
        costs = self.at(bucket)
        return costs.before + float(costs.verify.at(tokens))

    def drafting(self, bucket: Bucket, requests: ArrayLike, depth: ArrayLike, plain: float) -> Floats:
        """The seconds before the target runs if the drafter drafts for so many requests to this depth."""
        if self.untimed:
            return np.zeros(np.broadcast(requests, depth).shape)
        known, requests, depth = self._draft_of(bucket), np.asarray(requests), np.asarray(depth)
        if known is None:
            return np.full(np.broadcast(requests, depth).shape, PASS * plain)
        return depth * known.at(requests) if self._chain else known.at(requests * (1 + depth))

    def knows_plain(self, bucket: Bucket) -> bool:
        """Whether plain steps were timed here. Until then nothing drafts, because what drafting gains is measured
        against them. (Where nothing at all was timed, it drafts.)"""
        return bucket in self.buckets and self.buckets[bucket].num_plain >= PLAIN_FIRST

    def _draft_of(self, bucket: Bucket) -> Curve | None:
        if bucket in self.buckets and self.buckets[bucket].draft:
            return self.buckets[bucket].draft
        timed = [known for known, costs in self.buckets.items() if costs.draft]
        return self.buckets[self._nearest(bucket, timed)].draft if timed else None

    def _nearest(self, bucket: Bucket, among: Sequence[Bucket] = ()) -> Bucket:
        # The batch bends the curve more than the context; of two as near, the larger makes drafting dearer.
        return min(
            among or self.buckets,
            key=lambda b: (2 * abs(b[0] - bucket[0]) + abs(b[1] - bucket[1]), -b[0], -b[1]),
        )


def bucket_of(num_seqs: int, context: int) -> Bucket:
    return (num_seqs - 1).bit_length(), (max(context - 1, 0) // 256).bit_length() + 1 >> 1


def first_shape(num: int, reads: Reads) -> Floats:
    """The assumed cost by packed tokens of 'num' requests before anything is measured, in plain steps of one: a little
    for each token, and the weights that are read (experts)."""
    own = (tokens if tokens < num else num * (tokens / num) ** OWN_ROWS for tokens in GRID)
    one = reads(1)
    return np.array([reads(rows) / one + ROW * (tokens - 1) for tokens, rows in zip(GRID, own, strict=True)])


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


def expected_tokens(chances: Sequence[float]) -> list[float]:
    """The tokens that a step commits on average, by depth from 0. chances: of each position, once it is reached."""
    total, reached, tokens = 1.0, 1.0, [1.0]
    for chance in chances:
        reached *= chance
        total += reached
        tokens.append(total)
    return tokens
