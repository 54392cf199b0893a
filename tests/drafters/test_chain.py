"""A chain drafter through the whole engine: drafted text is plain text, on the host and where the device takes steps.

The drafter (tests/drafters/tiny_chain.py) is one that the package does not know. It is registered, and nothing else.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.drafters.base import REGISTERED
from sparkdraft.kernels import native
from sparkdraft.llm import Completion
from tests.drafters.tiny_chain import KIND, MAX_DEPTH, TinyChain, write_chain
from tests.fakes.steps import on_device
from tests.models.tiny import TinyOf, oracle

LENGTH, OUTPUT = 40, 48
PROMPTS = torch.randint(3, 259, (4, LENGTH), generator=torch.Generator().manual_seed(8)).tolist()
DTYPES = [pytest.param("float32", marks=pytest.mark.slow), "quantised"]
Params = list[SamplingParams]


@pytest.fixture(scope="module", autouse=True)
def chains_are_known() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REGISTERED, KIND.name, KIND)
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_of: TinyOf) -> tuple[Path, Path]:
    """A target, and a drafter that was fitted to what the target writes after the first three prompts."""
    root = tmp_path_factory.mktemp("pair")
    target = tiny_of("qwen3", initializer_range=0.1)
    with torch.no_grad():
        prompts = torch.tensor(PROMPTS[:3])
        texts = oracle(target).generate(prompts, min_new_tokens=OUTPUT, max_new_tokens=OUTPUT, do_sample=False)
    return target, write_chain(root / "drafter", target, texts.tolist(), LENGTH - 1)


def load(pair: tuple[Path, Path], dtype: str = "float32", overlaps: bool = False, **options: Any) -> LLM:
    if dtype == "quantised" and (reason := native.unavailable_reason()):
        pytest.skip(reason)
    target, drafter = pair
    settings = {"dtype": dtype, "ngram": False, "threads": 1, "drafter": str(drafter), "max_seqs": 4, **options}
    llm = LLM(str(target), **settings)
    return on_device(llm) if overlaps else llm


def chain_of(llm: LLM) -> TinyChain:
    proposer = llm.engine.drafting.proposer
    assert proposer and isinstance(proposer.drafter, TinyChain)
    return proposer.drafter


def greedy(num_draft: int | None, count: int = 4, **options: Any) -> Params:
    return [SamplingParams(max_tokens=OUTPUT, num_draft=num_draft, ignore_eos=True, **options)] * count


def sampled(num_draft: int, **options: Any) -> Params:
    """Requests that draw in different ways, and a greedy one among them."""
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"top_k": 20, "min_p": 0.01}, {"temperature": 0.0}]
    common: dict[str, Any] = {"temperature": 0.6, "max_tokens": OUTPUT, "num_draft": num_draft, "ignore_eos": True}
    return [SamplingParams(**{**common, **kind, **options}, seed=i) for i, kind in enumerate(kinds)]


def write(llm: LLM, params: Params) -> list[Completion]:
    return [r.completions[0] for r in llm.generate(PROMPTS[: len(params)], params)]


def texts(llm: LLM, params: Params) -> list[list[int]]:
    return [completion.ids for completion in write(llm, params)]


def accepted(completion: Completion) -> list[int]:
    assert completion.speculation
    histogram: list[int] = completion.speculation["acceptance_histogram"]
    return histogram


@pytest.mark.parametrize("overlaps", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_drafted_text_is_plain_text(pair: tuple[Path, Path], dtype: str, overlaps: bool) -> None:
    """One request and four at once, greedy and sampled, at every depth."""
    plain, llm = load(pair, dtype, spec="off"), load(pair, dtype, overlaps)
    assert llm.engine.drafting.max_depth == MAX_DEPTH
    for params in (greedy(0, 1), greedy(0), sampled(0)):
        expected = texts(plain, params)
        for depth in (1, 2, MAX_DEPTH, None):
            drafted = [SamplingParams(**{**_fields(p), "num_draft": depth}) for p in params]
            assert texts(llm, drafted) == expected, (len(params), depth)
    assert llm.engine.drafting.total.num_accepted_draft_tokens > 50  # 72 where the depth is given
    assert not [f for f in llm.plan.fallbacks if "drafts" in f.name]


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__slots__}  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlaps", [False, True], ids=["host", "device"])
def test_a_hidden_state_is_paired_with_the_id_that_follows_it(pair: tuple[Path, Path], overlaps: bool) -> None:
    """Otherwise no draft would be right: the drafter was fitted to those pairs, and to nothing else."""
    for completion in write(load(pair, overlaps=overlaps), greedy(1, 3)):
        wrong, right = accepted(completion)
        assert right > 3 * wrong, (wrong, right)
    counts = [sum(n) for n in zip(*(accepted(c) for c in write(load(pair, overlaps=overlaps), greedy(3))), strict=True)]
    assert all(counts), f"some steps accept none, some one, some two, some all: {counts}"


def test_a_pass_is_recorded_once_for_all_drafts_of_a_step(pair: tuple[Path, Path]) -> None:
    llm = load(pair, "quantised")
    texts(llm, greedy(MAX_DEPTH, 1))
    proposer = llm.engine.drafting.proposer
    assert proposer and proposer._passes and proposer._observing
    assert proposer._passes.num_held == 1
    kernels = proposer._passes.graph((1, 1)).kernels
    assert kernels.count("make_rows") == kernels.count("paged_attention") == 1


@pytest.mark.parametrize("overlaps", [False, True], ids=["host", "device"])
def test_a_found_prefix_changes_nothing(pair: tuple[Path, Path], overlaps: bool) -> None:
    cold, llm = load(pair, "quantised", overlaps, prefix_cache=False), load(pair, "quantised", overlaps)
    expected = write(cold, greedy(3))
    for round_number in range(2):
        for one, other in zip(write(llm, greedy(3)), expected, strict=True):
            assert one.ids == other.ids and accepted(one) == accepted(other)
            assert one.num_cached == (32 if round_number else 0)
    longer = [prompt + completion.ids for prompt, completion in zip(PROMPTS, expected, strict=True)]
    again, alone = (
        [r.completions[0] for r in x.generate(longer, SamplingParams(max_tokens=16, num_draft=3, ignore_eos=True))]
        for x in (llm, cold)
    )
    assert [c.num_cached for c in again] == [80] * 4
    assert [(c.ids, accepted(c)) for c in again] == [(c.ids, accepted(c)) for c in alone]


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("overlaps", [False, True], ids=["host", "device"])
def test_preempted_requests_write_the_same(pair: tuple[Path, Path], overlaps: bool, prefix_cache: bool) -> None:
    plain = load(pair, "quantised", spec="off")
    llm = load(pair, "quantised", overlaps, kv_tokens=208, max_model_len=112, prefix_cache=prefix_cache)
    for params in (greedy(3), sampled(3)):
        before = llm.engine.scheduler.num_preempted
        drafted = texts(llm, params)
        assert drafted == texts(plain, [SamplingParams(**{**_fields(p), "num_draft": 0}) for p in params])
        assert llm.engine.scheduler.num_preempted > before, "the test must exercise preemption"
    assert llm.engine.pool.num_free == llm.plan.num_blocks


def test_who_wants_log_probabilities_comes_and_goes_beside_drafts(pair: tuple[Path, Path]) -> None:
    """Its steps wait for the host between their halves; the drafter's state of the others passes through them."""
    plain, llm = load(pair, "quantised", spec="off"), load(pair, "quantised", overlaps=True)
    params = greedy(3, 3)
    short = SamplingParams(max_tokens=9, logprobs=1, num_draft=2, ignore_eos=True)
    expected = texts(plain, [*greedy(0, 3), SamplingParams(max_tokens=9, ignore_eos=True)])
    engine, seen = llm.engine, {str(i): list[int]() for i in range(4)}
    for i in range(3):
        engine.add(PROMPTS[i], params[i], str(i))
    step = 0
    while engine.has_work:
        if step == 6:
            engine.add(PROMPTS[3], short, "3")
        for piece in engine.step():
            seen[piece.request_id] += piece.ids
        step += 1
    assert list(seen.values()) == expected


