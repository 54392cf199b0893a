"""The official client against the real engine process: a tiny random model, and a little of the embedded one.

What the client returns are its own types, which validate what the server sent; text must be the same streamed and
whole, with drafting and without.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.server.conftest import Live

USER: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


def chat(server: Live, **options: Any) -> ChatCompletion:
    options = {"model": server.service.name, "messages": USER, "max_tokens": 24, "temperature": 0} | options
    answer = server.openai.chat.completions.create(**options)
    ChatCompletion.model_validate(answer.model_dump(), strict=False)
    return answer


def stream(server: Live, **options: Any) -> list[ChatCompletionChunk]:
    options = {"model": server.service.name, "messages": USER, "max_tokens": 24, "temperature": 0} | options
    chunks = list(server.openai.chat.completions.create(**options, stream=True))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=False)
    return chunks


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    deltas = [c.delta for chunk in chunks for c in chunk.choices if c.index == index]
    return "".join(delta.content or "" for delta in deltas)


def calls_of(chunks: list[ChatCompletionChunk]) -> list[tuple[str, str]]:
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for delta in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            assert delta.function is not None
            call = calls.setdefault(delta.index, ["", ""])
            call[0] += delta.function.name or ""
            call[1] += delta.function.arguments or ""
    return [(name, arguments) for name, arguments in calls.values()]


def test_models(tiny_server: Live) -> None:
    assert [model.id for model in tiny_server.openai.models.list()] == ["tiny"]
    assert tiny_server.openai.models.retrieve("tiny").object == "model"


def test_chat_and_usage(tiny_server: Live) -> None:
    answer = chat(tiny_server, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.content
    assert answer.usage and answer.usage.completion_tokens == 24 and answer.usage.prompt_tokens == 22
    again = chat(tiny_server, extra_body={"ignore_eos": True})
    assert again.usage and again.usage.prompt_tokens_details and again.usage.prompt_tokens_details.cached_tokens == 16


@pytest.mark.parametrize("more", [{}, {"presence_penalty": 1.5, "frequency_penalty": 0.5}, {"stop": ["e", "\x00"]}])
def test_streamed_and_whole_drafted_and_plain_are_one_text(tiny_server: Live, more: dict[str, Any]) -> None:
    texts = set()
    for speculation in ("auto", "off", 4):
        body = {"speculation": speculation, "ignore_eos": True}
        texts.add(chat(tiny_server, extra_body=body, max_tokens=60, **more).choices[0].message.content)
        texts.add(text_of(stream(tiny_server, extra_body=body, max_tokens=60, **more)))
    assert len(texts) == 1


def test_a_stream_with_usage(tiny_server: Live) -> None:
    *chunks, last = stream(tiny_server, stream_options={"include_usage": True}, extra_body={"return_speculation": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] in (["length"], ["stop"])
    assert last.choices == [] and last.usage and last.usage.total_tokens > 22
    assert last.model_extra and "speculative_decoding" in last.model_extra["metrics"]


def test_three_answers_and_seeds(tiny_server: Live) -> None:
    options: Any = {"n": 3, "temperature": 1.0, "seed": 5}
    answer = chat(tiny_server, **options)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) == 3
    chunks = stream(tiny_server, **options)
    assert [text_of(chunks, i) for i in range(3)] == texts
    assert chat(tiny_server, temperature=1.0, seed=5).choices[0].message.content == texts[0]


def test_stops(tiny_server: Live) -> None:
    text = chat(tiny_server, max_tokens=40, extra_body={"ignore_eos": True}).choices[0].message.content or ""
    stop = text[5:7]
    answer = chat(tiny_server, max_tokens=40, stop=[stop], extra_body={"ignore_eos": True})
    assert answer.choices[0].message.content == text[: text.index(stop)] and answer.choices[0].finish_reason == "stop"


def test_logprobs(tiny_server: Live) -> None:
    answer = chat(tiny_server, logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True})
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content and len(logprobs.content) == 24
    for row in logprobs.content:
        assert len(row.top_logprobs) == 3 and row.logprob == row.top_logprobs[0].logprob <= 0  # greedy takes the best
    chunks = stream(tiny_server, logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True, "speculation": "off"})
    streamed = [row for c in chunks if c.choices[0].logprobs for row in c.choices[0].logprobs.content or []]
    assert [row.token for row in streamed] == [row.token for row in logprobs.content]


def test_completions(tiny_server: Live) -> None:
    create = tiny_server.openai.completions.create
    one = create(model="tiny", prompt="hello", max_tokens=8, temperature=0, logprobs=2)
    shape = one.choices[0].logprobs
    assert (
        shape and shape.tokens and len(shape.tokens) == len(shape.token_logprobs or []) == len(shape.text_offset or [])
    )
    both = create(model="tiny", prompt=["hello", "world"], max_tokens=8, temperature=0, n=2)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text == one.choices[0].text
    ids = tiny_server.post("/tokenize", prompt="hello").json()["tokens"]
    assert create(model="tiny", prompt=ids, max_tokens=8, temperature=0).choices[0].text == one.choices[0].text
    streamed = create(model="tiny", prompt="hello", max_tokens=8, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == one.choices[0].text


def test_echo_scores_the_prompt(tiny_server: Live) -> None:
    answer = tiny_server.openai.completions.create(model="tiny", prompt="hello", max_tokens=1, echo=True, logprobs=1)
    shape = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith("hello") and shape and shape.tokens and shape.token_logprobs
    assert shape.tokens[:5] == list("hello") and shape.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in shape.token_logprobs[1:5])


def test_errors_are_the_clients_own(tiny_server: Live) -> None:
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        chat(tiny_server, model="gpt-7")
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as caught:
        chat(tiny_server, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="512"):
        chat(tiny_server, messages=[{"role": "user", "content": "x" * 600}])
    with pytest.raises(openai.BadRequestError, match="token id 319999"):
        chat(tiny_server, logit_bias={"319999": 1})
    with pytest.raises(openai.BadRequestError, match="schema"):
        schema = {"type": "object", "properties": {"a": {"type": "frog"}}}
        chat(tiny_server, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def test_json(tiny_server: Live) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    texts = set()
    for speculation in ("auto", "off", 3):
        options: Any = {"response_format": form, "max_tokens": 200, "extra_body": {"speculation": speculation}}
        texts |= {chat(tiny_server, **options).choices[0].message.content, text_of(stream(tiny_server, **options))}
    (text,) = texts
    assert json.loads(text or "").keys() == {"a", "b"}


@pytest.mark.parametrize("levels", [49, 64, 70, 200, 5000])
def test_nested_schemas_are_refused_and_the_server_lives_on(tiny_server: Live, levels: int) -> None:
    schema = '{"properties":{"a":' * levels + "{}" + "}}" * levels
    held = '"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":' + schema + "}}"
    tool = '{"type":"function","function":{"name":"f","parameters":' + schema + "}}"
    called = f'"tool_choice":"required","tools":[{tool}]'
    client = tiny_server.service.client
    before = client.pid, client.restarts
    for part in (held, called):
        for streamed in ("true", "false"):
            body = '{"messages":[{"role":"user","content":"x"}],"max_tokens":4,"stream":' + streamed + "," + part + "}"
            answer = tiny_server.http.post(
                "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
            )
            if part is held and levels > 49:
                assert answer.status_code == 400 and len(answer.json()["error"]["message"]) < 200
                if levels < 5000:
                    assert answer.json()["error"]["param"] == "response_format"
                    assert "more than 100 objects and arrays within each other, the limit" in answer.text
            else:
                assert answer.status_code in (200, 400)  # a tool's deep schema fills the context, if it can be read
    assert chat(tiny_server).choices and (client.pid, client.restarts) == before


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choice", ["none", "auto", "required", "get_weather"])
def test_tools_in_all_choices(smollm2: Live, choice: str, streamed: bool) -> None:
    named: Any = {"type": "function", "function": {"name": choice}} if choice == "get_weather" else choice
    options: Any = {"tools": [WEATHER, TIME], "tool_choice": named, "parallel_tool_calls": False, "max_tokens": 80}
    options["messages"] = [{"role": "user", "content": "What is the weather in Paris for 2 days?"}]
    if streamed:
        chunks = stream(smollm2, **options)
        calls, finish = calls_of(chunks), chunks[-1].choices[0].finish_reason
    else:
        answer = chat(smollm2, **options).choices[0]
        found = answer.message.tool_calls or []
        calls = [(c.function.name, c.function.arguments) for c in found if c.type == "function"]
        finish = answer.finish_reason
    if choice == "none":
        assert not calls and finish in ("stop", "length")
    if choice in ("required", "get_weather"):
        assert len(calls) == 1 and finish == "tool_calls"
    if choice == "get_weather":
        assert calls[0][0] == "get_weather" and json.loads(calls[0][1]).keys() == {"city", "days"}


def test_a_call_and_its_result_can_be_sent_back(smollm2: Live) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    answer = chat(smollm2, messages=messages, tools=[TIME], max_tokens=16)
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


PEOPLE = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 4, "maxItems": 4},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 4, "maxItems": 4},
    },
    "required": ["names", "ages"],
    "additionalProperties": False,
}
DRAFTED: dict[str, Any] = {
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.2, "extra_body": {"repetition_penalty": 1.05}},
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "people", "schema": PEOPLE}},
        "messages": [{"role": "user", "content": "Four people, their names and ages, as JSON."}],
    },
    "stops": {
        "stop": ["sum", "1 for"],
        "messages": [{"role": "user", "content": "Write a Python function that counts the vowels in a string."}],
    },
    "all": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "people", "schema": PEOPLE}},
        "presence_penalty": 0.3,
        "stop": ['"ages"'],
    },
}


def accepted_of(answer: ChatCompletion | ChatCompletionChunk) -> int:
    assert answer.model_extra
    record = answer.model_extra["metrics"]["speculative_decoding"]
    return int(record["num_accepted_draft_tokens"]) if record else 0


@pytest.mark.parametrize(
    "name", [n if n in ("all", "stops") else pytest.param(n, marks=pytest.mark.slow) for n in DRAFTED]
)
def test_a_drafted_text_is_the_plain_one_whatever_shapes_it(smollm2: Live, name: str) -> None:
    options: Any = {"messages": [{"role": "user", "content": "Count from one to twenty in words."}], "max_tokens": 64}
    options |= DRAFTED[name]
    more = options.pop("extra_body", {}) | {"return_speculation": True}
    texts, accepted = set(), {}
    for speculation in ("off", "auto", 3, 7):
        body = more | {"speculation": speculation}
        whole = chat(smollm2, **options, extra_body=body)
        chunks = stream(smollm2, **options, extra_body=body)
        texts |= {whole.choices[0].message.content, text_of(chunks)}
        accepted[speculation] = (accepted_of(whole), accepted_of(chunks[-1]))
        drafted = sum((chunk.model_extra or {})["accepted_chars"] for chunk in chunks)
        assert 0 < drafted < len(text_of(chunks)) if accepted[speculation][1] else drafted == 0
    (text,) = texts
    assert text and accepted["off"] == (0, 0)
    assert min(accepted[3]) > 0 and min(accepted[7]) > 0, accepted
    assert not any(stop in text for stop in options.get("stop", []))
    if name == "schema":
        assert json.loads(text).keys() == {"names", "ages"}


def test_the_embedded_model_answers(smollm2: Live) -> None:
    options: Any = {"messages": [{"role": "user", "content": "Count from one to ten."}], "max_tokens": 40}
    texts = set()
    for speculation in ("auto", "off", 6):
        body = {"speculation": speculation, "return_speculation": True}
        answer = chat(smollm2, **options, extra_body=body)
        texts |= {answer.choices[0].message.content, text_of(stream(smollm2, **options, extra_body=body))}
        assert answer.model_extra
        stats = answer.model_extra["metrics"]["speculative_decoding"]
        assert speculation != 6 or stats["num_accepted_draft_tokens"] > 0
    assert len(texts) == 1
    status = smollm2.http.get("/v1/status").json()
    assert status["drafter"] and status["speculative_decoding"]["num_draft_tokens"] > 0
