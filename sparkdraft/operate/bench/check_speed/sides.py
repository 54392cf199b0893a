"""Sides of a comparison that lines of both devices share: equal requests step by step, and whole requests."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from itertools import cycle, islice

from sparkdraft.core import SamplingParams
from sparkdraft.llm import LLM
from sparkdraft.operate.bench.offline import Bench, Ceilings, Load, throughput
from sparkdraft.operate.bench.prompts import chat_prompts, read_prompts
from sparkdraft.operate.bench.ratios import Metrics, Side

UNKNOWN = Ceilings(1.0, None)  # a Bench needs ceilings; the lines measure theirs beside each pass
SAMPLED = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
PENALISED = replace(SAMPLED, presence_penalty=1.5)
CLASSES = ("code", "qa", "json", "prose")


def asking(bench: Bench, params: SamplingParams) -> Bench:
    """Return a bench of the same engine whose requests have other parameters."""
    return Bench(bench.engine, bench.model, UNKNOWN, None, params)


def warm(bench: Bench, load: Load) -> Side:
    """Return one side of a comparison, after a first pass that compiles kernels and captures steps."""
    bench.check(load)
    bench.run(load)
    return partial(_speeds, bench, load)


def _speeds(bench: Bench, load: Load) -> Metrics:
    result = bench.run(load)
    return {"tok_s": result.tok_s, "prompt_tok_s": load.streams * load.prompt_len / result.prefill}


def whole_requests(llm: LLM, streams: int, requests: int, params: SamplingParams) -> Metrics:
    """Run the same requests each time, class by class. Seeds make sampled text the same with drafts and without."""
    texts = read_prompts(0)
    mixed = [text for each in zip(*(texts[name] for name in CLASSES), strict=True) for text in each]
    prompts = chat_prompts(llm, list(islice(cycle(mixed), requests)))
    seeded = [replace(params, seed=i) for i in range(requests)]
    result = throughput(llm.engine, zip(prompts, seeded, strict=True), streams)
    return {"tok_s": result.tok_s, "first_s": statistics.median(result.first)}