@pytest.mark.parametrize("overlaps", [False, True], ids=["host", "device"])
def test_its_cache_depends_on_the_text_alone(pair: tuple[Path, Path], overlaps: bool) -> None:
    """However plain and drafted steps alternate, on the host or the device: to the bit, on kernels that promise it."""

    def kept(llm: LLM, depths: list[int]) -> tuple[list[int], torch.Tensor]:
        engine, turn = llm.engine, cycle(depths)
        engine.add(PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True), "x")
        request, proposer = engine._by_id["x"][0], engine.drafting.proposer
        assert proposer
        while len(request.output_ids) < 40:
            engine.drafting.default = next(turn)
            engine.step()
        with torch.inference_mode():
            engine.drain()
            proposer.flush([request])
        positions, kv = torch.arange(LENGTH + 38), chain_of(llm).kv
        blocks = torch.tensor(request.blocks.tolist())[positions // 16]
        found = torch.stack([cache[blocks, :, positions % 16] for cache in (*kv.k, *kv.v)])
        engine.abort("x")
        engine.step()
        return request.output_ids[:40], found

    text, expected = kept(load(pair, "quantised"), [0])
    llm = load(pair, "quantised", overlaps)
    for depths in ([0], [1], [MAX_DEPTH], [0, 0, 3, 1, 0]):
        found, cache = kept(llm, depths)
        assert found == text and torch.equal(cache, expected)


def test_a_kind_that_nobody_knows_is_refused(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(REGISTERED, KIND.name)
    with pytest.raises(Exception, match="TinyChainDraftModel"):
        load(pair)


def test_it_says_what_a_step_reads(pair: tuple[Path, Path]) -> None:
    chain = chain_of(load(pair))
    one, three = chain.reads(1), chain.reads(3)
    assert three.propose == 3 * one.propose and three.observe == one.observe > 0


@pytest.mark.parametrize("overlaps", [False, True], ids=["host", "device"])
def test_a_prompt_of_which_one_row_is_left_drafts_at_once(pair: tuple[Path, Path], overlaps: bool) -> None:
    """After a chunk the drafter knows the last row's hidden state; after a prefix hit it does not, and waits a step."""
    options: dict[str, Any] = {"max_step_tokens": 32, "kv_tokens": 1024}
    plain, llm = load(pair, **options), load(pair, overlaps=overlaps, **options)
    for length in (33, 65, 65):  # the last one is found in the prefix cache, up to its last id
        prompt = [3 + (i * 7 + length) % 200 for i in range(length)]
        expected = plain.generate([prompt], SamplingParams(max_tokens=8, num_draft=0, ignore_eos=True))
        found = llm.generate([prompt], SamplingParams(max_tokens=8, num_draft=2, ignore_eos=True))
        assert found[0].completions[0].ids == expected[0].completions[0].ids
    assert found[0].completions[0].num_cached == 64
