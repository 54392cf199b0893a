"""Every architecture in every cache, on a CPU and on a GPU: drafts, prefixes, company and preemption change no text.

Drafts are the known text with mistakes, so blocks are accepted and rejected at all their places. On a GPU the steps are
recorded and overlapped, as in service; on a CPU the same steps run unrecorded.

In an exact cache texts are equal. A coded cache rounds keys and values, on a GPU (and those of fp8 on a CPU) after sums
whose last bit may depend on the number of rows: one code among thousands may be its neighbour then, and where the two
likeliest ids are nearly as likely as each other the other one may be written. Only there may such texts part, and few
of them. (On a CPU, fp8 keys and values with noise of a millionth before they are rounded: 10 of 96 texts of "llama"
part, at gaps of up to 0.28 nats, and 20 of "gemma4-experts", up to 0.39, where a row may reach another expert.)
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.engine.engine import Engine
from tests.models.known_text import KnownText
from tests.models.recurrent import load, overlapping, texts
from tests.models.tiny import write_tiny
from tests.spec.tiny_drafter import body, random_tensors, write_drafter, zlab

VARIANTS = ["llama", "qwen3", "qwen3-windows", "gemma3", "qwen3_moe", "gpt_oss", "gemma4", "gemma4-experts"]
VARIANTS += ["qwen3_5", "qwen3_5_moe", "qwen3_next"]
ON_A_CPU = ["gemma4-experts", "qwen3_next"]  # the others have tests of their own there
CACHES: dict[str, dict[str, Any]] = {
    "exact": {},
    "fp8": {"kv": "fp8"},
    "turboquant": {"kv": "turboquant", "tq_ring_capacity": 32},
    "all-coded": {"kv": "turboquant", "tq_mode": "full_tq"},
}
SEEDS = range(16)
PROMPTS = [[(31 * k + 7 * i * i + i) % 250 + 3 for i in range(5 + 3 * k)] for k in SEEDS]
PARAMS = [SamplingParams(12 + k % 5, temperature=0.8 * (k % 3 == 2), seed=k, ignore_eos=True) for k in SEEDS]
NEAR, MOST_APART = 0.5, 5  # nats between the two likeliest ids; texts, of the 11 greedy ones
FEW, DEPTH, LONG = 3, 5, 160  # requests whose drafts are known, fewer than there are lanes; drafts per step; context
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
CASES = [pytest.param((variant, "cuda"), marks=[pytest.mark.gpu, no_gpu], id=f"{variant}-cuda") for variant in VARIANTS]
CASES += [pytest.param((variant, "cpu"), marks=pytest.mark.slow, id=f"{variant}-cpu") for variant in ON_A_CPU]


class Expected(NamedTuple):
    """What requests write, and where another id was nearly as likely."""

    ids: list[list[int]]
    gaps: list[list[float]]  # between the two likeliest ids, in nats; infinite where the text must be this
    near: float  # where texts may part; 0: nowhere

    @classmethod
    def of(cls, llm: LLM, prompts: list[list[int]], params: list[SamplingParams], near: float) -> Expected:
        """Each by itself."""
        found = [
            llm.generate([prompt], replace(each, logprobs=2))[0].completions[0]
            for prompt, each in zip(prompts, params, strict=True)
        ]
        gaps = [[a[1] - b[1] for a, b in (token.top[:2] for token in each.logprobs or [])] for each in found]
        return cls([each.ids for each in found], gaps, near)

    def last(self, count: int) -> Expected:
        return Expected(self.ids[-count:], self.gaps[-count:], self.near)

    def check(self, found: list[list[int]], params: list[SamplingParams], when: str) -> None:
        if not self.near:
            assert found == self.ids, when
            return
        parted = 0
        for ids, own, gaps, each in zip(found, self.ids, self.gaps, params, strict=True):
            if each.temperature:
                continue  # the noise that chose is not among the logprobs; in an exact cache these are compared
            place = next((i for i, (a, b) in enumerate(zip(ids, own, strict=True)) if a != b), None)
            if place is not None:
                parted += 1
                more = f"{when}: {ids[place]} for {own[place]}, which was likelier by {gaps[place]}"
                assert gaps[place] < self.near, more
        assert parted <= MOST_APART, f"{when}: {parted} texts part"


class Case(NamedTuple):
    device: str
    target: Path
    drafter: Path  # DFlash

    def options(self, cache: str, **more: Any) -> dict[str, Any]:
        own = self.device == "cpu" and cache != "fp8"  # a CPU's own kernels have no fp8
        dtype = "auto" if own else "float32"  # in half precision a last bit may depend on the rows
        return {"device": self.device, "dtype": dtype, "max_seqs": 16, "max_model_len": LONG, **CACHES[cache], **more}

    def expected(self, cache: str, prompts: list[list[int]], params: list[SamplingParams]) -> Expected:
        llm = load(self.target, **self.options(cache, prefix_cache=False))
        rounded = cache != "exact" and (self.device == "cuda" or cache == "fp8")
        return Expected.of(llm, prompts, params, NEAR if rounded else 0.0)

    def drafted(self, cache: str, **more: Any) -> LLM:
        llm = load(self.target, **self.options(cache, spec=str(DEPTH), drafter=str(self.drafter), **more))
        return overlapping(llm) if llm.engine.overlap is None else llm


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    variant, device = request.param
    # A GPU's kernels of a coded cache take heads of 64 numbers or more.
    wide = {"head_dim": 64} | ({"global_head_dim": 128} if variant.startswith("gemma4") else {})
    target = write_tiny(tmp_path_factory.mktemp("target"), variant, **wide)
    config = json.loads((target / "config.json").read_text())
    config = config.get("text_config", config)
    shape = body("sf", window=16, hidden_size=config["hidden_size"], vocab_size=config["vocab_size"], head_dim=64)
    described = zlab(shape, num_target_layers=config["num_hidden_layers"])
    drafter = write_drafter(tmp_path_factory.mktemp("drafter"), described, random_tensors(shape))
    return Case(device, target, drafter)


@pytest.fixture(params=list(CACHES))
def cache(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings are made when they are needed: most would not be."""
    monkeypatch.setattr(Engine, "warm_up", lambda self: None)


