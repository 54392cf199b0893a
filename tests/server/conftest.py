"""Servers to test against, each in a thread with a port of its own: scripted, tiny and real.

`FakeClient` has EngineClient's interface and says what a test tells it to, so that the API can be tested without an
engine; `tiny` and `smollm2` run the real engine process with a random model and with the embedded one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from sparkdraft.backend import ModelInfo
from sparkdraft.config import EngineConfig
from sparkdraft.core import FinishReason, SamplingParams, StepOutput, TokenLogprob
from sparkdraft.server.app import create_app
from sparkdraft.server.config import ServerConfig
from sparkdraft.server.engine_client import EngineClient, EngineError, Pulse
from sparkdraft.server.run import Server, address_of, listen
from tests.models.tiny import byte_tokenizer, write_tiny
from tests.patience import PATIENT, wait_for

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
Say = Callable[[str, SamplingParams], str | EngineError]


class FakeClient:
    """Answers with say(prompt, params), in pieces of 'size' characters, every second one a draft."""

    def __init__(self, say: Say, size: int = 3, delay: float = 0.0, template: str | None = TEMPLATE) -> None:
        self.say, self.size, self.delay = say, size, delay
        self.raw = byte_tokenizer()
        self.state, self.stage, self.progress = "ready", "ready", (0, 0)
        self.last_error: str | None = None
        self.restarts, self.retry_after = 0, 7
        self.pulse, self.silence = Pulse(), ""
        self.seen: list[SamplingParams] = []
        self.aborted: list[str] = []
        self.switched: list[tuple[str, bool]] = []
        self.go_on = threading.Event()  # while it is cleared, nothing is said
        self.go_on.set()
        self.stopped = False
        self.finish = FinishReason.STOP  # of every text, and why it ended
        self.stop_reason: str | None = None
        self.info: ModelInfo | None = ModelInfo(
            model="fake",
            model_type="llama",
            max_model_len=512,
            vocab_size=320,
            tokenizer=self.raw.to_str(),
            special={},
            eos_ids=[2],
            chat_template=template,
            sampling={},
            plan="a plan in words",
            plan_facts={"max_seqs": 4, "max_draft": 7},
            fallbacks=[{"name": "nothing real", "reason": "it is a fake"}],
            drafter=None,
            created=1,
            facts=[{"name": "steps", "value": "counted", "reason": ""}],
        )

    async def start(self) -> None: ...

    async def stop(self, drain_seconds: float = 0.0) -> None:
        self.stopped = True
        self.state = "draining"

    def count_anew(self) -> None: ...

    def switch(self, part: str, on: bool) -> None:
        self.switched.append((part, on))

    def start_took(self) -> float:
        return 0.0

    async def status(self) -> dict[str, Any]:
        errors = {"key_error": 0.125, "value_error": 0.25, "attention_error": 0.5}
        return {
            "running": 1,
            "waiting": 2,
            "preemptions": 8,
            "kv_blocks_free": 3,
            "kv_blocks_total": 4,
            "drafting": {"num_drafts": 5},
            "kv_errors": errors | {"rows": 6, "layers": [{"layer": 0, **errors}]},
        }

    def submit(self, id: str, prompt_ids: list[int], params: SamplingParams) -> AsyncIterator[list[StepOutput]]:
        if self.state != "ready":
            raise EngineError("the engine is not ready", True)
        return self._events(id, prompt_ids, params)

    async def _events(self, id: str, prompt_ids: list[int], params: SamplingParams) -> AsyncIterator[list[StepOutput]]:
        self.seen.append(params)
        ended = False
        try:
            said = self.say(self.raw.decode(prompt_ids), params)
            if isinstance(said, EngineError):
                raise said
            for index in range(params.n):
                pieces = [said[i : i + self.size] for i in range(0, len(said), self.size)] or [""]
                for i, piece in enumerate(pieces):
                    await asyncio.sleep(self.delay)
                    while not self.go_on.is_set():
                        await asyncio.sleep(0.01)
                    if self.stopped:
                        raise EngineError("the server is shutting down", True)
                    yield [self._event(id, index, piece, params, len(prompt_ids), i == len(pieces) - 1)]
            ended = True
        finally:
            if not ended:
                self.aborted.append(id)

    def _event(self, id: str, index: int, text: str, params: SamplingParams, num_prompt: int, last: bool) -> StepOutput:
        has_end = last and self.finish is FinishReason.STOP and not self.stop_reason
        ids = self.raw.encode(text, add_special_tokens=False).ids + ([2] if has_end else [])
        rows = [TokenLogprob(i, -0.5, [(i, -0.5), (3, float("-inf"))][: params.logprobs]) for i in ids]
        finish = self.finish if last else None
        stats = {"num_spec_steps": 2, "num_draft_tokens": 4, "num_accepted_draft_tokens": 2, "num_spec_tokens": 2}
        stats |= {"acceptance_histogram": [1, 0, 1], "per_position_accepted": [1, 1]}
        return StepOutput(
            id,
            index,
            ids,
            text,
            finish,
            rows if params.logprobs is not None else None,
            num_prompt=num_prompt,
            num_cached=1,
            num_accepted=1,
            speculation=stats if last else None,
            stop_reason=self.stop_reason if last else None,
        )


class Live:
    """A server that runs, and how to talk to it."""

    def __init__(self, url: str, server: Server, config: ServerConfig) -> None:
        self.url, self.server, self.service = url, server, server.service
        headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=PATIENT)
        key = config.api_key or "none"
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENT)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def chat(self, content: str = "hello", **body: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **body)

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream; it must end as streams do."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line and not line.startswith(":")]
        assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
        return [json.loads(line[6:]) for line in lines[:-1]]

    wait_for = staticmethod(wait_for)


@contextmanager
def live(client: Any, until_ready: bool = True, warms_up: bool | None = None, **options: Any) -> Iterator[Live]:
    config = ServerConfig(port=0, **{"watchdog": False, **options})  # tests shall not depend on a busy machine
    listener = listen(config)
    if warms_up is None:
        warms_up = not isinstance(client, FakeClient)  # which shall see what a test sends, and nothing else
    server = Server(create_app(config, client, warms_up), config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    running = Live(address_of(listener), server, config)
    try:
        if until_ready:
            wait_for(lambda: server.service.ready)
        yield running
    finally:
        running.http.close()
        running.openai.close()
        server.should_exit = True
        thread.join(PATIENT)
        assert not thread.is_alive(), f"the server did not end: {_where(thread)}"


def _where(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "its thread has just ended"


@pytest.fixture(scope="module")
def echo() -> Iterator[Live]:
    """Says what it was asked, the whole rendered prompt."""
    with live(FakeClient(lambda prompt, params: prompt)) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny(tmp_path_factory.mktemp("served"), "llama")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}))
    return folder


@pytest.fixture(scope="session")
def tiny_server(tiny_folder: Path) -> Iterator[Live]:
    engine = EngineConfig(model=str(tiny_folder), device="cpu")
    with live(EngineClient(engine), engine=engine, served_name="tiny") as running:
        yield running


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Live]:
    engine = EngineConfig(device="cpu", spec="7")  # on a busy machine auto may find that drafting does not pay
    with live(EngineClient(engine), engine=engine) as running:
        yield running
