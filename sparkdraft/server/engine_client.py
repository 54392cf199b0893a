"""The API's side of the process boundary: starts the engine process, talks to it, and restarts it when it dies.

The two share a socket pair, so each sees at once when the other is gone: the child exits, or the parent fails what was
in flight and starts a new child. One asyncio protocol puts each event into the mailbox of its request; a reader takes
those that are there at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from sparkdraft.backend import ModelInfo
from sparkdraft.config import EngineConfig
from sparkdraft.core import SamplingParams, StepOutput
from sparkdraft.operate.canary.run import unchecked
from sparkdraft.server import messages
from sparkdraft.server.messages import Message

log = logging.getLogger(__name__)
COMMAND = (sys.executable, "-P", "-m", "sparkdraft.server.engine_process")  # -P: import nothing from the current folder
GRACE = 1.0  # seconds a child has to exit after its socket closed or after Shutdown, before it is killed
POLL = 0.01
FIRST_START = 10  # assumed seconds of a start before one was measured
BEAT = 0.5  # seconds between two pings
SILENT = 2.0  # seconds without a byte from the engine after which it counts as unresponsive
RETRY = 5  # seconds after which a client may try again meanwhile
AT_ONCE = 256  # events that a reader takes at most


class EngineError(Exception):
    """The engine is not there, refuses a request or fails while running it. retryable: the same request may work later,
    after about 'retry_after' seconds."""

    def __init__(self, sentence: str, retryable: bool = False, retry_after: int = 1) -> None:
        super().__init__(sentence)
        self.sentence, self.retryable, self.retry_after = sentence, retryable, retry_after


class RequestRefused(EngineError):
    """The engine runs and will not take this request: the client must change it."""


class RequestFailed(EngineError):
    """The engine runs and this request met a bug; the log has the traceback."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    first: float = 1.0  # seconds before the first restart; each failure in a row doubles them
    most: float = 30.0
    calm: float = 60.0  # an engine that was ready for this long died of something new: begin with 'first' again
    hang: float = 60.0  # seconds without a sign of life after which a ready engine is killed; 0: never
    step: float = 600.0  # seconds of one step after which it is killed; 0: never


