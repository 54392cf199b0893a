"""Checks before the routes: time-outs and sizes, host names, origins, API keys, and the queue.

The queue is counted here and not in the engine, so that a client is refused before anything it sent is tokenised.
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sparkdraft.server.config import ServerConfig
from sparkdraft.server.keys import Key, Keys
from sparkdraft.server.protocol.validation import ApiError, unavailable
from sparkdraft.server.request_log import record_of

CLOSE = {"Connection": "close"}  # for answers after which the connection cannot be used again
BODY_SECONDS = 30.0  # longest wait for another byte of a body, and for a whole body in addition to BODY_RATE
BODY_RATE = 10_000  # bytes of a body for which another second is allowed
VALUE_BYTES = 8  # a body may have one comma or opening bracket per 8 bytes: lists of ids take about seven
MIN_VALUES = 1 << 18  # commas and opening brackets that a body of any size may have; they take 0.1 s to parse
MAX_HEADERS = 100  # as Apache's
HEADER_SECONDS = 10.0  # from the first byte of a request, or from the connection's start, to the end of its headers
LINGER_SECONDS = 30.0  # for reading and dropping the rest of a refused body
RESTING = 10  # seconds after which a client may try again while no new work is taken
OPEN_PATHS = ("/", "/health")
EXPOSED = ("X-Request-Id", "Request-Id", "Retry-After")  # headers that a page of a listed origin may read


class HttpConnection(H11Protocol):
    """uvicorn's connection of one client, with a time-out for headers, which uvicorn does not have."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        if self._is_between_requests:
            self._expect_headers()
        super().data_received(data)
        if not self._is_between_requests:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_headers(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._expire)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        if self._is_between_requests:
            self.transport.close()


def check_head(scope: Scope) -> None:
    """Refuse what the HTTP parser lets pass: two lengths, an unknown version, and thousands of headers."""
    names = [name for name, _ in scope["headers"]]
    if scope["http_version"] not in ("1.0", "1.1"):
        raise ApiError(400, f"HTTP/{scope['http_version']} is not supported; use HTTP/1.1.", headers=CLOSE)
    if len(names) > MAX_HEADERS:
        raise ApiError(431, f"The request has {len(names):,} headers; send at most {MAX_HEADERS}.", headers=CLOSE)
    if b"transfer-encoding" in names and b"content-length" in names:
        sentence = "The request has both Transfer-Encoding and Content-Length; send one of them."
        raise ApiError(400, sentence, headers=CLOSE)


class Linger:
    """Middleware: makes sure that an answer sent before the end of a body reaches its client.

    Closing a connection with unread bytes resets it, and the reset may overtake the answer. So the rest of the body is
    read and dropped for a while before the connection is closed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not has_body(scope):
            return await self.app(scope, receive, send)
        # A client that waits for "100 Continue" has sent nothing yet; the first receive sends it that answer.
        ended = header_of(scope, b"expect") is not None

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
        """Counted piece by piece, so that a large body does not block the event loop."""
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
                limit = f"{self.max_values:,} commas and opening brackets"
                raise _too_large(f"has more than {limit}; send less in one request")
            if not message.get("more_body"):
                return bytes(body)

    def _check_size(self, size: int) -> None:
        if size > self.max_body:
            raise _too_large(f"is larger than {self.max_body:,} bytes; send less")


def _too_large(what: str) -> ApiError:
    sentence = f"The body {what}, or start the server with a larger --max-body."
    return ApiError(413, sentence, code="body_too_large", headers=CLOSE)


def header_of(scope: Scope, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)


def declared_length(scope: Scope) -> int:
    """0 if no length is declared, as for a chunked body."""
    return int(header_of(scope, b"content-length") or 0)


def has_body(scope: Scope) -> bool:
    return declared_length(scope) > 0 or header_of(scope, b"transfer-encoding") is not None


class Hosts:
    """Middleware: a request for a name that is neither this machine's own nor listed gets 403.

    A web page can let its own name point to 127.0.0.1 (DNS rebinding) and read this server's answers. The browser still
    sends the page's name as Host. A server that listens beyond this machine accepts all names, unless a list is given.
    """

    def __init__(self, app: ASGIApp, accepted: frozenset[str]) -> None:
        self.app, self.accepted = app, accepted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._check(header_of(scope, b"host") or b"")
        await self.app(scope, receive, send)

    def _check(self, header: bytes) -> None:
        """A request without the header is let through: every browser sends one."""
        name = host_name(header.decode("latin-1"))
        if name and not is_this_machine(name) and name not in self.accepted:
            raise ApiError(
                403,
                f"The Host header names '{name[:100]}' and this server answers to localhost, 127.0.0.1, [::1] and the "
                "names given by --allowed-hosts; add it there, or use one of these.",
                code="host_not_allowed",
            )


def accepted_hosts(config: ServerConfig) -> frozenset[str] | None:
    """Names accepted in addition to this machine's own; None: every name."""
    given = frozenset(host_name(entry) for entry in config.allowed_hosts.split(",") if entry.strip())
    return None if "*" in given or not (given or config.is_local) else given


