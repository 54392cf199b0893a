"""Probes any OpenAI-compatible server over HTTP for what a client cannot see in a single answer.

A probe fails for a tool call that comes back as text, another model behind the same name, answers that change at
temperature 0, a stream that stalls, or token counts that cannot be right.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any
from urllib.parse import urlsplit

import httpx

from sparkdraft.core import UserError
from sparkdraft.operate.canary.findings import Failed, Finding, Skipped, ask_all
from sparkdraft.operate.canary.probes import ASKED, CITY, NAME, TOOL
from sparkdraft.util.sse import lines_of

Messages = list[dict[str, Any]]
FIXED = {"temperature": 0, "seed": 1}  # nothing is left to chance


class Refused(Exception):
    """Raised for an error that the server answered; the message has the status and the text."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"status {response.status_code}: {response.text[:200]}")
        self.not_offered = response.status_code in (400, 422)  # the request asks for what the server does not have


class Unreachable(Exception):
    """Raised where no readable answer came."""


@dataclass(slots=True)
class Stream:
    """A stream as it arrived. Times are of time.monotonic()."""

    began: float
    times: list[float] = field(default_factory=list)  # of the chunks with text or a part of a call
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str = ""
    usage: dict[str, Any] | None = None
    done: bool = False  # whether the last event came
    broken: str = ""  # why it broke off

    def take(self, chunk: dict[str, Any], now: float) -> None:
        if error := chunk.get("error"):
            said = error.get("message") if isinstance(error, dict) else error
            self.broken = self.broken or f"the server sent an error: {str(said)[:200]}"
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            self.finish = choice.get("finish_reason") or self.finish
            thoughts = delta.get("reasoning_content") or delta.get("reasoning")
            if delta.get("content") or delta.get("tool_calls") or thoughts:
                self.times.append(now)
            self.text += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                self._add_call(part)

    def _add_call(self, part: dict[str, Any]) -> None:
        index, given = part.get("index", 0), part.get("function") or {}
        while len(self.calls) <= index:
            self.calls.append({"function": {"name": "", "arguments": ""}})
        function = self.calls[index]["function"]
        function["name"] += given.get("name") or ""
        function["arguments"] += given.get("arguments") or ""


