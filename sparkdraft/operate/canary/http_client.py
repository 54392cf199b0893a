"""Sends a probe's requests to an OpenAI-compatible server, and notes when each piece of a stream arrives."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from sparkdraft.core import UserError
from sparkdraft.util.sse import lines_of

Messages = list[dict[str, Any]]
FIXED = {"temperature": 0, "seed": 1}  # nothing is left to chance


class Refused(Exception):
    """The server answered with an error; the message has the status and what it said."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"status {response.status_code}: {response.text[:200]}")
        self.not_offered = response.status_code in (400, 422)  # the request asks for what the server does not have


class Unreachable(Exception):
    """No answer came, or not one that can be read."""


@dataclass(slots=True)
class Stream:
    """What arrived of one stream. Times are of time.monotonic()."""

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
        """The names that the server lists. Those that share a `root` with the model are aliases of it."""
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
        """Read a stream to its end, or to where it breaks off."""
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
