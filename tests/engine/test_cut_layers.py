"""Blocks that the device cuts, of models whose layers keep more than keys and values: dead rows leave nothing behind.

Drafts are the known text with mistakes, and how sure they are said to be is unlike from step to step, so that blocks
are cut anywhere, before the first mistake and after it. On a GPU the steps are recorded.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.core import AUTO, Request
from sparkdraft.engine.drafting import Drafting, Outcome
from sparkdraft.engine.engine import Engine
from tests.drafters.tiny_mtp import write_target
from tests.fakes.steps import device_steps, on_device
from tests.models.known_text import KnownText
from tests.models.recurrent import all_is_free, load, texts

LANES, DEPTH, OUTPUT = 4, 5, 40
PROMPTS = [[(31 * k + 7 * i * i + i) % 250 + 3 for i in range(23 + k)] for k in range(LANES - 1)]  # a lane is left over
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])]


def params(depth: int) -> list[SamplingParams]:
    """They end one after the other, and one of them is sampled."""
    sampling = [{"temperature": 0.7 * (i == 1), "seed": i, "num_draft": depth} for i in range(len(PROMPTS))]
    return [SamplingParams(OUTPUT + 9 * i, ignore_eos=True, **each) for i, each in enumerate(sampling)]  # type: ignore[arg-type]


def dear_rows(drafting: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step another price per row, and blocks of 5 for all that have room for them."""
    rng, budget, deepest = random.Random(0), drafting.budget, drafting.max_depth

    def depths(requests: list[Request]) -> dict[Request, int]:
        left = {r: min(DEPTH, r.max_output - len(r.output_ids) - 1) for r in requests}
        return {r: depth for r, depth in left.items() if depth > 0 and drafting._asked(r) is None}

    def terms(slots: list[Any], wanted: list[int], tokens: int) -> Any:
        price, fit = rng.choice([0.0, 0.1, 0.3, 0.6]), [0.8, -0.2, *[0.0] * deepest]
        fair = np.array([rng.choice([-1.0, 0.7, 1.0]) for _ in slots])
        return np.array([fit, fit]), fair, price * np.arange(1 + sum(wanted))

    monkeypatch.setattr(drafting, "depths", depths)
    monkeypatch.setattr(budget, "terms", terms)
    for name in ("expect", "measured", "record"):
        monkeypatch.setattr(budget, name, lambda *given: None)


def cutting(folder: Path, device: str, **options: Any) -> LLM:
    llm = load(folder, drafter="mtp", spec="auto", cut="on", device=device, max_seqs=LANES, **options)
    if device == "cpu":
        on_device(llm)
        device_steps(llm)._size = lambda num_requests, depth=0: LANES  # type: ignore[method-assign]
    return llm


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"kv": "fp8"}, {"kv": "turboquant"}], ids=["exact", "fp8", "turboquant"])
@pytest.mark.parametrize("variant", ["qwen3_5_moe", "qwen3_next"])
def test_cut_blocks_leave_states_experts_and_keys_as_plain_steps_do(
    variant: str, options: dict[str, Any], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (device, options.get("kv")) == ("cuda", "turboquant"):
        pytest.skip("a GPU's kernels take heads of 64 numbers or more")
    monkeypatch.setattr(Engine, "warm_up", lambda self: None)
    folder, _ = write_target(tmp_path, variant)
    if device == "cuda" or options.get("kv") == "fp8":  # in half precision a last bit may depend on the rows
        options = options | {"dtype": "float32"}
    plain = texts(load(folder, max_seqs=LANES, device=device, **options), PROMPTS, params(0))
    llm, seen = cutting(folder, device, **options), list[Outcome]()
    drafting, slots = llm.engine.drafting, device_steps(llm).slots
    assert slots.cuts
    known = [prompt + text for prompt, text in zip(PROMPTS, plain, strict=True)]
    monkeypatch.setattr(slots, "_draft", KnownText(slots, known, llm.model_config.vocab_size))
    dear_rows(drafting, monkeypatch)
    learn = drafting.learn_drafted
    monkeypatch.setattr(drafting, "learn_drafted", lambda steps, *rest: (seen.extend(steps), learn(steps, *rest)))
    assert texts(llm, PROMPTS, params(AUTO)) == plain and all_is_free(llm)
    assert len({o.verified for o in seen if o.verified < o.drafted}) > 2, "blocks are cut at several places"
    assert any(o.accepted < o.verified for o in seen) and sum(o.accepted for o in seen) > OUTPUT
