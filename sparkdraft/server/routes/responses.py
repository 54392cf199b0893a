"""OpenAI's Responses API: /v1/responses, and the responses that are kept in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.types import Receive, Scope, Send

from sparkdraft.core import SamplingParams
from sparkdraft.server.prompts import ModelText
from sparkdraft.server.protocol.response_answer import TOO_LONG, ResponsesAnswer, new_response_id
from sparkdraft.server.protocol.response_items import check_plain, for_storing, resolved, tools_in
from sparkdraft.server.protocol.response_tools import Given, Toolbox, ToolChoice
from sparkdraft.server.protocol.responses import ENCRYPTED, ResponsesRequest, chat_names
from sparkdraft.server.protocol.shapes import Json
from sparkdraft.server.protocol.validation import ApiError
from sparkdraft.server.protocol.written import Written
from sparkdraft.server.request_log import record_of
from sparkdraft.server.response_store import Stored
from sparkdraft.server.service import Service, service_of
from sparkdraft.server.stream import Job, Reply
from sparkdraft.text.events import OnlyCalls

router = APIRouter()


def owner_of(request: Request) -> str:
    """The name of the request's API key; the same for all where the server needs no key."""
    return record_of(request.scope).key


# ---- POST /v1/responses


@dataclass(frozen=True, slots=True)
class Asked:
    """A request with all that the store knows about it."""

    body: ResponsesRequest
    model: str
    items: list[Json]
    before: Stored | None  # the response that it continues
    toolbox: Toolbox
    choice: ToolChoice
    keep: Callable[[Json], None] | None


@router.post("/v1/responses", response_model=None)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """The answer to input items, as a stream of events or as one response."""
    service = service_of(request)
    service.check_model(body.model)
    body.check()
    before, items, keep = _known(body, request, service)
    # Reading thousands of tools takes seconds.
    asked = await service.in_thread(lambda: _asked(body, body.model or service.name, items, before, keep))
    if asked.toolbox.tools and asked.choice != "none":
        service.check_tools()
    return ResponsesReply(service, asked, service.require_ready())


Keep = Callable[[Json], None]


def _known(body: ResponsesRequest, request: Request, service: Service) -> tuple[Stored | None, list[Json], Keep | None]:
    """What the store has: the response before, the items with those that are referred to; and what will store this
    response."""
    store, owner = service.responses, owner_of(request)
    before = None
    if body.previous_response_id is not None:
        before = store.find(owner, body.previous_response_id)
        if before is None:
            field = "previous_response_id"
            raise _not_found(f"Previous response with id '{body.previous_response_id[:100]}'", field)
    items = resolved(body.items, lambda name: store.item(owner, name))

    def keep(response: Json) -> None:
        store.keep(owner, response, for_storing(items), before)

    return before, items, None if body.store is False else keep


def _asked(body: ResponsesRequest, model: str, items: list[Json], before: Stored | None, keep: Keep | None) -> Asked:
    listed = [Given(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or [])]
    toolbox = Toolbox([*listed, *tools_in(before.items if before else [], items)])
    return Asked(body, model, items, before, toolbox, toolbox.choice(body.tool_choice), keep)


class ResponsesReply(Reply):
    def __init__(self, service: Service, asked: Asked, text: ModelText) -> None:
        super().__init__(service, bool(asked.body.stream), 1, lambda: _job(text, asked), renders=True)
        self._refusal = lambda: _answer(text, asked, None, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A stream also tells as an event that a conversation is too long: Codex looks for it there only."""
        try:
            await super().__call__(scope, receive, send)
        except ApiError as error:
            if self.started or not self.stream or error.code != TOO_LONG:
                raise
            self._record.error = error
            answer = self._refusal()
            await self._end(answer, send, *answer.opening(0), *answer.failure(error))


def _job(text: ModelText, asked: Asked) -> Job:
    for field, value in {"input": asked.body.items, **asked.body.response_fields()}.items():
        if isinstance(value, dict | list):
            check_plain(value, field)
    chat = asked.body.chat(asked.before.items if asked.before else [], asked.items, asked.toolbox, asked.choice)
    forced = chat.choice in ("required", "named")
    if forced or chat.allowed is not None:
        asked.toolbox.check_patterns()
    with chat_names():
        prompt = text.prompt(chat)
    field = "tools" if forced else "text.format"
    return Job(_answer(text, asked, prompt.new_text(), prompt.params), [prompt.ids], prompt.params, field)


def _answer(text: ModelText, asked: Asked, written: Written | None, params: SamplingParams | None) -> ResponsesAnswer:
    """written, params: None if there will be no text."""
    body, fields = asked.body, asked.body.response_fields()
    if params:
        fields |= {"temperature": params.temperature, "top_p": params.top_p}
    return ResponsesAnswer(
        id=new_response_id(),
        model=asked.model,
        n=1,
        tokenizer=text.tokenizer,
        text=written or Written(OnlyCalls(text.tools.parser([])), text.eos_ids),
        toolbox=asked.toolbox,
        fields=fields,
        encodes_reasoning=body.includes(ENCRYPTED),
        wants_logprobs=body.wanted_logprobs is not None,
        keep=asked.keep,
        **body.answer_fields,
    )


# ---- stored responses


@router.get("/v1/responses/{name}")
async def stored_response(name: str, request: Request, stream: bool = False) -> dict[str, Any]:
    """A response that was stored."""
    if stream:
        raise ApiError(400, "A stored response cannot be streamed; leave stream out.", "stream")
    return _stored(name, request).response


@router.delete("/v1/responses/{name}")
async def delete_response(name: str, request: Request) -> dict[str, Any]:
    if not service_of(request).responses.delete(owner_of(request), name):
        raise _not_found(f"Response with id '{name[:100]}'")
    return {"id": name, "object": "response", "deleted": True}


@router.get("/v1/responses/{name}/input_items")
async def input_items(
    name: str,
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """The items that a stored response answers, earlier responses included. after: the last id of the page before."""
    items = _stored(name, request).input
    items = items[::-1] if order == "desc" else items
    if after is not None:
        start = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if start is None:
            raise ApiError(400, f"after is '{after[:100]}', and the response has no such item.", "after")
        items = items[start + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(items) > limit}


def _stored(name: str, request: Request) -> Stored:
    found = service_of(request).responses.find(owner_of(request), name)
    if found is None:
        raise _not_found(f"Response with id '{name[:100]}'")
    return found


def _not_found(what: str, param: str | None = None) -> ApiError:
    hint = "This server keeps the last responses in memory, those with store false not at all: send all items as input."
    return ApiError(404, f"{what} not found. {hint}", param, f"{param or 'response'}_not_found".replace("_id", ""))
