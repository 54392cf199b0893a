"""Real requests over a coded cache: drafts, other requests, chunks and cached prefixes change no text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from sparkdraft.cache.formats import CALIBRATION
from sparkdraft.core import SamplingParams
from sparkdraft.llm import LLM, Completion

OPTIONS = {"kv": "turboquant", "tq_ring_capacity": 24, "max_model_len": 256}


@pytest.fixture(scope="module")
def options(device: str) -> dict[str, Any]:
    return OPTIONS | {"device": device, "dtype": "float32"}


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.slow), "quantised"])
def any_weights(options: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    if options["device"] == "cuda" and request.param == "quantised":
        pytest.skip("only a CPU has quantised weights")
    return options | {"dtype": request.param}


def prompts(count: int, longest: int = 90) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 259) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize(
    "form",
    [pytest.param({"tq_mode": "hybrid"}, marks=pytest.mark.slow), {"tq_mode": "full_tq"}, {"kv": "fp8"}],
    ids=str,
)
def test_each_request_writes_what_it_writes_alone(
    wide_tiny: Path, any_weights: dict[str, Any], form: dict[str, str]
) -> None:
    if form == {"kv": "fp8"} and any_weights["dtype"] == "quantised":
        pytest.skip("the CPU kernels have no fp8 cache")
    params, asked, options = SamplingParams(max_tokens=12, ignore_eos=True), prompts(5), any_weights | form
    if options["kv"] == "fp8":
        options = {name: value for name, value in options.items() if not name.startswith("tq_")}
    alone = LLM(str(wide_tiny), max_seqs=1, prefix_cache=False, **options)
    crowd = LLM(str(wide_tiny), max_seqs=3, max_step_tokens=40, kv_tokens=400, **options)
    expected = [alone.generate([ids], params)[0].completions[0].ids for ids in asked]
    for _ in range(2):  # the second time prefixes are found
        assert [r.completions[0].ids for r in crowd.generate(asked, params)] == expected


@pytest.mark.slow
def test_sixteen_at_once_of_different_lengths(wide_tiny: Path, options: dict[str, Any]) -> None:
    asked = [(ids * 9)[: 5 + 7 * i] for i, ids in enumerate(prompts(16))]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    llm = LLM(str(wide_tiny), max_seqs=16, prefix_cache=False, **options)
    together = [r.completions[0].ids for r in llm.generate(asked, params)]
    assert together == [llm.generate([ids], params)[0].completions[0].ids for ids in asked]


@pytest.mark.slow
def test_text_that_repeats_is_drafted_and_stays_the_same(wide_tiny: Path, any_weights: dict[str, Any]) -> None:
    llm = LLM(str(wide_tiny), **any_weights)
    asked = [ids + [9, 17, 30] * 8 for ids in prompts(6, 40)]
    bias = dict.fromkeys((9, 17, 30, 40, 50, 60), 100.0)  # few ids, so that what comes is often a repetition

    def written(depth: int) -> list[Completion]:
        params = SamplingParams(max_tokens=40, ignore_eos=True, logit_bias=bias, num_draft=depth)
        return [r.completions[0] for r in llm.generate(asked, params)]

    plain, drafted = written(0), written(7)
    assert [c.ids for c in drafted] == [c.ids for c in plain]
    steps = [c.speculation for c in drafted if c.speculation]
    accepted = sum(s["num_accepted_draft_tokens"] for s in steps)
    assert 0 < accepted < sum(s["num_draft_tokens"] for s in steps), "some drafts are rejected, and written over"


def test_the_first_and_the_last_rows_have_pages_and_few_others(wide_tiny: Path, options: dict[str, Any]) -> None:
    llm = LLM(str(wide_tiny), prefix_cache=False, **options)
    engine, total = llm.engine, llm.engine.plan.coded.pages
    (rows,) = engine.scheduler.groups.parts
    engine.add((prompts(1)[0] * 9)[:200], SamplingParams(max_tokens=30, ignore_eos=True))
    while engine.has_work:
        engine.step()
        for request in engine.scheduler.running:
            row = request.num_computed
            read = {p // 16 for p in range(row) if p < rows.first or row - p < rows.recent}
            assert all(engine.runner.kv.page_of[request.blocks[i]] >= 0 for i in read), (row, read)
            assert total - rows.num_free <= rows.need, "pages of what fell behind are given back"
    assert rows.num_free == total


def test_a_prefix_whose_uncoded_end_is_lost_is_used_as_far_as_it_is_there(
    wide_tiny: Path, options: dict[str, Any]
) -> None:
    llm = LLM(str(wide_tiny), max_seqs=1, **options)
    params, (first, *others) = SamplingParams(max_tokens=4, ignore_eos=True), prompts(14, 200)
    first = (first * 200)[:150]
    expected = llm.generate([first], params)[0].completions[0]
    again = llm.generate([first], params)[0].completions[0]
    assert again.ids == expected.ids and again.num_cached >= 128
    for ids in others:  # each takes pages, until those of the first text are gone
        llm.generate([ids], params)
    lost = llm.generate([first], params)[0].completions[0]
    assert lost.ids == expected.ids and lost.num_cached < again.num_cached
    found = llm.generate([first], params)[0].completions[0]
    assert found.ids == expected.ids and found.num_cached == again.num_cached, "its blocks with pages are found instead"


@pytest.mark.slow
def test_the_embedded_model_reads_a_text_nearly_as_well_from_codes() -> None:
    """With the weights that a CPU gets by default: its mean log-probability moves by less than 0.02 nats."""
    text = CALIBRATION.read_text(encoding="utf-8")
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    means = []
    for kv in ("exact", "turboquant"):
        ring = {"tq_ring_capacity": 32} if kv == "turboquant" else {}
        llm = LLM("smollm2", device="cpu", kv=kv, spec="off", max_model_len=512, max_seqs=1, **ring)
        (result,) = llm.generate([llm.encode(text)[:300]], params)
        scores = [token.logprob for token in result.completions[0].prompt_logprobs or [] if token]
        assert len(scores) == 299 and llm.plan.kernels == "native"
        means.append(sum(scores) / len(scores))
    assert means[0] != means[1] and abs(means[0] - means[1]) < 0.02
