"""Speed, latency and acceptance of any OpenAI-compatible server, by class of prompt and number of streams.

A fixed number of streams is kept busy until the prompts of a class are done. If the server can switch drafting off per
request, the same prompts first run plainly, so that the speedup compares one machine in one state. Every prompt is sent
once beforehand, so that a prefix cache holds all of them in every measurement. Times are taken where the bytes arrive.
serve_prompts.jsonl was written for this. No torch.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from sparkdraft.core import UserError
from sparkdraft.operate.bench.prompts import read_questions
from sparkdraft.operate.bench.traffic import how_sampled
from sparkdraft.util.sse import async_lines_of

Messages = list[dict[str, Any]]
USAGE = {"stream_options": {"include_usage": True}}
SPECULATION = {"return_speculation": True}
# tried in this order: the most that a server may understand first
DIALECTS: tuple[dict[str, Any], ...] = (USAGE | SPECULATION, USAGE, {})
PROBE: Messages = [{"role": "user", "content": "Count from 1 to 40, separated by commas."}]  # easy to draft
PROBE_TOKENS = 64
COUNTER = re.compile(  # vLLM's names, after "vllm:" or our own prefix: name, labels, value
    r"^(?:vllm:|sparkdraft_)spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{(.*)\})? (\S+)",
    re.MULTILINE,
)


@dataclass(slots=True)
class Drafting:
    """Counts of drafting. by_position[i]: steps that accepted draft i. drafted_by_position[i]: steps that drafted this
    far; all of them if the server does not say."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)

    def add(self, other: Drafting, sign: int = 1) -> None:
        self.steps += sign * other.steps
        self.drafted += sign * other.drafted
        self.accepted += sign * other.accepted
        self.by_position = _added(self.by_position, other.by_position, sign)
        self.drafted_by_position = _added(self.drafted_by_position, other.drafted_by_position, sign)

    @property
    def length(self) -> float | None:
        """Tokens per drafting step: its accepted drafts and the one that the target adds."""
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def shares(self) -> list[float]:
        """Per position, the share of the steps that drafted it and accepted it."""
        drafted = self.drafted_by_position or [self.steps] * len(self.by_position)
        return [count / tries for count, tries in zip(self.by_position, drafted, strict=False) if tries]


@dataclass(slots=True)
class Sample:
    """A request as its client saw it. Times are of time.perf_counter()."""

    began: float = 0.0
    first: float | None = None  # the first piece of text
    last: float | None = None  # the last piece
    tokens: int = 0  # from usage; otherwise one per piece
    pieces: int = 0
    counted: bool = True  # whether tokens were counted as pieces, for lack of usage
    text: str = ""
    drafting: Drafting | None = None  # None: the response said nothing about drafts
    error: str = ""
    status: int = 200
    ended: bool = False  # whether the server said why it stopped

    def take(self, chunk: dict[str, Any], now: float) -> None:
        """Take one event of the stream."""
        if (tokens := (chunk.get("usage") or {}).get("completion_tokens")) is not None:
            self.tokens, self.counted = int(tokens), False
        if facts := (chunk.get("metrics") or {}).get("speculative_decoding"):
            self.drafting = read_speculation(facts)
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            self.ended = self.ended or choice.get("finish_reason") is not None
            text = delta.get("content") or ""
            if text or delta.get("reasoning_content") or delta.get("reasoning"):
                self.first = self.first or now
                self.last = now
                self.pieces += 1
                self.text += text
        if self.counted:
            self.tokens = self.pieces