class EngineClient:
    """state: "starting", "ready", "unresponsive" (it was ready and sends nothing), "restarting", "draining" or "failed"
    (a configuration that cannot run)."""

    def __init__(
        self,
        engine: EngineConfig | Mapping[str, Any],
        restart: RestartPolicy | None = None,
        command: Sequence[str] = COMMAND,
        canary: str | None = None,
    ) -> None:
        """canary: the tool parser of the canary (operate/canary), which then runs at each start; None: no canary."""
        self.options = engine.chosen() if isinstance(engine, EngineConfig) else dict(engine)
        self.restart, self.command = restart or RestartPolicy(), command
        self._canary = [] if canary is None else [canary]
        self._in_canary, self._unchecked = False, ""  # whether the last engine died in it; why it is off since then
        self.state = "starting"
        self.stage, self.progress = "process", (0, 0)  # stage of loading, and (done, total)
        self.last_error: str | None = None
        self.restarts = 0
        self.info: ModelInfo | None = None  # kept while a new engine starts
        self.start_began = time.monotonic()  # of the latest start: when the engine before it was lost
        self.start_seconds = float(FIRST_START)  # how long the last start took until requests were accepted
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dying: messages.Dying | None = None
        self._ready_at = 0.0
        self.pulse = Pulse()
        self._mailboxes: dict[str, Mailbox] = {}
        self._questions: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._idle = asyncio.Event()  # set while nothing is in flight
        self._idle.set()
        self._stopping = asyncio.Event()
        self._numbers = count()

    # ---- calls of the routes

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def retry_after(self) -> int:
        """Whole seconds until requests will probably be accepted, by the duration of the last start."""
        if self.state == "unresponsive":
            return RETRY
        return max(1, math.ceil(self.start_began + self.start_seconds - time.monotonic()))

    @property
    def silence(self) -> str:
        """Says that the engine does not answer; "" if it does."""
        if self.state != "unresponsive":
            return ""
        then = f"; after {self.restart.hang:g} s it is killed and started again" if self.restart.hang else ""
        silent = f"its process has given no sign of life for {self.pulse.silent_for:.0f} s"
        return f"the engine does not answer: {silent}{then}"

    def start_took(self) -> float:
        """Remember and return how long this start took; call it when requests are accepted."""
        self.start_seconds = time.monotonic() - self.start_began
        return self.start_seconds

    async def start(self) -> None:
        """Start the engine process and return; .state says when it is ready."""
        assert self._supervisor is None, "started twice"
        self.start_began = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._supervisor = asyncio.create_task(self._supervise())

    def submit(self, id: str, prompt_ids: Sequence[int], params: SamplingParams | Mapping[str, Any]) -> TokenStream:
        """Send a request under an id never used before; its events come from the iterator. Raises EngineError."""
        if self.state != "ready":
            raise self._not_ready()
        assert id not in self._mailboxes, f"request id {id} is in flight already"
        checked = params if isinstance(params, SamplingParams) else SamplingParams(**params)
        mailbox = self._mailboxes[id] = Mailbox(checked.n)
        self._idle.clear()
        self._send(messages.Submit(id, list(prompt_ids), messages.pack_params(checked)))
        return TokenStream(self, id, mailbox)

    async def abort(self, id: str) -> None:
        """End a request now; its iterator yields a last event with finish "abort". An ended request is no error."""
        if id in self._mailboxes:
            self._send(messages.Abort(id))

    async def status(self, timeout: float = 5.0) -> dict[str, Any]:
        """Live numbers of the engine, which answers between two steps."""
        if self._transport is None or not self._ready_at or self.state == "unresponsive":
            raise self._not_ready()
        name = str(next(self._numbers))
        future = self._questions[name] = asyncio.get_running_loop().create_future()
        self._send(messages.AskStatus(name))
        try:
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise EngineError(f"the engine did not answer in {timeout:g} s: a long step is running", True) from None
        finally:
            self._questions.pop(name, None)

    def count_anew(self) -> None:
        """Reset the engine's counts, after warm-up requests."""
        self._send(messages.CountAnew())

    def switch(self, part: str, on: bool) -> None:
        """Switch a part of the engine off or on (Backend.switch). A new process has all parts on."""
        self._send(messages.Switch(part, on))

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for up to this long, then end the engine process."""
        self.state = "draining"
        try:
            await asyncio.wait_for(self._idle.wait(), drain_seconds)
        except TimeoutError:
            self._fail_all("the server is shutting down and could not finish this request; send it again", True)
        self._stopping.set()
        self._send(messages.Shutdown())
        if self._supervisor is not None:
            done, _ = await asyncio.wait([self._supervisor], timeout=GRACE)
            if not done:
                self._kill()
                await asyncio.wait([self._supervisor])

    # ---- the life of the child

    async def _supervise(self) -> None:
        delay = self.restart.first
        while not self._stopping.is_set():
            self._dying, self._ready_at = None, 0.0
            self.stage, self.progress = "process", (0, 0)
            try:
                await self._run_child()
                reason = self._dying.sentence if self._dying else self._death()
            except OSError as error:  # the system cannot create a process just now
                self._child_lost()
                reason = f"the engine process could not be started ({error.strerror})"
            except Exception as error:  # it would fail again, as with options that do not fit a command line
                log.error("the engine process could not be started", exc_info=error)
                self._dying = messages.Dying(f"the engine process could not be started ({error})", final=True)
                self._child_lost()
                reason = self._dying.sentence
            if self.state == "draining":
                return self._fail_all("the engine stopped while the server was shutting down; send it again", True)
            self.last_error = reason
            if self._in_canary:  # it would die there again
                self._canary, self._unchecked = [], reason
                log.error("the engine died under the canary's probes and is started again without them: %s", reason)
            if self.state == "failed":
                return self._fail_all(reason, False)
            self._fail_all(f"the engine stopped and is being restarted; retry in a moment: {reason}", True)
            if self._ready_at and time.monotonic() - self._ready_at >= self.restart.calm:
                delay = self.restart.first
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            delay = min(2 * delay, self.restart.most)
            self.restarts += 1

    async def _run_child(self) -> None:
        """Run one engine process, from its start until it has exited and been waited for."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                # A process group of its own: the server acts on Ctrl-C and on signals to its group.
                self._process = subprocess.Popen(
                    [*self.command, str(theirs.fileno()), json.dumps(self.options), *self._canary],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=environment(),
                    process_group=0,
                )
        except BaseException:
            ours.close()
            raise
        connection = Connection(self._receive)
        self._transport, _ = await loop.create_unix_connection(lambda: connection, sock=ours)
        if self._stopping.is_set():
            self._send(messages.Shutdown())
        watching = asyncio.create_task(self._watch())
        await connection.lost
        watching.cancel()
        self._child_lost()
        await self._bury()

    async def _watch(self) -> None:
        """Ping the engine while it is ready, and kill it when it hangs. Its socket then closes, and it is restarted."""
        self.pulse = pulse = Pulse()
        while True:
            await asyncio.sleep(BEAT)
            if self.state not in ("ready", "unresponsive"):
                continue
            self._send(messages.Ping())
            pulse.pinged()
            if pulse.is_silent and self.state == "ready":
                self.state = "unresponsive"
                log.warning("%s", self.silence)
            if reason := pulse.hung(self.restart.hang, self.restart.step):
                log.error("%s", reason)
                self._dying = messages.Dying(reason)
                return self._kill()

    def _child_lost(self) -> None:
        self._transport, self.start_began = None, time.monotonic()
        self._in_canary = self.stage == "canary"
        if self.state != "draining":
            self.state = "failed" if self._dying and self._dying.final else "restarting"
            self.stage, self.progress = "waiting to start", (0, 0)
            self.last_error = self._dying.sentence if self._dying else self.last_error

    async def _bury(self) -> None:
        """Wait for the process, which exits because the socket is closed; kill it if it does not."""
        assert self._process is not None
        deadline = time.monotonic() + GRACE
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                self._kill()
            await asyncio.sleep(POLL)

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _death(self) -> str:
        code = self._process.returncode if self._process else None
        if code is not None and code < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"the engine process was killed by {names.get(-code, f'signal {-code}')}"
        return f"the engine process exited with code {code}"

    def _fail_all(self, sentence: str, retryable: bool) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.fail(EngineError(sentence, retryable, self.retry_after))
        for future in self._questions.values():
            if not future.done():
                future.set_exception(EngineError(sentence, retryable, self.retry_after))
        self._mailboxes.clear()
        self._questions.clear()
        self._idle.set()

    def _not_ready(self) -> EngineError:
        """For a request that comes while the state changes; Service.require_ready says more."""
        if self.state == "failed":
            return EngineError(self.last_error or "the engine cannot run")
        state = "the server is shutting down" if self.state == "draining" else f"the engine is {self.state}"
        return EngineError(self.silence or f"{state}; retry in {self.retry_after} s", True, self.retry_after)

    # ---- messages

    def _send(self, message: Message) -> None:
        if self._transport is not None:  # without one, everything in flight is about to be failed
            self._transport.write(messages.encode(message))

    def _receive(self, message: Message) -> None:
        self.pulse.heard()
        if self.state == "unresponsive":
            self.state = "ready"
            log.warning("the engine answers again")
        match message:
            case messages.Pong():
                self.pulse.answered(message.turn, message.idle)
            case messages.Tokens():
                for event in message.events:
                    self._deliver(event)
            case messages.Refused():
                mailbox = self._mailboxes.get(message.id)
                if mailbox is not None:
                    mailbox.fail(_refusal(message))
                    self._forget(message.id)
            case messages.Status():
                future = self._questions.get(message.id)
                if future is not None and not future.done():
                    future.set_result(message.facts)
            case messages.Loading():
                self.stage, self.progress = message.stage, (message.done, message.total)
            case messages.Ready():
                info, self._ready_at = message.info, time.monotonic()
                self.info = unchecked(info, self._unchecked) if self._unchecked else info
                self.stage, self.progress = "ready", (0, 0)
                if self.state != "draining":
                    self.state = "ready"
            case messages.Dying():
                self._dying = message
            case _:
                raise AssertionError(f"{type(message).__name__} is not for the API")

    def _deliver(self, event: StepOutput) -> None:
        mailbox = self._mailboxes.get(event.request_id)
        if mailbox is None:  # the client that asked has left
            return
        mailbox.put(event)
        if not mailbox.left:
            self._forget(event.request_id)

    def _forget(self, id: str) -> None:
        del self._mailboxes[id]
        if not self._mailboxes:
            self._idle.set()

    def leave_later(self, id: str, mailbox: Mailbox) -> None:
        """Call `leave` from any thread: the garbage collector may drop a reader in another thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.leave, id, mailbox)

    def leave(self, id: str, mailbox: Mailbox) -> None:
        if self._mailboxes.get(id) is mailbox:
            self._forget(id)
            self._send(messages.Abort(id))


def environment() -> dict[str, str]:
    """The child's environment: with -P it must still find this package in a checkout that is not installed."""
    root = Path(__file__).parents[2]
    if root.name in ("site-packages", "dist-packages"):
        return dict(os.environ)
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(root)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


