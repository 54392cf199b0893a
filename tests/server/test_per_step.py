"""The work per step of the engine does not grow back: one message, one write per client, nothing encoded twice.

Times depend on the machine, so messages, writes and encodings are counted.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdraft.core import FinishReason, SamplingParams, StepOutput
from sparkdraft.server import messages
from sparkdraft.server.app import create_app
from sparkdraft.server.config import ServerConfig
from sparkdraft.server.engine_client import AT_ONCE, EngineClient, EngineError
from sparkdraft.server.engine_process import EngineLoop
from sparkdraft.server.prompts import ModelText
from sparkdraft.server.protocol import shapes
from sparkdraft.server.protocol.chat import ChatAnswer
from sparkdraft.server.protocol.completions import CompletionAnswer
from sparkdraft.server.protocol.written import Written
from sparkdraft.text.events import chain
from tests.fakes import ByteTokenizer
from tests.server.conftest import FakeClient
from tests.server.echo_backend import EchoBackend

STREAMS, STEPS = 16, 5


class CountingWire:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.inbox: SimpleQueue[Any] = SimpleQueue()

    def send(self, message: messages.Message) -> None:
        self.sent.append(messages.encode(message))

    def flush(self) -> None: ...


def test_a_step_of_many_requests_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = counted(monkeypatch, messages._encoder, "encode")
    wire = CountingWire()
    info = FakeClient(lambda prompt, params: "").info
    assert info is not None
    loop = EngineLoop(EchoBackend(info), wire)  # type: ignore[arg-type]
    for i in range(STREAMS):
        wire.inbox.put(messages.Submit(f"r{i}", [65] * STEPS, {"n": 2}))
    loop._take(wait=False)
    for _ in range(STEPS):
        loop._step()
    assert len(wire.sent) == encoded["encode"] == STEPS
    for line in wire.sent[:-1]:
        (said,) = messages.Lines().feed(line)
        assert isinstance(said, messages.Tokens) and len(said.events) == 2 * STREAMS
        assert len(json.loads(line)[1][0]) == len(messages.ADDED), "a text that goes on is sent without the rest"


def test_the_events_of_a_message_are_one_batch_of_their_reader() -> None:
    async def run() -> None:
        client = EngineClient({})
        client.state = "ready"
        stream = client.submit("r", [1], SamplingParams(n=2))
        for finish in (None, None, FinishReason.LENGTH):
            client._receive(messages.Tokens([StepOutput("r", i, [65], "A", finish) for i in range(2)]))
            if finish is None:
                assert [event.index for event in await anext(stream)] == [0, 1]
        assert len(await anext(stream)) == 2 and not [events async for events in stream]
        late = client.submit("late", [1], SamplingParams())
        for _ in range(3):
            client._receive(messages.Tokens([StepOutput("late", 0, [65], "A", None)]))
        client._fail_all("the engine stopped", True)
        assert len(await anext(late)) == 3, "a reader that is late gets all at once, and then the error"
        with pytest.raises(EngineError):
            await anext(late)
        slow = client.submit("slow", [1], SamplingParams())
        for _ in range(AT_ONCE + 3):
            client._receive(messages.Tokens([StepOutput("slow", 0, [65], "A", None)]))
        assert [len(await anext(slow)) for _ in range(2)] == [AT_ONCE, 3], "one that was gone for long does not block"

    asyncio.run(run())


class Stepping(FakeClient):
    """Writes a character of each of the n texts per step."""

    async def _events(self, id: str, prompt_ids: list[int], params: SamplingParams) -> Any:
        for step in range(STEPS):
            finish = FinishReason.LENGTH if step == STEPS - 1 else None
            yield [StepOutput(id, i, [65 + i], chr(65 + i), finish, num_prompt=1) for i in range(params.n)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
    ],
)
def test_a_step_is_one_write_and_no_encoding_but_of_its_text(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    encoded = counted(monkeypatch, shapes._encoder, "encode")
    at_write: list[int] = []
    written: list[bytes] = []

    async def run() -> None:
        client = Stepping(lambda prompt, params: "")
        app = create_app(ServerConfig(), client)  # type: ignore[arg-type]
        service = app.state.service
        service.gate.max_seqs, service.text = 4, ModelText(client.info, {}, "auto", "auto", 0)  # type: ignore[arg-type]
        data = json.dumps(body | {"stream": True, "n": 3, "stream_options": {"include_usage": True}}).encode()
        scope = {"type": "http", "method": "POST", "path": path, "http_version": "1.1", "query_string": b""}
        scope["headers"] = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        asked = False

        async def receive() -> Any:
            nonlocal asked
            if asked:
                await asyncio.Event().wait()
            asked = True
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Any) -> None:
            if message.get("body"):
                written.append(message["body"])
                at_write.append(encoded["encode"])

        await app(scope, receive, send)
        service.close()

    asyncio.run(run())
    assert len(written) == STEPS + 1, "one write per step, and one for the end"
    assert [piece.count(b"data: ") for piece in written[1 : STEPS - 1]] == [3] * (STEPS - 2)
    per_step = [after - before for before, after in pairwise(at_write)]
    assert per_step[: STEPS - 2] == [3] * (STEPS - 2), "each of the three texts is encoded, and nothing around it"


def counted(monkeypatch: pytest.MonkeyPatch, thing: Any, name: str) -> Counter[str]:
    counts, real = Counter[str](), getattr(thing, name)

    def counting(*given: Any) -> Any:
        counts[name] += 1
        return real(*given)

    monkeypatch.setattr(thing, name, counting)
    return counts


@given(
    text=st.text(st.characters()),
    model=st.text(max_size=8),
    index=st.integers(0, 3),
    usage=st.booleans(),
    name=st.sampled_from(["content", "reasoning_content"]),
)
def test_a_chunk_of_text_is_what_encoding_it_whole_gives(
    text: str, model: str, index: int, usage: bool, name: str
) -> None:
    common: dict[str, Any] = {"id": "x", "model": model, "n": 1, "tokenizer": ByteTokenizer(), "include_usage": usage}
    chat = ChatAnswer(**common, eos_ids=frozenset(), new_text=lambda: Written(chain(None, None), frozenset()))
    completion = CompletionAnswer(**common, prompts=[])
    for answer, field in ((chat, name), (completion, "text")):
        whole = shapes.sse([answer.chunk(answer.text_choice(index, field, text), {}, is_last=False)])
        assert answer.text_chunk(index, field, text) == whole
        assert answer.text_chunk(index, field, text) == whole, "from what was kept"
