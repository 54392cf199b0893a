"""Runs `vllm serve` as a child process behind our own front: starts it, warms it up, probes it and restarts it.

    Linger -> Errors -> Hosts -> Auth -> BodyLimit -> Front -> Proxy -> vLLM on 127.0.0.1

The front answers /health, /metrics (by our names) and /v1/status, checks the key and the limits of a body, and hands
everything else on, streams included. A child that ends before it was ever ready ends this process with its status and
last lines. One that ends later, or whose /health keeps failing, is restarted. The first signal drains: new requests get
status 503, and the child finishes what it runs. A second signal, or the end of the drain time, kills the child.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import httpx
import uvicorn
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sparkdraft import __version__
from sparkdraft.bridges.cluster.node.processes import end_all
from sparkdraft.bridges.vllm.child import Child
from sparkdraft.core import UserError
from sparkdraft.operate.canary.findings import FAILED, Finding, summary
from sparkdraft.operate.canary.remote import Server as Asked
from sparkdraft.operate.canary.remote import check_url
from sparkdraft.server.app import Errors, send_warm_up_requests
from sparkdraft.server.config import ServerConfig
from sparkdraft.server.guards import Auth, BodyLimit, Hosts, Linger, accepted_hosts
from sparkdraft.server.metrics import PREFIX, Metrics
from sparkdraft.server.protocol.shapes import dumps
from sparkdraft.server.protocol.validation import ApiError, unavailable
from sparkdraft.server.run import http_config

POLL = 0.05
ASK = 0.5  # seconds between health checks while the child starts
WATCH = 5.0  # the same while it runs
LOOK = 5.0  # time limit of a health check, in seconds
UNWELL = 6  # failed health checks in a row after which a running child is killed
GRACE = 30.0  # seconds after the drain until a child that was told to end is killed
PAUSE = 3.0  # seconds before a restart
CANARY_SECONDS = 20.0  # no probe starts later than this

STARTING, READY, RESTARTING, DRAINING = "starting", "ready", "restarting", "draining"
RETRY = 5  # seconds in Retry-After
THEIRS = "vllm:"  # prefix of vLLM's metrics
HOP = {  # headers of a single connection, which a proxy does not forward
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"host", b"content-length",
}  # fmt: skip


class Proxy:
    """An ASGI application that forwards requests to a server on this machine."""

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
        """Returns a page of the server, or "" if it does not answer."""
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
        gone = asyncio.ensure_future(receive())  # after the whole body, only a disconnect can arrive
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
            # The engine ended during its answer: a stream gets an error event, any other answer breaks off.
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                sentence = f"The engine ended within its answer ({type(error).__name__}); send it again."
                failure = ApiError(503, sentence, code="no_answer")
                event = b"data: " + dumps(failure.body()) + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": False})
        finally:
            await response.aclose()


async def _unless(gone: asyncio.Future[Any], work: Awaitable[bytes]) -> bytes:
    """Returns the result, or b"" if the client disconnects first."""
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


class Supervised:
    """Keeps the engine running, and knows its state for the front."""

    def __init__(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        url: str,
        say: Callable[[str], None],
        *,
        version: str = "",
        shown: str = "",
        notes: Sequence[str] = (),
        api_key: str = "",
        canary: bool = True,
        drain: float = 30.0,
    ) -> None:
        """url: where the child listens. shown: the command, without secrets."""
        self.version, self.shown, self.notes = version, shown, list(notes)
        self.state, self.stage, self.restarts = STARTING, "starting", 0
        self.findings: list[Finding] = []
        self.proxy = Proxy(url)
        self._words, self._environ, self._url, self._say = words, environ, url, say
        self._key, self._asks, self._drain = api_key, canary, drain
        self._signals: list[int] = []

    @property
    def is_ready(self) -> bool:
        return self.state == READY

    def note_signal(self, number: int) -> None:
        """Called by a signal handler."""
        self._signals.append(number)
        self.state, self.stage = DRAINING, "draining"

    async def run(self) -> int:
        """Runs until a signal has ended the child, or the child ends before it is ready. Returns the exit status (0
        after a signal)."""
        try:
            while True:
                child, was_ready = Child(self._words, self._environ), False
                if await self._becomes_ready(child):
                    was_ready = True
                    await self._stay(child)
                status = await self._ended(child)
                end_all()
                if self._signals:
                    return 0
                how = await asyncio.to_thread(child.last_words)
                if not was_ready:
                    self._say(f"vLLM ended before it was ready, with {how}")
                    return status
                self.restarts += 1
                self.state, self.stage = RESTARTING, f"it ended with status {status}"
                self._say(f"vLLM ended and is started again (restart {self.restarts}), with {how}")
                await asyncio.sleep(PAUSE)
        finally:
            end_all()
            await self.proxy.close()

    async def _becomes_ready(self, child: Child) -> bool:
        """Waits until the child answers, warms it up and runs the canary."""
        start = time.monotonic()
        self._enter("loading")
        while not await self.proxy.is_healthy(LOOK):
            if child.status is not None or self._signals:
                return False
            await asyncio.sleep(ASK)
        answered = time.monotonic() - start
        self._enter("warm-up")
        await self._unless_ended(child, send_warm_up_requests(self.proxy, self._key))
        if self._asks:
            self._enter("canary")
            asked = Asked(self._url, self._key, timeout=CANARY_SECONDS)
            found = await self._unless_ended(child, asyncio.to_thread(check_url, asked, budget=CANARY_SECONDS))
            self.findings = found or []
        if child.status is not None or self._signals:
            return False
        self.state, self.stage = READY, READY
        self._say(f"ready after {time.monotonic() - start:.1f} s (it answered after {answered:.1f} s)")
        if self.findings:
            self._say(f"  canary: {summary([finding.as_dict() for finding in self.findings])}")
        return True

    def _enter(self, stage: str) -> None:
        if not self._signals:
            self.stage = stage
            self._say(f"{stage} ...")

    async def _unless_ended(self, child: Child, work: Coroutine[Any, Any, Any]) -> Any:
        """Returns the result, or None if the child ends, a signal comes first, or the work fails."""
        task = asyncio.ensure_future(work)
        while not task.done():
            if child.status is not None or self._signals:
                task.cancel()
                return None
            await asyncio.wait({task}, timeout=POLL)
        try:
            return task.result()
        except (UserError, OSError) as error:
            self._say(f"note: {self.stage}: {error}")
            return None

    async def _stay(self, child: Child) -> None:
        """Returns when the child ends, a signal comes, or health checks have failed for too long."""
        unwell, next_look = 0, time.monotonic() + WATCH
        while child.status is None and not self._signals:
            await asyncio.sleep(POLL)
            if time.monotonic() < next_look:
                continue
            unwell = 0 if await self.proxy.is_healthy(LOOK) else unwell + 1
            next_look = time.monotonic() + WATCH
            if unwell >= UNWELL and child.status is None and not self._signals:
                self._say(f"the engine's /health has failed {unwell} times in a row: it is killed")
                child.kill()
                return

    async def _ended(self, child: Child) -> int:
        """Waits for the child to end. Signals that have come by now are passed on as one. A later one, or the end of
        the drain time, kills the child."""
        passed, deadline, is_killed = 0, float("inf"), False
        while (status := child.status) is None:
            if self._signals and not passed:
                passed, deadline = len(self._signals), time.monotonic() + self._drain + GRACE
                child.tell(self._signals[0])
            again = len(self._signals) > passed
            if not is_killed and ((passed and again) or time.monotonic() > deadline):
                why = "a second signal came" if again else f"it did not end in {self._drain + GRACE:.0f} s"
                self._say(f"killed: {why}")
                child.kill()
                is_killed = True
            await asyncio.sleep(POLL)
        return status


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
    """Yields vLLM's metrics under our names. Help texts name other metrics; label values stay as they are."""
    for line in text.splitlines():
        if line.startswith((f"# HELP {THEIRS}", f"# TYPE {THEIRS}")):
            yield line.replace(THEIRS, PREFIX)
        elif line.startswith(THEIRS):
            yield line.replace(THEIRS, PREFIX, 1)


def create_front(config: ServerConfig, supervised: Supervised, metrics: Metrics) -> ASGIApp:
    app: ASGIApp = BodyLimit(Front(supervised, metrics), config.max_body)
    if config.api_key:
        app = Auth(app, config.api_key)
    if (accepted := accepted_hosts(config)) is not None:
        app = Hosts(app, accepted)
    return Linger(Errors(app, metrics))


class FrontServer(uvicorn.Server):
    """A uvicorn server that hands its signals to the supervised engine and ends after it."""

    def __init__(self, app: ASGIApp, supervised: Supervised) -> None:
        super().__init__(http_config(app, lifespan="off"))
        self.supervised = supervised

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.supervised.note_signal(sig)

    async def run_on(self, listener: socket.socket) -> int:
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        hang_up = signal.signal(signal.SIGHUP, self.handle_exit)
        try:
            return await self.supervised.run()
        finally:
            self.should_exit = True
            with suppress(asyncio.CancelledError):
                await serving
            signal.signal(signal.SIGHUP, hang_up)
