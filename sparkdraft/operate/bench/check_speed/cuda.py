"""Lines for a GPU: Qwen3-8B's shape with random weights, compared with the machine's ceilings and with itself.

Speeds are measured by operate/bench/offline.py, ceilings in the same rounds. Nothing is downloaded: the embedded
model's line is skipped if its file is not in the cache.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from sparkdraft.cache.formats import EXACT, smallest_format
from sparkdraft.config import NO_PROFILE, EngineConfig
from sparkdraft.core import AUTO, SamplingParams, UserError
from sparkdraft.llm import LLM
from sparkdraft.operate.bench import in_process, streaming
from sparkdraft.operate.bench.accept import decode
from sparkdraft.operate.bench.check_speed.check import Group, Measure, Names, Skipped, for_streams
from sparkdraft.operate.bench.check_speed.served import serving
from sparkdraft.operate.bench.check_speed.sides import (
    PENALISED,
    SAMPLED,
    UNKNOWN,
    asking,
    warm,
    whole_requests,
)
from sparkdraft.operate.bench.offline import Bench, Load
from sparkdraft.operate.bench.prompts import chat_prompts, read_prompts
from sparkdraft.operate.bench.random_model import drafter_shape, random_engine, shape
from sparkdraft.operate.bench.ratios import Metrics, Progress, Sample, against, in_turn, joined, part
from sparkdraft.operate.bench.streaming import Target
from sparkdraft.operate.bench.synthetic import Acceptance
from sparkdraft.operate.bench.traffic import Lengths, Planned, Record, Traffic
from sparkdraft.operate.forecast.rates import matmul_rate, memory_bandwidth
from sparkdraft.weights import hub

SMALLEST = smallest_format().name  # of the KV formats
ROUNDS = 3
ROOM = 512  # tokens of cache for each stream beyond its prompt and output
SERVED = {1: 6, 16: 64, 64: 192}  # streams -> requests of a pass
SERVED_PROMPT, SERVED_OUTPUT = Lengths(64, 512), Lengths(100, 300)  # tokens
SAMPLING = {"temperature": SAMPLED.temperature, "top_p": SAMPLED.top_p, "top_k": SAMPLED.top_k}
FIRST, FIRST_TOKEN = "server-first-token", 0.15  # seconds until 99 of 100 requests have their first token
EMBEDDED = "smollm2"
EMBEDDED_PROMPTS, EMBEDDED_LEN = 4, 128
EMBEDDED_STREAMS, EMBEDDED_TURNS = (1, 16, 64), 4  # and how many requests each stream runs, one after the other
EMBEDDED_KINDS = ("embedded-floor", "embedded-auto")
EMBEDDED_LOADS = {n: Load(n, prompt_len=64, output_len=128) for n in EMBEDDED_STREAMS}


@dataclass(frozen=True, slots=True)
class Setup:
    """The sizes that are measured, as in docs/numbers."""

    device: str = "cuda"
    dtype: str = "auto"
    model: str = "qwen3-8b"
    drafter: str = "dflash-5x"
    drafts: int = 15
    acceptance: float = 6.5  # synthetic: tokens per drafted step
    prompt_len: int = 256
    output_len: int = 64
    drafted_len: int = 256
    chunk: int = 8192  # the prompt that is read as one chunk
    context: int = 32_000  # the long context
    context_streams: int = 4
    context_len: int = 16  # tokens written after it

    def bench(self, streams: int, tokens: int, spec: str = "off", kv: str = EXACT, synthetic: bool = False) -> Bench:
        """spec: 'off' has no drafter, '0' a paused one. tokens: prompt and output of the longest load."""
        config = EngineConfig(
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            max_seqs=streams,
            kv=kv,
            kv_tokens=streams * (tokens + ROOM),
            prefix_cache=False,
            spec=spec,
            ngram=False,
        )
        model = shape(self.model)
        engine = random_engine(config, None if spec == "off" else drafter_shape(self.drafter, model))
        return Bench(engine, model, UNKNOWN, Acceptance(self.acceptance, self.drafts) if synthetic else None)


def short_contexts(setup: Setup, wanted: Names, progress: Progress) -> dict[str, Sample]:
    """Measure plain, sampled, paused and drafted steps at 1, 4 and 16 streams."""
    most, tokens = 16, setup.prompt_len + setup.drafted_len
    samples: dict[str, Sample] = {}
    plain = setup.bench(most, tokens)
    kinds: dict[str, Callable[[], Bench]] = {
        "floor": lambda: plain,
        "sampled": lambda: asking(plain, SAMPLED),
        "penalised": lambda: asking(plain, PENALISED),
        "paused": lambda: setup.bench(most, tokens, spec="0"),
        "wrong": lambda: setup.bench(most, tokens, spec="auto"),
        "drafted": lambda: setup.bench(most, tokens, spec=str(setup.drafts), synthetic=True),
    }
    for kind, make in kinds.items():
        counts = {n: name for n in (1, 4, most) if (name := for_streams(kind, n)) in wanted}
        bench = make() if counts else plain
        for streams, name in counts.items():
            before, total = ROUNDS * len(samples), ROUNDS * len(wanted)
            samples[name] = _compare(setup, kind, plain, bench, streams, part(progress, before, total))
    return samples


def _compare(setup: Setup, kind: str, plain: Bench, bench: Bench, streams: int, progress: Progress) -> Sample:
    load = Load(streams, setup.prompt_len, setup.output_len)
    if kind == "floor":
        return _of_bandwidth(plain, load, progress)
    drafted = Load(streams, setup.prompt_len, setup.drafted_len) if kind == "drafted" else load
    return in_turn(warm(plain, load), warm(bench, drafted), ROUNDS, progress)["tok_s"]


def long_contexts(setup: Setup, wanted: Names, progress: Progress) -> dict[str, Sample]:
    """Compare a prompt's chunk with a matmul, and long contexts with the bandwidth and with the smallest cache."""
    samples: dict[str, Sample] = {}
    streams, tokens = setup.context_streams, setup.context + setup.context_len
    exact, total = setup.bench(streams, tokens), 2 * ROUNDS + 1
    if "prompt-of-matmul" in wanted:
        chunk = Load(1, setup.chunk, setup.context_len)
        samples["prompt-of-matmul"] = _of_matmul(exact, chunk, part(progress, 0, total))
    if "floor-32000-tokens" in wanted:
        alone = Load(1, setup.context, setup.context_len)
        samples["floor-32000-tokens"] = _of_bandwidth(exact, alone, part(progress, ROUNDS, total))
    metrics = {f"{SMALLEST}-32000-tokens": "tok_s", f"{SMALLEST}-prompt": "prompt_tok_s"}
    if names := wanted & metrics.keys():
        load, coded = Load(streams, setup.context, setup.context_len), setup.bench(streams, tokens, kv=SMALLEST)
        found = in_turn(warm(exact, load), warm(coded, load), 1, part(progress, 2 * ROUNDS, total))
        samples |= {name: found[metrics[name]] for name in names}
    return samples