def host_name(text: str) -> str:
    """'localhost' for 'LocalHost.:8000', '::1' for '[::1]:8000' and for '::1'."""
    host = text.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0].rstrip(".")


def is_this_machine(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def cors_options(origins: list[str]) -> dict[str, Any]:
    """What CORSMiddleware is to allow pages of these origins. Cookies are not among it: keys are headers."""
    options: dict[str, Any] = {"allow_origins": origins, "allow_methods": ["*"], "allow_headers": ["*"]}
    # browsers that ask whether a page of the internet may reach a private address; older versions do not answer that
    if "allow_private_network" in inspect.signature(CORSMiddleware).parameters:
        options["allow_private_network"] = True
    return options | {"expose_headers": EXPOSED}


class Auth:
    """Middleware: a request without a key, or with a wrong one, gets 401, and one past its key's limits gets 429.

    The page and /health need no key, but a wrong one is refused there too. Limits count POST requests.
    """

    def __init__(self, app: ASGIApp, keys: Keys | str) -> None:
        """keys: or the only one."""
        self.app, self.keys = app, Keys(keys) if isinstance(keys, str) else keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = self._key_of(scope) if scope["type"] == "http" else None
        if key is None:
            return await self.app(scope, receive, send)
        record_of(scope).key = key.name
        if scope["method"] == "POST" and (key.max_concurrent or key.requests_per_minute):
            await self._count(key, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _key_of(self, scope: Scope) -> Key | None:
        """The request's key; None where none was sent and none is needed."""
        bearer, own = header_of(scope, b"authorization"), header_of(scope, b"x-api-key")
        if bearer is None and own is None and scope["path"] in OPEN_PATHS:
            return None
        scheme, _, given = (bearer or b"").partition(b" ")
        sent = [given.strip()] if scheme.lower() == b"bearer" else []
        sent += [own.strip()] if own is not None else []
        key = next((found for each in sent if (found := self.keys.find(each))), None)
        if key is None:
            what = "No API key was sent" if bearer is own is None else "The API key is wrong"
            headers = "'Authorization: Bearer <key>' or 'x-api-key: <key>'"
            sentence = f"{what}; send the header {headers} with a key of this server."
            raise ApiError(401, sentence, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return key

    async def _count(self, key: Key, scope: Scope, receive: Receive, send: Send) -> None:
        self.keys.enter(key)
        inside = True

        def leave() -> None:
            nonlocal inside
            if inside:
                inside = False
                self.keys.leave(key)

        async def answer(message: Message) -> None:
            # before the last bytes, so that a client with its answer can send the next request
            if message["type"] == "http.response.body" and not message.get("more_body"):
                leave()
            await send(message)

        try:
            await self.app(scope, receive, answer)
        finally:
            leave()


class Gate:
    """Counts the admitted sequences. At most `capacity` run or wait; further requests are told to come back later."""

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self.max_seqs = 1  # set when the engine is ready
        self.num_inside = 0
        # The watchdog sets these: why no request is admitted; why requests take longer, and how many times as long.
        self.closed = ""
        self.slow, self.slowdown = "", 1.0
        self._seconds: deque[float] = deque(maxlen=32)  # how long the last requests took

    @property
    def capacity(self) -> int:
        return self.max_seqs + int(self.max_queue / self.slowdown)

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """Count a request of so many sequences within the block. One larger than the capacity is admitted alone."""
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
