"""The engine's own process: loads the model, warms it up, then takes messages, steps, and sends what each step wrote.

A thread reads the socket, so that messages are there when a step ends and the process exits the moment its parent does,
also while it loads or steps. Only the main thread writes, and it waits for the API only when more than a bounded amount
is unsent; since the thread reads on meanwhile, neither side can wait for the other for ever. Grammars are compiled in
threads before their requests reach the engine. Starting and restarting this process is engine_client.py's work.
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
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn

from sparkdraft.core import FinishReason, GrammarSpec, SamplingParams, StepOutput, TryLater, UserError
from sparkdraft.defaults import usable_defaults
from sparkdraft.server import messages
from sparkdraft.server.messages import Message, ModelInfo, TokenEvent

if TYPE_CHECKING:
    from sparkdraft.llm import LLM
    from sparkdraft.text.grammar import Grammar

MOST_UNSENT = 1 << 20  # bytes the API may be behind before steps wait for it
READ_SIZE = 1 << 18
REPORT_EVERY = 0.1  # seconds between reports of loading
COMPILE_THREADS = 2
MOST_FAILURES = 8  # steps that fail in a row before the process gives up: it is not the requests' fault then


@dataclass(frozen=True, slots=True)
class Compiled:
    """A thread is done with a request's grammar."""

    id: str
    work: Future[Grammar]


class Wire:
    """The socket to the API: what came in waits in 'inbox'; what goes out is sent as far as the socket takes it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unsent = bytearray()
        self.inbox: SimpleQueue[Message | Compiled] = SimpleQueue()
        Thread(target=self._read, name="wire", daemon=True).start()

    def send(self, message: Message) -> None:
        """Drops nothing: past MOST_UNSENT it waits."""
        self._unsent += messages.encode(message)
        self._push(MOST_UNSENT)

    def flush(self) -> None:
        self._push(0)

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
                    self.inbox.put(message)
        except OSError:
            pass  # closed with something unread
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)  # nobody is left to work for: no step, no clean-up is worth waiting for


class Service:
    """The loop: messages, a step, its tokens."""

    def __init__(self, llm: LLM, wire: Wire) -> None:
        self.engine, self.wire = llm.engine, wire
        self._compilers = ThreadPoolExecutor(COMPILE_THREADS, "grammar")
        self._compiling: dict[str, tuple[Future[Grammar], messages.Submit, SamplingParams]] = {}
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()  # by reason
        self._open: Counter[str] = Counter()  # by id: texts whose end has not been sent
        self._failures = 0  # steps in a row
        self._num_trial_preempted = 0  # before the first user's request
        self._started = time.monotonic()

    def run(self) -> None:
        while True:
            self._take(wait=not self.engine.has_work)
            if self.engine.has_work:
                self._step()

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            self._failures += 1
            if self._failures == MOST_FAILURES:
                raise
            self._fail_batch(error)
        else:
            self._failures = 0
            self._send(outputs)

    def _fail_batch(self, error: Exception) -> None:
        """What ran gets an error and what waits runs next. A broken device is left to a new process."""
        if is_device_error(error):
            raise error
        traceback.print_exception(error)
        self.engine.fail_batch()
        sentence = f"the engine failed in a step that this request was part of ({_told(error)}); its log says more"
        for name in [name for name in self._open if not self.engine.knows(name)]:
            self._finished["error"] += self._open.pop(name)
            self.wire.send(messages.Refused(name, sentence, is_bug=True))

    def _take(self, wait: bool) -> None:
        """All messages there are; where there is nothing else to do, wait for one."""
        inbox = self.wire.inbox
        if wait:
            self.wire.flush()
            self._handle(inbox.get())
        for _ in range(inbox.qsize()):  # those that come meanwhile wait for the next step: none can stall it
            self._handle(inbox.get())

    def _send(self, outputs: list[StepOutput]) -> None:
        if not outputs:
            return
        self._counts["steps"] += 1
        for output in outputs:
            self._counts["tokens_generated"] += len(output.ids)
            if output.finish:
                self._finished[output.finish] += 1
                self._open[output.request_id] -= 1
                if not self._open[output.request_id]:
                    del self._open[output.request_id]
                if output.index == 0:  # its siblings' prompts are the same one
                    self._counts["prompt_tokens"] += output.num_prompt
                    self._counts["cached_prompt_tokens"] += output.num_cached
        self.wire.send(messages.Tokens([TokenEvent.of(output) for output in outputs]))

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
            case messages.CountAnew():
                self._counts.clear()
                self._finished.clear()
                self._num_trial_preempted = self.engine.scheduler.num_preempted
                self.engine.forget_trials()
            case _:
                raise AssertionError(f"{type(message).__name__} is not for the engine")

    def _submit(self, request: messages.Submit) -> None:
        try:
            params = messages.unpack_params(request.params)
            if params.grammar is None:
                self._add(request, params)
            else:
                self._compile(request, params, params.grammar)
        except Exception as error:
            self._refuse(request.id, error)

    def _add(self, request: messages.Submit, params: SamplingParams, grammar: Grammar | None = None) -> None:
        self.engine.add(request.prompt_ids, params, request.id, grammar)
        self._open[request.id] = params.n

    def _compile(self, request: messages.Submit, params: SamplingParams, grammar: GrammarSpec) -> None:
        work = self._compilers.submit(self.engine.grammars.compile, grammar)
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
        """What one request brings about is answered to that request: nobody else's may end by it."""
        if isinstance(error, UserError):
            wait = error.retry_after if isinstance(error, TryLater) else 0
            self.wire.send(messages.Refused(name, str(error), retry_after=wait))
            return
        traceback.print_exception(error)
        with suppress(Exception):  # of a request that is in half
            self.engine.abort(name)
        self.wire.send(messages.Refused(name, f"the engine could not take the request: {_told(error)}", is_bug=True))

    def _abort(self, name: str) -> None:
        try:
            self.engine.abort(name)
        except Exception as error:  # of steps that were in the air, which an abort brings down
            self._fail_batch(error)
            self.engine.abort(name)
        work, _, params = self._compiling.pop(name, (None, None, None))
        if work is not None and params is not None:
            work.cancel()
            self._open[name] = params.n
            self._send([StepOutput(name, i, [], "", FinishReason.ABORT) for i in range(params.n)])

    def _status(self) -> dict[str, Any]:
        engine, counts = self.engine, self._counts
        return {
            "running": len(engine.scheduler.running),
            "waiting": len(engine.scheduler.waiting),
            "compiling": len(self._compiling),
            "kv_blocks_free": engine.pool.num_free,
            "kv_blocks_total": engine.pool.num_blocks,
            "block_size": engine.plan.block_size,
            "steps": counts["steps"],
            "tokens_generated": counts["tokens_generated"],
            "prompt_tokens": counts["prompt_tokens"],
            "cached_prompt_tokens": counts["cached_prompt_tokens"],
            "preemptions": engine.scheduler.num_preempted - self._num_trial_preempted,
            "finished": dict(self._finished),
            "drafting": engine.drafting.so_far().as_dict(),
            "kv_errors": engine.kv_errors(),
            "uptime": time.monotonic() - self._started,
        }


