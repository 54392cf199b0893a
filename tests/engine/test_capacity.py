"""A coded cache holds what its plan says: contexts of 32,000 tokens, as many at once as its memory was planned for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparkdraft.config import EngineConfig
from sparkdraft.core import SamplingParams
from sparkdraft.engine.build import build_engine
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.machine import plan_here
from sparkdraft.operate.bench.random_model import RandomCheckpoint, SilentTokenizer, shape

CONTEXT, WRITTEN, BLOCK = 32000, 64, 16
# 8 K/V heads of 128. The number of layers does not change the ratio.
MODEL = replace(shape("qwen3-0.6b"), layers=shape("qwen3-0.6b").layers[:4])
POOL = 4 << 30  # bytes for everything; the rest of the GPU is not to be touched


def made(kv: str) -> Engine:
    free = torch.cuda.mem_get_info()[0]
    config = EngineConfig(
        model="qwen3-0.6b", device="cuda", kv=kv, memory_fraction=POOL / free, max_seqs=30, max_model_len=CONTEXT + 768,
        prefix_cache=False, ngram=False, spec="off",
    )  # fmt: skip
    plan = plan_here(config, MODEL)
    assert plan.memory.total <= POOL
    return build_engine(plan, config, MODEL, RandomCheckpoint(MODEL, "cuda"), SilentTokenizer())


def held_at_once(engine: Engine) -> int:
    """Tokens of requests that fill the pool, when all of them have written and none has ended."""
    room, lengths = engine.plan.num_blocks * BLOCK, []
    while room > 1024:
        lengths.append(min(CONTEXT, room - 512))
        room -= -(-(lengths[-1] + 512) // BLOCK) * BLOCK  # what it may write while the last prompts run
    generator = torch.Generator().manual_seed(1)
    names = set()
    for length in lengths:
        ids = torch.randint(0, MODEL.vocab_size, (length,), generator=generator).tolist()
        names.add(engine.add(ids, SamplingParams(max_tokens=500, ignore_eos=True)))
    waiting = set(names)
    while waiting:
        waiting -= {output.request_id for output in engine.step()}
    running = engine.scheduler.running
    assert {request.id for request in running} == names, "nobody gave way"
    tokens = sum(request.num_computed for request in running)
    for name in names:
        engine.abort(name)
    engine.step()
    return tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_four_times_the_tokens_are_held_at_once() -> None:
    tokens = {}
    for kv in ("exact", "turboquant"):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        engine = made(kv)
        torch.cuda.reset_peak_memory_stats()
        tokens[kv] = held_at_once(engine)
        assert torch.cuda.max_memory_allocated() - before <= 1.03 * POOL
        del engine
    print(f"tokens of 32,000-token contexts in {POOL / 2**30:.0f} GiB: {tokens}")
    assert tokens["turboquant"] >= 4.2 * tokens["exact"] > 4.2 * 32000
