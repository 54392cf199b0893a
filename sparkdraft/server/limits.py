"""How much one client may ask for: the limits in numbers, the size of a body, and the length of the queue.

Each limit is checked where what it limits is first seen, and the answer names it. The queue is counted here and not in
the engine, so that a client is turned away at once and nothing it sent has been tokenised.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparkdraft.server.protocol.errors import ApiError

MAX_MESSAGES = 2000
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_SCHEMA_BYTES = 64 << 10
MAX_TOOLS = 128  # as OpenAI
MAX_PROMPTS = 256  # of one /v1/completions request
MAX_LOGIT_BIAS = 1024
PATIENCE = 8  # a body up to this many times too large is read to its end, so that the client sees the answer


class BodyLimit:
    """Middleware: reads the body up to the limit and hands it on whole; a larger one gets 413."""

    def __init__(self, app: ASGIApp, max_body: int) -> None:
        self.app, self.max_body = app, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            return await self.app(scope, receive, send)
        body = await self._read(receive)
        if body is None:
            return  # the client has gone
        if len(body) > self.max_body:
            raise ApiError(
                413,
                f"The body is larger than {self.max_body:,} bytes; send less, or raise max_body.",
                code="body_too_large",
                headers={"Connection": "close"},
            )
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self.app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytearray | None:
        body, size = bytearray(), 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            size += len(piece)
            if len(body) <= self.max_body:
                body += piece
            if not message.get("more_body") or size > PATIENCE * self.max_body:
                return body


class Gate:
    """Counts the sequences that were let in. `capacity` run or wait; who comes after them is told to come back."""

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self.max_seqs = 1  # set when the engine is ready
        self.num_inside = 0
        self._seconds: deque[float] = deque(maxlen=32)  # how long the last requests took

    @property
    def capacity(self) -> int:
        return self.max_seqs + self.max_queue

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """One request of 'count' sequences is inside from here to the end of the block."""
        if self.num_inside >= self.capacity:
            raise ApiError(
                429,
                f"{self.num_inside} sequences run or wait here and {self.capacity} is the limit; try again later.",
                code="queue_full",
                headers={"Retry-After": str(self.retry_after())},
            )
        self.num_inside += count
        try:
            yield
        finally:
            self.num_inside -= count

    def took(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def retry_after(self) -> int:
        """Seconds until a place is likely free: the time a request takes over how many run at once."""
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        return min(60, max(1, math.ceil(mean / self.max_seqs)))
