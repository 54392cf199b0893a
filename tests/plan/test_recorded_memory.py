"""What recorded steps of the CPU kernels write to, beside what the plan counts for it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from sparkdraft import LLM, SamplingParams
from sparkdraft.kernels import native
from sparkdraft.kernels.native.graph import Arena
from sparkdraft.plan.memory import GRAPHS

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason="needs the CPU kernels")


def arenas() -> dict[int, int]:
    found = [each for each in gc.get_objects() if type(each) is Arena]
    return {id(each): sum(chunk.nbytes for chunk in each._chunks) for each in found}


def test_recordings_of_the_deepest_drafts_fit_what_is_planned(smollm2_path: Path) -> None:
    before = arenas()
    llm = LLM("smollm2", device="cpu", spec="15", kv_tokens=2048, max_model_len=256, max_seqs=8)
    prompts = [[100 * each + n for n in range(8)] for each in range(8)]
    llm.generate(prompts, SamplingParams(20, ignore_eos=True))  # the first drafts are 15: all of them could be kept
    taken = sum(size for each, size in arenas().items() if each not in before)
    limits, layers = GRAPHS["native"], 30 + 2 * 5  # of the target and of the drafter
    planned = llm.engine.plan.memory.graphs - limits.most * limits.bytes_each * layers
    assert 0.8 * planned < taken < 1.1 * planned, (taken, planned)
