"""From a prepared request to bytes on the wire: one loop that streams chunks or collects them into one answer.

`Reply` is the response of both endpoints. It enters the queue, prepares the prompt off the event loop, submits it, and
passes the engine's events to the answer; all that are there go out in one write. When the client hangs up, everything
is cancelled, which aborts the request. Before the first byte an error is a status; after it, an event of the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sparkdraft.core import FinishReason, SamplingParams, StepOutput
from sparkdraft.server.engine_client import EngineError, RequestRefused
from sparkdraft.server.protocol.shapes import Answer, Chunk, Json, dumps, sse
from sparkdraft.server.protocol.validation import ApiError, unavailable
from sparkdraft.server.request_log import Record, record_of
from sparkdraft.server.service import Service, as_api_error

STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # tells nginx not to buffer the stream
]
T = TypeVar("T")
PING = 2.5  # seconds without an event after which a stream that has begun gets a comment, which clients skip


@dataclass(frozen=True, slots=True)
class Job:
    answer: Answer
    prompts: Sequence[list[int]]
    params: SamplingParams
    grammar_field: str | None = None  # the field of the request from which the grammar was made
    scores: bool = False  # only the prompt counts: what is written is dropped

    @property
    def names(self) -> list[str]:
        """The ids of the engine's requests, one for each prompt."""
        return [f"{self.answer.id}-{i}" for i in range(len(self.prompts))]


class Reply(Response):
    """count: of sequences. prepare: makes the job in a thread; renders: with the chat template first."""

    def __init__(
        self, service: Service, stream: bool, count: int, prepare: Callable[[], Job], renders: bool = False
    ) -> None:
        super().__init__()
        self.service, self.stream, self.count, self.prepare, self.renders = service, stream, count, prepare, renders
        self.started = False  # whether the first byte was sent
        self._sent_at = 0.0  # when the last bytes were
        self._record = Record()  # for the log; that of the request from the call on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._record = record_of(scope)
        gone = asyncio.create_task(_gone(receive))
        work = asyncio.create_task(self._run(send))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                self.service.metrics.aborted.add()
                self._record.aborted = True
        finally:
            for task in (gone, work):
                task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def _run(self, send: Send) -> None:
        begin, failure = time.monotonic(), None
        # left before the last bytes are sent, so that a client with its answer can send the next request
        with self.service.gate.enter(self.count):
            try:
                job = await self.service.in_thread(self.prepare, self.renders)
                await self._follow(job, begin, send)
            except ApiError as error:
                failure = error
            except EngineError as error:
                failure = as_api_error(error)
                # everything else was checked while preparing
                if isinstance(error, RequestRefused) and job.params.grammar:
                    failure.param = job.grammar_field
        self.service.gate.took(time.monotonic() - begin)
        if failure is None:
            await self._finish(job, send)
            return
        if failure.status >= 500:
            self.service.metrics.failed.add()
        if not self.started:
            raise failure
        self._record.error = failure
        await self._end(job.answer, send, *job.answer.failure(failure))

    async def _follow(self, job: Job, begin: float, send: Send) -> None:
        watch = Watch(self.service, job, begin)
        self._record.facts = watch.facts
        pinging = asyncio.create_task(self._ping(job.answer, send))
        try:
            if self.stream and (opening := job.answer.opening(sum(map(len, job.prompts)))):
                await self._send(job.answer, send, opening)
            async with AsyncExitStack() as stack:
                async for events in await self._submit(job, stack):
                    kept = list(takewhile(lambda event: event.finish is not FinishReason.ABORT, events))
                    if kept:
                        watch.arrived()
                    chunks = [chunk for event in kept for chunk in watch.push(event)]
                    if self.stream and chunks:
                        await self._send(job.answer, send, chunks)
                    if len(kept) < len(events):
                        raise unavailable("The server ended this request; send it again.", "aborted", 1)
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)
        watch.end()

    async def _ping(self, answer: Answer, send: Send) -> None:
        """Send pings while a stream that has begun waits for its next event."""
        while self.stream:
            await asyncio.sleep(PING)
            if self.started and time.monotonic() - self._sent_at >= PING:
                said = self.service.client.silence or "waiting for the next token"
                await send({"type": "http.response.body", "body": answer.ping(said), "more_body": True})

    async def _finish(self, job: Job, send: Send) -> None:
        if self.stream:
            await self._end(job.answer, send, *job.answer.last_chunks())
        else:
            body = dumps(job.answer.whole())
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def _submit(self, job: Job, stack: AsyncExitStack) -> AsyncIterator[list[StepOutput]]:
        """Submit all prompts. Leaving the stack aborts them."""
        streams = []
        for name, prompt in zip(job.names, job.prompts, strict=True):
            stream = self.service.client.submit(name, prompt, job.params)
            streams.append(await stack.enter_async_context(aclosing(stream)))
        return streams[0] if len(streams) == 1 else await stack.enter_async_context(aclosing(merged(streams)))

    async def _send(self, answer: Answer, send: Send, chunks: Sequence[Chunk], is_last: bool = False) -> None:
        self._sent_at = time.monotonic()
        if not self.started:
            self.started = True
            headers = [(b"content-type", answer.media_type), *STREAM_HEADERS]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        body = sse(chunks) + (answer.done if is_last else b"")
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def _end(self, answer: Answer, send: Send, *chunks: Chunk) -> None:
        await self._send(answer, send, chunks, is_last=True)


