"""Ollama's routes: chat, generate, and what its clients ask about the model; and vLLM's /version.

One model is served, so that routes which change or fetch models are refused. What is not known of the model is empty.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from sparkdraft import __version__
from sparkdraft.backend import ModelInfo
from sparkdraft.operate.canary.findings import TOOLS
from sparkdraft.server.prompts import ChatPrompt, ModelText
from sparkdraft.server.protocol.chat import ChatRequest
from sparkdraft.server.protocol.ollama import (
    OPTIONS,
    ModelRequest,
    OllamaAnswer,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    WriteRequest,
    stamp,
)
from sparkdraft.server.protocol.shapes import Json, dumps
from sparkdraft.server.protocol.validation import ApiError
from sparkdraft.server.protocol.written import Written
from sparkdraft.server.service import Service, service_of
from sparkdraft.server.stream import Job, Reply
from sparkdraft.text.events import chain

API_VERSION = "0.32.0"  # of Ollama, as these routes follow it: clients refuse servers below the version that they need
LATEST = ":latest"  # the tag of names that have none
NEVER = "2300-01-01T00:00:00Z"  # when the model is unloaded
EMBEDDINGS = ("/api/embed", "/api/embeddings")
REFUSED = {  # path -> method
    **dict.fromkeys(("/api/create", "/api/copy", "/api/push", *EMBEDDINGS), "POST"),
    "/api/delete": "DELETE",
}
router = APIRouter()


# ---- POST /api/chat and /api/generate


@router.post("/api/chat", response_model=None)
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    """The answer to a conversation, as lines of JSON or as one body."""
    return _reply(service_of(request), body, OllamaChatAnswer)


@router.post("/api/generate", response_model=None)
async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
    """The answer to a prompt; raw: the text that follows it."""
    return _reply(service_of(request), body, OllamaGenerateAnswer)


def _reply(service: Service, body: WriteRequest, kind: type[OllamaAnswer]) -> Response:
    begin, name = time.monotonic(), _served(service, body.model)
    body.check()
    text = service.require_ready()
    if body.is_empty:
        return _json(kind.loaded(name))
    inner = body.as_chat(text.style.thinking, name)
    if inner.choice != "none":
        service.check_tools()
    raw = body if isinstance(body, OllamaGenerateRequest) and body.raw else None

    def job() -> Job:
        prompt = _raw_prompt(text, raw, inner) if raw else text.prompt(inner)
        answer = kind(
            id=f"ollama-{uuid4().hex}",
            model=name,
            n=1,
            tokenizer=text.tokenizer,
            text=prompt.new_text(),
            eos_ids=text.eos_ids,
            wants_logprobs=bool(inner.logprobs),
            begin=begin,
        )
        return Job(answer, [prompt.ids], prompt.params, "format")

    return Reply(service, body.streams, 1, job, renders=raw is None)


def _raw_prompt(text: ModelText, body: OllamaGenerateRequest, inner: ChatRequest) -> ChatPrompt:
    ids = text.encode(body.prompt or "")
    room = text.check_length(ids, "prompt")
    constraint = inner.constraint()
    more: Json = {"logprobs": inner.wanted_logprobs, "grammar": constraint and constraint.spec, "continues": True}
    params = inner.sampling(text.sampling, room, text.repetition_limit, **more)
    return ChatPrompt(ids, params, lambda: Written(chain(None, None), text.eos_ids))


# ---- about the model


@router.head("/api/tags", include_in_schema=False)
@router.get("/api/tags")
async def tags(request: Request) -> Json:
    """The model that is served, under each of its names."""
    service = service_of(request)
    modified = {"modified_at": _modified(service), "size": 0, "capabilities": _capabilities(service)}
    return {"models": [_described(service, name) | modified for name in service.config.names]}


@router.get("/api/ps")
async def ps(request: Request) -> Json:
    """The model that is served, if it is ready."""
    service = service_of(request)
    info = service.client.info
    if info is None or not service.ready:
        return {"models": []}
    lasting = {"expires_at": NEVER, "size": 0, "size_vram": 0, "context_length": info.max_model_len}
    return {"models": [_described(service, name) | lasting for name in service.config.names]}


@router.post("/api/show")
async def show(body: ModelRequest, request: Request) -> Json:
    """What is known about the model."""
    service = service_of(request)
    name = _served(service, body.model or body.name)
    info = service.require_ready().info
    family = info.model_type
    ours = {ours: theirs for theirs, ours in OPTIONS.items()}
    defaults = [f"{ours.get(field, field):<30} {value}" for field, value in service.sampling.items()]
    return {
        "license": "",
        "modelfile": "",
        "parameters": "\n".join(defaults),
        "template": info.chat_template or "",
        "modified_at": _modified(service),
        "details": _details(info),
        "model_info": {
            "general.architecture": family,
            "general.basename": name,
            f"{family}.context_length": info.max_model_len,
            f"{family}.vocab_size": info.vocab_size,
        },
        "capabilities": _capabilities(service),
    }


@router.head("/api/version", include_in_schema=False)
@router.get("/api/version")
async def api_version() -> dict[str, str]:
    """The version of Ollama's API that is followed, and this server's own."""
    return {"version": API_VERSION, "sparkdraft": __version__}


@router.get("/version")
async def version() -> dict[str, str]:
    """This server's version, as in vLLM."""
    return {"version": __version__}