def free(llm: LLM) -> list[int]:
    """Blocks, pages and slots that nobody holds."""
    parts = llm.engine.scheduler.holdings.parts
    return [llm.engine.pool.num_free, *(getattr(part, "pages", part).num_free for part in parts)]  # type: ignore[attr-defined]


def test_company_prefixes_and_drafts_change_no_text(case: Case, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = case.expected(cache, PROMPTS, PARAMS)
    assert len({tuple(ids) for ids in expected.ids}) > 8
    for llm in (load(case.target, **case.options(cache)), case.drafted(cache)):
        before = free(llm)
        expected.check(texts(llm, PROMPTS, PARAMS), PARAMS, "16 at once, cold")
        expected.check(texts(llm, PROMPTS, PARAMS), PARAMS, "16 at once, from the prefix cache")
        assert free(llm) == before
    known_drafts(case.drafted(cache), expected.last(FEW), monkeypatch)


def known_drafts(llm: LLM, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter that is loaded is mostly wrong; this one mostly right."""
    overlap, prompts, params = llm.engine.overlap, PROMPTS[-FEW:], PARAMS[-FEW:]
    assert overlap
    known = [prompt + ids for prompt, ids in zip(prompts, expected.ids, strict=True)]
    monkeypatch.setattr(overlap.lanes, "_draft", KnownText(overlap.lanes, known, llm.model_config.vocab_size))
    expected.check(texts(llm, prompts, params), params, "drafts mostly right")
    seen = llm.engine.drafting.so_far()
    assert 10 < seen.num_accepted_draft_tokens < seen.num_draft_tokens
    assert llm.engine.runner.unrecorded == [] and llm.engine.drafting.proposer.unrecorded == []


def test_requests_that_give_their_blocks_back_write_the_same(case: Case, cache: str) -> None:
    """They are admitted with pages for their windows, and then grow to more blocks than there are for two."""
    params = [SamplingParams(120, ignore_eos=True)] * FEW
    expected = case.expected(cache, PROMPTS[:FEW], params)
    tight = case.drafted(cache, kv_tokens=LONG)
    before = free(tight)
    expected.check(texts(tight, PROMPTS[:FEW], params), params, "given back and read again")
    assert tight.engine.scheduler.num_preempted and free(tight) == before
