"""How much one client may ask for: the limits as numbers, the size of a body, and the length of the queue.

Each limit is checked where the limited thing is first seen, and the answer names it. The queue is counted here and not
in the engine, so that a client is refused at once, before anything it sent is tokenised.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparkdraft.server.protocol.errors import ApiError, unavailable

CLOSE = {"Connection": "close"}  # for answers after which the connection cannot be used again
MAX_MESSAGES = 2000
MAX_SCHEMA_BYTES = 64 << 10
MAX_TOOLS = 128  # as OpenAI's
MAX_PROMPTS = 256  # per /v1/completions request
MAX_PARTS = 2000  # per message content
VALUE_BYTES = 8  # bytes of a body per comma or opening bracket that it may have: lists of ids take about seven
MIN_VALUES = 1 << 18  # commas and opening brackets that a body of any size may have; they take 0.1 s to parse
BODY_SECONDS = 30.0  # may pass without a byte of a body, and for the whole body beside what its size allows
BODY_RATE = 10_000  # bytes of a body for which another second is allowed
MAX_HEADERS = 100  # as Apache's
RESTING = 10  # seconds after which a client may try again while no new work is taken
LINGER_SECONDS = 30.0  # for reading and dropping the rest of a refused body


def check_head(scope: Scope) -> None:
    """Refuse what the HTTP parser lets pass: two lengths (one of which a proxy may have believed), an unknown version,
    and thousands of headers."""
    names = [name for name, _ in scope["headers"]]
    if scope["http_version"] not in ("1.0", "1.1"):
        raise ApiError(400, f"HTTP/{scope['http_version']} is not supported; use HTTP/1.1.", headers=CLOSE)
    if len(names) > MAX_HEADERS:
        raise ApiError(431, f"The request has {len(names):,} headers; send at most {MAX_HEADERS}.", headers=CLOSE)
    if b"transfer-encoding" in names and b"content-length" in names:
        sentence = "The request has both Transfer-Encoding and Content-Length; send one of them."
        raise ApiError(400, sentence, headers=CLOSE)


class BodyLimit:
    """Middleware: reads the body up to the limits and passes it on whole; a body past a limit is refused at once."""

    def __init__(self, app: ASGIApp, max_body: int) -> None:
        self.app, self.max_body = app, max_body
        self.max_values = max(MIN_VALUES, max_body // VALUE_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            return await self.app(scope, receive, send)
        self._check_size(declared_length(scope))
        body = await self._read(receive)
        if body is None:
            return  # the client has gone
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Read the body, counted piece by piece, so that a large body does not block the event loop."""
        body, num_values, begin = bytearray(), 0, time.monotonic()
        while True:
            left = BODY_SECONDS + len(body) / BODY_RATE - (time.monotonic() - begin)
            try:
                async with asyncio.timeout(min(BODY_SECONDS, left)):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408,
                    f"The body stopped or is too slow: {len(body):,} bytes came in {time.monotonic() - begin:.0f} s. "
                    f"The limit is {BODY_SECONDS:g} s, plus 1 s for every {BODY_RATE:,} bytes; send it again, faster.",
                    headers=CLOSE,
                ) from None
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            body += piece
            self._check_size(len(body))
            num_values += sum(map(piece.count, (b",", b"[", b"{")))
            if num_values > self.max_values:
                raise ApiError(
                    413,
                    f"The body has more than {self.max_values:,} commas and opening brackets; send less in one "
                    "request, or start the server with a larger --max-body.",
                    code="body_too_large",
                    headers=CLOSE,
                )
            if not message.get("more_body"):
                return bytes(body)

    def _check_size(self, size: int) -> None:
        if size > self.max_body:
            raise ApiError(
                413,
                f"The body is larger than {self.max_body:,} bytes; send less, or start the server with a larger "
                "--max-body.",
                code="body_too_large",
                headers=CLOSE,
            )


class Linger:
    """Middleware: makes sure that an answer sent before the end of a body reaches its client.

    Closing a connection with unread bytes resets it, and the reset may overtake the answer. So the whole answer is
    sent, the rest of the body is read and dropped for a while, and only then the connection is closed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not has_body(scope):
            return await self.app(scope, receive, send)
        # A client that waits for "100 Continue" has sent nothing yet; the first receive sends it that answer.
        ended = any(name == b"expect" for name, _ in scope["headers"])

        async def watched() -> Message:
            nonlocal ended
            message = await receive()
            ended = message["type"] == "http.disconnect" or not message.get("more_body")
            return message

        async def answer(message: Message) -> None:
            if ended or message["type"] != "http.response.body" or message.get("more_body"):
                return await send(message)
            await send({**message, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    while not ended:
                        await watched()
            await send({"type": "http.response.body"})

        await self.app(scope, watched, answer)


def declared_length(scope: Scope) -> int:
    """0 if no length is declared, as for a chunked body."""
    return int(next((value for name, value in scope["headers"] if name == b"content-length"), b"0"))


def has_body(scope: Scope) -> bool:
    return declared_length(scope) > 0 or any(name == b"transfer-encoding" for name, _ in scope["headers"])


class Gate:
    """Counts the admitted sequences. At most `capacity` run or wait; further requests are told to come back later."""

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self.max_seqs = 1  # set when the engine is ready
        self.num_inside = 0
        self.closed = ""  # why no request is admitted, set by the watchdog
        self.slow, self.slowdown = "", 1.0  # why requests take longer than usual and how many times as long, likewise
        self._seconds: deque[float] = deque(maxlen=32)  # how long the last requests took

    @property
    def capacity(self) -> int:
        """The queue is as much shorter as requests take longer, so that the last in it waits as long as ever."""
        return self.max_seqs + int(self.max_queue / self.slowdown)

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """Count one request of 'count' sequences from here to the end of the with block. A request larger than the
        capacity is admitted when no other is inside; otherwise it never could be."""
        if self.closed:
            wait = self.retry_after(RESTING)
            text = f"The server is overloaded; retry in {wait} s. The reason: {self.closed}."
            raise unavailable(text, "overloaded", wait)
        if self.num_inside and self.num_inside + count > self.capacity:
            wait, lower = self.retry_after(), f" (lower than usual: {self.slow})" if self.slow else ""
            raise ApiError(
                429,
                f"The server is overloaded; retry in {wait} s. {self.num_inside} sequences run or wait, this request "
                f"has {count}, and the limit is {self.capacity}{lower}.",
                code="queue_full",
                headers={"Retry-After": str(wait)},
            )
        self.num_inside += count
        try:
            yield
        finally:
            self.num_inside -= count

    def took(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def retry_after(self, least: int = 1) -> int:
        """Seconds until a place is probably free: the time of a request divided by the number that run at once."""
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        return min(60, max(least, math.ceil(mean / self.max_seqs)))
