"""The server as a process: a socket, uvicorn around the application, and an orderly shutdown.

SIGTERM or Ctrl-C drains: /health and new requests get 503, running requests may finish for `drain_seconds`, those left
then end with an error, and the process exits with 0. A second signal does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Callable
from types import FrameType
from typing import Literal

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from sparkdraft.core import UserError
from sparkdraft.server.config import ServerConfig
from sparkdraft.server.guards import HttpConnection
from sparkdraft.server.service import Service

BACKLOG = 2048
POLL = 0.05
LAST_WORDS = 2  # seconds for the answers to reach their clients once nothing runs any more


def listen(config: ServerConfig) -> socket.socket:
    """Bind the socket before anything is loaded, so that a port in use is reported at once."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)  # asyncio disables Nagle's delay only for sockets created as TCP
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        if not isinstance(error, OSError) or isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            usual = "127.0.0.1 (for this machine alone) or 0.0.0.0 (for others too)"
            wrong = f"host is '{config.host}', which is not an address of this machine"
            raise UserError(f"{wrong}; choose another with --host, such as {usual}") from None
        place = f"{config.host} port {config.port}"
        raise UserError(f"cannot listen on {place} ({error.strerror}); choose another with --port") from None
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def http_config(app: ASGIApp, lifespan: Literal["on", "off"] = "on") -> uvicorn.Config:
    """uvicorn's configuration; our own middleware logs."""
    return uvicorn.Config(
        app,
        http=HttpConnection,
        log_config=None,
        access_log=False,
        lifespan=lifespan,
        backlog=BACKLOG,
        timeout_graceful_shutdown=LAST_WORDS,
        server_header=False,
    )


class Server(uvicorn.Server):
    """uvicorn with our own shutdown."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        super().__init__(http_config(app))
        self.service: Service = app.state.service
        self.drain_seconds = config.drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def run_on(self, listener: socket.socket, watch: Callable[[Service], AsyncIterator[None]]) -> None:
        """Serve until a signal. 'watch' runs beside it and may raise UserError, which ends the server."""
        self._loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        watching = asyncio.create_task(_exhaust(watch(self.service)))
        await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done() and watching.exception():
            self.should_exit = True
        await serving
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler. The first signal is not passed to uvicorn, which would raise it again after the end."""
        if self.service.draining or self._loop is None:
            self.should_exit = self.force_exit = True
            return
        self.service.draining = True
        self._loop.call_soon_threadsafe(self._begin_drain)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # Otherwise uvicorn leaves the application running, and it is cancelled with a traceback.
            await self.lifespan.shutdown()

    def _begin_drain(self) -> None:
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        deadline = asyncio.get_running_loop().time() + self.drain_seconds
        while self.service.gate.num_inside and asyncio.get_running_loop().time() < deadline and not self.should_exit:
            await asyncio.sleep(POLL)
        await self.service.client.stop(0.0)  # requests that still run get their error
        self.should_exit = True


async def _exhaust(steps: AsyncIterator[None]) -> None:
    async for _ in steps:
        pass
