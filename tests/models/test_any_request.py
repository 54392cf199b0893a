"""Any mix of requests writes what each writes alone without drafts: whatever they ask of their logits, whoever joins,
leaves, is aborted or preempted, and whether the host or the device takes the steps.

The slow cases are 2,000 requests over all architectures.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.core import FinishReason, GrammarSpec, StepOutput
from sparkdraft.engine.engine import Engine
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab
from tests.fakes.steps import on_device
from tests.models.recurrent import load
from tests.models.tiny import write_tiny

VARIANTS = ["llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "gemma3", "gemma4", "qwen3_5"]
VARIANTS += ["qwen3_5_moe", "qwen3_next"]
PREEMPTED = {"llama", "qwen2", "qwen3", "qwen3_moe"}  # the others have windows or states, which admit fewer requests
FEW = {"qwen3", "qwen3_5"}  # in every run
REQUESTS = 84  # per variant and way of stepping: 2,016 in all
CONTEXT = 192
Jobs = dict[str, tuple[list[int], SamplingParams]]
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
CASES = [
    pytest.param(variant, where, 24 if often else REQUESTS, marks=[] if often else [pytest.mark.slow])
    for often in (True, False)
    for variant in VARIANTS
    for where in ("host", "device")
    if variant in FEW or not often
]
CASES += [pytest.param(each, "cuda", REQUESTS, marks=[pytest.mark.gpu, no_gpu]) for each in VARIANTS]


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings are made when they are needed: most would not be."""
    monkeypatch.setattr(Engine, "warm_up", lambda self: None)


def some_params(rng: random.Random) -> dict[str, Any]:
    """What one request asks for, without its length."""
    asked: dict[str, Any] = {"seed": rng.randrange(2**32), "ignore_eos": rng.random() < 0.7}
    if rng.random() < 0.6:
        asked |= {"temperature": rng.choice([0.3, 0.8, 1.2])}
        asked |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.8, "top_k": 20}])
    if rng.random() < 0.4:
        asked |= rng.choice([{"presence_penalty": 1.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.3}])
    if rng.random() < 0.2:
        asked["logit_bias"] = {rng.randrange(259): rng.choice([-100.0, 4.0]) for _ in range(3)}
    if rng.random() < 0.2:
        asked["min_tokens"] = rng.randint(1, 6)
    if rng.random() < 0.2:
        asked["stop_ids"] = [rng.randrange(259) for _ in range(4)]
    if rng.random() < 0.2:
        asked["logprobs"] = rng.choice([0, 2, 20])
    if rng.random() < 0.1:
        asked["prompt_logprobs"] = 1
    if rng.random() < 0.15:
        asked["grammar"] = GrammarSpec("regex", "[a-z ,.]{3,40}")
    if rng.random() < 0.1:
        asked["n"] = 2
    return asked


class Written:
    """What the texts of one request have said so far."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.prompt: list[Any] | None = None
        self.finish: dict[int, FinishReason] = {}

    def add(self, output: StepOutput) -> None:
        index = output.index
        self.ids.setdefault(index, []).extend(output.ids)
        self.text[index] = self.text.get(index, "") + output.text
        self.logprobs.setdefault(index, []).extend(output.logprobs or ())
        self.prompt = output.prompt_logprobs or self.prompt
        if output.finish:
            self.finish[index] = output.finish


def write_alone(llm: LLM, prompt: list[int], params: SamplingParams) -> Written:
    engine, written = llm.engine, Written()
    engine.add(prompt, params, "alone")
    while engine.has_work:
        for output in engine.step():
            written.add(output)
    return written


def write_together(
    llm: LLM, jobs: dict[str, tuple[list[int], SamplingParams]], rng: random.Random
) -> dict[str, Written]:
    engine, written, waiting = llm.engine, {name: Written() for name in jobs}, list(jobs)
    open_: set[str] = set()
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.5:
            open_.add(waiting[0])
            engine.add(*jobs[waiting[0]], waiting.pop(0))
        if open_ and rng.random() < 0.01:
            engine.abort(rng.choice(sorted(open_)))
        for output in engine.step() if engine.has_work else ():
            written[output.request_id].add(output)
            if len(written[output.request_id].finish) == jobs[output.request_id][1].n:
                open_.discard(output.request_id)
    return written


def same_scores(ours: list[Any], theirs: list[Any]) -> bool:
    """An id may be reported in place of one as likely."""
    return all(
        (a is None and b is None)
        or (
            (a.id == b.id and abs(a.logprob - b.logprob) < 1e-3)
            and all(abs(x[1] - y[1]) < 1e-3 for x, y in zip(a.top, b.top, strict=True))
        )
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize(("variant", "where", "count"), CASES)
def test_each_equals_itself_alone(variant: str, where: str, count: int, tmp_path: Path) -> None:
    rng = random.Random(f"{variant} {where}")
    target = write_tiny(tmp_path / "target", variant, **({"head_dim": 64} if where == "cuda" else {}))
    config = json.loads((target / "config.json").read_text())
    config = config.get("text_config", config)
    shape = body("sf", window=16, hidden_size=config["hidden_size"], vocab_size=config["vocab_size"], head_dim=64)
    described = zlab(shape, num_target_layers=config["num_hidden_layers"])
    drafter = write_drafter(tmp_path / "drafter", described, random_tensors(shape))
    on_gpu = where == "cuda"
    options = {
        "device": "cuda" if on_gpu else "cpu",
        "dtype": "float32" if on_gpu else "auto",
        "max_model_len": CONTEXT,
    }
    alone = load(target, prefix_cache=False, **options)
    # Few blocks, so that some requests are preempted.
    together = load(
        target, spec="auto", drafter=str(drafter), ngram=True, **(options | {"kv_tokens": 304, "max_seqs": 6})
    )
    if where == "device":
        on_device(together)
    jobs, shared = {}, [rng.randrange(3, 250) for _ in range(48)]
    for i in range(count):
        prompt = shared[: rng.choice([0, 0, 20, 48])] + [rng.randrange(3, 250) for _ in range(rng.randint(1, 60))]
        depth = rng.choice([None, None, 0, 3, 7])
        length = rng.randint(6, 16 if on_gpu else 40)
        if not on_gpu and rng.random() < 0.08:
            length = CONTEXT  # it ends with the context
        params = SamplingParams(max_tokens=length, num_draft=depth, **some_params(rng))
        jobs[f"r{i}"] = prompt, params
    free = together.engine.pool.num_free
    for name, found in write_together(together, jobs, rng).items():
        prompt, params = jobs[name]
        expected = write_alone(alone, prompt, SamplingParams(**{**fields_of(params), "num_draft": 0}))
        for index, finish in found.finish.items():
            ids, whole = found.ids[index], expected.ids[index]
            if finish is FinishReason.ABORT:
                assert ids == whole[: len(ids)], (name, index, params)
                continue
            assert ids == whole and found.text[index] == expected.text[index], (name, index, params)
            assert finish is expected.finish[index], (name, index, params)
            assert same_scores(found.logprobs[index], expected.logprobs[index]), (name, index, params)
        if FinishReason.ABORT not in found.finish.values() and params.prompt_logprobs is not None:
            assert found.prompt is not None and expected.prompt is not None
            assert same_scores(found.prompt, expected.prompt), (name, params)
    assert together.engine.pool.num_free == free
    assert together.engine.drafting.so_far().num_draft_tokens
    if count >= REQUESTS and variant in PREEMPTED:
        assert together.engine.scheduler.num_preempted


def fields_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__slots__}  # type: ignore[attr-defined]