def _served(service: Service, asked: str | None) -> str:
    """The name that was asked for, if it is one of the model's."""
    if not asked:
        raise ApiError(400, "model is required; send a name from /api/tags.", "model")
    if not _is_served(service, asked):
        raise ApiError(404, f"model '{asked}' not found; this server has {_listed(service)}.", "model")
    return asked


def _is_served(service: Service, name: str) -> bool:
    return name in service.config.names or name.removesuffix(LATEST) in service.config.names


def _listed(service: Service) -> str:
    return ", ".join(f"'{name}'" for name in service.config.names)


def _described(service: Service, name: str) -> Json:
    info = service.client.info
    return {"name": name, "model": name, "digest": _digest(info) if info else "", "details": _details(info)}


def _digest(info: ModelInfo) -> str:
    """A hash of what tells this model from others."""
    facts = [info.model, info.model_type, info.vocab_size, info.max_model_len, info.eos_ids, info.chat_template]
    return hashlib.sha256(dumps(facts)).hexdigest()


def _details(info: ModelInfo | None) -> Json:
    family = info.model_type if info else ""
    return {
        "parent_model": "",
        "format": "gguf" if info and info.model.endswith(".gguf") else "",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": _quantization(info) if info else "",
    }


def _quantization(info: ModelInfo) -> str:
    """How a CPU keeps the matrices. On a GPU they may stay in the codes of the file, which the plan does not name."""
    return str(info.plan_facts.get("weights", "")) if info.plan_facts.get("device") == "cpu" else ""


def _capabilities(service: Service) -> list[str]:
    """What /api/chat and /api/generate can do with this model; empty until it is ready."""
    text = service.text
    if text is None:
        return []
    thinking = text.style.thinking
    has = {
        "completion": True,
        "tools": bool(text.info.chat_template) and all(found["part"] != TOOLS for found in service.failed_probes),
        "thinking": thinking.happens or thinking.has_efforts or bool(thinking.switch),
    }
    return [name for name, there in has.items() if there]


def _modified(service: Service) -> str:
    """When the model was loaded: its files may be anywhere."""
    return stamp(service.client.info.created if service.client.info else service.started)


# ---- what other servers do with models


@router.post("/api/pull", response_model=None)
async def pull(body: ModelRequest, request: Request) -> Response:
    """A name of the served model is already here. Other models are refused."""
    service = service_of(request)
    if not _is_served(service, body.model or body.name or ""):
        raise _one_model(service, "/api/pull")
    media_type = OllamaAnswer.media_type.decode() if body.stream is not False else "application/json"
    return Response(dumps({"status": "success"}) + b"\n", media_type=media_type)


def _refusal(path: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        if path in EMBEDDINGS:
            raise ApiError(400, f"{path} is not supported: this server writes text; use another one for embeddings.")
        raise _one_model(service_of(request), path)

    return refuse


def _one_model(service: Service, path: str) -> ApiError:
    served = f"this server has one model, {_listed(service)}"
    return ApiError(400, f"{path} is not supported: {served}; to serve another, start the server with its --model.")


for _path, _method in REFUSED.items():
    router.add_route(_path, _refusal(_path), methods=[_method], include_in_schema=False)


def _json(body: Json) -> Response:
    return Response(dumps(body), media_type="application/json")
