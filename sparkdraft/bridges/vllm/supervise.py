"""Another engine's server, started, warmed up, probed, watched and started again, behind our front.

A child that ends before it ever was ready ends us, with its status and its last lines. One that ends later, or
whose /health fails for a while, is started again. The first signal drains: new requests get 503, and the child is told,
which finishes what it runs. A second signal, or the end of its time, kills it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from sparkdraft.bridges.cluster.node.processes import end_all
from sparkdraft.bridges.vllm.child import Child
from sparkdraft.bridges.vllm.front import Proxy
from sparkdraft.core import UserError
from sparkdraft.operate.canary.findings import Finding, summary
from sparkdraft.operate.canary.http_client import Server as Asked
from sparkdraft.operate.canary.remote import check_url
from sparkdraft.server.app import send_warm_up_requests
from sparkdraft.server.run import http_config

POLL = 0.05
ASK = 0.5  # seconds between two looks whether a child that starts is healthy
WATCH = 5.0  # the same while it runs
LOOK = 5.0  # seconds that it may take to answer a look
UNWELL = 6  # looks in a row that fail before a child that runs is ended
GRACE = 30.0  # seconds beyond the drain before a child that was told to end is killed
PAUSE = 3.0  # seconds before a child is started again
CANARY_SECONDS = 20.0  # after which no further probe is begun

STARTING, READY, RESTARTING, DRAINING = "starting", "ready", "restarting", "draining"


class Supervised:
    """What the front needs to know of the engine, and the task that keeps it running."""

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
        """url: where the child listens. shown: its command, without secrets."""
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
        """From a signal handler."""
        self._signals.append(number)
        self.state, self.stage = DRAINING, "draining"

    async def run(self) -> int:
        """Until a signal has ended the child, or it ended before it was ready; returns the exit status, 0 after a
        signal."""
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
        """Wait until it answers, send it warm-up requests, and ask it the canary's questions."""
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
        """The result, or None if the child ends or a signal comes before it is there, or the work fails."""
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
        """Until it ends, a signal comes, or it has been unwell for too long."""
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
        """Wait for its end. The first signal is passed on, with which those count that came before it was passed on; a
        later one, or the end of its time, kills the child."""
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


class FrontServer(uvicorn.Server):
    """uvicorn, whose signals go to the supervised engine: the server ends when that has ended."""

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
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            signal.signal(signal.SIGHUP, hang_up)
