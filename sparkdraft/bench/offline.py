"""Decode and prefill speed through the real engine, against the machine's measured memory bandwidth.

A decode step must read every weight and the K/V of every sequence once, so bytes over bandwidth is a floor that no
engine passes; speed is reported as a share of it. Prompts are random ids, so nothing repeats and no prefix is found.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass

import torch

from sparkdraft.core import SamplingParams
from sparkdraft.engine.engine import Engine
from sparkdraft.models.config import ModelConfig
from sparkdraft.plan.memory import kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a batch size at a prompt length."""

    streams: int
    prompt_len: int
    prefill_tok_s: float
    decode_tok_s: float  # all streams together
    step_ms: float  # median of the decode steps
    floor_ms: float  # bytes read over measured bandwidth
    share: float  # floor over measured

    def as_dict(self) -> dict[str, float]:
        return {k: round(v, 4) for k, v in asdict(self).items()}


def measure(
    engine: Engine, model: ModelConfig, bandwidth: float, streams: int, prompt_len: int, output_len: int
) -> Row:
    """One run of 'streams' equal requests, from empty to done; decode counts while all of them decode."""
    max_tokens = output_len + head_start(engine, streams, prompt_len)
    generator = torch.Generator().manual_seed(prompt_len * 1000 + streams)
    for _ in range(streams):
        ids = torch.randint(0, model.vocab_size, (prompt_len,), generator=generator).tolist()
        engine.add(ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    begin = time.perf_counter()
    steps: list[float] = []
    begun: set[str] = set()  # streams that have their first token
    prefill = 0.0
    while engine.has_work:
        before = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        if len(begun) < streams:
            begun |= {output.request_id for output in outputs}
            prefill = now - begin
        elif len(outputs) == streams:
            steps.append(now - before)
    step = statistics.median(steps)
    floor = floor_seconds(engine, model, bandwidth, streams, prompt_len + output_len // 2)
    return Row(
        streams, prompt_len, streams * prompt_len / prefill, streams / step, step * 1e3, floor * 1e3, floor / step
    )


def head_start(engine: Engine, streams: int, prompt_len: int) -> int:
    """Tokens that the first stream may write while the last one's prompt still runs."""
    return 1 + streams * prompt_len // max(engine.plan.max_rows - streams, 1)


def floor_seconds(engine: Engine, model: ModelConfig, bandwidth: float, streams: int, context: int) -> float:
    kv_itemsize = engine.runner.kv.k.element_size()
    kv = streams * context * kv_bytes_per_token(model, kv_itemsize)
    return (engine.runner.model.nbytes + kv) / bandwidth