# ---- loading


def load(options: dict[str, Any], wire: Wire) -> LLM:
    """The model, ready for real requests; the API hears how far it is."""
    wire.send(messages.Loading("opening"))
    from sparkdraft.llm import LLM  # brings torch, which takes a second or two
    from sparkdraft.server.warm_up import warm_up

    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        if done >= total or time.monotonic() - last > REPORT_EVERY:
            last = time.monotonic()
            wire.send(messages.Loading("weights", done, total))
        if done >= total:
            wire.send(messages.Loading("warm-up"))

    llm = LLM(progress=report, **options)
    warm_up(llm.engine, lambda done, total: wire.send(messages.Loading("warm-up", done, total)))
    gc.freeze()  # what is loaded stays: searching it for garbage would take 2 ms now and then, in the middle of a step
    return llm


def model_info(llm: LLM, model: str) -> ModelInfo:
    from sparkdraft.plan.resolve import Fallback

    plan, proposer = llm.plan, llm.engine.drafting.proposer
    sampling, problems = usable_defaults(llm.checkpoint.generation)
    plan.fallbacks.extend(Fallback(f"the model's default {name} is not used", why) for name, why in problems.items())
    facts = asdict(plan)
    del facts["fallbacks"], facts["memory"]
    facts |= {"kv_tokens": plan.num_blocks * plan.block_size, "max_draft": llm.engine.drafting.max_depth}
    caps = proposer.drafter.caps if proposer else None
    return ModelInfo(
        model=model,
        model_type=llm.model_config.model_type,
        max_model_len=plan.max_model_len,
        vocab_size=llm.model_config.vocab_size,
        tokenizer=llm.tokenizer.raw.to_str(),
        special=llm.checkpoint.special,
        eos_ids=sorted(llm.tokenizer.eos_ids),
        chat_template=llm.checkpoint.chat_template,
        sampling=sampling,
        plan=plan.describe(),
        plan_facts=facts,
        fallbacks=[asdict(fallback) for fallback in plan.fallbacks],
        drafter={"name": caps.name, "max_depth": caps.max_depth} if caps else None,
        created=int(time.time()),
        facts=[asdict(fact) for fact in llm.facts()],
    )


def die(wire: Wire, error: BaseException, final: bool) -> NoReturn:
    """Say why, then go; clean-up could hang where the device does."""
    wire.send(messages.Dying(str(error) if final else _told(error), final))
    wire.flush()
    sys.stderr.flush()
    os._exit(1)


def is_device_error(error: BaseException) -> bool:
    """Whether the GPU reported it: its context may be lost, and every tensor with it. Too little memory is not that.

    What a library reports in its own way (Triton, cuBLAS) is found by Engine.fail_batch, which waits for the GPU.
    """
    import torch

    return isinstance(error, torch.AcceleratorError)


def _told(error: BaseException) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or ["an unknown error"])[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """arguments: the number of the inherited socket, and the fields of EngineConfig as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes, and the server decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends it at once, whatever was inherited
    number, text = sys.argv[1:] if arguments is None else arguments
    os.set_inheritable(int(number), False)  # a compiler that loading starts must not keep it open
    wire = Wire(socket.socket(fileno=int(number)))
    options = json.loads(text)
    try:
        llm = load(options, wire)
        wire.send(messages.Ready(model_info(llm, options.get("model", "smollm2"))))
    except UserError as error:
        die(wire, error, final=True)
    except BaseException as error:
        traceback.print_exc()
        die(wire, error, final=False)
    try:
        Service(llm, wire).run()
    except BaseException as error:
        traceback.print_exc()
        die(wire, error, final=False)


if __name__ == "__main__":
    main()