def scored(event: StepOutput) -> StepOutput:
    """The event of a prompt that is only scored."""
    return replace(event, ids=[], text="", logprobs=None, num_accepted=0, finish=event.finish and FinishReason.LENGTH)


class Watch:
    """Passes the events of one request to its answer, and counts them in its tally and in the server's metrics."""

    def __init__(self, service: Service, job: Job, begin: float) -> None:
        self.metrics, self.job, self.begin = service.metrics, job, begin
        self.first = self.last = 0.0  # when outputs came
        self.alone = len(job.prompts) == job.params.n == 1
        self._num_chars, self._said = service.config.log_prompts, ""  # of the first text, for the log
        self._index = {name: i for i, name in enumerate(job.names)}  # of the prompt
        self._seen: set[int] = set()  # prompts that have begun
        self._finishes: set[str] = set()

    def arrived(self) -> None:
        """Note the time of the next outputs."""
        now = time.monotonic()
        if self.alone and self.last:
            self.metrics.between.observe(now - self.last)
        self.last = now

    def push(self, event: StepOutput) -> list[Chunk]:
        prompt_index = self._index[event.request_id]
        if prompt_index not in self._seen:
            self._begin(prompt_index, event.num_cached)
        event = scored(event) if self.job.scores else event
        self.job.answer.tally.num_output += len(event.ids)
        self.metrics.generation_tokens.add(len(event.ids))
        if len(self._said) < self._num_chars and prompt_index == event.index == 0:
            self._said += event.text
        if event.finish:
            self._end(event.finish, event.speculation)
        return self.job.answer.push(event, prompt_index)

    def _begin(self, prompt_index: int, num_cached: int) -> None:
        if not self._seen:
            self.first = time.monotonic()
            self.metrics.first_token.observe(self.first - self.begin)
        self._seen.add(prompt_index)
        tally, num_prompt = self.job.answer.tally, len(self.job.prompts[prompt_index])
        tally.num_prompt += num_prompt
        tally.num_cached += num_cached
        self.metrics.prompt_tokens.add(num_prompt)
        self.metrics.cached_tokens.add(num_cached)

    def _end(self, finish: FinishReason, speculation: Json | None) -> None:
        self.metrics.success.add(label=finish.value)
        self._finishes.add(finish.value)
        if speculation:
            self.job.answer.tally.speculation.append(speculation)
            self.metrics.speculation(speculation)

    def end(self) -> None:
        now, tally = time.monotonic(), self.job.answer.tally
        self.metrics.latency.observe(now - self.begin)
        self.metrics.prompt_size.observe(tally.num_prompt)
        self.metrics.output_size.observe(tally.num_output)
        if self.alone and tally.num_output > 1:
            self.metrics.per_token.observe((now - self.first) / (tally.num_output - 1))

    def facts(self) -> Json:
        """What the log's line says of the request, also of one that was broken off."""
        tally, prompts, seconds = self.job.answer.tally, self.job.prompts, self.last - self.first
        speed = (tally.num_output - 1) / seconds if seconds > 0 and tally.num_output > 1 else None
        drafted = {"drafted": "num_draft_tokens", "accepted": "num_accepted_draft_tokens"} if tally.speculation else {}
        return {
            "prompt_tokens": sum(map(len, prompts)),
            "cached_tokens": tally.num_cached,
            "output_tokens": tally.num_output,
            "first_token_ms": round(1000 * (self.first - self.begin), 1) if self.first else None,
            "tokens_per_second": speed and round(speed, 1),
            **{name: sum(record[key] for record in tally.speculation) for name, key in drafted.items()},
            "finish": ",".join(sorted(self._finishes)),
            **(self._texts() if self._num_chars else {}),
        }

    def _texts(self) -> Json:
        """The end of the first prompt and the beginning of its first text."""
        token_bytes = self.job.answer.tokenizer.token_bytes
        last = b"".join(token_bytes(token, skip_special=False) for token in self.job.prompts[0][-self._num_chars :])
        prompt = last.decode("utf-8", "replace")[-self._num_chars :]
        return {"prompt": prompt, "answer": self._said[: self._num_chars]}


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[T, None]:
    """Several streams as one, in the order in which their items come; the first error ends it."""
    queue: asyncio.Queue[T | Exception | None] = asyncio.Queue()

    async def pump(stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    left = len(tasks)
    try:
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Return when the client has hung up."""
    with suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
