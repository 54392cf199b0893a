"""Drafters of any block size start and draft without changing the text; some published ones have blocks of 10.

The drafters are random, so nearly all drafts are refused: that is the hard half of losslessness.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.speculation.budget import depth_choices
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab
from tests.fakes.steps import on_device

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
PROMPTS = [[5, 6, 7, 8, 9, 10], [40, 41, 42]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])])
@pytest.mark.parametrize("block", [2, 5, 7, *(pytest.param(n, marks=pytest.mark.slow) for n in (9, 10, 11))])
def test_any_block_size_starts_and_writes_the_plain_text(
    block: int, device: str, tiny_qwen3: Path, tmp_path: Path
) -> None:
    folder = write_drafter(tmp_path / "drafter", zlab(body(), block), random_tensors(body()))
    options = {"device": device, "dtype": "float32", "threads": 1, "ngram": False, "max_seqs": 2}
    llm = LLM(str(tiny_qwen3), drafter=str(folder), **options)  # type: ignore[arg-type]
    engine = llm.engine
    if device == "cpu":  # where overlapped steps run eagerly, by the same code
        on_device(llm)
        engine.warm_up()
    texts = {}
    for depth in range(block):
        params = SamplingParams(max_tokens=24, num_draft=depth, ignore_eos=True)
        texts[depth] = [result.completions[0].ids for result in llm.generate(PROMPTS, params)]
    assert all(text == texts[0] for text in texts.values())
    assert engine.drafting.total.steps, "nothing was drafted"


@pytest.mark.parametrize("max_depth", range(1, 40))
def test_the_choices_hold_every_depth_that_can_be_asked_for(max_depth: int) -> None:
    for fixed in (None, 1, max_depth // 2, max_depth):
        choices = depth_choices(max_depth, fixed)
        assert choices == sorted(set(choices)) and choices[0] == 0 and choices[-1] == max_depth
        assert fixed is None or fixed in choices
        assert depth_choices(max_depth, fixed, chain=True) == list(range(max_depth + 1))
