"""One streamed request to an OpenAI-compatible server, and what its client saw of it.

Times are taken here, where the bytes arrive, so they do not depend on what the server reports. What a server
understands beyond the plain request (usage, statistics of drafts, a switch for drafting) is found out once, by asking.
bench/serve decides which requests are sent, and sums up.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any
from urllib.parse import urlsplit

import httpx

from sparkdraft.core import UserError
from sparkdraft.util.sse import async_lines_of

Messages = list[dict[str, str]]
USAGE = {"stream_options": {"include_usage": True}}
SPECULATION = {"return_speculation": True}
# tried in this order: the most that a server may understand first
DIALECTS: tuple[dict[str, Any], ...] = (USAGE | SPECULATION, USAGE, {})
PROBE: Messages = [{"role": "user", "content": "Count from 1 to 40, separated by commas."}]  # easy to draft
PROBE_TOKENS = 64
COUNTERS = {  # vLLM's names, after "vllm:" or our own prefix
    "spec_decode_num_drafts": "steps",
    "spec_decode_num_draft_tokens": "drafted",
    "spec_decode_num_accepted_tokens": "accepted",
    "spec_decode_num_accepted_tokens_per_pos": "position",
}
PREFIXES = ("vllm:", "sparkdraft_")


@dataclass(slots=True)
class Drafting:
    """Steps that drafted, their drafts and the accepted ones; by_position[i]: steps that accepted draft i.

    drafted_by_position[i]: steps that drafted this far; if the server does not say, all of them, as with a fixed depth.
    """

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
    """One request as its client saw it. Times are of time.perf_counter()."""

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
    """A server at an address. `await open()` first: it finds the model and what the server understands."""

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
        """Find the model and the dialect; returns the probe's answer in it. Raises UserError if that cannot work."""
        self.model = await self._find_model()
        for self.extras in DIALECTS:
            sample = await self.chat(PROBE, PROBE_TOKENS)
            if sample.status not in (400, 422):
                break
        if sample.error:
            raise UserError(f"{self.root} does not answer a chat request: {sample.error}")
        return sample

    async def can_switch(self, drafted: Sample) -> bool:
        """Whether `speculation: "off"` is honoured: the request that drafted now drafts nothing."""
        if drafted.drafting is None or not drafted.drafting.drafted:
            return False
        plain = await self.chat(PROBE, PROBE_TOKENS, {"speculation": "off"})
        return not plain.error and (plain.drafting is None or not plain.drafting.drafted)

    async def chat(self, messages: Messages, max_tokens: int, more: dict[str, Any] | None = None) -> Sample:
        """Send a chat request and read the answer to its end; a failure is recorded in the sample, never raised."""
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
        """The server's own counts so far, from /metrics; None if it has none."""
        try:
            response = await self.http.get(f"{self.root}/metrics")
        except httpx.HTTPError:
            return None
        return read_counters(response.text) if response.status_code == 200 else None

    async def _find_model(self) -> str:
        """The model that was asked for, or the first that is served."""
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
    """The address without a trailing /v1, which users often include."""
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
    sums, positions, found = {"steps": 0, "drafted": 0, "accepted": 0}, dict[int, int](), False
    for line in text.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "no such")
        kind = COUNTERS.get(name.removeprefix(prefix).removesuffix("_total"))
        if kind is None or not name.startswith(prefix):
            continue
        found, count = True, int(float(rest.rpartition("}")[2].split()[0]))
        if kind == "position":
            place = int(rest.split('position="')[1].split('"')[0])
            positions[place] = positions.get(place, 0) + count
        else:
            sums[kind] += count
    by_position = [positions.get(i, 0) for i in range(max(positions, default=-1) + 1)]
    return Drafting(sums["steps"], sums["drafted"], sums["accepted"], by_position) if found else None


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
