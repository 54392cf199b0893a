"""Text drafted by an MTP head is plain text: greedy, sampled, in batches, after prefixes, preempted, in other caches.

The heads are fitted to what their targets write, so that some drafts are accepted and others are not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdraft import LLM, SamplingParams
from sparkdraft.drafters.mtp import MAX_DEPTH
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.slots import Chunks, Ran, StepKind
from sparkdraft.kernels import native
from tests.drafters.tiny_mtp import VARIANTS, fit_head, write_target
from tests.fakes.steps import device_steps, on_device
from tests.models.recurrent import Texts, all_is_free, complete, load, texts

LENGTH, OUTPUT = 23, 24
PROMPTS = [[(31 * k + 7 * i * i + i) % 250 + 3 for i in range(LENGTH)] for k in range(16)]
GREEDY = SamplingParams(OUTPUT, ignore_eos=True)
overlaps = pytest.mark.parametrize("overlaps", [False, True], ids=["host", "device"])
each_variant = pytest.mark.parametrize("case", VARIANTS, indirect=True)
RARELY = [pytest.param(variant, marks=pytest.mark.slow) for variant in VARIANTS[:2]]
one_variant = pytest.mark.parametrize("case", [*RARELY, VARIANTS[2]], indirect=True)  # the others in the long run


@dataclass(frozen=True)
class Case:
    folder: Path
    plain: LLM
    known: dict[str, Texts] = field(default_factory=dict)

    def texts(self, prompts: Texts, params: list[SamplingParams]) -> Texts:
        """What the target writes without drafts."""
        key = repr((prompts, params))
        if key not in self.known:
            self.known[key] = texts(self.plain, prompts, params)
        return self.known[key]


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A target whose head was fitted to what it writes after the first six prompts."""
    if reason := native.unavailable_reason():
        pytest.skip(reason)
    folder, head = write_target(tmp_path_factory.mktemp(request.param), request.param)
    plain = load(folder, max_seqs=16, prefix_cache=False)
    written = [prompt + text for prompt, text in zip(PROMPTS[:6], texts(plain, PROMPTS[:6], GREEDY), strict=True)]
    fit_head(folder, head, written, LENGTH - 1)
    return Case(folder, plain)


def drafting(case: Case, overlaps: bool = False, **options: Any) -> LLM:
    llm = load(case.folder, **{"drafter": "mtp", "spec": "3", "max_seqs": 16, **options})
    return on_device(llm) if overlaps else llm


def sampled(count: int) -> list[SamplingParams]:
    """Requests that draw in different ways, with greedy ones among them."""
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"top_k": 20, "min_p": 0.01}, {"temperature": 0.0}]
    first = replace(GREEDY, temperature=0.6)
    return [replace(first, **kinds[i % 4], seed=i) for i in range(count)]


def numbers(llm: LLM) -> tuple[int, int]:
    """Drafts that were accepted, and drafts that were not."""
    stats = llm.engine.drafting.so_far()
    return stats.num_accepted_draft_tokens, stats.num_draft_tokens - stats.num_accepted_draft_tokens


@each_variant
@overlaps
def test_drafted_text_is_plain_text(case: Case, overlaps: bool) -> None:
    llm = drafting(case, overlaps, spec="auto")
    assert llm.engine.drafting.max_depth == MAX_DEPTH and llm.engine.drafting.choices == list(range(MAX_DEPTH + 1))
    for depth, params in ((1, [GREEDY]), (MAX_DEPTH, [GREEDY] * 4), (3, sampled(2)), (2, sampled(16))):
        prompts, drafted = PROMPTS[: len(params)], [replace(each, num_draft=depth) for each in params]
        assert texts(llm, prompts, drafted) == case.texts(prompts, params), (len(params), depth)
    right, wrong = numbers(llm)
    assert right > 60 and wrong > 60 and all_is_free(llm)
    assert not llm.engine.drafting.proposer.unrecorded  # type: ignore[union-attr]


@one_variant
@overlaps
def test_a_found_prefix_changes_nothing(case: Case, overlaps: bool) -> None:
    """The head's K/V are found with the block; the states of recurrent layers say how long a prefix may be."""
    llm, prompts = drafting(case, overlaps), PROMPTS[:4]
    expected = case.texts(prompts, [GREEDY] * 4)
    assert texts(llm, prompts, GREEDY) == expected
    first = numbers(llm)
    again = complete(llm, prompts, GREEDY)
    assert [each.ids for each in again] == expected and all(each.num_cached == 16 for each in again)
    assert [b - a for a, b in zip(first, numbers(llm), strict=True)] == pytest.approx(first, abs=8)
    longer = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    found = complete(llm, longer, GREEDY)
    assert [each.ids for each in found] == case.texts(longer, [GREEDY] * 4)
    assert all(each.num_cached >= 16 for each in found) and all_is_free(llm)


