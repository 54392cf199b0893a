"""POST /tokenize and /detokenize, as vLLM has them: text or messages to ids, and back."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from sparkdraft.server.prompts import ModelText
from sparkdraft.server.protocol.chat import check_parts
from sparkdraft.server.protocol.completions import DetokenizeRequest, TokenizeRequest
from sparkdraft.server.protocol.errors import ApiError
from sparkdraft.server.protocol.shapes import Json, dumps, token_name
from sparkdraft.server.service import service_of

router = APIRouter()


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
    ids = _ids(text, body)
    names = [token_name(token, text.tokenizer) for token in ids] if body.return_token_strs else None
    return _json({"count": len(ids), "max_model_len": text.info.max_model_len, "tokens": ids, "token_strs": names})


def _ids(text: ModelText, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Send either prompt or messages.", "prompt")
    if body.messages is None:
        return text.encode(body.prompt or "", body.add_special_tokens is not False)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []] or None
    said = text.tools.instructions(tools) if tools else None
    return text.encode_chat(text.rendered(body.messages, body, tools, said, text.variables(body.chat_template_kwargs)))


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
    """Called in the thread: a long list takes as long to serialise as to compute."""
    return Response(dumps(body), media_type="application/json")
