"""The architectures with experts, windows, sinks and norms on both sides, through the whole engine.

What transformers computes, tests/models/test_parity.py holds them to; here it must be the same alone and in company,
drafted and plain, with and without prefixes, and in every cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.core import UserError
from sparkdraft.kernels import native
from sparkdraft.plan.memory import rope_bytes
from tests.models.tiny import TinyOf, oracle_logits

VARIANTS = ["qwen3_moe", "gpt_oss", "gemma4", "gemma4-experts"]
SEEDS = range(16)
PROMPTS = [[(31 * k + 7 * i * i + i) % 250 + 3 for i in range(3 + 3 * k)] for k in SEEDS]
PARAMS = [SamplingParams(6 + k % 5, temperature=0.8 * (k % 3 == 2), seed=k, ignore_eos=True) for k in SEEDS]
# Texts of two ids repeat themselves, so that n-grams have something to draft, and the model still has to choose.
TWO_IDS = [[40 + (i * i * (k + 3) // 7) % 2 for i in range(60 + 9 * k)] for k in range(4)]
TWO = SamplingParams(14, ignore_eos=True, logit_bias={40: 100.0, 41: 100.0})
needs_native = pytest.mark.skipif(native.unavailable_reason() is not None, reason="no C++ compiler")
DTYPES = [pytest.param("float32", marks=pytest.mark.slow), "auto"]


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tiny_of: TinyOf) -> Path:
    return tiny_of(request.param)


def load(folder: Path, **options: Any) -> LLM:
    defaults = {"device": "cpu", "dtype": "float32", "spec": "off", "kv_tokens": 2048, "ngram": False, "threads": 1}
    return LLM(str(folder), **(defaults | options))


def written(llm: LLM, which: range = SEEDS) -> list[list[int]]:
    results = llm.generate([PROMPTS[k] for k in which], [PARAMS[k] for k in which])
    return [completion.ids for result in results for completion in result.completions]


def alone(llm: LLM) -> list[list[int]]:
    return [written(llm, range(k, k + 1))[0] for k in SEEDS]


def all_is_free(llm: LLM) -> bool:
    pages = [part.pages.num_free for part in llm.engine.scheduler.groups.parts]  # type: ignore[attr-defined]
    return llm.engine.pool.num_free == llm.engine.plan.num_blocks and pages == [w.pages for w in llm.plan.windows]


def test_it_writes_what_the_oracle_would(folder: Path) -> None:
    """Prompts in chunks, across the window's edge, and what is written after them."""
    llm = load(folder, max_step_tokens=20, max_seqs=4)
    for prompt in (PROMPTS[0], PROMPTS[15]):
        found, after = read(llm, prompt)
        scores = oracle_logits(folder, [*prompt, *after]).log_softmax(-1)
        expected = scores[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)
        assert scores[len(prompt) - 1 : -1].argmax(-1).tolist() == after


def read(llm: LLM, prompt: list[int]) -> tuple[torch.Tensor, list[int]]:
    """The log-probabilities of a prompt's ids, and what is written after it."""
    llm.engine.add(prompt, SamplingParams(12, prompt_logprobs=0, ignore_eos=True))
    after, reported = [], []
    while llm.engine.has_work:
        for output in llm.engine.step():
            after += output.ids
            reported += output.prompt_logprobs or []
    return torch.tensor([each.logprob for each in reported if each]), after


@pytest.mark.parametrize("dtype", DTYPES)
def test_sixteen_requests_write_what_each_writes_alone(folder: Path, dtype: str) -> None:
    """Alone without a prefix cache; together with one, once cold and once warm."""
    expected = alone(load(folder, dtype=dtype, prefix_cache=False))
    assert len({tuple(ids) for ids in expected}) > 8 and len({i for ids in expected for i in ids}) > 16
    together = load(folder, dtype=dtype)
    assert written(together) == expected and written(together) == expected
    assert all_is_free(together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_drafts_change_no_text(folder: Path, dtype: str) -> None:
    plain, drafted = load(folder, dtype=dtype), load(folder, dtype=dtype, spec="4", ngram=True)
    expected, found = ([c.ids for r in llm.generate(TWO_IDS, TWO) for c in r.completions] for llm in (plain, drafted))
    assert found == expected
    steps = drafted.engine.drafting.so_far()
    assert steps.num_spec_steps > 4 and all_is_free(drafted)


def test_requests_that_give_their_blocks_back_write_the_same(folder: Path) -> None:
    """They are admitted with pages for their windows, and then grow to more blocks than there are for two."""
    tight, roomy = (load(folder, dtype="auto", kv_tokens=tokens, max_model_len=256) for tokens in (256, 2048))
    params = SamplingParams(max_tokens=170, ignore_eos=True)
    found, expected = ([r.completions[0].ids for r in llm.generate(PROMPTS[:3], params)] for llm in (tight, roomy))
    assert found == expected
    assert tight.engine.scheduler.num_preempted and all_is_free(tight)


CODED = {"kv": "turboquant", "tq_mode": "full_tq", "tq_key_bits": 5, "tq_value_bits": 5}


@pytest.mark.parametrize("kv", [{"kv": "fp8"}, CODED], ids=["fp8", "turboquant"])
def test_other_caches_run_and_are_near(folder: Path, kv: dict[str, Any]) -> None:
    """Rounded keys and values give another text, and a tiny router other experts; what a prompt gives is near."""
    exact, rounded = load(folder), load(folder, **kv)
    (right, _), (near, _) = (read(llm, PROMPTS[15]) for llm in (exact, rounded))
    assert len(near) == len(PROMPTS[15]) - 1 and not torch.equal(right, near)
    assert torch.corrcoef(torch.stack((right, near)))[0, 1] > 0.9
    some = range(0, 16, 5)
    assert written(rounded, some) == written(rounded, some) and all_is_free(rounded)


def test_the_plan_counts_the_experts(folder: Path) -> None:
    llm = load(folder)
    held = sum(matrix.nbytes for matrix in llm.engine.runner.model.matrices)
    table = llm.engine.runner.model.embedding
    assert isinstance(table, torch.Tensor)
    config = llm.engine.runner.model.config
    held += rope_bytes(config, llm.plan.max_model_len) + (0 if config.tie_embeddings else table.nbytes)
    assert llm.plan.memory.weights == pytest.approx(held, rel=0.1)


@needs_native
def test_a_kind_of_cache_that_the_kernels_lack_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="kv fp8 does not run on the CPU kernels"):
        load(folder, dtype="quantised", kv="fp8")