class Server:
    """A server at an address. `open` first: it finds the model's name."""

    def __init__(self, url: str, api_key: str = "", model: str = "", timeout: float = 60.0) -> None:
        """timeout: seconds without a byte after which a request is given up."""
        root = url.rstrip("/").removesuffix("/v1")
        if urlsplit(root).scheme not in ("http", "https") or not urlsplit(root).netloc:
            raise UserError(f"--url is '{url}'; it must be an address such as http://127.0.0.1:8000")
        self.root, self.model = root, model
        self.aliases: list[str] = []  # other names that the server says mean the same model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        local = urlsplit(root).hostname in ("localhost", "127.0.0.1", "::1")
        limits = httpx.Timeout(timeout, connect=10.0)
        self._http = httpx.Client(headers=headers, timeout=limits, trust_env=not local)

    def open(self) -> None:
        """Find the model's name. Raises UserError if the server cannot be reached."""
        try:
            names = self.models()
        except (Refused, Unreachable) as error:
            if not self.model:
                raise UserError(f"{self.root} does not list its models ({error}); name one with --model") from None
            return
        if not self.model and not names:
            raise UserError(f"{self.root} lists no model; name one with --model")
        self.model = self.model or names[0]

    def models(self) -> list[str]:
        """Return the models that the server lists. Those that share the model's `root` are its aliases."""
        listed = self._json("GET", "/v1/models").get("data") or []
        roots = {entry.get("id"): entry.get("root") for entry in listed if isinstance(entry, dict)}
        own = roots.get(self.model)
        self.aliases = [str(name) for name, root in roots.items() if own is not None and root == own]
        return [str(name) for name in roots]

    def chat(self, messages: Messages, **more: Any) -> dict[str, Any]:
        answer = self._json("POST", "/v1/chat/completions", self._body(messages, more))
        if not answer.get("choices"):
            raise Unreachable(f"the answer has no choices: {json.dumps(answer)[:100]}")
        return answer

    def stream(self, messages: Messages, **more: Any) -> Stream:
        """Read a stream to its end, or until it breaks off."""
        body, stream = self._body(messages, more) | {"stream": True}, Stream(time.monotonic())
        try:
            with self._http.stream("POST", self.root + "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise Refused(response)
                for line in lines_of(response):
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or not data:
                        continue
                    if data == "[DONE]":
                        stream.done = True
                        break
                    stream.take(json.loads(data), time.monotonic())
        except httpx.TimeoutException:
            stream.broken = f"nothing came for {self._http.timeout.read:.0f} s"
        except (httpx.HTTPError, ValueError) as error:
            stream.broken = f"{type(error).__name__}: {error}"
        return stream

    def _body(self, messages: Messages, more: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "messages": messages, **FIXED, **more}

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._http.request(method, self.root + path, json=body)
        except httpx.HTTPError as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from None
        if response.status_code != 200:
            raise Refused(response)
        try:
            value = response.json()
        except ValueError:
            raise Unreachable(f"the answer is not JSON: {response.text[:100]!r}") from None
        if not isinstance(value, dict):
            raise Unreachable(f"the answer is not a JSON object: {response.text[:100]!r}")
        return value


# ---- probes, each of a few short requests

COUNT = {"role": "user", "content": "Count from 1 to 30 in words, separated by commas."}
PART = "The river is wide here and the ferry is slow. "
STALL = 3.0  # seconds without a chunk, after the first
SLOWER = 25  # and this many times the usual gap: a slow model does not stall
TOKENS = 48
MOST_CHARS = 40  # per token of an answer, on average: no vocabulary has longer tokens for plain words
# What OpenAI's API promises of arguments, it promises of strict tools alone; vLLM holds no others to their schema.
STRICT = TOOL | {"function": TOOL["function"] | {"strict": True}}
DATED = re.compile(r"[-@]\d{4}(-?\d\d-?\d\d)?")  # what a version of the model adds to the name that was asked
UNFINISHED = "the answer ended by its length before it had any content: the model thinks longer than the probe allows"
MARKS = ("<tool_call", "<function", '"name"', "[TOOL_CALLS]", "<|python_tag|>", f"{NAME}(")


def names_agree(server: Server) -> str:
    """The answer must come from the model that was asked."""
    names = server.models()
    answers = [server.chat([ASKED], max_tokens=4)["model"] for _ in range(2)]
    for name in answers:
        is_dated = DATED.fullmatch(name.removeprefix(server.model))
        if name != server.model and name not in server.aliases and not is_dated:
            raise Failed(f"'{server.model}' was asked and '{name}' answered: the endpoint has another model behind it")
    other = f" as '{answers[-1]}'" if answers[-1] != server.model else ""
    return f"'{server.model}' answers{other}" + (f", {len(names)} models are listed" if names else "")


def answers_repeat(server: Server) -> str:
    """At temperature 0 the same question must get the same answer."""
    answers = [server.chat([COUNT], max_tokens=TOKENS) for _ in range(4)]
    prints = {answer.get("system_fingerprint") for answer in answers}
    if len(prints) > 1:
        said = " and ".join(sorted(map(str, prints)))
        raise Failed(f"four equal requests were answered by different systems (system_fingerprint {said})")
    texts = [_thoughts(answer) + _content(answer) for answer in answers]
    if not any(texts):
        raise Skipped(f"four answers of up to {TOKENS} tokens have no text to compare")
    for other in texts[1:]:
        if other != texts[0]:
            place = next((i for i, pair in enumerate(zip(texts[0], other, strict=False)) if pair[0] != pair[1]), 0)
            pieces = " and ".join(repr(text[place : place + 24]) for text in (texts[0], other))
            raise Failed(f"at temperature 0 two answers part after {place} characters: {pieces}")
    return f"four answers at temperature 0 are equal ({len(texts[0])} characters)"


def call_is_a_call(server: Server) -> str:
    """A tool call must come back as a call, whole and in a stream."""
    forced: dict[str, Any] = {"tools": [STRICT], "tool_choice": "required", "max_tokens": 128}
    try:
        answer, how = server.chat([ASKED], **forced), "a required call"
    except Refused as reason:
        if not reason.not_offered:
            raise
        answer = _auto_call(server)
        forced |= {"tools": [TOOL], "tool_choice": "auto"}
        how = "a call"
    message = answer["choices"][0]["message"]
    if not message.get("tool_calls"):
        _skip_unfinished(answer)
    arguments = _arguments(message.get("tool_calls") or [], message.get("content") or "")
    stream = server.stream([ASKED], **forced)
    if stream.broken:
        raise Failed(f"the stream of a call broke off: {stream.broken}")
    if stream.finish == "length" and not stream.calls and not stream.text:
        raise Skipped(f"{how} is whole; streamed, {UNFINISHED}")
    _arguments(stream.calls, stream.text)
    return f"{how} of {NAME} has the arguments {json.dumps(arguments)}, whole and in a stream"


def _auto_call(server: Server) -> dict[str, Any]:
    """Probe servers that know no tool_choice "required": there the model decides whether it calls. A server that
    refuses tools altogether, as vLLM does without a parser, shows no call as text."""
    try:
        answer = server.chat([ASKED], tools=[TOOL], max_tokens=128)
    except Refused as reason:
        if not reason.not_offered:
            raise
        raise Skipped(f"the server takes no tools: {reason}") from None
    message = answer["choices"][0]["message"]
    if not message.get("tool_calls"):
        _skip_unfinished(answer)
    text = message.get("content") or ""
    if not message.get("tool_calls") and not any(mark in text for mark in MARKS):
        raise Skipped(f"the server takes no tool_choice 'required', and the model did not call: {text[:60]!r}")
    return answer


def _arguments(calls: list[dict[str, Any]], text: str) -> dict[str, Any]:
    if not calls:
        as_text = any(mark in text for mark in MARKS)
        what = "a tool call came back as text" if as_text else "no call came although one was required"
        raise Failed(f"{what}: {text[:100]!r}")
    function = calls[0].get("function") or {}
    if function.get("name") != NAME:
        raise Failed(f"the call names '{function.get('name')}', and {NAME} is the only function")
    given = function.get("arguments")
    try:
        value = json.loads(given) if isinstance(given, str) else None
    except ValueError:
        value = None
    if not isinstance(value, dict) or "city" not in value:
        raise Failed(f"the call's arguments are {given!r}; they must be a JSON object with a city, as text")
    return value


def schema_holds(server: Server) -> str:
    """An answer under a JSON schema must follow it."""
    shape = TOOL["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": shape, "strict": True}}
    try:
        answer = server.chat([ASKED], response_format=form, max_tokens=64)
    except Refused as reason:
        if not reason.not_offered:
            raise
        raise Skipped(f"the server takes no JSON schema: {reason}") from None
    _skip_unfinished(answer)
    text = _content(answer)
    try:
        value = json.loads(text)
    except ValueError:
        raise Failed(f"an answer under a JSON schema is not JSON: {text[:100]!r}") from None
    if not isinstance(value, dict) or value.get("city") not in (CITY, "Oslo"):
        raise Failed(f"an answer does not follow its JSON schema: {text[:100]!r}")
    return f"the answer follows its schema: {json.dumps(value)}"


