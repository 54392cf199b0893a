"""The routes: chat, completions, models, health and metrics, token ids, and the chat page.

A route checks what can be known at once. A `Reply` (stream.py) does the rest while the answer is sent. /health is for
machines, /v1/status for people.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse

from sparkdraft import __version__
from sparkdraft.server.guards import RESTING
from sparkdraft.server.prompts import ModelText
from sparkdraft.server.protocol.chat import ChatAnswer, ChatRequest, check_parts
from sparkdraft.server.protocol.completions import (
    CompletionAnswer,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from sparkdraft.server.protocol.shapes import Json, dumps, token_name
from sparkdraft.server.protocol.validation import ApiError
from sparkdraft.server.service import Service, service_of
from sparkdraft.server.stream import Job, Reply

DEFAULT_TOKENS = 16  # of a completion, as OpenAI's
PAGE = Path(__file__).parent / "page" / "index.html"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
router = APIRouter()


# ---- POST /v1/chat/completions


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """The answer to a conversation, as a stream or as one body."""
    service = service_of(request)
    service.check_model(body.model)
    body.check()
    if body.choice != "none":
        service.check_tools()
    text, name = service.require_ready(), body.model or service.name
    return Reply(service, bool(body.stream), body.n or 1, lambda: _chat_job(text, body, name), renders=True)


def _chat_job(text: ModelText, body: ChatRequest, name: str) -> Job:
    prompt = text.prompt(body)
    answer = ChatAnswer(
        id=f"chatcmpl-{uuid4().hex}",
        model=name,
        n=prompt.params.n,
        tokenizer=text.tokenizer,
        eos_ids=text.eos_ids,
        new_parser=prompt.new_parser,
        wants_logprobs=bool(body.logprobs),
        parallel=prompt.parallel,
        old_calls=bool(body.functions),
        may_be_empty=text.tools.may_be_empty,
        **body.answer_fields,
    )
    grammar_field = "tools" if body.choice in ("required", "named") else "response_format"
    return Job(answer, [prompt.ids], prompt.params, grammar_field)


# ---- POST /v1/completions


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """The text that follows a prompt, as a stream or as one body."""
    service = service_of(request)
    service.check_model(body.model)
    body.check()
    text, name = service.require_ready(), body.model or service.name
    count = (body.n or 1) * len(body.prompts)
    return Reply(service, bool(body.stream), count, lambda: _completion_job(text, body, name))


def _completion_job(text: ModelText, body: CompletionRequest, name: str) -> Job:
    text.check_fields(body)
    ids = [_prompt_ids(text, body, prompt) for prompt in body.prompts]
    echo, wanted = bool(body.echo), [body.prompt_logprobs, body.logprobs if body.echo else None]
    most = max((count for count in wanted if count is not None), default=None)
    given: dict[str, Any] = {"continues": True, "logprobs": body.logprobs, "prompt_logprobs": most}
    params = body.sampling(text.sampling, DEFAULT_TOKENS, text.repetition_limit, **given)
    as_sent = body.truncate_prompt_tokens is None
    shown = [
        prompt if isinstance(prompt, str) and as_sent else text.tokenizer.decode(each) if echo else ""
        for prompt, each in zip(body.prompts, ids, strict=True)
    ]
    answer = CompletionAnswer(
        id=f"cmpl-{uuid4().hex}",
        model=name,
        n=params.n,
        prompts=list(zip(shown, ids, strict=True)),
        tokenizer=text.tokenizer,
        echo=echo,
        logprobs=body.logprobs,
        **body.answer_fields,
    )
    return Job(answer, ids, params, scores=body.scores)


def _prompt_ids(text: ModelText, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        prompt = text.encode(prompt, body.add_special_tokens is not False, cuts=body.truncate_prompt_tokens is not None)
    text.check_ids(prompt, "prompt")
    ids = text.truncated(prompt, body)
    text.check_length(ids, "prompt")
    return ids


# ---- GET /v1/models


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The model that is served, under each of its names."""
    service = service_of(request)
    return {"object": "list", "data": [_card(service, name) for name in service.config.names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    service = service_of(request)
    service.check_model(name)
    return _card(service, name)


def _card(service: Service, name: str) -> dict[str, Any]:
    info = service.client.info
    return {
        "id": name,
        "object": "model",
        "owned_by": "sparkdraft",
        "created": info.created if info else int(service.started),
        "max_model_len": info.max_model_len if info else None,
        "sampling_defaults": service.sampling if info else None,
    }


# ---- GET /health, /metrics and /v1/status


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 when requests are answered, else 503 with the stage of loading, or with why the engine does not answer."""
    service = service_of(request)
    found: dict[str, Any] = {}
    if failed := service.failed_probes:
        found["canary"] = failed
    if warnings := service.watchdog.warnings:
        found["warnings"] = warnings
    if service.ready and service.gate.closed:
        wait = service.gate.retry_after(RESTING)
        return JSONResponse({"status": "overloaded"} | found, status_code=503, headers={"Retry-After": str(wait)})
    if service.ready:
        return JSONResponse({"status": "degraded" if found else "ok"} | found)
    wait = service.client.retry_after
    return JSONResponse(_state(service) | found, status_code=503, headers={"Retry-After": str(wait)})


@router.get("/metrics")
async def metrics(request: Request) -> PlainTextResponse:
    """Prometheus' text format; vLLM's names with the prefix sparkdraft_."""
    service = service_of(request)
    counted, engine = service.metrics, await service.engine_status()
    counted.ready.set(float(service.ready))
    counted.restarts.set(service.client.restarts)
    counted.silence.set(service.client.pulse.silent_for)
    if engine or service.client.state not in ("ready", "unresponsive"):  # a busy engine keeps its last values
        counted.running.set(engine.get("running", 0))
        counted.waiting.set(engine.get("waiting", 0))
        counted.kv_usage.set(_kv_usage(engine))
        counted.preemptions.set(engine.get("preemptions", 0))
    if errors := engine.get("kv_errors"):
        counted.coding(errors)
    counted.canary(service.canary)
    counted.watch(service.watchdog.alarms.values())
    return PlainTextResponse(counted.render(), media_type="text/plain; version=0.0.4")


@router.get("/v1/status")
async def status(request: Request) -> dict[str, Any]:
    """The resolved plan, every fallback with its reason, and live numbers."""
    service = service_of(request)
    info, engine = service.client.info, await service.engine_status()
    return _state(service) | {
        "version": __version__,
        "uptime_s": round(time.time() - service.started, 1),
        "model": service.name,
        "names": service.config.names,
        "restarts": service.client.restarts,
        "silent_s": service.client.pulse.silent_for,
        "step_s": service.client.pulse.step_for,
        "last_error": service.last_error,
        "source": info.model if info else service.config.engine.model,
        "model_type": info.model_type if info else None,
        "max_model_len": info.max_model_len if info else None,
        "plan": info.plan if info else None,
        "plan_facts": info.plan_facts if info else {},
        "fallbacks": info.fallbacks if info else [],
        "facts": service.facts,
        "canary": service.canary,
        "watchdog": service.watchdog.describe(),
        "drafter": info.drafter if info else None,
        "sampling_defaults": service.sampling if info else None,
        "queue": {"inside": service.gate.num_inside, "capacity": service.gate.capacity},
        "speculative_decoding": engine.pop("drafting", None),
        "engine": engine,
    }


def _state(service: Service) -> dict[str, Any]:
    done, total = service.client.progress
    return {
        "status": "ok" if service.ready else service.state,
        "stage": service.stage,
        "progress": {"done": done, "total": total},
        "error": None if service.ready else service.last_error,
    }


def _kv_usage(engine: dict[str, Any]) -> float:
    if engine.get("kv_usage") is not None:
        return float(engine["kv_usage"])
    total = engine.get("kv_blocks_total", 0)
    return 1 - engine["kv_blocks_free"] / total if total else 0.0


# ---- POST /tokenize and /detokenize, as in vLLM


@router.post("/tokenize", response_model=None)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The ids of a prompt, or of messages in the chat template."""
    service = service_of(request)
    service.check_model(body.model)
    check_parts(body.messages or ())
    body.check_opening(body.messages or ())
    text = service.require_ready()
    with service.gate.enter(1):
        return await service.in_thread(lambda: _tokenized(text, body), renders=body.messages is not None)


def _tokenized(text: ModelText, body: TokenizeRequest) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Send either prompt or messages.", "prompt")
    if body.messages is None:
        ids = text.encode(body.prompt or "", body.add_special_tokens is not False)
    else:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []] or None
        said = text.tools.instructions(tools) if tools else None
        variables = text.variables(body.chat_template_kwargs)
        ids = text.encode_chat(text.rendered(body.messages, body, tools, said, variables))
    names = [token_name(token, text.tokenizer) for token in ids] if body.return_token_strs else None
    return _json({"count": len(ids), "max_model_len": text.info.max_model_len, "tokens": ids, "token_strs": names})


@router.post("/detokenize", response_model=None)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of ids, special tokens included."""
    service = service_of(request)
    service.check_model(body.model)
    text = service.require_ready()
    text.check_count(body.tokens, "tokens")
    with service.gate.enter(1):
        return await service.in_thread(lambda: _detokenized(text, body.tokens))


def _detokenized(text: ModelText, ids: list[int]) -> Response:
    text.check_ids(ids, "tokens")
    return _json({"prompt": text.tokenizer.decode(ids, skip_special=False)})


def _json(body: Json) -> Response:
    """Call it in the thread: serialising a long list takes as long as computing it."""
    return Response(dumps(body), media_type="application/json")


# ---- GET /


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page() -> FileResponse:
    """The chat page: one file, which may load nothing from elsewhere."""
    return FileResponse(PAGE, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)
