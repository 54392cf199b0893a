"""Sends traffic (traffic.py) to the /v1/completions of an OpenAI-compatible server, and notes when each piece arrives.

At 64 streams thousands of pieces arrive a second, and a client that parses them as they come would be measured in place
of the server. So a connection only notes the time and the bytes of what it reads; everything is parsed after the last
answer. Connections are kept and used again. Prompts are lists of ids, so their lengths are exact, and `ignore_eos` lets
every answer reach its drawn length. No torch.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sparkdraft.operate.bench.traffic import Answered, Planned, Record
from sparkdraft.util.sse import Cutter

TIMEOUT = 600.0  # seconds that an answer may take
Reads = list[tuple[float, bytes]]  # when something of a body arrived, and what


@dataclass(slots=True)
class Answer:
    record: Record
    status: int = 0  # 0: none came
    reads: Reads = field(default_factory=list)  # of its body


class Chunks:
    """Decodes a chunked body."""

    def __init__(self) -> None:
        self.ended = False
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return what is in the chunks that end in this data."""
        self._rest += data
        found = []
        while (border := self._rest.find(b"\r\n")) >= 0:
            size = int(self._rest[:border].partition(b";")[0], 16)
            end = border + 2 + size
            if not size:
                self.ended = b"\r\n\r\n" in self._rest[border:]
                break
            if len(self._rest) < end + 2:
                break
            found.append(self._rest[border + 2 : end])
            self._rest = self._rest[end + 2 :]
        return b"".join(found)


class Connection(asyncio.Protocol):
    """A connection to the server, for one request after the other."""

    def __init__(self) -> None:
        self.closed = self.ends = False  # ends: the server closes it after this answer
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self.status, self.reads = 0, Reads()
        self._head = b""
        self._chunks: Chunks | None = None
        self._left: int | None = None  # bytes of a body of known length; None: it ends with the connection

    async def request(self, data: bytes) -> None:
        """Send a request and wait for the end of its answer, which is then in `status` and `reads`."""
        assert self._transport is not None, "not connected"
        self._begin()
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        await asyncio.wait_for(self._answered, TIMEOUT)

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.status:
            self._head += data
            head, border, data = self._head.partition(b"\r\n\r\n")
            if not border:
                return
            self._read_head(head)
        if self._chunks is not None:
            data = self._chunks.feed(data)
        elif self._left is not None:
            self._left -= len(data)
        if data:
            self.reads.append((now, data))
        if self._left == 0 or (self._chunks is not None and self._chunks.ended):
            self._end()

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        self.status = int(first.split()[1])
        self.ends = first.startswith(b"HTTP/1.0")
        for line in lines:
            name, _, value = line.lower().partition(b":")
            if name == b"transfer-encoding" and b"chunked" in value:
                self._chunks = Chunks()
            elif name == b"content-length":
                self._left = int(value)
            elif name == b"connection":
                self.ends = b"close" in value

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._end()

    def _end(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)


class Target:
    """A server's /v1/completions, with the connections to it that are free."""

    def __init__(self, root: str, api_key: str, model: str, sampling: Mapping[str, Any]) -> None:
        """root: as serve.server_root returns it. sampling: what every request says."""
        parts = urlsplit(root)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._tls else 80)
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"POST {parts.path}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n{key}"
        self._body = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        self._body |= {"temperature": 0, **sampling}
        self._free: list[Connection] = []

    def request(self, planned: Planned) -> bytes:
        data = json.dumps(self._body | {"prompt": planned.prompt, "max_tokens": planned.output_len}).encode()
        return f"{self._head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data

    async def send(self, request: bytes) -> Answer:
        """Sends a request and waits for its answer. A failure is recorded, never raised. A connection that was kept may
        be closed by the server at this very moment: then the request is sent again."""
        answer, connection = Answer(Record(time.perf_counter())), None
        try:
            if kept := self._kept():
                connection = kept
                await kept.request(request)
            if connection is None or not connection.status:
                connection = await self._connect()
                await connection.request(request)
        except TimeoutError:
            answer.record.error = f"no end of the answer within {TIMEOUT:g} s"
        except OSError as error:
            answer.record.error = f"cannot connect: {error.strerror or error}"
        answer.record.ended = time.perf_counter()
        if connection is not None:
            answer.status, answer.reads = connection.status, connection.reads
            if answer.record.error or connection.ends:
                connection.close()
            elif not connection.closed:
                self._free.append(connection)
        return answer

    def _kept(self) -> Connection | None:
        while self._free:
            if not (connection := self._free.pop()).closed:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Connection, self._host, self._port, ssl=self._tls))[1]

    def close(self) -> None:
        for connection in self._free:
            connection.close()


async def run(
    target: Target, planned: Sequence[Planned], streams: int, answered: Answered
) -> tuple[list[Record], float]:
    """Send the requests as they arrive, at most 'streams' at once; return their records, and the seconds in all."""
    requests = list(map(target.request, planned))
    places, begin = asyncio.Semaphore(streams), time.perf_counter()

    async def send(each: Planned, request: bytes) -> Answer:
        await asyncio.sleep(each.at)
        async with places:
            answer = await target.send(request)
        answered()
        return answer

    answers = await asyncio.gather(*(send(each, request) for each, request in zip(planned, requests, strict=True)))
    seconds = time.perf_counter() - begin
    return list(map(read, answers)), seconds


# ---- after the last answer


def read(answer: Answer) -> Record:
    """Complete the record of an answer from its body."""
    record = answer.record
    if record.error:
        return record
    if not answer.status:
        record.error = "the connection ended before the answer began"
    elif answer.status != 200:
        record.error = f"status {answer.status}: {_message(b''.join(data for _, data in answer.reads))}"
    else:
        try:
            _read_events(record, answer.reads)
        except (ValueError, AttributeError, TypeError):
            record.error = "the answer is no stream of completions"
    return record


def _read_events(record: Record, reads: Reads) -> None:
    done = False
    for now, line in _lines(reads):
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:"):
            continue
        if data == "[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if chunk.get("error"):
            record.error = _message(data.encode())
            return
        record.tokens = (chunk.get("usage") or {}).get("completion_tokens") or record.tokens
        if any(choice.get("text") for choice in chunk.get("choices") or ()):
            record.pieces.append(now)
    if not done:
        record.error = "the connection ended before the answer did"
    elif not record.pieces:
        record.error = "the answer had no text"
    elif not record.tokens:
        record.error = "the answer does not say how many tokens it has, though usage was asked for"


def _lines(reads: Reads) -> Iterator[tuple[float, str]]:
    """The lines of an event stream, each with the time when its end arrived. A character may be cut in two; then it is
    one of a text, which is not looked at."""
    cutter = Cutter()
    for now, data in reads:
        for line in cutter.take(data.decode("utf-8", "replace")):
            yield now, line


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode("utf-8", "replace")[:200] or "an answer without words"