def stream_flows(server: Server) -> str:
    """A stream must come in pieces, without long gaps, and say why it ends."""
    stream = server.stream([COUNT], max_tokens=TOKENS)
    gaps = sorted(b - a for a, b in zip(stream.times, stream.times[1:], strict=False))
    if stream.broken:
        raise Failed(f"the stream broke off after {len(stream.times)} chunks: {stream.broken}")
    if not stream.finish or not stream.done:
        missing = "a finish_reason" if not stream.finish else "data: [DONE]"
        raise Failed(f"the stream ended without {missing}")
    if len(stream.times) < 2 and len(stream.text) > 60:
        raise Failed(f"{len(stream.text)} characters came in one piece: something between here and the model buffers")
    if gaps and gaps[-1] > max(STALL, SLOWER * gaps[len(gaps) // 2]):
        raise Failed(f"the stream stalled for {gaps[-1]:.1f} s; its usual gap is {gaps[len(gaps) // 2] * 1e3:.0f} ms")
    span = stream.times[-1] - stream.times[0] if stream.times else 0.0
    if len(gaps) >= 8 and span < 0.02 * (stream.times[0] - stream.began) and stream.times[0] - stream.began > 0.5:
        raise Failed(f"all {len(stream.times)} chunks came at once after {stream.times[0] - stream.began:.1f} s")
    longest = f"{gaps[-1] * 1e3:.0f} ms" if gaps else "none"
    return f"{len(stream.times)} chunks, longest gap {longest}"


def usage_adds_up(server: Server) -> str:
    """Token counts must add up, grow with the prompt, and be the same in a stream."""
    answer = server.chat([COUNT], max_tokens=TOKENS)
    prompt, written = _usage(answer)
    finish, text = answer["choices"][0].get("finish_reason"), _content(answer)
    if written > TOKENS:
        raise Failed(f"{written} completion tokens are counted, and at most {TOKENS} were asked for")
    if finish == "length" and written != TOKENS:
        raise Failed(f"the answer ended by its length of {TOKENS} tokens, and {written} are counted")
    if text and not len(text) / MOST_CHARS <= written:
        raise Failed(f"an answer of {len(text)} characters counts as {written} tokens")
    sizes = [_usage(server.chat([{"role": "user", "content": PART * times}], max_tokens=1))[0] for times in (8, 16, 24)]
    steps = sizes[1] - sizes[0], sizes[2] - sizes[1]
    if steps[0] < 8 or abs(steps[0] - steps[1]) > 2:
        raise Failed(f"prompts of one text 8, 16 and 24 times count as {sizes[0]}, {sizes[1]} and {sizes[2]} tokens")
    stream = server.stream([COUNT], max_tokens=TOKENS, stream_options={"include_usage": True})
    if not stream.usage:
        return f"{prompt} + {written} tokens add up; streams report no usage"
    counted = _usage({"usage": stream.usage})
    if counted[0] != prompt or (stream.text == text and counted[1] != written):
        raise Failed(f"the same answer counts as {prompt} + {written} tokens, and {counted[0]} + {counted[1]} streamed")
    return f"{prompt} + {written} tokens add up, and are the same in a stream"


PROBES = (
    ("the model that was asked answers", names_agree),
    ("answers repeat at temperature 0", answers_repeat),
    ("tool call is a call", call_is_a_call),
    ("JSON schema holds", schema_holds),
    ("stream flows", stream_flows),
    ("usage adds up", usage_adds_up),
)


def check_url(
    server: Server, report: Callable[[int, int], None] = lambda done, total: None, budget: float = inf
) -> list[Finding]:
    """Run all probes. Raises UserError if the server cannot be reached. budget: seconds after which no probe begins."""
    server.open()
    return ask_all([(name, "", partial(probe, server)) for name, probe in PROBES], report, budget, _broken)


def _broken(error: Exception) -> str:
    if isinstance(error, (Refused, Unreachable)):
        return f"a request was not answered: {error}"
    if isinstance(error, (KeyError, TypeError, AttributeError, IndexError)):
        return f"an answer cannot be read ({type(error).__name__}: {error})"
    raise error


def _content(answer: dict[str, Any]) -> str:
    message = answer["choices"][0].get("message") or {}
    return str(message.get("content") or "")


def _thoughts(answer: dict[str, Any]) -> str:
    message = answer["choices"][0].get("message") or {}
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


def _skip_unfinished(answer: dict[str, Any]) -> None:
    """Skip a probe whose answer reached the limit while the model was thinking, which says nothing about the server."""
    if answer["choices"][0].get("finish_reason") == "length" and not _content(answer):
        raise Skipped(UNFINISHED)


def _usage(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer.get("usage") or {}
    try:
        prompt, written, total = (int(usage[f"{name}_tokens"]) for name in ("prompt", "completion", "total"))
    except (KeyError, TypeError, ValueError):
        raise Failed(f"an answer reports the usage {usage or None}, which does not have the three counts") from None
    if prompt + written != total or prompt < 1 or written < 0:
        raise Failed(f"{prompt} prompt tokens and {written} completion tokens are counted as {total} in total")
    return prompt, written
