"""POST /v1/completions: plain text that continues one prompt or several."""

from __future__ import annotations

import time
from typing import Any
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
    text.check_fields(body)
    ids = [_ids(text, body, prompt) for prompt in body.prompts]
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
        created=int(time.time()),
        model=name,
        n=params.n,
        prompts=list(zip(shown, ids, strict=True)),
        tokenizer=text.tokenizer,
        echo=echo,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        include_usage=body.include_usage,
        usage_in_each=body.usage_in_each,
        return_speculation=bool(body.return_speculation),
    )
    return Job(answer, ids, params, scores=body.scores)


def _ids(text: ModelText, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        prompt = text.encode(prompt, body.add_special_tokens is not False, cuts=body.truncate_prompt_tokens is not None)
    text.check_ids(prompt, "prompt")
    ids = text.truncated(prompt, body)
    text.check_length(ids, "prompt")
    return ids
