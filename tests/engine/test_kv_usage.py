"""The share of the caches that /metrics shows: bytes that requests hold, of blocks, pages and states, worked out from
what the groups themselves count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkdraft.backend import GROWTH
from sparkdraft.core import SamplingParams
from sparkdraft.engine.backend import kv_usage
from sparkdraft.engine.build import held_units
from sparkdraft.llm import LLM
from tests.models.tiny import write_tiny

SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "spec": "off", "threads": 1, "prefix_cache": False}
SMALL |= {"max_seqs": 2, "max_step_tokens": 64, "max_model_len": 256, "block_size": 16}


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **SMALL | options)


def begin(llm: LLM, tokens: int) -> str:
    name = llm.engine.add([3 + i % 200 for i in range(tokens)], SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(-(-tokens // 64)):
        llm.engine.step()
    return name


def finish(llm: LLM, name: str) -> None:
    llm.engine.abort(name)
    while llm.engine.has_work:
        llm.engine.step()


@pytest.mark.parametrize(
    ("variant", "options", "groups"),
    [
        ("qwen3", {}, 0),
        ("qwen2-windows", {}, 1),
        ("qwen3_next", {}, 1),
        ("gemma4", {}, 1),
        ("qwen3", {"kv": "turboquant", "tq_ring_capacity": 32}, 1),
    ],
)
def test_what_is_held_is_counted(tmp_path: Path, variant: str, options: dict[str, Any], groups: int) -> None:
    llm = load(write_tiny(tmp_path, variant, shards="1GB"), **options)
    engine, plan = llm.engine, llm.plan
    units = held_units(plan)
    assert len(units) == len(engine.scheduler.groups.parts) == groups
    assert [count for count, _ in units] == list(engine.scheduler.groups.num_free), "nobody runs, so all are free"
    assert kv_usage(engine) == 0
    name = begin(llm, 40)
    blocks = engine.pool.num_blocks - engine.pool.num_free
    block_bytes = plan.memory.kv // plan.num_blocks
    taken = [count - free for (count, _), free in zip(units, engine.scheduler.groups.num_free, strict=True)]
    assert blocks == 3 and all(taken), "41 rows in blocks of 16"
    held = blocks * block_bytes + sum(n * size for n, (_, size) in zip(taken, units, strict=True))
    total = plan.num_blocks * block_bytes + sum(count * size for count, size in units)
    assert kv_usage(engine) == pytest.approx(held / total) and 0 < held < total
    if variant == "qwen3_next":  # one of two states: far more than blocks alone would say
        assert kv_usage(engine) > 2 * blocks / plan.num_blocks * (plan.num_blocks * block_bytes / total)
    engine.switch(GROWTH, False)
    assert engine.pool.num_held and kv_usage(engine) == pytest.approx(held / total), "no request holds those"
    finish(llm, name)
    assert kv_usage(engine) == 0
