"""Speed, latency and acceptance of any OpenAI-compatible server, by class of prompt and number of streams.

A fixed number of streams is kept busy until the prompts of a class are done: what one stream waits for is what a person
would wait for, and the sum is what the machine gives. If the server can switch drafting off per request, the same
prompts run plainly first, so that the speedup is of one machine in one state. Every prompt is sent once before anything
is measured, so that a prefix cache holds all of them, for every row alike. serve_prompts.jsonl was written for this.
bench/serve_client sends one request; bench/serve_report makes tables and charts.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sparkdraft.core import UserError
from sparkdraft.operate.bench.serve_client import Client, Drafting, Messages, Sample

PROMPTS = Path(__file__).with_name("serve_prompts.jsonl")
ALL = "all"
FEWEST = 8  # requests per class, unless told otherwise
WARM_TOKENS = 8
OFF = {"speculation": "off"}
Report = Callable[[str, int, int], None]  # (what runs now, requests done, requests in all)


@dataclass(frozen=True, slots=True)
class Settings:
    url: str
    api_key: str = field(default="", repr=False)
    model: str = ""  # empty: the first that is served
    streams: tuple[int, ...] = (1, 4, 8, 16)
    classes: tuple[str, ...] = ()  # empty: all
    output_len: int = 256
    requests: int = 0  # per class; 0: FEWEST, or as many as there are streams
    temperature: float = 0.0
    ignore_eos: bool = False

    def num_requests(self, streams: int) -> int:
        return self.requests or max(FEWEST, streams)

    def options(self, index: int) -> dict[str, Any]:
        """What a request adds to its prompt. With a seed a sampled answer is the same, drafted and plain."""
        sampled = {"temperature": self.temperature, "seed": index} if self.temperature else {}
        return sampled | ({"ignore_eos": True} if self.ignore_eos else {})


@dataclass(slots=True)
class Load:
    """The requests that ran together, in the order of their prompts, and how long all of them took."""

    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    drafting: Drafting | None = None  # None: not known

    def merge(self, other: Load) -> None:
        self.samples += other.samples
        self.seconds += other.seconds
        if other.drafting is not None:
            self.drafting = self.drafting or Drafting()
            self.drafting.add(other.drafting)

    def as_dict(self) -> dict[str, Any]:
        good = [sample for sample in self.samples if not sample.error]
        errors = [sample.error for sample in self.samples if sample.error]
        tokens = sum(sample.tokens for sample in good)
        drafting = self.drafting or Drafting()
        return {
            "requests": len(self.samples),
            "errors": len(errors),
            "first_error": errors[0] if errors else None,
            "tokens": tokens,
            "seconds": self.seconds,
            "tok_s": tokens / self.seconds if tokens else None,
            "tok_s_per_request": percentiles([s.tokens / (s.last - s.began) for s in good if s.last], 1.0),
            "ttft_ms": percentiles([s.first - s.began for s in good if s.first]),
            "tpot_ms": percentiles([t for s in good if (t := per_token(s)) is not None]),
            "latency_ms": percentiles([s.last - s.began for s in good if s.last]),
            "acceptance_length": drafting.length,
            "draft_acceptance_rate": drafting.accepted / drafting.drafted if drafting.drafted else None,
            "per_position": drafting.shares,
            "drafting_steps": drafting.steps if self.drafting is not None else None,
        }


@dataclass(slots=True)
class Cell:
    """One class at one number of streams."""

    name: str
    streams: int
    load: Load
    plain: Load | None = None

    def as_dict(self) -> dict[str, Any]:
        row = {"class": self.name, "streams": self.streams} | self.load.as_dict()
        if self.plain is None:
            return row
        plain = self.plain.as_dict()
        pairs = [(a, b) for a, b in zip(self.load.samples, self.plain.samples, strict=True) if not (a.error or b.error)]
        both = row["tok_s"] and plain["tok_s"]
        row |= {"plain": plain, "speedup": row["tok_s"] / plain["tok_s"] if both else None}
        return row | {"same_text": sum(a.text == b.text for a, b in pairs), "compared": len(pairs)}


@dataclass(slots=True)
class Result:
    """What was found out about the server, and the cells measured so far."""

    settings: Settings
    model: str = ""
    counted: bool = False  # whether tokens are counted as pieces of the stream
    source: str | None = None  # where acceptance comes from: "responses", "metrics" or nowhere
    can_switch: bool = False
    cells: list[Cell] = field(default_factory=list)

    def with_totals(self) -> list[Cell]:
        """The cells, and 'all' for each number of streams at which more than one class was measured."""
        return self.cells + [self._total(n) for n in self.settings.streams if self._count(n) > 1]

    def _count(self, streams: int) -> int:
        return sum(cell.streams == streams for cell in self.cells)

    def _total(self, streams: int) -> Cell:
        total = Cell(ALL, streams, Load(), Load() if self.can_switch else None)
        for cell in self.cells:
            if cell.streams == streams:
                total.load.merge(cell.load)
                if total.plain is not None and cell.plain is not None:
                    total.plain.merge(cell.plain)
        return total


async def measure(settings: Settings, result: Result, report: Report) -> None:
    """Fill 'result' one cell at a time, so that what was measured stays if the rest is interrupted."""
    prompts = read_prompts(settings.classes)
    async with Client(settings.url, settings.api_key, settings.model, max(settings.streams)) as client:
        report("asking what the server understands", 0, 1)
        probe = await client.open()
        result.model, result.counted = client.model, probe.counted
        result.can_switch = await client.can_switch(probe)
        if probe.drafting is not None:
            result.source = "responses"
        elif await client.counters() is not None:
            result.source = "metrics"
        bench = _Bench(settings, client, result, report)
        await bench.warm_up(prompts)
        for name, each in prompts.items():
            for streams in settings.streams:
                result.cells.append(await bench.cell(name, each, streams))


class _Bench:
    """Sends the requests and reports progress."""

    def __init__(self, settings: Settings, client: Client, result: Result, report: Report) -> None:
        self.settings, self.client, self.result, self.report = settings, client, result, report
        self.modes = 2 if result.can_switch else 1
        self.done, self.total, self.label = 0, 0, ""

    async def warm_up(self, prompts: dict[str, list[Messages]]) -> None:
        """Send every prompt that will be used once, with a short answer, in each mode."""
        most = max(map(self.settings.num_requests, self.settings.streams))
        used = [prompt for each in prompts.values() for prompt in islice(each, most)]
        measured = len(prompts) * sum(map(self.settings.num_requests, self.settings.streams))
        self.total = self.modes * (len(used) + measured)
        self.label, streams = "warming up", max(self.settings.streams)
        for plain in (False, True)[: self.modes]:
            load = await self.load(used, streams, WARM_TOKENS, plain)
            if all(sample.error for sample in load.samples):
                raise UserError(f"no request of the warm-up was answered; the first said: {load.samples[0].error}")

    async def cell(self, name: str, prompts: Sequence[Messages], streams: int) -> Cell:
        """Measure plain first, then the server's default."""
        count = self.settings.num_requests(streams)
        work = [prompts[i % len(prompts)] for i in range(count)]
        self.label = f"{name}, {streams} {'stream' if streams == 1 else 'streams'}"
        plain = await self.load(work, streams, self.settings.output_len, True) if self.result.can_switch else None
        before = await self.counters()
        load = await self.load(work, streams, self.settings.output_len, False)
        if self.result.source == "responses":
            load.drafting = Drafting()
            for sample in load.samples:
                load.drafting.add(sample.drafting or Drafting())
        elif before and (after := await self.counters()):
            after.add(before, -1)
            load.drafting = after
        return Cell(name, streams, load, plain)

    async def counters(self) -> Drafting | None:
        return await self.client.counters() if self.result.source == "metrics" else None

    async def load(self, work: Sequence[Messages], streams: int, max_tokens: int, plain: bool) -> Load:
        def option(index: int) -> dict[str, Any]:
            return self.settings.options(index) | (OFF if plain else {})

        def answered() -> None:
            self.done += 1
            self.report(self.label, self.done, self.total)

        return await keep_busy(self.client, work, streams, max_tokens, option, answered)


