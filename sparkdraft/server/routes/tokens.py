"""POST /tokenize and /detokenize, as vLLM has them: text or messages to ids, and back."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from sparkdraft.server.prompts import ModelText
from sparkdraft.server.protocol.completions import DetokenizeRequest, TokenizeRequest
from sparkdraft.server.protocol.errors import ApiError
from sparkdraft.server.protocol.shapes import token_name
from sparkdraft.server.service import service_of

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """The ids of a prompt, or of messages in the chat template."""
    service = service_of(request)
    service.check_model(body.model)
    text = service.require_ready()
    ids = await asyncio.to_thread(_ids, text, body)
    names = [token_name(token, text.tokenizer) for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": text.info.max_model_len, "tokens": ids, "token_strs": names}


def _ids(text: ModelText, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Send either prompt or messages.", "prompt")
    if body.messages is None:
        return text.encode(body.prompt or "", body.add_special_tokens is not False)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []] or None
    opens = body.add_generation_prompt is not False
    return text.encode_chat(text.render(text.messages(body.messages), tools, add_generation_prompt=opens))


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
    """The text of ids, special tokens included."""
    service = service_of(request)
    service.check_model(body.model)
    text = service.require_ready()
    wrong = next((token for token in body.tokens if token >= text.info.vocab_size), None)
    if wrong is not None:
        raise ApiError(400, f"There is no token {wrong}; ids go from 0 to {text.info.vocab_size - 1}.", "tokens")
    return {"prompt": await asyncio.to_thread(text.tokenizer.decode, body.tokens, False)}
