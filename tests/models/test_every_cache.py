"""Every architecture in every cache, on a CPU and on a GPU: drafts, prefixes, company and preemption change no text.

Drafts are the known text with mistakes, so blocks are accepted and rejected at all their places. On a GPU the steps are
recorded and overlapped, as in service; on a CPU the same steps run unrecorded.

In an exact cache texts are equal. A coded cache rounds keys and values, on a GPU (and those of fp8 on a CPU) after sums
whose last bit may depend on the number of rows: one code among thousands may be its neighbour then, and where the two
likeliest ids are nearly as likely as each other the other one may be written. So each id of such a text is scored, as a
request by itself reads it: nearly all must be nearly the likeliest. (On a CPU, fp8 keys and values with noise of a
millionth before they are rounded: of 1280 ids of "llama" the furthest is 0.28 nats below the likeliest; of
"gemma4-experts", where a row may reach another expert, 6 are further than 0.5. Of ids at random 97 to 99 % are.)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.engine.engine import Engine
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab
from tests.fakes.steps import device_steps, on_device
from tests.models.known_text import KnownText
from tests.models.recurrent import load, texts
from tests.models.tiny import write_tiny

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
NEAR, FAR = 0.5, 0.02  # nats; the share of ids that may be further below the likeliest
FEW, DEPTH, LONG = 3, 5, 160  # requests whose drafts are known, fewer than there are lanes; drafts per step; context
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
CASES = [pytest.param((variant, "cuda"), marks=[pytest.mark.gpu, no_gpu], id=f"{variant}-cuda") for variant in VARIANTS]
CASES += [pytest.param((variant, "cpu"), marks=pytest.mark.slow, id=f"{variant}-cpu") for variant in ON_A_CPU]


@dataclass(frozen=True)
class Expected:
    """What requests write, each by itself."""

    alone: LLM
    prompts: list[list[int]]
    params: list[SamplingParams]
    ids: list[list[int]]
    rounded: bool  # other texts are as good, if each of their ids is nearly the likeliest

    @classmethod
    def of(cls, alone: LLM, prompts: list[list[int]], params: list[SamplingParams], rounded: bool) -> Expected:
        ids = [texts(alone, [prompt], [each])[0] for prompt, each in zip(prompts, params, strict=True)]
        return cls(alone, prompts, params, ids, rounded)

    def last(self, count: int) -> Expected:
        return replace(self, prompts=self.prompts[-count:], params=self.params[-count:], ids=self.ids[-count:])

    def check(self, found: list[list[int]], when: str) -> None:
        if not self.rounded:
            assert found == self.ids, when
            return
        short = []  # nats of greedy ids below the likeliest; the noise that chose others is not among the logprobs
        for prompt, ids, params in zip(self.prompts, found, self.params, strict=True):
            if not params.temperature:
                short += self.below(prompt, ids)
        far = sorted(each for each in short if each > NEAR)
        assert len(far) <= 1 + FAR * len(short), f"{when}: {len(far)} of {len(short)} ids are far off: {far}"

    def below(self, prompt: list[int], ids: list[int]) -> list[float]:
        """How much less likely each id is than the likeliest at its place, read by itself as a prompt."""
        (result,) = self.alone.generate([prompt + ids], SamplingParams(1, prompt_logprobs=1, ignore_eos=True))
        scored = result.completions[0].prompt_logprobs
        assert scored is not None
        return [token.top[0][1] - token.logprob for token in scored[len(prompt) :] if token is not None]


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
        return Expected.of(llm, prompts, params, rounded)

    def drafted(self, cache: str, **more: Any) -> LLM:
        llm = load(self.target, **self.options(cache, spec=str(DEPTH), drafter=str(self.drafter), **more))
        return llm if llm.engine.steps.ahead else on_device(llm)


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
    parts = llm.engine.scheduler.groups.parts
    return [llm.engine.pool.num_free, *(getattr(part, "pages", part).num_free for part in parts)]  # type: ignore[attr-defined]


def test_company_prefixes_and_drafts_change_no_text(case: Case, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = case.expected(cache, PROMPTS, PARAMS)
    assert len({tuple(ids) for ids in expected.ids}) > 8
    for llm in (load(case.target, **case.options(cache)), case.drafted(cache)):
        before = free(llm)
        expected.check(texts(llm, PROMPTS, PARAMS), "16 at once, cold")
        expected.check(texts(llm, PROMPTS, PARAMS), "16 at once, from the prefix cache")
        assert free(llm) == before
    known_drafts(case.drafted(cache), expected.last(FEW), monkeypatch)


def known_drafts(llm: LLM, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter that is loaded is mostly wrong; this one mostly right."""
    slots = device_steps(llm).slots
    known = [prompt + ids for prompt, ids in zip(expected.prompts, expected.ids, strict=True)]
    monkeypatch.setattr(slots, "_draft", KnownText(slots, known, llm.model_config.vocab_size))
    expected.check(texts(llm, expected.prompts, expected.params), "drafts mostly right")
    seen = llm.engine.drafting.so_far()
    assert 10 < seen.num_accepted_draft_tokens < seen.num_draft_tokens
    assert llm.engine.runner.unrecorded == [] and llm.engine.drafting.proposer.unrecorded == []


def test_requests_that_give_their_blocks_back_write_the_same(case: Case, cache: str) -> None:
    """They are admitted with pages for their windows, and then grow to more blocks than there are for two."""
    params = [SamplingParams(120, ignore_eos=True)] * FEW
    expected = case.expected(cache, PROMPTS[:FEW], params)
    tight = case.drafted(cache, kv_tokens=LONG)
    before = free(tight)
    expected.check(texts(tight, PROMPTS[:FEW], params), "given back and read again")
    assert tight.engine.scheduler.num_preempted and free(tight) == before
