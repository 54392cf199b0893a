"""Gemma 4's assistant through the whole engine: drafted text is plain text, on the host and where the device takes
steps, whatever format the target's keys and values are kept in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.drafters.assistant import MAX_DEPTH
from sparkdraft.engine.engine import Engine
from sparkdraft.kernels import native
from sparkdraft.llm import Completion
from tests.drafters.tiny_assistant import write_fitted
from tests.fakes.steps import on_device
from tests.models.tiny import TinyOf

LENGTH, OUTPUT = 40, 40
PROMPTS = torch.randint(3, 259, (4, LENGTH), generator=torch.Generator().manual_seed(8)).tolist()
DTYPES = [pytest.param("float32", marks=pytest.mark.slow), "quantised"]
HOST_AND_DEVICE = pytest.mark.parametrize("overlaps", [False, True], ids=["host", "device"])
Pair = tuple[Path, Path]


@pytest.fixture(scope="module", autouse=True)
def no_steps_at_start() -> Any:
    """They measure costs, from which depths are chosen: here depths are fixed, and they would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "warm_up", lambda engine: None)
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_of: TinyOf) -> Pair:
    """A target, and an assistant that was fitted to what the target writes after the first two prompts."""
    root = tmp_path_factory.mktemp("pair")
    target = tiny_of("gemma4")
    llm = load((target, root), "float32", drafter="none")
    written = texts(llm, greedy(0, 2))
    known = [prompt + ids for prompt, ids in zip(PROMPTS, written, strict=False)]
    return target, write_fitted(root / "assistant", target, known, LENGTH - 1)


def load(pair: Pair, dtype: str = "quantised", overlaps: bool = False, **options: Any) -> LLM:
    if dtype == "quantised" and (reason := native.unavailable_reason()):
        pytest.skip(reason)
    target, drafter = pair
    settings = {"dtype": dtype, "ngram": False, "threads": 1, "drafter": str(drafter), "max_seqs": 4, **options}
    llm = LLM(str(target), **settings)
    return on_device(llm) if overlaps else llm


def greedy(num_draft: int, count: int = 4, tokens: int = OUTPUT) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=tokens, num_draft=num_draft, ignore_eos=True)] * count


def sampled(num_draft: int, tokens: int = OUTPUT) -> list[SamplingParams]:
    """Requests that draw in different ways, and a greedy one among them."""
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"top_k": 20, "min_p": 0.01}, {"temperature": 0.0}]
    common: dict[str, Any] = {"temperature": 0.6, "max_tokens": tokens, "num_draft": num_draft, "ignore_eos": True}
    return [SamplingParams(**{**common, **kind}, seed=i) for i, kind in enumerate(kinds)]


def write(llm: LLM, params: list[SamplingParams]) -> list[Completion]:
    return [r.completions[0] for r in llm.generate(PROMPTS[: len(params)], params)]


def texts(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [completion.ids for completion in write(llm, params)]


def accepted(completion: Completion) -> list[int]:
    assert completion.speculation
    histogram: list[int] = completion.speculation["acceptance_histogram"]
    return histogram


@HOST_AND_DEVICE
@pytest.mark.parametrize("dtype", DTYPES)
def test_drafted_text_is_plain_text(pair: Pair, dtype: str, overlaps: bool) -> None:
    """One request and four at once, greedy and sampled, at several depths."""
    plain, llm = load(pair, dtype, drafter="none"), load(pair, dtype, overlaps)
    assert llm.engine.drafting.max_depth == MAX_DEPTH
    for expected, drafted in (
        (texts(plain, greedy(0, 1)), [greedy(3, 1)]),
        (texts(plain, greedy(0)), [greedy(1), greedy(MAX_DEPTH)]),
        (texts(plain, sampled(0)), [sampled(2)]),
    ):
        for params in drafted:
            assert texts(llm, params) == expected, params
    assert llm.engine.drafting.total.num_accepted_draft_tokens > 50
    assert llm.engine.runner.unrecorded == [] and llm.engine.drafting.proposer.unrecorded == []


@HOST_AND_DEVICE
def test_the_first_draft_follows_the_last_row_and_the_next_ones_each_other(pair: Pair, overlaps: bool) -> None:
    """Otherwise no draft would be right: W_pre was fitted to a hidden state with the id after it, and nothing else."""
    written = write(load(pair, "float32", overlaps), greedy(3, 2))
    counts = [sum(n) for n in zip(*map(accepted, written), strict=True)]
    assert counts[0] < sum(counts) / 3 and counts[3] > 3, f"drafts accepted per step: {counts}"


def test_a_pass_is_recorded_once_for_all_drafts_and_observes_nothing(pair: Pair) -> None:
    llm = load(pair)
    texts(llm, greedy(MAX_DEPTH, 1))
    proposer = llm.engine.drafting.proposer
    assert proposer and proposer._passes and proposer._observing
    assert proposer._passes.num_held == 1 and proposer._observing.num_held == 0
    kernels = proposer._passes.graph((1, 1)).kernels
    assert kernels.count("paged_attention") == 3 and kernels.count("find_pages") == 1
    assert not [name for name in kernels if "write" in name]


@HOST_AND_DEVICE
def test_a_found_prefix_changes_nothing(pair: Pair, overlaps: bool) -> None:
    cold, llm = load(pair, overlaps=overlaps, prefix_cache=False), load(pair, overlaps=overlaps)
    expected = write(cold, greedy(3, 2))
    for round_number in range(2):
        for one, other in zip(write(llm, greedy(3, 2)), expected, strict=True):
            assert one.ids == other.ids and accepted(one) == accepted(other)
            assert one.num_cached == (32 if round_number else 0)


@HOST_AND_DEVICE
def test_preempted_requests_write_the_same(pair: Pair, overlaps: bool) -> None:
    plain, llm = load(pair, drafter="none"), load(pair, overlaps=overlaps, kv_tokens=144, max_model_len=112)
    for params in (greedy, sampled):
        before = llm.engine.scheduler.num_preempted
        assert texts(llm, params(3, tokens=64)) == texts(plain, params(0, tokens=64))
        assert llm.engine.scheduler.num_preempted > before, "the test must exercise preemption"
    assert llm.engine.pool.num_free == llm.plan.num_blocks


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {"kv": "fp8"}),
        ("quantised", {"kv": "turboquant", "tq_mode": "hybrid", "tq_ring_capacity": 16, "tq_centre": False}),
        pytest.param("quantised", {"kv": "turboquant", "tq_mode": "full_tq"}, marks=pytest.mark.slow),
    ],
    ids=["fp8", "turboquant", "all-coded"],
)
def test_other_formats_of_the_cache_change_nothing_either(pair: Pair, dtype: str, options: dict[str, Any]) -> None:
    plain, llm = load(pair, dtype, drafter="none", **options), load(pair, dtype, **options)
    for temperature in (0.0, 0.7):
        common: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "temperature": temperature, "seed": 4}
        expected, drafted = (
            each.generate(PROMPTS[:2], SamplingParams(**common, num_draft=depth))
            for each, depth in ((plain, 0), (llm, 3))
        )
        assert [r.completions[0].ids for r in drafted] == [r.completions[0].ids for r in expected]
    assert llm.engine.drafting.total.num_accepted_draft_tokens > 0


def test_it_says_what_a_step_reads(pair: Pair) -> None:
    llm = load(pair)
    drafter = llm.engine.drafting.proposer.drafter
    one, three = drafter.reads(1), drafter.reads(3)
    assert three.propose == 3 * one.propose > 0 and one.observe == 0
    assert one.kv_per_token == 2 * 64 * 4, "the one layer over the whole context, float32"
