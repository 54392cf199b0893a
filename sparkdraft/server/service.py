"""What the routes share: the configuration, the engine's client, the counters, and the model's tokenizer and template.

The tokenizer is made as soon as the engine has said what it serves, in a thread, and then a few requests are rehearsed,
both before /health says ready, so that the first user does not pay for it. What a route does with these is its own
matter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from sparkdraft.defaults import resolve
from sparkdraft.server.config import ServerConfig
from sparkdraft.server.engine_errors import EngineError, RequestFailed, RequestRefused
from sparkdraft.server.limits import Gate
from sparkdraft.server.metrics import Metrics
from sparkdraft.server.prompts import ModelText
from sparkdraft.server.protocol.errors import ApiError, as_sentence, unavailable

if TYPE_CHECKING:
    from sparkdraft.server.engine_client import EngineClient
    from sparkdraft.server.messages import ModelInfo

POLL = 0.05  # seconds between looks at the engine's state


class Service:
    def __init__(self, config: ServerConfig, client: EngineClient) -> None:
        self.config, self.client = config, client
        self.metrics = Metrics()
        self.gate = Gate(config.max_queue)
        self.started = time.time()
        self.draining = False
        self.text: ModelText | None = None  # made by follow()
        self.start_seconds = 0.0  # that the engine's last start took, set by follow()

    # ---- what is served

    @property
    def name(self) -> str:
        return self.config.names[0]

    @property
    def sampling(self) -> dict[str, float]:
        """What a request gets for the fields that it leaves out."""
        return resolve(self.config.sampling_defaults, self.client.info.sampling if self.client.info else {})

    @property
    def ready(self) -> bool:
        return self.client.state == "ready" and self._has_text and not self.draining

    @property
    def _has_text(self) -> bool:
        """Of this engine, not of one before it."""
        return self.text is not None and self.text.info is self.client.info

    def check_model(self, asked: str | None) -> None:
        if asked is not None and asked not in self.config.names:
            served = ", ".join(f"'{name}'" for name in self.config.names)
            raise ApiError(
                404, f"The model '{asked}' is not served here; served: {served}.", "model", "model_not_found"
            )

    def require_ready(self) -> ModelText:
        if self.ready:
            assert self.text is not None
            return self.text
        if self.state == "draining":
            shutting = "The server is shutting down; send the request elsewhere, or later."
            raise unavailable(shutting, "draining", self.client.retry_after)
        if self.state == "failed":
            raise unavailable(f"The engine can not run: {self.client.last_error}.", "engine_failed", 60)
        done, total = self.client.progress
        stage = f"{self.stage}, {done} of {total}" if total else self.stage
        wait = self.client.retry_after
        raise unavailable(f"The model is not ready yet ({stage}); try again in {wait} s.", "not_ready", wait)

    @property
    def state(self) -> str:
        if self.draining:
            return "draining"
        return "starting" if self.client.state == "ready" and not self._has_text else self.client.state

    @property
    def stage(self) -> str:
        """Of loading; the rehearsal comes after all that the engine does by itself."""
        return "rehearsal" if self.client.state == "ready" and not self._has_text else self.client.stage

    # ---- the engine's facts

    async def follow(self, rehearse: Callable[[ModelText], Awaitable[None]]) -> None:
        """Forever: make the tokenizer of whatever the engine serves, and run first requests with it."""
        info: ModelInfo | None = None
        while True:
            if self.client.info is not info:
                info = self.client.info
                if info is not None:
                    text = await asyncio.to_thread(ModelText, info, self.sampling)
                    self.gate.max_seqs = int(info.plan_facts.get("max_seqs") or 1)
                    await rehearse(text)
                    self.text = text
                    self.start_seconds = self.client.start_took()
            await asyncio.sleep(POLL)

    async def engine_status(self) -> dict[str, Any]:
        """The engine's live numbers; empty while there is none to ask, or it is too busy to answer."""
        try:
            return await self.client.status()
        except EngineError:
            return {}


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def as_api_error(error: EngineError) -> ApiError:
    """What the engine said, as an answer: a request it will not run is the client's to change."""
    sentence = as_sentence(error.sentence)
    if isinstance(error, RequestRefused):
        return ApiError(400, sentence)
    if isinstance(error, RequestFailed):
        return ApiError(500, sentence, code="internal_error")
    return unavailable(sentence, "engine_unavailable", error.retry_after if error.retryable else 60)
