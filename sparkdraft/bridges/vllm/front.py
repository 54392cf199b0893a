"""Our own front before another engine's server: /health, /metrics by our names, the key, the limits of a body;
everything else is handed on as it is, streams included.

    Linger -> Errors -> Hosts -> Auth -> BodyLimit -> Front -> the engine's server on 127.0.0.1

`Front` is an ASGI application over a `Supervised` (supervise.py), which says what the engine is doing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sparkdraft import __version__
from sparkdraft.operate.canary.findings import FAILED
from sparkdraft.server.app import Errors
from sparkdraft.server.config import ServerConfig
from sparkdraft.server.guards import Auth, BodyLimit, Hosts, Linger, accepted_hosts
from sparkdraft.server.metrics import PREFIX, Metrics
from sparkdraft.server.protocol.errors import ApiError, unavailable
from sparkdraft.server.protocol.shapes import dumps

if TYPE_CHECKING:
    from sparkdraft.bridges.vllm.supervise import Supervised

RETRY = 5  # seconds after which a client may ask again
THEIRS = "vllm:"  # what vLLM's metrics begin with
HOP = {  # headers of one connection, which are not handed on
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"host", b"content-length",
}  # fmt: skip


def create_front(config: ServerConfig, supervised: Supervised, metrics: Metrics) -> ASGIApp:
    app: ASGIApp = BodyLimit(Front(supervised, metrics), config.max_body)
    if config.api_key:
        app = Auth(app, config.api_key)
    if (accepted := accepted_hosts(config)) is not None:
        app = Hosts(app, accepted)
    return Linger(Errors(app, metrics))


class Front:
    def __init__(self, supervised: Supervised, metrics: Metrics) -> None:
        self.supervised, self.metrics = supervised, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        routes = {"/health": self._health, "/metrics": self._metrics, "/v1/status": self._status}
        if (route := routes.get(scope["path"])) and scope["method"] in ("GET", "HEAD"):
            response: Response = await route()
            return await response(scope, receive, send)
        state = self.supervised
        if not state.is_ready:
            raise unavailable(f"The engine is not ready ({state.stage}); try again.", "not_ready", RETRY)
        await state.proxy(scope, receive, send)

    async def _health(self) -> Response:
        state = self.supervised
        failed = [finding.probe for finding in state.findings if finding.status == FAILED]
        found = {"canary": failed} if failed else {}
        if state.is_ready:
            return JSONResponse({"status": "degraded" if failed else "ok"} | found)
        body = {"status": state.state, "stage": state.stage} | found
        return JSONResponse(body, status_code=503, headers={"Retry-After": str(RETRY)})

    async def _metrics(self) -> Response:
        state, own = self.supervised, self.metrics
        own.ready.set(float(state.is_ready))
        own.restarts.set(state.restarts)
        own.canary([finding.as_dict() for finding in state.findings])
        lines = [line for metric in (own.http, own.ready, own.restarts, own.probe_passed) for line in metric.lines()]
        lines += renamed(await state.proxy.read("/metrics"))
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def _status(self) -> Response:
        state = self.supervised
        return JSONResponse(
            {
                "status": "ok" if state.is_ready else state.state,
                "stage": state.stage,
                "version": __version__,
                "engine": {"name": "vllm", "version": state.version, "command": state.shown},
                "notes": state.notes,
                "restarts": state.restarts,
                "canary": [finding.as_dict() for finding in state.findings],
            }
        )


def renamed(text: str) -> Iterator[str]:
    """vLLM's metrics by our names, and those of our plugin in it that have no other name."""
    lines = text.splitlines()
    theirs = {_name(line).removeprefix(THEIRS) for line in lines if _name(line).startswith(THEIRS)}
    for line in lines:
        name = _name(line)
        if name.startswith(THEIRS):
            # Texts of help name other metrics; values of labels are not ours to change.
            yield line.replace(THEIRS, PREFIX) if line.startswith("#") else line.replace(THEIRS, PREFIX, 1)
        elif name.startswith(PREFIX) and name.removeprefix(PREFIX) not in theirs:
            yield line


def _name(line: str) -> str:
    """The metric that a line of Prometheus' text format is about."""
    words = line.split(None, 3)
    if line.startswith("#"):
        return words[2] if len(words) > 2 else ""
    return words[0].partition("{")[0] if words else ""


class Proxy:
    """Hands requests on to a server on this machine, as an ASGI application."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._http = httpx.AsyncClient(base_url=url, timeout=None, trust_env=False, limits=limits)

    async def close(self) -> None:
        await self._http.aclose()

    async def is_healthy(self, seconds: float) -> bool:
        with suppress(httpx.HTTPError):
            return (await self._http.get("/health", timeout=seconds)).status_code == httpx.codes.OK
        return False

    async def read(self, path: str) -> str:
        """A page of the server; empty if it does not answer."""
        with suppress(httpx.HTTPError):
            response = await self._http.get(path, timeout=5.0)
            return response.text if response.status_code == httpx.codes.OK else ""
        return ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _body(receive)
        path = scope.get("raw_path") or scope["path"].encode()
        query = scope.get("query_string", b"")
        target = path.split(b"?")[0] + (b"?" + query if query else b"")
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in HOP]
        url = self._http.base_url.copy_with(raw_path=target)
        request = self._http.build_request(scope["method"], url, headers=headers, content=body)
        gone = asyncio.ensure_future(receive())  # nothing follows a whole body but the end of the connection
        sent = asyncio.ensure_future(self._http.send(request, stream=True))
        try:
            await asyncio.wait({gone, sent}, return_when=asyncio.FIRST_COMPLETED)
            if sent.done():
                await self._answer(sent, gone, send)
        finally:
            for task in (gone, sent):
                task.cancel()

    async def _answer(self, sent: asyncio.Future[httpx.Response], gone: asyncio.Future[Any], send: Send) -> None:
        try:
            response = sent.result()
        except httpx.HTTPError as error:
            raise ApiError(
                503, f"The engine did not answer ({type(error).__name__}); try again.", code="no_answer"
            ) from None
        headers = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in HOP]
        if "content-length" in response.headers:
            headers.append((b"content-length", response.headers["content-length"].encode()))
        try:
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            pieces = response.aiter_raw()
            while piece := await _unless(gone, anext(pieces, b"")):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.HTTPError as error:
            # The engine ended within its answer: a stream says so, and any other answer breaks off.
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                sentence = f"The engine ended within its answer ({type(error).__name__}); send it again."
                failure = ApiError(503, sentence, code="no_answer")
                event = b"data: " + dumps(failure.body()) + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": False})
        finally:
            await response.aclose()


async def _unless(gone: asyncio.Future[Any], work: Awaitable[bytes]) -> bytes:
    """What comes, or nothing where the client has gone before."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({gone, task}, return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            return task.result()
    finally:
        task.cancel()
    with suppress(asyncio.CancelledError, httpx.HTTPError):
        await task
    return b""


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body
