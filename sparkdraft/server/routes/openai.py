"""OpenAI's routes: chat, completions and models; and vLLM's for token ids."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from sparkdraft.server.prompts import ModelText
from sparkdraft.server.protocol.anthropic import model_list
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
        new_text=prompt.new_text,
        wants_logprobs=bool(body.logprobs),
        old_calls=bool(body.functions),
        prompt_ids=prompt.ids,
        **body.answer_fields,
    )
    grammar_field = "tools" if body.choice in ("required", "named") else body.constraint_field or "tools"
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
    constraint = body.constraint()
    given["grammar"] = constraint and constraint.spec
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
    return Job(answer, ids, params, body.constraint_field, scores=body.scores)


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
    service, info = service_of(request), service_of(request).client.info
    if "anthropic-version" in request.headers:  # Anthropic's clients ask at the same address for another form
        created = info.created if info else int(service.started)
        return model_list(service.config.names, created, info.max_model_len if info else None)
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