def _of_bandwidth(bench: Bench, load: Load, progress: Progress) -> Sample:
    """Compare the bytes that a step must read per second with the bandwidth measured before and after."""
    warm(bench, load)

    def ceiling() -> Metrics:
        return {"bytes_s": memory_bandwidth(bench.engine.plan.device, torch.get_num_threads())}

    def reached() -> Metrics:
        result = bench.run(load)
        return {"bytes_s": sum(bench.floor_bytes(load, result.drafted, depth=result.depth).values()) / result.step}

    return in_turn(ceiling, reached, ROUNDS, progress)["bytes_s"]


def _of_matmul(bench: Bench, load: Load, progress: Progress) -> Sample:
    warm(bench, load)

    def ceiling() -> Metrics:
        return {"operations_s": matmul_rate()}

    def reached() -> Metrics:
        return {"operations_s": bench.prompt_operations(load) / bench.run(load).prefill}

    return in_turn(ceiling, reached, ROUNDS, progress)["operations_s"]


@dataclass(slots=True)
class ClosedLoop:
    """Sampled requests of drawn lengths, of which the next begins when one ends."""

    bench: Bench
    url: str
    model: str
    streams: int
    first: list[float] = field(default_factory=list)  # per pass over HTTP, when 99 of 100 had their first token

    def planned(self) -> list[Planned]:
        traffic = Traffic(SERVED_PROMPT, SERVED_OUTPUT, SERVED[self.streams])
        return traffic.plan(self.streams, self.bench.model.vocab_size)

    def in_process(self) -> Metrics:
        return _rate(*in_process.run(self.bench.engine, self.planned(), self.streams, SAMPLING, _ignore))

    def over_http(self) -> Metrics:
        records, seconds = asyncio.run(self._sent())
        if errors := [record.error for record in records if record.error]:
            raise UserError(f"the server did not answer a request: {errors[0]}")
        self.first.append(float(np.quantile([record.first for record in records], 0.99)))
        return _rate(records, seconds)

    async def _sent(self) -> tuple[list[Record], float]:
        target = Target(self.url, "", self.model, SAMPLING)
        try:
            return await streaming.run(target, self.planned(), self.streams, _ignore)
        finally:
            target.close()


def _rate(records: list[Record], seconds: float) -> Metrics:
    return {"tok_s": sum(record.tokens for record in records) / seconds}


def _ignore() -> None:
    pass