class Connection(asyncio.Protocol):
    """Turns bytes into messages. 'lost' is done once the other end is closed."""

    def __init__(self, receive: Callable[[Message], None]) -> None:
        self._receive, self._lines = receive, messages.Lines()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        for message in self._lines.feed(data):
            self._receive(message)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)


def _refusal(message: messages.Refused) -> EngineError:
    if message.retry_after:
        return EngineError(message.sentence, True, message.retry_after)
    return RequestFailed(message.sentence) if message.is_bug else RequestRefused(message.sentence)


@dataclass(eq=False, slots=True)
class Mailbox:
    """The events of one request that wait for their reader. The client holds the mailbox and not the reader, whose end
    by the garbage collector is then noticed."""

    left: int  # how many of its n texts have not ended
    events: list[StepOutput] = field(default_factory=list)
    error: EngineError | None = None  # comes after the events
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, event: StepOutput) -> None:
        self.events.append(event)
        if event.finish:
            self.left -= 1
        self._arrived.set()

    def fail(self, error: EngineError) -> None:
        self.error = error
        self._arrived.set()

    async def take(self) -> list[StepOutput]:
        """Waits for at least one event and returns those that are there: AT_ONCE at most, so that a client that has not
        read for long does not hold up the others. Raises the error that ended the request."""
        while not self.events:
            if self.error is not None:
                raise self.error
            self._arrived.clear()
            await self._arrived.wait()
        events, self.events = self.events[:AT_ONCE], self.events[AT_ONCE:]
        return events