class Client:
    """A server at an address. `await open()` first: it finds the model and the server's dialect."""

    def __init__(self, url: str, api_key: str = "", model: str = "", streams: int = 1, timeout: float = 600.0) -> None:
        self.root, self.model, self.extras = server_root(url), model, DIALECTS[0]
        local = urlsplit(self.root).hostname in ("localhost", "127.0.0.1", "::1")
        self.http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=10.0),
            limits=httpx.Limits(max_connections=streams + 1, max_keepalive_connections=streams + 1),
            trust_env=not local,  # no proxy between a machine and itself
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.http.aclose()

    async def open(self) -> Sample:
        """Find the model and the dialect; return the probe's answer. Raises UserError if that cannot work."""
        self.model = await self.find_model()
        for self.extras in DIALECTS:
            sample = await self.chat(PROBE, PROBE_TOKENS)
            if sample.status not in (400, 422):
                break
        if sample.error:
            raise UserError(f"{self.root} does not answer a chat request: {sample.error}")
        return sample

    async def can_switch(self, drafted: Sample) -> bool:
        """Return whether `speculation: "off"` is honoured: the request that drafted before must draft nothing."""
        if drafted.drafting is None or not drafted.drafting.drafted:
            return False
        plain = await self.chat(PROBE, PROBE_TOKENS, {"speculation": "off"})
        return not plain.error and (plain.drafting is None or not plain.drafting.drafted)

    async def chat(self, messages: Messages, max_tokens: int, more: dict[str, Any] | None = None) -> Sample:
        """Send a chat request and read the answer to its end. A failure is recorded in the sample, never raised."""
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= self.extras | (more or {})
        sample = Sample(began=time.perf_counter())
        try:
            async with self.http.stream("POST", f"{self.root}/v1/chat/completions", json=body) as response:
                sample.status = response.status_code
                if response.status_code != 200:
                    sample.error = _refusal(response.status_code, await response.aread())
                    return sample
                async for chunk in _events(response):
                    if chunk.get("error"):
                        sample.error = _message(chunk)
                    sample.take(chunk, time.perf_counter())
        except (httpx.HTTPError, ValueError) as error:
            sample.error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if not sample.error and not (sample.ended and sample.pieces):
            sample.error = "the answer was empty" if sample.ended else "the connection ended before the answer did"
        return sample

    async def counters(self) -> Drafting | None:
        """Return the server's own counts so far, from /metrics; None if it has none."""
        try:
            response = await self.http.get(f"{self.root}/metrics")
        except httpx.HTTPError:
            return None
        return read_counters(response.text) if response.status_code == 200 else None

    async def find_model(self) -> str:
        """Return the model that was asked for, or the first that is served."""
        try:
            response = await self.http.get(f"{self.root}/v1/models")
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise UserError(f"{self.root} cannot be reached ({why}); start the server or correct --url") from None
        if response.status_code == 401:
            raise UserError(f"{self.root} wants a key; give the right one with --api-key")
        try:
            return self.model or str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            where = f"{self.root}/v1/models answered {response.status_code}"
            raise UserError(f"{where} and names no model; give --model, or correct --url") from None


def server_root(url: str) -> str:
    """Strip a trailing /v1, which users often include."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--url is '{url}'; give an address such as http://127.0.0.1:8000")
    if parts.username or parts.password or parts.query:
        raise UserError("--url holds a name, a password or a query; give the key with --api-key")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def read_speculation(facts: dict[str, Any]) -> Drafting:
    """Read `metrics.speculative_decoding` of a response. The histogram counts steps by number of accepted drafts."""
    histogram = [int(count) for count in facts.get("acceptance_histogram") or ()]
    steps, accepted = int(facts.get("num_spec_steps") or 0), int(facts.get("num_accepted_draft_tokens") or 0)
    by_position = [sum(histogram[reach:]) for reach in range(1, len(histogram))]
    drafted = [int(count) for count in facts.get("per_position_drafted") or [steps] * len(by_position)]
    return Drafting(steps, int(facts.get("num_draft_tokens") or 0), accepted, by_position, drafted)


def read_counters(text: str) -> Drafting | None:
    """Read counters of drafts from Prometheus' text, summed over engines and models. None if there are none."""
    sums, positions = Counter[str](), Counter[int]()
    for name, labels, value in COUNTER.findall(text):
        if name == "accepted_tokens_per_pos":
            positions[int(labels.split('position="')[1].split('"')[0])] += int(float(value))
        else:
            sums[name] += int(float(value))
    if not (sums or positions):
        return None
    by_position = [positions[i] for i in range(max(positions, default=-1) + 1)]
    return Drafting(sums["drafts"], sums["draft_tokens"], sums["accepted_tokens"], by_position)


def _added(mine: list[int], more: list[int], sign: int) -> list[int]:
    return [a + sign * b for a, b in zip_longest(mine, more, fillvalue=0)]


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in async_lines_of(response):
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            chunk = json.loads(data)
            if isinstance(chunk, dict):
                yield chunk


def _refusal(status: int, body: bytes) -> str:
    try:
        said = _message(json.loads(body))
    except ValueError:
        said = ""
    return f"status {status}: {said}" if said else f"status {status}"


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    said = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return str(said or "an error without words")


# ---- loads: requests that run together

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
    sampling: dict[str, Any] = field(default_factory=dict)  # what a request says, by SamplingParams' names
    ignore_eos: bool = False

    def num_requests(self, streams: int) -> int:
        return self.requests or max(FEWEST, streams)

    def options(self, index: int) -> dict[str, Any]:
        """The options of a request. The seed makes a sampled answer the same, drafted and plain."""
        seed = {"seed": index} if self.sampling.get("temperature") else {}
        return self.sampling | seed | ({"ignore_eos": True} if self.ignore_eos else {})