@one_variant
@overlaps
def test_preempted_requests_write_the_same(case: Case, overlaps: bool) -> None:
    llm = drafting(case, overlaps, kv_tokens=112, max_model_len=96, max_seqs=4)
    for params in ([GREEDY] * 4, sampled(4)):
        before = llm.engine.scheduler.num_preempted
        assert texts(llm, PROMPTS[:4], params) == case.texts(PROMPTS[:4], params)
        assert llm.engine.scheduler.num_preempted > before, "the test must exercise preemption"
    assert all_is_free(llm)


@each_variant
def test_rows_past_a_cut_reach_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are cut anywhere on the device: recurrent layers record the rows that are left, experts see no others, and
    the text stays the plain one."""
    llm, rng = on_device(drafting(case, spec="auto")), random.Random(0)
    engine, ops, slots = llm.engine, llm.engine.runner.model.ops, device_steps(llm).slots
    sent, alive, ran = list[int](), list[int](), list[int]()  # alive: of slots; ran: with prompts beside them
    budget, route, pack, forward = engine.drafting.budget, ops.norm_route, ops.pack_rows, slots.forward

    def routed(*given: Any) -> Any:
        routing = route(*given)
        if given[-1] is not None:  # the target's layers, not the head's
            sent.append(int((routing.ids >= 0).all(1).sum()))
            assert int((routing.ids < 0).all(1).sum()) == len(routing.ids) - sent[-1]
        return routing

    def packed(*given: Any) -> Any:
        rows = pack(*given)
        alive.append(int(rows.query_start[-1]))
        return rows

    def counted(kind: StepKind, chunks: Chunks | None = None) -> Ran:
        before, result = len(alive), forward(kind, chunks)
        ran.append(sum(alive[before:]) + (int(chunks.view.query_start[-1]) if chunks else 0))
        return result

    def terms(slots: list[Any], wanted: list[int], tokens: int) -> Any:
        fit = [0.8, 0.0, *[0.0] * engine.drafting.max_depth]
        fair = np.array([rng.choice([-1.0, 0.8, 1.0]) for _ in slots])
        return np.array([fit, fit]), fair, rng.choice([0.0, 0.3, 0.7]) * np.arange(1 + sum(wanted))

    monkeypatch.setattr(ops, "norm_route", routed)
    monkeypatch.setattr(ops, "pack_rows", packed)
    monkeypatch.setattr(slots, "forward", counted)
    monkeypatch.setattr(engine.drafting, "depths", lambda requests: dict.fromkeys(requests, MAX_DEPTH))
    monkeypatch.setattr(budget, "terms", terms)
    for name in ("expect", "measured", "record"):
        monkeypatch.setattr(budget, name, lambda *given: None)
    for params in ([GREEDY] * 4, sampled(4)):
        assert texts(llm, PROMPTS[:4], params) == case.texts(PROMPTS[:4], params)
    assert min(numbers(llm)) > 10 and all_is_free(llm)
    assert len(set(alive)) > 3 and max(alive) <= 4 * (1 + MAX_DEPTH)
    if sent:
        layers = len(sent) // len(ran)
        assert layers and sent == [rows for rows in ran for _ in range(layers)]


CACHES = [
    pytest.param({"kv": "turboquant", "tq_ring_capacity": 32}, id="turboquant"),
    pytest.param({"kv": "turboquant", "tq_mode": "full_tq"}, id="all coded", marks=pytest.mark.slow),
    pytest.param({"kv": "fp8", "dtype": "float32"}, id="fp8", marks=pytest.mark.slow),
]


@one_variant
@pytest.mark.parametrize("cache", CACHES)
def test_other_caches_of_the_full_layers(case: Case, cache: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded keys and values of the target give another text, which drafts do not change; the head's stay exact."""
    monkeypatch.setattr(Engine, "warm_up", lambda self: None)  # which only measures
    plain, params, prompts = load(case.folder, **cache, prefix_cache=False), sampled(2), PROMPTS[:2]
    expected: Texts = texts(plain, prompts, params)
    llm = drafting(case, **cache)
    assert texts(llm, prompts, params) == expected
    assert [each.ids for each in complete(llm, prompts, params)] == expected
    assert min(numbers(llm)) > 3 and all_is_free(llm)