class TokenStream(AsyncIterator[list[StepOutput]]):
    """Yields the events of one request, to its end: each time all that have arrived, which are those of one step where
    the reader keeps up. Closing, cancelling or dropping it earlier aborts the request."""

    def __init__(self, client: EngineClient, id: str, mailbox: Mailbox) -> None:
        self.id = id
        self._client, self._mailbox, self._left = client, mailbox, mailbox.left

    async def __anext__(self) -> list[StepOutput]:
        if not self._left:
            raise StopAsyncIteration
        try:
            events = await self._mailbox.take()
        except asyncio.CancelledError:
            self.close()
            raise
        except EngineError:
            self._left = 0
            raise
        for event in events:
            self._left -= event.finish is not None
        return events

    def close(self) -> None:
        if self._left:
            self._left = 0
            self._client.leave(self.id, self._mailbox)

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        if self._left:
            self._client.leave_later(self.id, self._mailbox)


class Pulse:
    """True if the engine process still runs, as the API sees it.

    The API pings the engine process every BEAT seconds. A thread of that process answers, so a long step does not look
    like a stopped process. Each answer also says which turn the engine's loop is in, so a step that never ends is
    noticed too. Time is counted in pings, so a pause of the API itself is not held against the engine.
    """

    def __init__(self) -> None:
        self.silent_for = 0.0  # seconds since the engine process last sent something
        self.step_for = 0.0  # seconds that the current turn of the engine's loop has lasted; 0 while it waits for work
        self._turn, self._idle = 0, True

    @property
    def is_silent(self) -> bool:
        return self.silent_for > SILENT

    def pinged(self, seconds: float = BEAT) -> None:
        """Count the time since the last ping."""
        self.silent_for += seconds
        self.step_for += 0.0 if self._idle else seconds

    def heard(self) -> None:
        """Note that the engine process sent something."""
        self.silent_for = 0.0

    def answered(self, turn: int, idle: bool) -> None:
        if idle or turn != self._turn:
            self.step_for = 0.0
        self._turn, self._idle = turn, idle

    def hung(self, hang: float, step: float) -> str:
        """Why the engine counts as hung, or "". hang, step: the longest silence and the longest step; 0: no limit."""
        if hang and self.silent_for >= hang:
            return f"the engine process gave no sign of life for {self.silent_for:.0f} s and was killed"
        if step and self.step_for >= step and not self.is_silent:
            return f"a step of the engine lasted {self.step_for:.0f} s, so its process was killed"
        return ""