def server(setup: Setup, wanted: Names, progress: Progress) -> dict[str, Sample]:
    """Send requests over HTTP, and run them on an engine of this process, without drafts."""
    most, samples = max(SERVED), dict[str, Sample]()
    counts = [n for n in SERVED if {for_streams("server", n), for_streams(FIRST, n)} & wanted]
    bench = setup.bench(most, SERVED_PROMPT.high + SERVED_OUTPUT.high)
    bench.engine.warm_up()
    flags = {"shape": setup.model, "device": setup.device, "dtype": setup.dtype, "spec": "off", "max-seqs": most}
    flags["kv-tokens"] = bench.engine.plan.num_blocks * bench.engine.plan.block_size
    with serving(*(word for name, value in flags.items() for word in (f"--{name}", str(value)))) as url:
        for done, streams in enumerate(counts):
            loop = ClosedLoop(bench, url, setup.model, streams)
            loop.in_process()  # the server has had its first requests when it started
            found = in_turn(loop.in_process, loop.over_http, 1, part(progress, done, len(counts)))
            samples[for_streams("server", streams)] = found["tok_s"]
            samples[for_streams(FIRST, streams)] = against(FIRST_TOKEN, loop.first)
    return {name: sample for name, sample in samples.items() if name in wanted}


def embedded(wanted: Names, progress: Progress) -> dict[str, Sample]:
    """Run the embedded model and its drafter on code prompts, one after the other."""
    llm, found = _load_embedded(), []
    prompts = chat_prompts(llm, read_prompts(EMBEDDED_PROMPTS)["code"])
    for done, ids in enumerate(prompts):
        plain, auto = (partial(_one_stream, llm, ids, depth) for depth in (0, AUTO))
        auto()  # records the steps that this text needs
        found.append(in_turn(plain, auto, 1, part(progress, done, len(prompts)))["tok_s"])
    return {"embedded-drafted-code": joined(found)}


def embedded_streams(wanted: Names, progress: Progress, make: Callable[..., LLM] | None = None) -> dict[str, Sample]:
    """Run the embedded model at several streams: plain steps against the bandwidth, and the default against --spec
    off over sampled requests of all classes of prompts."""
    make = make or _load_embedded
    plain, samples = make(spec="off", max_seqs=max(EMBEDDED_STREAMS)), dict[str, Sample]()
    bench = Bench(plain.engine, plain.model_config, UNKNOWN)

    def rounds() -> Progress:
        return part(progress, ROUNDS * len(samples), ROUNDS * len(wanted))

    for streams, load in EMBEDDED_LOADS.items():
        if (name := for_streams("embedded-floor", streams)) in wanted:
            samples[name] = _of_bandwidth(bench, load, rounds())
    counts = {n: name for n in EMBEDDED_STREAMS if (name := for_streams("embedded-auto", n)) in wanted}
    auto = make(max_seqs=max(EMBEDDED_STREAMS)) if counts else plain
    for streams, name in counts.items():
        params = replace(SAMPLED, max_tokens=EMBEDDED_LEN)
        off, on = (partial(whole_requests, llm, streams, EMBEDDED_TURNS * streams, params) for llm in (plain, auto))
        off(), on()  # steps are captured and timed here
        samples[name] = in_turn(off, on, ROUNDS, rounds())["tok_s"]
    return samples


def _load_embedded(**options: Any) -> LLM:
    if hub.cached_path(EMBEDDED) is None:
        raise Skipped(f"the file of {EMBEDDED} is not in {hub.cache_dir()}, and nothing is fetched here")
    return LLM(EMBEDDED, device="cuda", prefix_cache=False, profile=NO_PROFILE, **options)


def _one_stream(llm: LLM, ids: list[int], depth: int) -> Metrics:
    written, seconds = decode(llm, ids, SamplingParams(EMBEDDED_LEN, num_draft=depth))
    return {"tok_s": (len(written) - 1) / seconds}


def _freed(measure: Measure, wanted: Names, progress: Progress) -> dict[str, Sample]:
    """Run a group and free its GPU memory before the next begins."""
    samples = measure(wanted, progress)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return samples


def groups(setup: Setup) -> tuple[Group, ...]:
    kinds = {"floor": (1, 4, 16), "sampled": (1, 16), "penalised": (16,), "paused": (1, 16), "wrong": (16,)}
    kinds |= {"drafted": (1, 4, 16)}
    short = tuple(for_streams(kind, n) for kind, counts in kinds.items() for n in counts)
    long = ("prompt-of-matmul", "floor-32000-tokens", f"{SMALLEST}-32000-tokens", f"{SMALLEST}-prompt")
    measures: dict[tuple[str, ...], Measure] = {
        short: partial(short_contexts, setup),
        long: partial(long_contexts, setup),
        (*(for_streams("server", n) for n in SERVED), for_streams(FIRST, 16)): partial(server, setup),
        ("embedded-drafted-code",): embedded,
        tuple(for_streams(kind, n) for kind in EMBEDDED_KINDS for n in EMBEDDED_STREAMS): embedded_streams,
    }
    return tuple(Group(names, partial(_freed, measure)) for names, measure in measures.items())
