"""The state that the routes share: configuration, engine client, counters, the model's tokenizer and chat template.

Before /health says ready, the tokenizer is made and a few warm-up requests run, so that no user waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TypeVar

from starlette.requests import Request

from sparkdraft.backend import ModelInfo
from sparkdraft.config import sampling_in_effect
from sparkdraft.operate.canary.findings import FAILED, TOOLS
from sparkdraft.server.config import ServerConfig
from sparkdraft.server.engine_client import EngineClient, EngineError, RequestFailed, RequestRefused
from sparkdraft.server.guards import Gate
from sparkdraft.server.metrics import Metrics
from sparkdraft.server.prompts import ModelText
from sparkdraft.server.protocol.validation import ApiError, as_sentence, unavailable
from sparkdraft.server.response_store import ResponseStore
from sparkdraft.server.watchdog import Watchdog

log = logging.getLogger(__name__)
POLL = 0.05  # seconds between two checks of the engine's state
TEXT_THREADS = 4  # threads that tokenise, and as many that render chats; further such work waits for one of them
T = TypeVar("T")


class Service:
    def __init__(self, config: ServerConfig, client: EngineClient) -> None:
        self.config, self.client = config, client
        self.metrics = Metrics()
        self.gate = Gate(config.max_queue)
        self.watchdog = Watchdog(self)
        self.responses = ResponseStore()  # of the Responses API
        self.started = time.time()
        self.draining = False
        self.text: ModelText | None = None  # made by follow()
        self.refusal: str | None = None  # why this engine's tokenizer or template cannot be used, set by follow()
        self._threads = ThreadPoolExecutor(TEXT_THREADS, "text")
        self._chat_threads = ThreadPoolExecutor(TEXT_THREADS, "chat")  # a slow chat template delays only chats
        self.start_seconds = 0.0  # time of the engine's last start, set by follow()

    # ---- what is served

    @property
    def name(self) -> str:
        return self.config.names[0]

    @property
    def sampling(self) -> dict[str, float]:
        """The values for fields that a request leaves out."""
        return sampling_in_effect(self.config.sampling_defaults, self.client.info.sampling if self.client.info else {})

    @property
    def facts(self) -> list[dict[str, str]]:
        """Facts about the engine and the model's text: name, value and reason of each."""
        own = [asdict(fact) for fact in self.text.style.facts] if self.text else []
        return [*(self.client.info.facts if self.client.info else []), *own]

    @property
    def canary(self) -> list[dict[str, Any]]:
        """The findings of the engine's canary; empty if it is off."""
        return self.client.info.canary if self.client.info else []

    @property
    def failed_probes(self) -> list[dict[str, Any]]:
        return [finding for finding in self.canary if finding["status"] == FAILED]

    def check_tools(self) -> None:
        """Refuse tools if the canary found that calls are not parsed: a client would take them for text."""
        if any(finding["part"] == TOOLS for finding in self.failed_probes):
            sentence = f"{TOOLS.capitalize()} are off: the canary found that calls are not read; /health says more."
            raise ApiError(500, sentence, "tools", "tools_disabled")

    @property
    def ready(self) -> bool:
        return self.client.state == "ready" and self._has_text and not self.draining

    @property
    def _has_text(self) -> bool:
        """True if `text` belongs to this engine and not to an earlier one."""
        return self.text is not None and self.text.info is self.client.info

    def check_model(self, asked: str | None) -> None:
        if asked is not None and asked not in self.config.names:
            served = ", ".join(f"'{name}'" for name in self.config.names)
            sentence = f"The model '{asked}' is not served here; this server has {served}."
            raise ApiError(404, sentence, "model", "model_not_found")

    def require_ready(self) -> ModelText:
        if self.ready:
            assert self.text is not None
            return self.text
        wait = self.client.retry_after
        if self.state == "draining":
            raise unavailable("The server is shutting down; retry later, or use another server.", "draining", wait)
        if self.state == "failed":
            raise unavailable(f"The engine cannot run: {self.last_error}.", "engine_failed", 60)
        if self.state == "unresponsive":
            raise unavailable(f"{as_sentence(self.client.silence)} Retry in {wait} s.", "engine_unresponsive", wait)
        done, total = self.client.progress
        stage = f"{self.stage}, {done} of {total}" if total else self.stage
        raise unavailable(f"The model is not ready yet ({stage}); retry in {wait} s.", "not_ready", wait)

    @property
    def state(self) -> str:
        if self.draining:
            return "draining"
        if self.client.state == "ready" and not self._has_text:
            return "failed" if self.refusal else "starting"
        return self.client.state

    @property
    def last_error(self) -> str | None:
        return self.refusal or self.client.silence or self.client.last_error

    @property
    def stage(self) -> str:
        """The stage of loading; warm-up requests are the last."""
        if self.client.state == "unresponsive":
            return "waiting for the engine"
        return "warm-up requests" if self.client.state == "ready" and not self._has_text else self.client.stage

    # ---- the engine's facts

    async def follow(self, warm_up: Callable[[ModelText], Awaitable[None]]) -> None:
        """Prepare each new engine, forever: make its tokenizer, and run warm-up requests with it."""
        info: ModelInfo | None = None
        while True:
            if self.client.info is not info:
                info = self.client.info
                if info is not None:
                    await self._prepare(info, warm_up)
            await asyncio.sleep(POLL)

    async def _prepare(self, info: ModelInfo, warm_up: Callable[[ModelText], Awaitable[None]]) -> None:
        self.refusal = None
        try:
            config = self.config
            chosen = config.reasoning_parser, config.tool_parser, config.repetition_limit
            text = await self.in_thread(lambda: ModelText(info, self.sampling, *chosen), renders=True)
        except Exception as error:  # the engine reads tokenizers too, but not all of them by the same way
            log.error("the tokenizer or the chat template of the model cannot be used", exc_info=error)
            self.refusal = f"the tokenizer or the chat template cannot be used: {error or type(error).__name__}"
            return
        self.gate.max_seqs = int(info.plan_facts.get("max_seqs") or 1)
        try:
            await warm_up(text)
        except Exception as error:
            log.error("a warm-up request failed; the server accepts requests anyway", exc_info=error)
        # Otherwise the engine died meanwhile, and a new one is starting.
        if self.client.info is info and self.client.state in ("ready", "unresponsive"):
            self.text = text
            self.start_seconds = self.client.start_took()

    async def in_thread(self, work: Callable[[], T], renders: bool = False) -> T:
        """Run CPU-bound work in a few threads, so that large texts delay only each other. renders: the work begins with
        a chat template."""
        threads = self._chat_threads if renders else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def close(self) -> None:
        for threads in (self._threads, self._chat_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def engine_status(self) -> dict[str, Any]:
        """The engine's live numbers; empty if it does not answer."""
        try:
            return await self.client.status()
        except EngineError:
            return {}


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def as_api_error(error: EngineError) -> ApiError:
    sentence = as_sentence(error.sentence)
    if isinstance(error, RequestRefused):
        return ApiError(400, sentence)
    if isinstance(error, RequestFailed):
        return ApiError(500, sentence, code="internal_error")
    return unavailable(sentence, "engine_unavailable", error.retry_after if error.retryable else 60)
