"""POST /v1/chat/completions: checks what can be known at once; the rest happens while the reply is sent."""

from __future__ import annotations

import time
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from sparkdraft.server.prompts import ModelText
from sparkdraft.server.protocol.chat import ChatRequest
from sparkdraft.server.protocol.chat_answer import ChatAnswer
from sparkdraft.server.service import service_of
from sparkdraft.server.stream import Job, Reply

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """The answer to a conversation, as a stream or as one body."""
    service = service_of(request)
    service.check_model(body.model)
    body.check()
    if body.choice != "none":
        service.check_tools()
    text, name = service.require_ready(), body.model or service.name
    return Reply(service, bool(body.stream), body.n or 1, lambda: prepare(text, body, name), renders=True)


def prepare(text: ModelText, body: ChatRequest, name: str) -> Job:
    prompt = text.prompt(body)
    answer = ChatAnswer(
        id=f"chatcmpl-{uuid4().hex}",
        created=int(time.time()),
        model=name,
        n=prompt.params.n,
        tokenizer=text.tokenizer,
        eos_ids=text.eos_ids,
        new_parser=prompt.new_parser,
        wants_logprobs=bool(body.logprobs),
        parallel=prompt.parallel,
        old_calls=bool(body.functions),
        may_be_empty=text.tools.may_be_empty,
        prompt_logprobs=body.prompt_logprobs,
        include_usage=body.include_usage,
        usage_in_each=body.usage_in_each,
        return_speculation=bool(body.return_speculation),
    )
    return Job(
        answer, [prompt.ids], prompt.params, "tools" if body.choice in ("required", "named") else "response_format"
    )
