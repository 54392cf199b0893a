"""The engine's own process: loads a backend, then takes messages, steps it, and sends what each step wrote.

The backend is known only by its protocol (sparkdraft/backend.py). A thread reads the socket and answers pings, so that
messages are there when a step ends, and the process exits as soon as its parent does. The main thread writes, and waits
for the API only when much is unsent; the reading thread never waits. Grammars are compiled in threads before their
requests reach the backend. engine_client.py starts and restarts this process.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NoReturn

from sparkdraft.backend import Backend, LoadBackend, Report
from sparkdraft.core import FinishReason, GrammarSpec, SamplingParams, StepOutput, TryLater, UserError
from sparkdraft.operate.canary.findings import GRAMMARS
from sparkdraft.operate.canary.run import Canary
from sparkdraft.server import messages
from sparkdraft.server.messages import Message
from sparkdraft.text import template

MOST_UNSENT = 1 << 20  # bytes that the API may be behind before steps wait for it
READ_SIZE = 1 << 18
REPORT_EVERY = 0.1  # seconds between reports of loading
COMPILE_THREADS = 2
MOST_FAILURES = 8  # failed steps in a row after which the process gives up: then the requests are not at fault


@dataclass(frozen=True, slots=True)
class Compiled:
    id: str
    work: Future[Any]


class Wire:
    """The socket to the API: received messages wait in 'inbox'; messages are sent as far as the socket takes them."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unsent = bytearray()
        self._sending = Lock()
        self.turn, self.idle = 0, True  # of the engine's loop; while it loads there is none
        self.inbox: SimpleQueue[Message | Compiled] = SimpleQueue()
        Thread(target=self._read, name="wire", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message. Nothing is dropped: with more than MOST_UNSENT bytes unsent it waits."""
        with self._sending:
            self._unsent += messages.encode(message)
            self._push(MOST_UNSENT)

    def flush(self) -> None:
        with self._sending:
            self._push(0)

    def _pong(self) -> None:
        """Answer a ping without waiting. If the main thread is sending just now, that is answer enough."""
        if self._sending.acquire(blocking=False):
            self._unsent += messages.encode(messages.Pong(self.turn, self.idle))
            self._push(len(self._unsent))
            self._sending.release()

    def _push(self, may_stay: int) -> None:
        while self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_DONTWAIT)]
            except BlockingIOError:
                if len(self._unsent) <= may_stay:
                    return
                select.select([], [self._socket], [])
            except OSError:
                os._exit(0)  # the API is gone

    def _read(self) -> None:
        lines = messages.Lines()
        try:
            while data := self._socket.recv(READ_SIZE):
                for message in lines.feed(data):
                    if isinstance(message, messages.Shutdown):
                        return
                    if isinstance(message, messages.Ping):
                        self._pong()
                    else:
                        self.inbox.put(message)
        except OSError:
            pass  # closed with something unread
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)  # the API is gone, so no step and no clean-up is worth waiting for


class EngineLoop:
    def __init__(self, backend: Backend, wire: Wire, broken: Collection[str] = ()) -> None:
        """broken: parts that the canary found wrong."""
        self.backend, self.wire, self.broken = backend, wire, broken
        self._compilers = ThreadPoolExecutor(COMPILE_THREADS, "grammar")
        self._compiling: dict[str, tuple[Future[Any], messages.Submit, SamplingParams]] = {}
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()  # per reason
        self._open: Counter[str] = Counter()  # per id: texts whose end has not been sent
        self._failures = 0  # failed steps in a row
        self._started = time.monotonic()

    def run(self) -> None:
        while True:
            self.wire.turn += 1
            self._take(wait=not self.backend.has_work)
            if self.backend.has_work:
                self._step()

    def _step(self) -> None:
        try:
            outputs = self.backend.step()
        except Exception as error:
            self._failures += 1
            if self._failures == MOST_FAILURES:
                raise
            self._fail_batch(error)
        else:
            self._failures = 0
            self._send(outputs)

    def _fail_batch(self, error: Exception) -> None:
        """Running requests get an error, and waiting ones run next. A backend that cannot continue raises."""
        lost = self.backend.fail_batch(error)
        traceback.print_exception(error)
        sentence = f"a step of the engine that ran this request failed ({_told(error)}); see the server's log"
        for name in lost:
            self._finished["error"] += self._open.pop(name, 0)
            self.wire.send(messages.Refused(name, sentence, is_bug=True))

    def _take(self, wait: bool) -> None:
        """Handle all messages that are there; if there is nothing else to do, wait for one."""
        inbox = self.wire.inbox
        if wait:
            self.wire.flush()
            self.wire.idle = True
            message = inbox.get()
            self.wire.idle = False
            self._handle(message)
        for _ in range(inbox.qsize()):  # later messages wait for the next step, so that they cannot delay this one
            self._handle(inbox.get())

    def _send(self, outputs: list[StepOutput]) -> None:
        """Send what a step wrote as one message. The GPU may wait meanwhile, so a text that goes on costs little."""
        outputs = [output for output in outputs if output.request_id in self._open]  # others were refused half added
        if not outputs:
            return
        self.wire.send(messages.Tokens(outputs))
        self._counts["steps"] += 1
        self._counts["tokens_generated"] += sum([len(output.ids) for output in outputs])
        for output in outputs:
            if output.finish:
                self._count_end(output, output.finish)

    def _count_end(self, output: StepOutput, finish: FinishReason) -> None:
        self._finished[finish] += 1
        self._open[output.request_id] -= 1
        if not self._open[output.request_id]:
            del self._open[output.request_id]
        if output.index == 0:  # its siblings have the same prompt
            self._counts["prompt_tokens"] += output.num_prompt
            self._counts["cached_prompt_tokens"] += output.num_cached

    def _handle(self, message: Message | Compiled) -> None:
        match message:
            case messages.Submit():
                self._submit(message)
            case Compiled():
                self._compiled(message)
            case messages.Abort():
                self._abort(message.id)
            case messages.AskStatus():
                self.wire.send(messages.Status(message.id, self._status()))
            case messages.Switch():
                self.backend.switch(message.part, message.on and message.part not in self.broken)
            case messages.CountAnew():
                self._counts.clear()
                self._finished.clear()
                self.backend.reset_counts()
            case _:
                raise AssertionError(f"{type(message).__name__} is not for the engine")

    def _submit(self, request: messages.Submit) -> None:
        try:
            params = messages.unpack_params(request.params)
            if params.grammar is None:
                self._add(request, params)
            elif GRAMMARS in self.broken:
                sentence = f"{GRAMMARS} is off, because the canary found at start that grammars do not hold"
                self.wire.send(messages.Refused(request.id, sentence, is_bug=True))
            else:
                self._compile(request, params, params.grammar)
        except Exception as error:
            self._refuse(request.id, error)

    def _add(self, request: messages.Submit, params: SamplingParams, grammar: Any = None) -> None:
        self.backend.add(request.id, request.prompt_ids, params, grammar)
        self._open[request.id] = params.n

    def _compile(self, request: messages.Submit, params: SamplingParams, grammar: GrammarSpec) -> None:
        work = self._compilers.submit(self.backend.compile_grammar, grammar)
        self._compiling[request.id] = work, request, params
        work.add_done_callback(lambda done: self.wire.inbox.put(Compiled(request.id, done)))

    def _compiled(self, done: Compiled) -> None:
        work, request, params = self._compiling.get(done.id, (None, None, None))
        if work is not done.work or request is None or params is None:
            return  # aborted meanwhile
        del self._compiling[done.id]
        try:
            self._add(request, params, work.result())
        except Exception as error:
            self._refuse(request.id, error)

    def _refuse(self, name: str, error: Exception) -> None:
        """Answer an error to the request that caused it; no other request ends by it."""
        if isinstance(error, UserError):
            wait = error.retry_after if isinstance(error, TryLater) else 0
            self.wire.send(messages.Refused(name, str(error), retry_after=wait))
            return
        traceback.print_exception(error)
        with suppress(Exception):  # the request may be half added
            self.backend.abort(name)
        self.wire.send(messages.Refused(name, f"the engine could not start the request: {_told(error)}", is_bug=True))

    def _abort(self, name: str) -> None:
        try:
            self.backend.abort(name)
        except Exception as error:  # from launched steps, which an abort reads
            self._fail_batch(error)
            self.backend.abort(name)
        work, _, params = self._compiling.pop(name, (None, None, None))
        if work is not None and params is not None:
            work.cancel()
            self._open[name] = params.n
            self._send([StepOutput(name, i, [], "", FinishReason.ABORT) for i in range(params.n)])

    def _status(self) -> dict[str, Any]:
        """The backend's status, and what this process has counted."""
        counted = ("steps", "tokens_generated", "prompt_tokens", "cached_prompt_tokens")
        return asdict(self.backend.status()) | {
            "compiling": len(self._compiling),
            **{name: self._counts[name] for name in counted},
            "finished": dict(self._finished),
            "uptime": time.monotonic() - self._started,
        }


# ---- loading


def load_engine(options: dict[str, Any], report: Report) -> Backend:
    """The project's own engine: the one place where the server names a backend."""
    from sparkdraft.engine.backend import load_backend  # imports torch, which takes a second or two

    return load_backend(options, report)


class LoadReport:
    """Tells the API how far loading is: when a stage begins and ends, and from time to time in between."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._said, self._at = ("", 0), 0.0  # the stage with its total, and when it was last sent

    def __call__(self, stage: str, done: int, total: int) -> None:
        if (stage, total) != self._said or done >= total or time.monotonic() - self._at > REPORT_EVERY:
            self._said, self._at = (stage, total), time.monotonic()
            self._wire.send(messages.Loading(stage, done, total))


def die(wire: Wire, error: BaseException, final: bool) -> NoReturn:
    """Say why, then exit without clean-up, which could hang if the device does."""
    wire.send(messages.Dying(str(error) if final else _told(error), final))
    wire.flush()
    sys.stderr.flush()
    os._exit(1)


def _told(error: BaseException) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or ["an unknown error"])[0]


def main(arguments: Sequence[str] | None = None, load: LoadBackend = load_engine) -> None:
    """arguments: the number of the inherited socket, the fields of EngineConfig as JSON, and, to run the canary, the
    tool parser."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes, and the server decides what to do
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends the process at once, whatever was inherited
    number, text, *canary_parser = sys.argv[1:] if arguments is None else arguments
    os.set_inheritable(int(number), False)  # a compiler that loading starts must not keep it open
    wire = Wire(socket.socket(fileno=int(number)))
    try:
        wire.send(messages.Loading("opening"))
        canary = Canary(load, json.loads(text), LoadReport(wire), canary_parser[0] if canary_parser else None)
        backend = canary.load()
        template.close()  # the chat template was tried; the API's process renders chats
        gc.freeze()  # what is loaded stays; the garbage collector would take 2 ms to search it, in the middle of a step
        wire.send(messages.Ready(canary.info(backend)))
    except UserError as error:
        die(wire, error, final=True)
    except BaseException as error:
        traceback.print_exc()
        die(wire, error, final=False)
    try:
        EngineLoop(backend, wire, {finding.part for finding in canary.broken}).run()
    except BaseException as error:
        traceback.print_exc()
        die(wire, error, final=False)


if __name__ == "__main__":
    main()
