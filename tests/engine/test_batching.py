"""64 real requests through a real model in a cache too small for them: each writes what it writes alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from sparkdraft.core import SamplingParams
from sparkdraft.llm import LLM

FORMS = [
    pytest.param({"dtype": "float32"}, id="float32", marks=pytest.mark.slow),
    pytest.param({"dtype": "quantised"}, id="quantised"),
    pytest.param({"dtype": "float32", "device": "cuda"}, id="cuda", marks=pytest.mark.gpu),
    pytest.param({"dtype": "float32", "device": "cuda", "kv": "fp8"}, id="cuda-fp8", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=FORMS)
def options(request: pytest.FixtureRequest) -> dict[str, str]:
    if request.param.get("device") == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return request.param


def jobs() -> dict[str, tuple[list[int], SamplingParams]]:
    rng = random.Random(3)
    made = {}
    for i in range(64):
        prompt = [9] * rng.choice([0, 0, 20, 40]) + [rng.randrange(3, 259) for _ in range(rng.randint(1, 50))]
        params = SamplingParams(
            max_tokens=rng.randint(1, 40),
            temperature=rng.choice([0.0, 0.0, 0.8]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            seed=i,
        )
        made[f"r{i}"] = (prompt, params)
    return made


def test_each_request_writes_what_it_writes_alone(tiny_qwen3: Path, options: dict[str, str]) -> None:
    crowd = LLM(str(tiny_qwen3), max_seqs=8, max_step_tokens=48, kv_tokens=320, **options).engine
    alone = LLM(str(tiny_qwen3), max_seqs=1, max_step_tokens=512, prefix_cache=False, **options)
    rng, waiting, out, aborted = random.Random(4), list(jobs()), {}, set()
    free, num_preempted = crowd.pool.num_free, 0
    schedule = crowd.scheduler.schedule

    def counted(depths: object) -> object:
        nonlocal num_preempted
        batch = schedule(depths)  # type: ignore[arg-type]
        num_preempted += len(batch.preempted) if batch else 0
        return batch

    crowd.scheduler.schedule = counted  # type: ignore[method-assign, assignment]
    while waiting or crowd.has_work:
        for _ in range(rng.randint(0, 2)):
            if waiting:
                crowd.add(*jobs()[waiting[-1]], request_id=waiting.pop())
        if rng.random() < 0.05 and crowd._by_id:
            aborted.add(name := rng.choice(list(crowd._by_id)))
            crowd.abort(name)
        for piece in crowd.step():
            out.setdefault(piece.request_id, []).extend(piece.ids)
    assert crowd.pool.num_free == free
    assert num_preempted > 0 and aborted, "the test must exercise preemption and abort"
    for name, (prompt, params) in jobs().items():
        expected = alone.generate([prompt], params)[0].completions[0].ids
        got = out.get(name, [])
        assert got == (expected[: len(got)] if name in aborted else expected), name


def test_prefix_cache_spares_the_shared_prompt_and_changes_nothing(tiny_qwen3: Path, options: dict[str, str]) -> None:
    llm = LLM(str(tiny_qwen3), max_model_len=512, **options)
    cold = LLM(str(tiny_qwen3), max_model_len=512, prefix_cache=False, **options)
    rng = random.Random(6)
    shared = [rng.randrange(3, 259) for _ in range(480)]
    params = SamplingParams(max_tokens=16)
    llm.generate([[*shared, 5, 6]], params)
    (second,) = llm.generate([[*shared, 7, 8, 9]], params)
    (plain,) = cold.generate([[*shared, 7, 8, 9]], params)
    assert second.completions[0].num_cached == 480
    assert plain.completions[0].num_cached == 0
    assert second.completions[0].ids == plain.completions[0].ids


def test_prompt_logprobs_in_chunks_equal_those_in_one_piece(tiny_qwen3: Path, options: dict[str, str]) -> None:
    prompt = [random.Random(7).randrange(3, 259) for _ in range(300)]
    params = SamplingParams(max_tokens=2, prompt_logprobs=2)
    whole = LLM(str(tiny_qwen3), max_step_tokens=512, **options).generate([prompt], params)[0].completions[0]
    pieces = (
        LLM(str(tiny_qwen3), max_step_tokens=70, max_seqs=4, **options).generate([prompt], params)[0].completions[0]
    )
    assert whole.prompt_logprobs is not None and pieces.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == 300 and whole.prompt_logprobs[0] is None
    for a, b, token in zip(whole.prompt_logprobs[1:], pieces.prompt_logprobs[1:], prompt[1:], strict=True):
        assert a is not None and b is not None
        assert a.id == token and a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_prompt_logprobs_of_one_id_are_none(tiny_qwen3: Path, options: dict[str, str]) -> None:
    """Such a step is replayed, so it leaves no hidden states to make them of."""
    llm = LLM(str(tiny_qwen3), kv_tokens=1024, spec="off", **options)
    llm.engine.runner._residual = None  # as after a start in which every prompt was replayed
    text = llm.generate([[5]], SamplingParams(max_tokens=2, prompt_logprobs=0))[0].completions[0]
    assert text.prompt_logprobs == [None]


def test_stream_and_generate_agree_and_leaving_a_stream_aborts(tiny_qwen3: Path, options: dict[str, str]) -> None:
    llm = LLM(str(tiny_qwen3), **options)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    pieces = list(llm.stream([5, 6, 7], params))
    (result,) = llm.generate([[5, 6, 7]], params)
    assert "".join(p.text for p in pieces) == result.text
    for _ in llm.stream([5, 6, 7], params):
        break
    llm.engine.step()
    assert not llm.engine.has_work and llm.engine.pool.num_free == llm.plan.num_blocks