@dataclass(slots=True)
class Load:
    """Requests that ran together, in the order of their prompts, and their total time."""

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
    """Facts about the server, and the cells measured so far."""

    settings: Settings
    model: str = ""
    counted: bool = False  # whether tokens are counted as pieces of the stream
    source: str | None = None  # where acceptance comes from: "responses", "metrics" or nowhere
    can_switch: bool = False
    cells: list[Cell] = field(default_factory=list)

    def with_totals(self) -> list[Cell]:
        """The cells, and 'all' for each number of streams at which several classes were measured."""
        totals = []
        for streams in self.settings.streams:
            mine = [cell for cell in self.cells if cell.streams == streams]
            if len(mine) > 1:
                total = Cell(ALL, streams, Load(), Load() if self.can_switch else None)
                for cell in mine:
                    total.load.merge(cell.load)
                    if total.plain is not None and cell.plain is not None:
                        total.plain.merge(cell.plain)
                totals.append(total)
        return self.cells + totals


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
        """Send every prompt once, with a short answer, in each mode."""
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
    """Let 'streams' workers take the prompts in order, each the next as soon as its last is answered."""
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
    """Return the prompts of each class as messages; of all classes unless some are named."""
    classes: dict[str, list[Messages]] = {}
    for question in read_questions(PROMPTS):
        classes.setdefault(question.kind, []).append(question.messages)
    if unknown := [name for name in names if name not in classes]:
        raise UserError(f"there is no class '{unknown[0]}'; --classes takes any of {', '.join(classes)}")
    return {name: classes[name] for name in names or classes}


def per_token(sample: Sample) -> float | None:
    """Seconds per token after the first."""
    if sample.first is None or sample.last is None or sample.tokens < 2:
        return None
    return (sample.last - sample.first) / (sample.tokens - 1)


def percentiles(values: Sequence[float], scale: float = 1e3) -> dict[str, float] | None:
    """Return p50 and p95, in milliseconds by default."""
    if not values:
        return None
    return {f"p{q}": float(np.percentile(values, q)) * scale for q in (50, 95)}


# ---- results: JSON, and a Markdown table that can be pasted into an issue

DRAFTS_FROM = {
    "responses": "Acceptance is taken from the responses.",
    "metrics": "Acceptance is taken from the server's /metrics, which counts all its clients together.",
    None: "The server says nothing about drafts.",
}
Row = dict[str, Any]


def summary(result: Result) -> dict[str, Any]:
    settings = result.settings
    return {
        "bench": "serve",
        "url": settings.url,
        "model": result.model,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "output_len": settings.output_len,
        "sampling": settings.sampling,
        "ignore_eos": settings.ignore_eos,
        "tokens_from": "chunks" if result.counted else "usage",
        "prompts_sent_before": True,
        "acceptance_from": result.source,
        "can_switch": result.can_switch,
        "rows": [cell.as_dict() for cell in result.with_totals()],
    }


def markdown(report: dict[str, Any]) -> str:
    """The table, below a description of what was measured and how."""
    switched = report["can_switch"]
    heads = ["class", "streams", "tok/s", *(["plain tok/s", "speedup"] if switched else [])]
    heads += ["each, p50", "TTFT ms p50 / p95", "TPOT ms p50 / p95"]
    heads += [] if report["acceptance_from"] is None else ["acceptance length", "1st / 2nd / 3rd"]
    heads += [*(["same text"] if switched else []), "errors"]
    lines = [f"**{report['model']}** at {report['url']}, {report['date'][:10]}. {_how(report)}", ""]
    lines += [_line(heads), _line(["---"] + ["---:"] * (len(heads) - 1))]
    return "\n".join(lines + [_line(_row(row, report)) for row in report["rows"]])


def _how(report: dict[str, Any]) -> str:
    end = ", past the model's own end" if report["ignore_eos"] else ""
    tokens = f"Up to {report['output_len']} tokens per answer{end}, {how_sampled(report['sampling'])}; "
    tokens += (
        "counted by the server" if report["tokens_from"] == "usage" else "counted by pieces of the stream, for want"
    )
    tokens += "" if report["tokens_from"] == "usage" else " of usage: a piece of several tokens counts as one"
    known = "Every prompt was sent once before, so a server that caches prompts knows it"
    return f"{tokens}. {known}. {DRAFTS_FROM[report['acceptance_from']]}"


def _row(row: Row, report: dict[str, Any]) -> list[str]:
    plain = row.get("plain")
    cells = [row["class"], str(row["streams"]), _number(row["tok_s"])]
    if report["can_switch"]:
        cells += [_number(plain["tok_s"] if plain else None), _number(row.get("speedup"), 2)]
    each = row["tok_s_per_request"]
    cells += [_number(each["p50"] if each else None), _pair(row["ttft_ms"], 0), _pair(row["tpot_ms"], 1)]
    if report["acceptance_from"] is not None:
        shares = " / ".join(f"{share:.0%}" for share in row["per_position"][:3])
        cells += [_number(row["acceptance_length"], 2), shares or "-"]
    if report["can_switch"]:
        cells += [f"{row['same_text']} of {row['compared']}" if plain else "-"]
    errors = row["errors"] + (plain["errors"] if plain else 0)
    return [*cells, str(errors)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _pair(values: dict[str, float] | None, digits: int) -> str:
    return f"{values['p50']:.{digits}f} / {values['p95']:.{digits}f}" if values else "-"


def write(report: dict[str, Any], table: str, folder: Path) -> list[Path]:
    """Write serve.json and serve.md, and return their paths."""
    texts = {"serve.json": json.dumps(report, indent=1) + "\n", "serve.md": table + "\n"}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]
