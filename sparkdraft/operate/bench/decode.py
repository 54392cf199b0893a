"""Decode speed alone: the two passes of bench offline that a comparison of formats needs."""

from __future__ import annotations

import gc
import statistics
from dataclasses import asdict, dataclass

import torch

from sparkdraft.operate.bench.offline import WARM_STEPS, Bench, Counted, Load, Report


@dataclass(frozen=True, slots=True)
class Speed:
    streams: int
    context: int
    decode_tok_s: float  # all streams together
    step_ms: float  # median
    floor_ms: float  # bytes that a step reads, including the format's own K/V, over measured bandwidth
    share: float  # floor over measured
    prefill_tok_s: float

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


class DecodeBench(Bench):
    """Measures decode speed alone: only the two passes of bench offline that this needs."""

    def decode(self, load: Load, report: Report) -> Speed:
        warm = min(load.output_len, WARM_STEPS)
        progress = Counted(report, warm + load.output_len)
        report(0, progress.total)
        self._run(load, warm, progress)
        measured = self._run(load, load.output_len)
        step, floor = statistics.median(measured.steps), sum(self.floor_bytes(load).values()) / self.ceilings.bandwidth
        tokens, prompts = measured.tokens / len(measured.steps), load.streams * load.prompt_len
        speeds = (tokens / step, step * 1e3, floor * 1e3, floor / step, prompts / measured.prefill)
        return Speed(load.streams, load.prompt_len, *speeds)


def release(device: str) -> None:
    """Free the memory of an engine that is no longer used, so that the next one plans with all free memory."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
