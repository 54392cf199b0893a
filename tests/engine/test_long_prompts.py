"""A prompt of several chunks on a GPU: no step waits for another, and every layer's cache is as if each had."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparkdraft.config import EngineConfig
from sparkdraft.core import SamplingParams
from sparkdraft.engine.build import build_engine
from sparkdraft.engine.machine import plan_here
from sparkdraft.operate.bench.random_model import RandomCheckpoint, SilentTokenizer, shape

MODEL = replace(shape("qwen3-8b"), layers=shape("qwen3-8b").layers[:4])
CHUNK, NUM_CHUNKS = 1024, 4
SLEEP = 200_000_000  # cycles, about a tenth of a second: the device is behind the host, however fast it is


def prefilled(wait: bool) -> tuple[list[int], list[Tensor]]:
    """The first ids written after the prompt, and K and V of the prompt's rows in every layer."""
    length = CHUNK * NUM_CHUNKS
    config = EngineConfig(
        model="qwen3-8b",
        device="cuda",
        max_seqs=1,
        max_step_tokens=CHUNK,
        max_model_len=length + 64,
        ngram=False,
        spec="off",
    )
    plan = plan_here(config, MODEL)
    engine = build_engine(plan, config, MODEL, RandomCheckpoint(MODEL, "cuda"), SilentTokenizer())
    ids = torch.randint(0, MODEL.vocab_size, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    engine.add(ids, SamplingParams(max_tokens=8, ignore_eos=True))
    written: list[int] = []
    while len(written) < 2:
        torch.cuda._sleep(SLEEP)
        for output in engine.step():
            written += output.ids
        if wait:
            torch.cuda.synchronize()
    blocks = torch.tensor(engine.scheduler.running[0].blocks.tolist()[: length // plan.block_size], device="cuda")
    kv = engine.runner.kv
    return written, [cache[blocks].cpu() for cache in (*kv.k, *kv.v)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_four_chunks_fill_every_layers_cache_alike_with_and_without_waiting() -> None:
    ids, caches = prefilled(wait=True)
    again, unwaited = prefilled(wait=False)
    assert len(caches) == 2 * MODEL.num_layers
    for number, (one, other) in enumerate(zip(caches, unwaited, strict=True)):
        assert torch.equal(one, other), f"cache {number} of {len(caches)}"
    assert ids == again
