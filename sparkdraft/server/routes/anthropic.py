"""Anthropic's routes: messages, and the number of their tokens. Query parameters and the headers anthropic-version and
anthropic-beta change nothing."""

from __future__ import annotations

from uuid import uuid4

from fastapi import APIRouter, Request, Response

from sparkdraft.server.prompts import ChatPrompt, ModelText
from sparkdraft.server.protocol.anthropic import (
    CountTokensRequest,
    MessagesAnswer,
    MessagesRequest,
    chat_request,
    is_too_long,
    num_tokens,
    too_long,
)
from sparkdraft.server.protocol.shapes import Json
from sparkdraft.server.protocol.validation import ApiError
from sparkdraft.server.request_log import record_of
from sparkdraft.server.service import service_of
from sparkdraft.server.stream import Job, Reply

router = APIRouter()


# ---- POST /v1/messages


@router.post("/v1/messages", response_model=None)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """The next message of a conversation, as a stream or as one body."""
    service = service_of(request)
    service.check_model(body.model)
    if body.may_call:
        service.check_tools()
    text, names = service.require_ready(), (body.model or service.name, record_of(request.scope).id)
    return Reply(service, bool(body.stream), 1, lambda: _job(text, body, *names), renders=True)


def _job(text: ModelText, body: MessagesRequest, name: str, request_id: str) -> Job:
    try:
        prompt = _prompt(text, body)
    except ApiError as error:
        raise too_long(error, text.info.max_model_len) if is_too_long(error) else error from None
    answer = MessagesAnswer(
        id=f"msg_{uuid4().hex}",
        model=name,
        request_id=request_id,
        n=1,
        tokenizer=text.tokenizer,
        written=prompt.new_text(),
        eos_ids=text.eos_ids,
        stops=prompt.params.stop,
        max_tokens=body.max_tokens,
        max_model_len=text.info.max_model_len,
        keep_special=prompt.params.keep_special,
    )
    return Job(answer, [prompt.ids], prompt.params)


def _prompt(text: ModelText, body: CountTokensRequest) -> ChatPrompt:
    return text.prompt(chat_request(body, text.style.thinking.switch, text.repetition_limit))


# ---- POST /v1/messages/count_tokens


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(body: CountTokensRequest, request: Request) -> Json:
    """The number of tokens of the prompt that the same body has in /v1/messages."""
    service = service_of(request)
    service.check_model(body.model)
    text = service.require_ready()
    with service.gate.enter(1):
        return await service.in_thread(lambda: {"input_tokens": _count(text, body)}, renders=True)


def _count(text: ModelText, body: CountTokensRequest) -> int:
    try:
        return len(_prompt(text, body).ids)
    except ApiError as error:
        if not is_too_long(error):
            raise
        count, is_counted = num_tokens(error)
        if is_counted:
            return count
        raise too_long(error, text.info.max_model_len) from None
