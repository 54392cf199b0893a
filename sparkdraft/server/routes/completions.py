"""POST /v1/completions: plain text that continues one prompt or several."""

from __future__ import annotations

import time
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from sparkdraft.server.prompts import ModelText
from sparkdraft.server.protocol.completion_answer import CompletionAnswer
from sparkdraft.server.protocol.completions import CompletionRequest
from sparkdraft.server.service import service_of
from sparkdraft.server.stream import Job, Reply

DEFAULT_TOKENS = 16  # as OpenAI's
router = APIRouter()


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """The text that follows a prompt, as a stream or as one body."""
    service = service_of(request)
    service.check_model(body.model)
    body.check()
    text, name = service.require_ready(), body.model or service.name
    count = (body.n or 1) * len(body.prompts)
    return Reply(service, bool(body.stream), count, lambda: prepare(text, body, name))


def prepare(text: ModelText, body: CompletionRequest, name: str) -> Job:
    ids = [text.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]
    for each in ids:
        text.check_ids(each, "prompt")
        text.check_length(each, "prompt")
    text.check_fields(body)
    echo = bool(body.echo)
    wanted = {"logprobs": body.logprobs, "prompt_logprobs": body.logprobs if echo else None}
    params = body.sampling(text.sampling, DEFAULT_TOKENS, continues=True, **wanted)
    shown = [p if isinstance(p, str) else text.tokenizer.decode(p) if echo else "" for p in body.prompts]
    answer = CompletionAnswer(
        id=f"cmpl-{uuid4().hex}",
        created=int(time.time()),
        model=name,
        n=params.n,
        prompts=list(zip(shown, ids, strict=True)),
        tokenizer=text.tokenizer,
        echo=echo,
        wants_logprobs=body.logprobs is not None,
        include_usage=body.include_usage,
        return_speculation=bool(body.return_speculation),
    )
    return Job(answer, ids, params)