async def keep_busy(
    client: Client,
    work: Sequence[Messages],
    streams: int,
    max_tokens: int,
    options: Callable[[int], dict[str, Any]] = lambda index: {},
    answered: Callable[[], None] = lambda: None,
) -> Load:
    """'streams' workers take the prompts in order, each the next as soon as its last is answered."""
    samples: list[Sample] = [Sample()] * len(work)
    todo = iter(enumerate(work))

    async def worker() -> None:
        for index, messages in todo:
            samples[index] = await client.chat(messages, max_tokens, options(index))
            answered()

    begin = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(min(streams, len(work)))))
    return Load(samples, time.perf_counter() - begin)


def read_prompts(names: Sequence[str] = ()) -> dict[str, list[Messages]]:
    """Class -> its prompts as messages; all classes unless some are named."""
    classes: dict[str, list[Messages]] = {}
    for entry in map(json.loads, PROMPTS.read_text(encoding="utf-8").splitlines()):
        messages = entry.get("messages") or [{"role": "user", "content": entry["prompt"]}]
        classes.setdefault(entry["class"], []).append(messages)
    if unknown := [name for name in names if name not in classes]:
        raise UserError(f"there is no class '{unknown[0]}'; --classes takes any of {', '.join(classes)}")
    return {name: classes[name] for name in names or classes}


def per_token(sample: Sample) -> float | None:
    """Seconds per token after the first."""
    if sample.first is None or sample.last is None or sample.tokens < 2:
        return None
    return (sample.last - sample.first) / (sample.tokens - 1)


def percentiles(values: Sequence[float], scale: float = 1e3) -> dict[str, float] | None:
    """p50 and p95; seconds become milliseconds."""
    if not values:
        return None
    return {f"p{q}": float(np.percentile(values, q)) * scale for q in (50, 95)}
