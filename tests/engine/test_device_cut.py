"""Blocks that the device cuts by itself: as the host would, and without a change of the text.

On a CPU a device's steps run the same code uncaptured (tests/engine/test_device_steps.py).
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.core import AUTO, Batch, Fact, Request, Work
from sparkdraft.engine.device_steps import Launched
from sparkdraft.engine.drafting import Drafting, Outcome
from sparkdraft.kernels import reference
from sparkdraft.kernels.ops import DraftTerms
from sparkdraft.speculation.budget import Budget
from sparkdraft.speculation.survival import Kind
from tests.fakes.steps import device_steps, on_device, on_host
from tests.speculation.machines import DEPTHS, price

DEPTH = 15
TEXTS = ["def merge(a, b):", "The sea is", '{"name": "Ada", "born": 1815,', "Once upon a time", "1, 2, 3, 4, 5,"]


@pytest.mark.parametrize("num", [1, 8])
def test_the_device_admits_as_many_drafts_as_the_host(num: int) -> None:
    """Fits that have learnt, requests that kept more or less than was promised, greedy and drawn, of several depths."""
    rng = random.Random(num)
    made = Budget(DEPTH, [Kind(0.7, drawn, True, True) for drawn in (False, True)], DEPTHS)
    slots, found = [made.open(i % 2) for i in range(num)], set()
    for depth in DEPTHS * 3:
        made.measured(num * (1 + depth), num, 100, 5 + 0.2 * num * depth, 0.6, num * bool(depth), depth)
    for _ in range(100):
        made.choose(slots, 100)
        made._rests.paused[slots] = [i == 3 for i in range(num)]  # one of them probes
        most = [rng.choice([1, 3, 7, 15]) for _ in slots]
        gaps = np.full((num, DEPTH), np.nan)
        for row, depth in zip(gaps, most, strict=True):
            row[:depth] = [rng.gauss(3, 4) for _ in range(depth)]
        asked = [slot if i != 5 else None for i, slot in enumerate(slots)]  # one names its depth
        fits, fair, worth = made.terms(asked, most, num)
        terms = DraftTerms(*(torch.tensor(each, dtype=torch.float32) for each in (fits, fair, worth)))
        drawn = torch.tensor([float(i % 2) for i in range(num)])
        sent = torch.tensor(np.nan_to_num(gaps), dtype=torch.float32)
        on_device = reference.admit_drafts(sent, torch.tensor(most, dtype=torch.int32), drawn, terms).tolist()
        cut = [i for i in range(num) if i != 5]
        tokens = num + (most[5] if num > 5 else 0)
        on_host = dict(zip(cut, made.admit([slots[i] for i in cut], gaps[cut], tokens), strict=True))
        assert on_device == [on_host.get(i, most[i]) for i in range(num)]
        found |= set(on_host.values())
        kept = list(on_host.values())
        made.record([slots[i] for i in cut], kept, [rng.randint(0, n) for n in kept])
    assert len(found) > 6, "blocks are cut at many places"


@pytest.fixture(scope="module")
def llm() -> LLM:
    made = LLM("smollm2", device="cpu", ngram=False, max_seqs=5, kv_tokens=4096)
    drafting = made.engine.drafting
    assert drafting.cuts and drafting.proposer
    return on_device(made)


@pytest.fixture
def outcomes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Outcome]]:
    """What became of the drafts of overlapped steps."""
    drafting, seen = llm.engine.drafting, list[Outcome]()
    learn = drafting.learn_drafted

    def watched(steps: list[Outcome], rows: int, seconds: float, verify: float) -> None:
        assert 0 <= verify <= seconds or not seconds
        seen.extend(steps)
        learn(steps, rows, seconds, verify)

    monkeypatch.setattr(drafting, "learn_drafted", watched)
    yield seen


def written(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [r.completions[0].ids for r in llm.generate(TEXTS[: len(params)], params)]


def dear_rows(drafting: Drafting, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every step some price per row and any confidence in a request, and blocks of 15 for all."""
    rng = random.Random(seed)
    monkeypatch.setattr(drafting, "depths", lambda requests: dict.fromkeys(requests, DEPTH))
    for name in ("expect", "measured", "record"):
        monkeypatch.setattr(drafting.budget, name, lambda *given: None)

    def terms(slots: list[Any], wanted: list[int], tokens: int) -> Any:
        fits = np.array([[0.78, -0.25, *[0.0] * DEPTH], [0.57, -0.96, *[0.0] * DEPTH]])
        fair = np.array([rng.choice([-1.0, 0.7, 1.0, 1.1]) for _ in slots])
        return fits, fair, rng.choice([0.0, 0.1, 0.3, 0.6]) * np.arange(1 + sum(wanted))

    monkeypatch.setattr(drafting.budget, "terms", terms)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("streams", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_wherever_blocks_are_cut_the_text_is_plain_text(
    llm: LLM, outcomes: list[Outcome], streams: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def params(depth: int) -> list[SamplingParams]:
        sampling: dict[str, Any] = {"temperature": temperature, "top_p": 0.9, "ignore_eos": True, "num_draft": depth}
        return [SamplingParams(max_tokens=60 + 5 * i, seed=i, **sampling) for i in range(streams)]

    plain = written(llm, params(0))
    dear_rows(llm.engine.drafting, monkeypatch, streams)
    outcomes.clear()
    assert written(llm, params(AUTO)) == plain
    cut = [o for o in outcomes if o.verified < o.drafted]
    assert len({o.verified for o in cut}) > 2 and any(o.verified == o.drafted for o in outcomes)
    assert all(o.accepted <= o.verified and len(o.gaps) == o.drafted for o in outcomes)
    assert sum(o.accepted for o in outcomes) > 10


@pytest.mark.parametrize(("took", "verify", "known"), [(5.0, 0.25, 0.25), (0.0, 0.25, 0.0)])
def test_a_part_that_is_longer_than_the_step_is_not_believed(
    took: float, verify: float, known: float, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = device_steps(llm)
    work = Work(Request("x", 0, [1], SamplingParams(), 0, 8), 0, 1, True, most_drafts=1)
    step = Launched(Batch([work]), {work.request: 0}, [], 1, 2, True, False)
    step.slots = torch.tensor([[7, 8, 0, 1, int(verify * 1e9), 0]], dtype=torch.int32)
    monkeypatch.setattr(steps, "_unread", deque([step]))
    monkeypatch.setattr(steps, "_read_at", time.perf_counter() - took)
    read = steps.read()
    assert read.seconds >= took and read.verify_seconds == pytest.approx(known) and bool(read.seconds) == bool(known)


def test_the_host_learns_from_what_the_device_says(
    llm: LLM, outcomes: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calibration, what cut blocks bring, and what drafting and verifying cost, timed apart."""
    drafting = llm.engine.drafting
    budget = drafting.budget
    assert budget
    for name in ("batch", "choose", "measured"):
        monkeypatch.setattr(budget, name, getattr(budget, name))  # as before, after this test
    measured = budget.measured
    price(budget, 0.15)
    monkeypatch.setattr(budget, "measured", measured)
    params = [SamplingParams(max_tokens=60, ignore_eos=True, num_draft=AUTO)] * 2
    fit = budget.survival.fits
    known = fit.slope[0], fit.base[0]
    llm.generate(TEXTS[:2], params)
    assert (fit.slope[0], fit.base[0]) != known
    assert len({o.verified for o in outcomes}) > 2
    costs = budget.costs.buckets[1, 0]
    assert costs.draft and any(costs.draft.weight) and sum(map(bool, costs.verify.weight)) > 3, "of cut steps too"


def test_a_named_depth_is_not_cut(llm: LLM, outcomes: list[Outcome]) -> None:
    llm.generate(TEXTS[:2], [SamplingParams(max_tokens=40, ignore_eos=True, num_draft=7)] * 2)
    assert all(o.verified == o.drafted for o in outcomes) and sum(o.drafted == 7 for o in outcomes) > 4


def test_what_cuts_is_said(llm: LLM) -> None:
    def said() -> Fact:
        (fact,) = (fact for fact in llm.facts() if fact.name == "blocks of drafts")
        return fact

    assert "on the device" in said().value and not said().reason
    steps = llm.engine.steps
    on_host(llm)
    assert "by the host" in said().value
    llm.engine.steps = steps
    proposer = llm.engine.drafting.proposer
    assert proposer

    def on_gpu(cut: str, default: int | None = None, experts: bool = True) -> tuple[bool, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(proposer, "device", torch.device("cuda"))
            patch.setattr(proposer, "finds_gaps", True)
            reads = (lambda rows: rows) if experts else (lambda rows: 1.0)
            made = Drafting(512, proposer, False, default, reads, None, cut)
            return made.cuts, made.whole

    assert on_gpu("auto") == on_gpu("on", 7, False) == (True, "")
    assert on_gpu("off") == (False, "cut is off") and on_gpu("auto", 7) == (False, "the depth is fixed")
    assert not on_gpu("auto", experts=False)[0] and "without experts" in on_gpu("auto", experts=False)[1]
