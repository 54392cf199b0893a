"""Decides which source drafts and how deep, and records how it went: the engine's one view of speculation.

In each step it names a depth for every decoding request (fixed by the user, or chosen by speculation/budget.py) and
fills in drafts: from the request's own text where a long match is found, else from the drafter. After the step it
passes on what was accepted. Without a drafter and without n-grams it does nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from sparkdraft.core import AUTO, Batch, Request, SamplingParams, UserError, Work
from sparkdraft.drafters.ngram import NGRAM_DEPTH, NgramIndex
from sparkdraft.engine.graphs import gpu_sizes, packed_tokens
from sparkdraft.engine.proposer import Proposer
from sparkdraft.engine.runner import Runner
from sparkdraft.kernels.ops import WIDEST
from sparkdraft.speculation.budget import Budget, depth_choices, hardly_any
from sparkdraft.speculation.costs import Bucket, Reads, bucket_of
from sparkdraft.speculation.stats import SpecStats
from sparkdraft.speculation.survival import Floats, Ints, Kind

# The acceptance that a request starts with: for n-gram drafts (True) and for a model's (False), which is the embedded
# drafter's mean (docs/numbers/drafting.md). Starting to draft in vain costs 1 %, starting paused up to a quarter.
START = {True: 0.8, False: 0.69}
LOOK_EVERY = 4  # while no match is found, a request's text is searched again after this many new ids
UNRECORDED = 2  # the first steps of a new shape are launched plainly or captured, and take several times as long
PLAIN_SAMPLE = 8  # one of this many plain steps is timed


class Outcome(NamedTuple):
    """What a step of a GPU did to one request."""

    request: Request
    drafted: int
    verified: int
    accepted: int
    gaps: list[float]  # of what was drafted; empty where blocks are not cut
    source: str  # of the drafts; "" without any


@dataclass(slots=True)
class Speculation:
    """What is kept for one request."""

    slots: dict[str, int]  # of the budget, per source: n-grams and the model differ in cost and in acceptance
    ngram: NgramIndex = field(default_factory=NgramIndex)
    stats: SpecStats = field(default_factory=SpecStats)
    source: str = ""  # the source that would draft in the coming step
    matches: bool = False  # whether the device has found the end of its text in it before


def check_depth(name: str, depth: int | None, most: int, has_drafter: bool) -> None:
    """Raises UserError if this asks for more drafts per step than can be made."""
    if depth and depth > most:
        own = "this drafter allows" if has_drafter else "drafts from the request's own text go up to"
        limit = f"{own} {most}: ask for fewer, or leave it out" if most else "there is no drafter: leave it out"
        raise UserError(f"{name} is {depth}; {limit}")


def check_depths(spec: int | None, depths: Sequence[int] | None, most: int, has_drafter: bool) -> None:
    """Raises UserError if `spec` or `spec_depths` asks for more drafts per step than can be made."""
    check_depth("spec", spec, most, has_drafter)
    if depths and most:
        check_depth("spec_depths", max(depths), most, has_drafter)


class Drafting:
    def __init__(
        self,
        max_model_len: int,
        proposer: Proposer | None = None,
        ngram: bool = False,
        default: int | None = None,
        reads: Reads = lambda rows: 1.0,
        depths: Sequence[int] | None = None,
        cut: str = "auto",
    ) -> None:
        """default: the depth of requests that name none; None chooses every step, 0 is off. reads: what a step reads of
        the target's weights, in any unit. depths: those to choose from; None: automatic. cut: auto, on or off."""
        self.proposer, self.ngram, self.default = proposer, ngram, default
        self.matches_itself = True  # whether the host looks for matches; else the device tells of them (`match`)
        self.is_off = False  # whether no request drafts, whatever it asks for
        self.has_experts = reads(2) > reads(1)  # in the target: more rows read more weights
        self.whole = self._reason_not_to_cut(cut, proposer)  # why blocks of drafts are verified whole; "": they are cut
        self.cuts = proposer is not None and not self.whole
        if proposer:
            proposer.finds_gaps = self.cuts
        self.max_depth = proposer.max_depth if proposer else (NGRAM_DEPTH if ngram else 0)
        check_depths(default, depths, self.max_depth, bool(proposer))
        named, chain = depths if self.max_depth else None, proposer is not None and proposer.chain
        self.choices = depth_choices(self.max_depth, default, named, chain)
        self.model = proposer.drafter.caps.name if proposer else ""
        sources = [*(["ngram"] if ngram else []), *([self.model] if proposer else [])]
        self._kinds = {(source, drawn): i for i, (source, drawn) in enumerate(product(sources, (False, True)))}
        # On a GPU a step is one graph of all requests: it runs the drafter, whoever drafts, and also for copied drafts.
        for_all = proposer is not None and proposer.device.type != "cpu"
        kinds = [
            Kind(START[source == "ngram"], drawn, for_all or source != "ngram", source != "ngram" and self.cuts)
            for source, drawn in self._kinds
        ]
        self.budget = None
        if sources:
            # Where drafts are cut, the tokens that are left decide what a step costs: no expert is read for others.
            runs = self._runs if for_all and not self.cuts else None
            self.budget = Budget(self.max_depth, kinds, depths or self.choices, reads, chain, for_all, runs)
        self.total = SpecStats()  # of requests that have ended
        self._max_model_len = max_model_len
        self._requests: dict[Request, Speculation] = {}
        self._has_chosen = False  # whether the last depths were chosen, and not all given by their requests
        self._num_plain = 0  # steps without drafts
        self._quiet = set[Request]()  # requests of which none drafts, until the budget looks again or a text matches
        self._plain_known: Bucket | None = None  # the kind of batch whose plain steps have been timed
        self._num_steps: Counter[tuple[int, int]] = Counter()  # per (requests, rows)

    def check(self, params: SamplingParams) -> None:
        check_depth("num_draft", params.num_draft, self.max_depth, bool(self.proposer))

    def depths(self, requests: list[Request]) -> dict[Request, int]:
        """The number of drafts wanted for each request that may draft in the coming step."""
        if not self.budget or self.is_off or not requests or (self._are_quiet(requests) and self.budget.holds()):
            return {}
        if self._cannot_gain(requests):  # then no text is searched for matches either
            self._has_chosen = False
            self._quiet.clear()
            self.budget.stay_plain()
            return {}
        depths: dict[Request, int] = {}
        free: dict[Request, int] = {}  # the slot of each request that names no depth
        for request in requests:
            asked = self._asked(request)
            if asked != 0 and (source := self._look_up(request)):
                if asked is not None:
                    depths[request] = min(asked, self.max_depth)
                else:
                    free[request] = self._of(request).slots[source]
        self._has_chosen = bool(free)
        if free:
            longest, others = max(r.num_tokens for r in requests), len(requests) - len(free)
            chosen = self.budget.choose(list(free.values()), longest, others, sum(depths.values()))
            depths |= zip(free, chosen, strict=True)
        limited = {r: self._limited(r, depth) for r, depth in depths.items() if depth}
        found = {r: depth for r, depth in limited.items() if depth > 0}
        self._quiet.clear()
        if free and not found and not self.matches_itself:
            self._quiet.update(r for r in requests if r in free or self._asked(r) == 0)
        return found

    def _cannot_gain(self, requests: list[Request]) -> bool:
        """Whether the depth of all is chosen and even drafts that are nearly certain would lose in so large a batch."""
        assert self.budget
        if len(requests) == 1 or any(self._asked(request) is not None for request in requests):
            return False
        longest = max(request.num_tokens for request in requests)
        return not self.budget.could_pay(len(requests), longest, copied=True)

    def _are_quiet(self, requests: list[Request]) -> bool:
        """Whether the choice that none drafts holds for this batch too: hardly any request is new in it."""
        if not self._quiet or bucket_of(len(requests), 0) != bucket_of(len(self._quiet), 0):
            return False
        new = [request for request in requests if request not in self._quiet]
        return not new or (hardly_any(len(new), len(requests)) and all(self._asked(r) is None for r in new))

    def match(self, matches: Iterable[tuple[Request, int]]) -> None:
        """The device has looked at the ends of these texts: the length of what was there before."""
        for request, length in matches:
            kept = self._of(request)
            if kept.matches != (length > 0):
                kept.matches = length > 0
                if self.proposer:
                    self._quiet.discard(request)  # a match of one does not pay for the drafter's pass over all
                else:
                    self._quiet.clear()

    def propose(self, batch: Batch) -> None:
        """Fills in the drafts of all work that has room for them."""
        drafting = [w for w in batch.work if w.most_drafts]
        for work in drafting:
            work.source = self._of(work.request).source
            if work.source == "ngram":
                work.drafts = self._of(work.request).ngram.propose(work.most_drafts)
        neural = [w for w in drafting if not w.drafts]
        if self.proposer and neural:
            found = self.proposer.propose(neural)
            for work, (drafts, _) in zip(neural, found, strict=True):
                work.drafts = drafts
            self._admit(batch, neural, [gaps for _, gaps in found])

    def observe(self, batch: Batch, num_accepted: Sequence[int], runner: Runner) -> None:
        """After the step: shows the drafter the committed tokens, and records what was accepted."""
        if not self.max_depth:
            return
        if self.proposer:
            self._show(self.proposer, batch, runner)
        drafted = []
        for work, accepted in zip(batch.work, num_accepted, strict=True):
            if work.decodes:
                self._of(work.request).stats.record(work.num_draft + work.num_refused, accepted, work.source)
                if work.source:  # the first draft that a grammar refused counts as compared
                    drafted.append((work.request, work.source, work.num_draft + bool(work.num_refused), accepted))
        self._learn(drafted)

    def _show(self, proposer: Proposer, batch: Batch, runner: Runner) -> None:
        """Shows the drafter the committed tokens, or passes over those of a batch in which no draft could pay."""
        row, longest = 0, max(w.stop for w in batch.work)
        # depths were chosen for the decoding requests; prompts will join them
        sizes = {True: sum(w.decodes for w in batch.work), False: len(batch.work)}
        could_pay = {kind: self._could_pay(sizes[kind], longest) for kind in {w.decodes for w in batch.work}}
        for work in batch.work:
            if could_pay[work.decodes] or work.drafts or self._asked(work.request):
                proposer.observe(work, runner, row)
            else:
                proposer.pass_over(work)
            row += work.num_scheduled

    def _learn(self, steps: list[tuple[Request, str, int, int]]) -> None:
        """Shows the budget (request, source, compared drafts, accepted drafts) of one step."""
        told = [(self._of(r).slots[source], n, k) for r, source, n, k in steps if source and self._asked(r) is None]
        if told and self.budget:
            self.budget.record(*zip(*told, strict=True))

    def cut_terms(self, requests: Sequence[Request], depths: dict[Request, int]) -> list[float]:
        """By what the device admits drafts of these requests, which have its slots in this order; none: there is
        nothing to cut."""
        if not self.cuts or not depths or not self.proposer or not self.budget:
            return []
        slots = [self._of(r).slots[self.model] if r in depths and self._asked(r) is None else None for r in requests]
        wanted = [depths.get(r, 0) for r in requests]
        fits, fair, worth = self.budget.terms(slots, wanted, len(requests))
        own = fits[[self._kinds[self.model, drawn] for drawn in (False, True)]]
        spare = [-1.0] * (self.proposer.plan.max_seqs - len(requests))
        return [*own.ravel().tolist(), *fair.tolist(), *spare, *worth.tolist()]

    def _runs(self, num: int, depth: Ints, tokens: Floats) -> Floats:
        """The tokens that a step of a GPU runs for so many requests at a depth, of those that it packs."""
        assert self.proposer
        slots = next(size for size in gpu_sizes(self.proposer.plan.max_seqs, drafting=True) if size >= num)
        return np.asarray(packed_tokens(tokens, np.maximum(slots * (1 + depth), tokens)))

    def saved(self, num: int, tokens: int, fewer: int) -> float:
        """The seconds that a step of so many requests saves if it runs fewer tokens."""
        if not self.budget or not self.budget.costs.buckets:
            return 0.0
        verify = self.budget.costs.at(bucket_of(num, 0)).verify
        return float(verify.at(tokens) - verify.at(fewer))

    def pays_beside(self, rows: int) -> bool:
        """Whether this step's drafts pay although a prompt of so many tokens then takes a pass of its own."""
        return not self._has_chosen or (self.budget is not None and self.budget.pays_beside(rows))

    def measured_at_start(self, num: int, depth: int, rows: int, seconds: float, verify: float) -> None:
        """The time of a captured step of so many empty slots, and the part of it after drafting. Of a model with
        experts it says too little: rows of empty slots reach none."""
        if self.has_experts or not self.budget:
            return
        self.budget.measured(rows, num, 1, verify, seconds - verify, num * bool(depth), depth)

    def learn_plain(self, requests: list[Request], seconds: float, verify: float) -> None:
        """Records one step without drafts of a GPU. seconds: its time; verify: the part of it on the device, 0 if that
        is not known or says nothing of such a step alone."""
        if not self.budget:
            return
        for request in requests:
            self._of(request).stats.num_plain_steps += 1
        if verify and requests:
            contexts = [request.num_tokens for request in requests]
            if self._wants_plain(contexts):
                self.budget.measured(len(requests), len(requests), max(contexts), verify, seconds - verify)

    def learn_drafted(self, steps: list[Outcome], rows: int, seconds: float, verify: float) -> None:
        """Records one drafted step of a GPU. rows: the tokens that it ran; the times are as `learn_plain` has them, and
        what is not of verifying is of drafting."""
        if not self.budget:
            return
        cut = [step for step in steps if step.gaps and step.source == self.model and self._asked(step.request) is None]
        if cut:
            slots = [self._of(step.request).slots[self.model] for step in cut]
            self.budget.expect(slots, self._table([step.gaps for step in cut]))
        num_drafting = sum(step.drafted > 0 for step in steps)
        for request, drafted, verified, accepted, _, source in steps:
            stats = self._of(request).stats
            stats.record(verified, accepted, source)
            if drafted:
                draft = seconds - verify if verify else 0.0
                stats.add_time(draft / num_drafting, (seconds - draft) / num_drafting)
        self._learn([(s.request, s.source, s.verified, s.accepted) for s in steps if s.drafted])
        if verify:
            longest, deepest = max(s.request.num_tokens for s in steps), max(s.drafted for s in steps)
            block = next(depth for depth in self.choices if depth >= deepest)
            tokens = sum(1 + s.verified for s in steps) if self.cuts else rows
            drafting = len(steps) if self.proposer else 0  # the pass is one of all requests
            self.budget.measured(tokens, len(steps), longest, verify, seconds - verify, drafting, block)

    def timed(self, batch: Batch, draft: float, verify: float) -> None:
        if not self.budget or not batch.decodes:
            return
        drafted = [w for w in batch.work if w.most_drafts and (w.drafts or w.source == self.model)]
        num, longest = len(batch.work), max(w.stop for w in batch.work)
        shape = (num, num + sum(w.num_draft for w in drafted))
        self._num_steps[shape] += 1
        if not drafted and not self._wants_plain([w.stop for w in batch.work]):
            return
        if self._num_steps[shape] > UNRECORDED:
            neural = [w.most_drafts for w in drafted if w.source == self.model]
            self.budget.measured(shape[1], num, longest, verify, draft, len(neural), max(neural, default=0))
        for work in drafted:
            # shared out, so that the sum over requests is the time that passed
            self._of(work.request).stats.add_time(draft / len(drafted), verify / len(drafted))

    def drafts_from_text(self, requests: Iterable[Request]) -> bool:
        """Return whether any of these requests, all of which draft, drafts from its own text."""
        return any(self._of(r).source == "ngram" for r in requests)

    def reset_counts(self) -> None:
        self.total = SpecStats()

    def so_far(self) -> SpecStats:
        """Statistics of all requests, including those that still run."""
        found = SpecStats()
        for stats in (self.total, *(kept.stats for kept in self._requests.values())):
            found.merge(stats)
        return found

    def report(self, request: Request) -> dict[str, Any] | None:
        kept = self._requests.get(request)
        return None if kept is None else kept.stats.as_dict()

    def release(self, request: Request) -> None:
        self.forget_rows(request)
        kept = self._requests.pop(request, None)
        if kept is not None:
            for slot in kept.slots.values():
                self.budget.close(slot)  # type: ignore[union-attr]
            self.total.merge(kept.stats)

    def _admit(self, batch: Batch, works: list[Work], gaps: list[list[float]]) -> None:
        """Drops drafts of the model's blocks that are not worth verifying. A depth that was asked for by name is
        kept."""
        cut = [(w, g) for w, g in zip(works, gaps, strict=True) if g and self._asked(w.request) is None]
        if not cut or not self.budget:
            return
        slots = [self._of(work.request).slots[self.model] for work, _ in cut]
        tokens = batch.num_rows - sum(work.num_draft for work, _ in cut)
        kept = self.budget.admit(slots, self._table([sure for _, sure in cut]), tokens)
        for (work, _), number in zip(cut, kept, strict=True):
            work.drafts = work.drafts[:number]

    def _table(self, gaps: Sequence[Sequence[float]]) -> Floats:
        """[blocks, max_depth]: the gaps of drafts that were made, and NaN for the others."""
        table = np.full((len(gaps), self.max_depth), np.nan)
        for row, sure in zip(table, gaps, strict=True):
            row[: len(sure)] = np.nan_to_num(np.array(sure), nan=-WIDEST)
        return table

    def _reason_not_to_cut(self, cut: str, proposer: Proposer | None) -> str:
        """On a CPU every token costs time. On a GPU finding out how sure drafts are costs every drafted step a
        little."""
        if cut == "off":
            return "cut is off"
        if cut == "on" or proposer is None or proposer.device.type == "cpu":
            return ""
        if not self.has_experts:
            return "a few more rows of a model without experts cost a GPU next to nothing"
        return "" if self.default is None else "the depth is fixed"

    def _wants_plain(self, contexts: list[int]) -> bool:
        """Return whether to time this plain step: those of a known kind are many and alike, so only some are timed."""
        self._num_plain += 1
        num, longest = len(contexts), max(contexts)
        bucket = bucket_of(num, longest)
        asked = self.budget is not None and self.budget.wants_plain
        if self.budget:
            self.budget.wants_plain = False
        if asked or self._num_plain % PLAIN_SAMPLE == 0 or bucket != self._plain_known:
            if self.budget and self.budget.costs.knows_plain(bucket):
                self._plain_known = bucket
            return True
        return False

    def _could_pay(self, num: int, longest: int) -> bool:
        """Whether drafts could pay in a batch of this many requests, or the drafter must see all tokens in any case."""
        if self.proposer is None or not self.proposer.may_pass_over or self.budget is None:
            return True
        return self.budget.could_pay(num, longest)

    def _asked(self, request: Request) -> int | None:
        """The depth that is fixed for a request; None if it is chosen every step."""
        asked = request.params.num_draft
        return self.default if asked is None else None if asked == AUTO else asked

    def _limited(self, request: Request, depth: int) -> int:
        """Limits a depth: no drafts past the last token wanted, none where a block would pass the context's end."""
        if request.next_start + 1 + self.max_depth > self._max_model_len:
            return 0
        most = request.max_output - len(request.output_ids) - request.least_unread - 1
        if depth > most and self._asked(request) is None:
            return max(d for d in self.choices if d <= max(most, 0))
        return min(depth, most)

    def _of(self, request: Request) -> Speculation:
        kept = self._requests.get(request)
        if kept is None:
            drawn, budget = request.params.temperature > 0, self.budget
            slots = {source: budget.open(kind) for (source, of), kind in self._kinds.items() if of == drawn and budget}
            kept = self._requests[request] = Speculation(slots)
        return kept

    def _look_up(self, request: Request) -> str:
        """The source that would draft. A long match in the own text is preferred: it is free and seldom wrong."""
        kept = self._of(request)
        kept.source = self.model if self.proposer and self.proposer.is_ready(request) else ""
        if kept.matches:
            kept.source = "ngram"
        elif self.ngram and self.matches_itself:
            index, known = kept.ngram, request.num_tokens
            if known - len(index) >= LOOK_EVERY or index.matches:
                index.extend(request.ids(len(index), known))
                if index.matches:
                    kept.source = "ngram"
        return kept.source

    def forget_rows(self, request: Request) -> None:
        """The request was preempted or has ended."""
        if self.proposer:
            self.proposer.release(request)
