"""The draft budget: how many drafts a step verifies, and of which requests, so that tokens a second are highest.

A step of n requests that verifies k drafts takes the time of n + k packed tokens (speculation/costs.py) and the
drafter's own, and writes n tokens and as many more as the survivals of its drafts add up to (speculation/survival.py).
So the drafts with the largest survivals are admitted, over the whole batch, down to the border at which that quotient
is largest. Survivals fall along a block, so a request keeps the first of its drafts. They are compared in 64 levels: a
batch is a histogram, and choosing takes as many calls for many requests as for one.

The rule is used twice. Before drafting, with the survivals that are expected: which requests draft, and how deep. After
it, where the drafter says how sure it is of each draft: how many of each block are verified (`admit`; on a GPU the
operator `admit_drafts` does the same).

A request that does not draft is paused. It would never learn that its text has become easy, so paused requests probe
together: one step with a small draft. Probes, and what was lost before a request was paused, are paid from a ledger
that gets BUDGET of every step: a drafter that is always wrong costs that share of the time and no more. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from sparkdraft.kernels.ops import LEVELS
from sparkdraft.speculation.costs import Bucket, CostTable, Reads, bucket_of, expected_tokens
from sparkdraft.speculation.survival import Floats, Ints, Kind, Survival

BUDGET = 0.01  # share of time that probing may cost
CREDIT = 8e-3  # seconds that the ledger begins with, and holds at most: 0.8 % of the first second
DEBT = 1.5  # plain steps that it owes at most
WAIT = 16  # steps between pausing and a probe, and between probes, at least
NEWCOMER = 2  # but only so many for each step in which a request has drafted: one refused draft says little
LOOK = 4  # steps that a choice holds for, at most, where requests draft
REST = 64  # steps after which what depends on costs alone is found out again
NEW = 8  # a choice holds while fewer than one request in so many has joined since
MAX_PROBE = 4
ALIKE = 0.5  # a probe is for the likeliest request, and for those that are at least so likely beside it
CHEAP = 1.25  # a probe is as deep as costs at most so many times the shallowest
LIKELY = 1.5  # tokens expected with one draft: above, a probe that goes well is no sign that the text has changed
STALE = 128  # steps after which a plain one is run and timed where all steps draft: drafts are weighed against it
HOPED = 0.97  # chance of each draft with which drafting must pay somewhere, or a batch does not even probe
MARGIN = 1.03  # what a paused batch must be promised before it begins to draft; it stops as soon as drafts would lose
_BORDERS = np.arange(LEVELS - 1, 0, -1) / LEVELS


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


# The tokens that a step runs, of so many requests and the deepest of them, for those that it packs.
Runs = Callable[[int, Ints, Floats], Floats]


class Batch:
    """The step of the last choice, and what its tokens cost."""

    def __init__(self, costs: CostTable, bucket: Bucket, num: int, extra: int) -> None:
        self.num, self.tokens = num, num + extra  # requests, and packed tokens before any draft of ours
        self.costs, self.bucket = costs, bucket
        self.verify, self.before = costs.at(bucket).verify, costs.at(bucket).before
        self.plain = costs.plain(bucket, self.tokens)
        self.rate = num / self.plain  # tokens a second that the choice promises
        self.seconds = self.plain  # of its step


class Budget:
    def __init__(
        self,
        max_depth: int,
        kinds: Sequence[Kind],
        depths: Sequence[int] = (),
        reads: Reads = lambda rows: 1.0,
        chain: bool = False,
        drafts_for_all: bool = False,
        runs: Runs | None = None,
    ) -> None:
        """depths: those to choose from, 0 among them; none: all up to max_depth. reads, chain: as CostTable has them.
        drafts_for_all: the drafter's pass is one of all requests, whoever drafts. runs: the tokens that a step runs for
        those that it packs, if there are steps for some numbers of tokens only; then requests draft to any depth beside
        the deepest."""
        assert max_depth >= 1 and all(0 < kind.start < 1 for kind in kinds), f"max_depth {max_depth}, {kinds}"
        self.max_depth = max_depth
        self.depths = np.array(list(depths) or range(max_depth + 1))[1:]
        self.costs, self.survival = CostTable(reads, chain), Survival(max_depth, kinds)
        self.batch: Batch | None = None  # of the last choice
        self.balance, self.clock = CREDIT, 0
        self._probes = [d for d in self.depths.tolist() if d <= MAX_PROBE] or self.depths[:1].tolist()
        self._by_model = np.array([kind.by_model for kind in kinds])
        self._for_all, self._runs = drafts_for_all, runs
        self._each = np.arange(1, max_depth + 1) if runs else self.depths  # depths of one request beside others
        self._positions = np.arange(max_depth)
        self._rests = Rests(0)
        # The last choice, by slot, which holds for batches of this kind until then: text and costs change slowly.
        self._chosen: dict[int, int] = {}
        self._chosen_for: tuple[Bucket, int] | None = None
        self._until = 0
        self._weighed, self._news = 0, False  # the step of the last choice that weighed all depths; learnt since
        # Answers of `could_pay` by what was asked, and how often each is given again.
        self._may_pay: dict[tuple[int, int, int, bool, bool], tuple[bool, int]] = {}
        self._plain_at: dict[Bucket, int] = {}  # the last step without drafts
        self.wants_plain = False  # whether the next plain step that is read should be timed
        self._guessed = -1  # the step that drafted for requests of a kind of which little is known
        self._told: list[Told] = []  # steps that are not learnt yet
        self._judged = False  # whether a block is being verified

    def open(self, kind: int) -> int:
        """A slot for a request."""
        slot = self.survival.open(kind)
        self._rests.open(slot)
        return slot

    def close(self, slot: int) -> None:
        self._learn()
        self.survival.close(slot)
        self._chosen.pop(slot, None)

    # ---- before drafting

    def holds(self) -> bool:
        """Whether the last choice holds for one more step; counts that step."""
        if self.clock + 1 >= self._until:
            return False
        self._pass()
        return True

    def stay_plain(self) -> None:
        """Counts a step in which nobody drafts because `could_pay` said no. The last choice holds no longer."""
        self._until = 0
        self._pass()

    def _pass(self) -> None:
        self.clock += 1
        self.balance += BUDGET * (self.batch.plain if self.batch else 0.0)

    def choose(self, slots: Sequence[int], context: int, others: int = 0, extra: int = 0) -> list[int]:
        """Depths for one step over these requests, of which the longest has 'context' tokens. others: requests of this
        step whose depth is not chosen here; extra: their drafts."""
        if not slots:
            return []
        num = len(slots) + others
        bucket = bucket_of(num, context)
        self._pass()
        if self.clock < self._until and self._chosen_for == (bucket, extra) and (held := self._held(slots)):
            return held
        self._until = 0
        if self.costs.buckets and not extra and not self.costs.knows_plain(bucket):
            return [0] * len(slots)
        self._learn()
        mine = np.array(slots)
        guesses = bool(self.survival.is_new(mine).any())
        if guesses and self._guessed == self.clock - 1:
            return [0] * len(slots)  # on a GPU the step that was drafted on a guess has not been read
        self.batch = batch = Batch(self.costs, bucket, num, extra)
        depths = np.zeros(len(mine), np.int64)
        paused = bool(self._rests.paused[mine].all())
        pays = not paused or self.could_pay(num, context, extra)
        same = self._chosen_for == (bucket, extra) and self.clock < self._weighed + REST
        if pays and not (paused and same and not self._news):
            depths = self._best(mine, batch)
            self._weighed, self._news = self.clock, False
        self._pause(mine, depths, batch)
        idle = self._add_probes(mine, depths, batch) if pays else WAIT
        drafts = mine[depths > 0]
        if not extra and self._is_stale(bucket, drafts):
            return [0] * len(slots)
        if len(drafts):
            self._guessed = self.clock if guesses else -1
            idle = min(idle, 1 if guesses and self._for_all else LOOK)
        if len(drafts) and len(slots) > 1:
            tried = sorted(self.survival.tried(drafts))  # of many there is always one that has just begun
            idle = min(idle, int(tried[len(tried) // 2 if len(tried) > NEW else 0]) // LOOK)
        chosen = depths.tolist()
        self._chosen, self._chosen_for = dict(zip(slots, chosen, strict=True)), (bucket, extra)
        self._until = self.clock + max(idle, 1)
        return chosen

    def _held(self, slots: Sequence[int]) -> list[int]:
        """The last choice, where hardly any request is new: it drafts as deep as most. Empty: it does not hold."""
        if list(self._chosen) == list(slots):
            return list(self._chosen.values())
        new = list(set(slots) - self._chosen.keys())
        if not hardly_any(len(new), len(slots)) or not self._by_model[self.survival.kind(np.array(new, int))].all():
            return []  # copied drafts cost no pass, so they begin at once
        usual = sorted(self._chosen.values())[len(self._chosen) // 2]
        return [self._chosen.get(slot, usual) for slot in slots]

    def _is_stale(self, bucket: Bucket, drafts: Ints) -> bool:
        """Whether no step was plain for so long that what one costs should be found out by this one."""
        stale = len(drafts) > 0 and self.clock - self._plain_at.setdefault(bucket, self.clock) >= STALE
        self.wants_plain |= stale  # until it is read, which a GPU's is some steps later
        if stale or not len(drafts):
            self._plain_at[bucket] = self.clock
        return stale

    def could_pay(self, num: int, context: int, extra: int = 0, copied: bool = False) -> bool:
        """Whether any text would gain by drafts in such a batch; where tokens are dear, even certain drafts lose.
        copied: also drafts that are copied from the text, which cost no pass where there are any. An answer is given a
        few times."""
        bucket = bucket_of(num, context)
        known = self.costs.knows_plain(bucket)
        asked = num, bucket[1], extra, copied, known
        pays, more = self._may_pay.get(asked, (False, 0))
        if not more:
            pays, more = self._could_pay(bucket, num, extra, copied), REST if known else WAIT
        self._may_pay[asked] = pays, more - 1
        return pays

    def _could_pay(self, bucket: Bucket, num: int, extra: int, copied: bool) -> bool:
        plain = self.costs.plain(bucket, num + extra)
        gained = np.array(expected_tokens([HOPED] * self.max_depth))[self.depths] - 1
        drafting = np.array([[1], [num]])  # one of them, or all
        passes = self.costs.drafting(bucket, num if self._for_all else drafting, self.depths, plain)
        packed = self._packed(num, num + 1.0 * drafting * self.depths, self.depths)
        seconds = self.costs.at(bucket).verify.at(extra + packed)
        rates = (num + drafting * gained) * plain / num
        if not self._by_model.any() or (copied and not self._by_model.all()):
            least = MARGIN if copied else 1.0  # searching texts for matches costs a little
            if (rates > least * seconds).any():
                return True
        return bool(self._by_model.any() and (rates > passes + seconds).any())

    def pays_beside(self, rows: int) -> bool:
        """Whether the last choice's drafts still pay when a prompt of so many tokens has to run in a pass of its own.
        Without drafts it would share one with the decoding requests."""
        batch = self.batch
        assert batch, "no depth was chosen"
        prompt, joint = (float(batch.verify.at(n)) for n in (rows, rows + batch.num))
        return batch.rate * batch.seconds * (batch.before + joint) > batch.num * (batch.seconds + prompt)

    def _best(self, slots: Ints, batch: Batch) -> Ints:
        """The depths that promise the most tokens a second. Those that are cut later are expected to be."""
        (expected, weights), kinds = self.survival.expected(slots), self.survival.kind(slots)
        by_model, cut = self._by_model[kinds], self.survival.finds_gaps[kinds]
        num_model, each = int(by_model.sum()), weights[:, :, None]
        passes = self._passes(batch, num_model)

        # One depth for all, and one border that the survivals of verified drafts must reach.
        drafts, tokens = self._histogram(expected, each)
        if len(slots) == 1 and not cut[0]:
            drafts[:, -1] = self.depths  # all are verified, however unlikely
        verifying = self._verifying(batch, drafts, self.depths[:, None])
        rates = (batch.num + tokens) / (passes[:, None] + verifying)
        if len(slots) == 1:  # it shares nothing
            border = int(rates.max(0).argmax()) if cut[0] else -1
            most = int(rates[:, border].argmax())
            found = rates[most, border], passes[most], verifying[most, border], drafts[most, border]
            return self._taken(slots, batch, self.depths[[most]], *found)
        best = int(rates.argmax())
        most, border = best // rates.shape[1], _BORDERS[best % rates.shape[1]]
        rate, floor = max(rates.flat[best], batch.rate), np.where(cut, border, 0.0)[:, None, None]

        # What each request brings beyond what the border asks for, and whether that pays for its own part of the pass.
        choices = self._each[self._each <= self.depths[most]]
        whole = expected[:, 0].cumsum(1)[:, choices - 1] - border * choices
        over = (each * np.maximum(expected[:, :, : choices[-1]] - border, 0.0)).sum((1, 2))
        gain = np.where(cut, over, whole.max(1))
        own = (passes[most] - self._passes(batch, 1)[most]) / (num_model - 1) if num_model > 1 else 0.0
        rests = self._rests.paused[slots] | (self.survival.tried(slots) == 0)
        pays = gain - rate * own * by_model > np.where(rests, MARGIN - 1, 0.0)
        chosen = np.where(pays, np.where(cut, choices[-1], choices[whole.argmax(1)]), 0)

        # Three steps are compared: these depths, the same depth for all, and no drafts of the model.
        alike = self.depths[int(rates[:, -1].argmax())]
        tried = np.array([chosen, np.where(cut, chosen, alike), np.where(by_model, 0, chosen)])
        taken = each * ((self._positions < tried[:, :, None, None]) & (expected >= floor))
        drafts, tokens = taken.sum((1, 2, 3)), (taken * expected).sum((1, 2, 3))
        verifying = self._verifying(batch, drafts, tried.max(1))
        passed = self._before(batch, tried, by_model)
        reached = (batch.num + tokens) / (passed + verifying)
        best = int(reached.argmax())
        return self._taken(slots, batch, tried[best], reached[best], passed[best], verifying[best], drafts[best])

    def _taken(
        self, slots: Ints, batch: Batch, depths: Ints, rate: float, passed: float, verifying: float, drafts: float
    ) -> Ints:
        """These depths, if their step promises more than a plain one, else zeros. rate: tokens a second; passed:
        seconds before the target runs; verifying: seconds of the target; drafts: those that are verified in all."""
        rests = self._rests
        resting = rests.paused[slots] | (self.survival.tried(slots) == 0)
        if rate <= batch.rate * (MARGIN if resting.all() else 1.0):
            return np.zeros(len(slots), np.int64)
        batch.rate, batch.seconds = float(rate), float(passed + verifying)

        # What the drafts of this step cost each request, in tokens that a plain step would have written.
        worth = batch.num / batch.plain
        rests.price[slots] = (passed - batch.before) * worth / max((depths > 0).sum(), 1)
        rests.each[slots] = (verifying - batch.verify.at(batch.tokens)) * worth / max(drafts, 1.0)
        return depths

    def _before(self, batch: Batch, depths: Ints, by_model: Ints) -> Floats:
        """The seconds before verifying of steps in which requests draft to these depths, [steps, requests]."""
        drafting, deepest = ((depths > 0) & by_model).sum(1), self._ran((depths * by_model).max(1))
        passes = batch.costs.drafting(batch.bucket, batch.num if self._for_all else drafting, deepest, batch.plain)
        return np.where(drafting > 0, passes, batch.before)

    def _verifying(self, batch: Batch, drafts: Floats, deepest: Ints) -> Floats:
        """The seconds of verifying steps with so many drafts in all, and so many of the request with most."""
        return batch.verify.at(batch.tokens - batch.num + self._packed(batch.num, batch.num + drafts, deepest))

    def _packed(self, num: int, tokens: Floats, deepest: Ints) -> Floats:
        """The tokens that a step of these requests runs."""
        return tokens if self._runs is None else np.where(deepest, self._runs(num, self._ran(deepest), tokens), tokens)

    def _ran(self, deepest: Ints) -> Ints:
        """The depth of a step whose deepest request drafts this."""
        return np.asarray(np.append(0, self.depths)[self.depths.searchsorted(deepest) + (deepest > 0)])

    def _passes(self, batch: Batch, drafting: int) -> Floats:
        """By depth of choice, the seconds before verifying if so many requests are drafted for."""
        if not drafting:
            return np.full(len(self.depths), batch.before)
        return self.costs.drafting(batch.bucket, batch.num if self._for_all else drafting, self.depths, batch.plain)

    def _histogram(self, expected: Floats, each: Floats) -> tuple[Floats, Floats]:
        """[choices, borders]: how many drafts reach a border, to each depth, and the sum of their survivals. each: the
        weights of blocks."""
        cells = (expected * LEVELS).astype(np.int64) + LEVELS * self._positions
        size = LEVELS * self.max_depth
        found = []
        for counted in (np.broadcast_to(each, expected.shape), each * expected):
            sums = np.bincount(cells.ravel(), counted.ravel(), size).reshape(self.max_depth, LEVELS)[:, :0:-1]
            found.append(sums.cumsum(1).cumsum(0)[self.depths - 1])
        return found[0], found[1]

    # ---- pauses and probes

    def _pause(self, slots: Ints, depths: Ints, batch: Batch) -> None:
        rests, drafts = self._rests, depths > 0
        newly = slots[~drafts & ~rests.paused[slots]]
        if len(newly):
            self.balance = min(self.balance, CREDIT) - rests.debt[newly].sum() / batch.num * batch.plain
            rests.since[newly] = np.where(self.survival.tried(newly) > 0, self.clock, -WAIT)
        rests.paused[slots], rests.debt[newly] = ~drafts, 0.0
        rests.follows[slots[drafts]] = rests.probes[slots[drafts]] = False

    def _add_probes(self, slots: Ints, depths: Ints, batch: Batch) -> int:
        """Paused requests whose time has come draft a little, all at once, as soon as the ledger can pay. Returns the
        steps until then."""
        rests = self._rests
        if not rests.paused[slots].any():
            return WAIT
        wait = np.minimum(NEWCOMER * self.survival.tried(slots), WAIT)
        left = np.where(rests.paused[slots], np.maximum(wait - (self.clock - rests.since[slots]), 0), WAIT)
        left[rests.follows[slots]] = 0
        due = rests.paused[slots] & (left == 0)
        if not due.any():
            return int(np.ceil(left.min()))
        expected, weights = self.survival.expected(slots)
        usual = (expected * weights[:, :, None]).sum(1) * due[:, None]
        due &= usual[:, 0] >= ALIKE * usual[:, 0].max()
        depth, price = self._probe(depths, due, self._by_model[self.survival.kind(slots)], batch)
        self.balance = max(min(self.balance, max(CREDIT, price)), -DEBT * batch.plain)
        loss = price - usual[due, :depth].sum() / batch.rate  # if it goes as usual
        if loss > self.balance and not rests.follows[slots].any():
            saved = int((loss - self.balance) / (BUDGET * batch.plain)) + 1
            return min(saved, REST if len(slots) == 1 else WAIT)  # of several another may be due before
        self.balance -= price
        depths[due] = depth
        probing = slots[due]
        rests.price[probing] = price / batch.plain * batch.num / len(probing)
        rests.since[probing], rests.follows[probing], rests.probes[probing] = self.clock, False, True
        return 0

    def _probe(self, depths: Ints, due: Ints, by_model: Ints, batch: Batch) -> tuple[int, float]:
        """The depth of a probe, and the seconds that it takes beyond the step without it."""
        steps = np.array([depths, *(np.where(due, probe, depths) for probe in self._probes)])
        seconds = self._before(batch, steps, by_model) + self._verifying(batch, steps.sum(1), steps.max(1))
        prices = np.maximum(seconds[1:] - seconds[0], 0.0)
        number = int(np.flatnonzero(prices <= CHEAP * prices[0])[-1])
        return self._probes[number], float(prices[number])

    # ---- after drafting

    def admit(self, slots: Sequence[int], gaps: Floats, tokens: int) -> list[int]:
        """How many drafts of each block to verify, given how sure the drafter is of each (gaps [slots, depth]; NaN: it
        was not made). tokens: those of the step beside these drafts. A probe is not cut: it is made to learn."""
        assert self.batch, "a block was drafted before any depth was chosen"
        mine, made = np.array(slots), ~np.isnan(gaps)
        survival, self._judged = self.survival.expect(mine, gaps), True
        probes, number = self._rests.paused[mine], made.sum(1)
        open_ = np.where(made & ~probes[:, None], survival, 0.0)
        worth = self._worth(tokens + int(number[probes].sum()), open_.size)
        levels = (open_ * LEVELS).astype(np.int64).ravel()
        counts, sums = (np.bincount(levels, weights, LEVELS)[:0:-1].cumsum() for weights in (None, open_.ravel()))
        gain = sums - worth[counts.astype(np.int64)]
        best = int(gain.argmax())
        border = _BORDERS[best] if gain[best] > 0 else 1.0
        return [int(kept) for kept in np.where(probes, number, (open_ >= border).sum(1))]

    def terms(self, slots: Sequence[int | None], depths: Sequence[int], tokens: int) -> tuple[Floats, Floats, Floats]:
        """By what the device admits drafts (kernels/ops.py, DraftTerms). None: a slot that is not cut. tokens: those of
        the step beside all drafts."""
        held = [slot is None or self._rests.paused[slot] for slot in slots]
        known = self.survival.fair(np.array([slot or 0 for slot in slots]))
        fits = self.survival.fits
        whole = sum(depth for depth, is_held in zip(depths, held, strict=True) if is_held)
        worth = np.zeros(1) if all(held) or not self.batch else self._worth(tokens + whole, sum(depths) - whole)
        return np.column_stack((fits.slope, fits.base, fits.own)), np.where(held, -1.0, known), worth

    def expect(self, slots: Sequence[int], gaps: Floats) -> None:
        """The device has cut these blocks by itself."""
        self.survival.expect(np.array(slots), gaps)
        self._judged = True

    def _worth(self, tokens: int, most: int) -> Floats:
        """By number of drafts, what verifying them costs in tokens, at the rate of the last choice."""
        assert self.batch
        seconds = self.batch.verify.at(tokens + np.arange(1 + most))
        return np.asarray(self.batch.rate * (seconds - seconds[0]))

    # ---- after the step

    def record(self, slots: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """After a step, for requests whose depth was chosen here. drafted: drafts that were compared. It is learnt with
        the next choice that is made anew: at once after a probe, or if nothing was accepted."""
        if not any(drafted) and not self._judged:
            return
        self._told.append(Told(list(slots), list(drafted), list(accepted), self.survival.take_blocks(np.array(slots))))
        self._guessed = -1
        if not any(accepted) or self._rests.probes[self._told[-1].slots].any():
            self._until = 0
        self._judged = False

    def _learn(self) -> None:
        """Learns from the steps that were recorded."""
        told, self._told = self._told, []
        self._news |= bool(told)
        for slots, steps in groupby(told, key=lambda step: step.slots):
            _, drafted, accepted, blocks = zip(*steps, strict=True)
            self._learn_steps(np.array(slots), np.array(drafted), np.array(accepted), np.array(blocks))

    def _learn_steps(self, slots: Ints, drafted: Ints, accepted: Ints, blocks: Floats) -> None:
        """drafted, accepted: [steps, slots]; blocks: [steps, slots, 2, depth]."""
        tells, rests = (drafted > 0).any(0) | ~np.isnan(blocks[:, :, 1, 0]).all(0), self._rests
        slots, drafted, accepted, blocks = slots[tells], drafted[:, tells], accepted[:, tells], blocks[:, tells]
        self.survival.learn(slots, drafted, accepted, blocks)
        # A step that was launched before its request was paused, or drafted by another source than was chosen, is
        # neither a choice's nor a probe's.
        chosen, probed, right = ~rests.paused[slots], rests.probes[slots], accepted.sum(0)
        drafts = slots[chosen]
        lost = len(drafted) * rests.price[drafts] + rests.each[drafts] * drafted.sum(0)[chosen] - right[chosen]
        rests.debt[drafts] = np.maximum(rests.debt[drafts] + lost, 0.0)
        if not probed.any():
            return
        # A probe that went well is followed by another at once, until choose() leaves depth 0 or one fails.
        if self.batch:
            self.balance += right[probed].sum() / self.batch.rate
        rests.probes[slots] = False
        went_well = slots[probed & (right >= rests.price[slots])]
        rests.follows[went_well] = True
        self.survival.forget(went_well[1 + self.survival.chances(went_well)[:, 0] < LIKELY])

    def measured(
        self, tokens: int, num: int, context: int, verify: float, draft: float | None, drafting: int = 0, depth: int = 0
    ) -> None:
        """The time of a step of so many packed tokens, as CostTable.learn has it."""
        assert tokens >= num > 0 and verify > 0, f"{tokens} tokens of {num} requests, {verify} s"
        self.costs.learn(bucket_of(num, context), tokens, verify, draft, drafting, depth, tokens == num)


def hardly_any(new: int, of: int) -> bool:
    """Whether so few of these requests are new that the choice for the others holds for all."""
    return NEW * new < of


class Told(NamedTuple):
    """What a step did to its requests."""

    slots: list[int]
    drafted: list[int]
    accepted: list[int]
    blocks: Floats  # as Survival.take_blocks has them


class Rests:
    """Which requests are paused, and what their drafts cost, by slot."""

    def __init__(self, size: int) -> None:
        # probes: a probe of it is being verified; follows: its last probe went well
        self.paused, self.probes, self.follows = np.zeros((3, size), bool)
        self.since = np.zeros(size, np.int64)  # when it was paused or probed last
        # In tokens: its part of the drafter's pass or a whole probe, each draft that is verified, and what steps have
        # lost since drafts last paid.
        self.price, self.each, self.debt = np.zeros((3, size))

    def open(self, slot: int) -> None:
        if slot >= len(self.paused):
            more = Rests(max(slot + 1 - len(self.paused), len(self.paused)))
            for name, values in vars(self).items():
                setattr(self, name, np.concatenate((values, getattr(more, name))))
        self.paused[slot] = self.probes[slot] = self.follows[slot] = False
        self.since[slot], self.price[slot], self.each[slot], self.debt[slot] = -WAIT, 0.0, 0.0, 0.0
