"""The API's own work, against a scripted engine: shapes, limits, errors, keys, streams, and clients that hang up."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from sparkdraft.core import AUTO, REPETITION, FinishReason, Repetition
from sparkdraft.server.engine_client import EngineError, RequestFailed, RequestRefused
from tests.patience import PATIENT
from tests.server.conftest import FakeClient, Live, live

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello"}]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    return body["error"]


# ---- answers


def test_a_chat_and_its_usage(echo: Live) -> None:
    body = echo.chat("hello", model="smollm2", return_speculation=True).json()
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "user: hello\nassistant:" and choice["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == len("user: hello\nassistant:")
    assert body["usage"]["completion_tokens"] == body["usage"]["prompt_tokens"] + 1
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert body["metrics"]["speculative_decoding"]["num_draft_tokens"] == 4
    assert "metrics" not in echo.chat("hello").json()


def test_a_stream_has_its_parts_in_order(echo: Live) -> None:
    options = {"stream_options": {"include_usage": True}, "return_speculation": True}
    first, *middle, finish, usage = echo.events(CHAT, messages=USER, **options)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"]["content"] for c in middle) == "user: hello\nassistant:"
    assert finish["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens"] == 22
    assert usage["metrics"]["speculative_decoding"]["num_spec_steps"] == 2
    assert all(c["usage"] is None for c in [first, *middle, finish])
    chunks = [first, *middle, finish]
    assert sum(c["tokens"] for c in chunks) == usage["usage"]["completion_tokens"]
    assert sum(c["accepted"] for c in chunks) == sum(c["accepted_chars"] for c in chunks) == 8  # one a piece
    assert len({c["id"] for c in [*chunks, usage]}) == 1


def test_no_end_of_a_line_in_a_text_ends_a_line_of_the_stream(echo: Live) -> None:
    """`events` reads lines as httpx does, by Unicode's ends of lines, and so do other clients."""
    ends = "".join(chr(code) for code in range(0x3000) if len(f"a{chr(code)}b".splitlines()) > 1)
    assert len(ends) > 9
    said = "|".join(ends)
    events = echo.events(CHAT, messages=[{"role": "user", "content": said}])
    assert said in "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
    assert said in echo.chat(said).json()["choices"][0]["message"]["content"]


def test_without_usage_the_last_chunk_has_the_metrics(echo: Live) -> None:
    *others, last = echo.events(CHAT, messages=USER, n=2, return_speculation=True)
    assert last["metrics"]["speculative_decoding"]["num_spec_steps"] == 4
    assert not any("metrics" in chunk or "usage" in chunk for chunk in others)
    plain = echo.events(CHAT, messages=USER)
    assert not any({"metrics", "usage", "tokens", "accepted", "accepted_chars"} & chunk.keys() for chunk in plain)


def test_completions_of_many_prompts(echo: Live) -> None:
    body = echo.post(COMPLETIONS, prompt=["abc", "defg"], n=2).json()
    assert [c["text"] for c in body["choices"]] == ["abc", "abc", "defg", "defg"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3] and body["usage"]["prompt_tokens"] == 7
    chunks = echo.events(COMPLETIONS, prompt=["abc", "defg"], n=2)
    texts = ["", "", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["abc", "abc", "defg", "defg"]


def test_completions_of_ids_and_echo(echo: Live) -> None:
    ids = echo.post("/tokenize", prompt="abc").json()["tokens"]
    assert echo.post(COMPLETIONS, prompt=ids).json()["choices"][0]["text"] == "abc"
    assert len(echo.post(COMPLETIONS, prompt=[ids, ids]).json()["choices"]) == 2
    assert echo.post(COMPLETIONS, prompt=ids, echo=True).json()["choices"][0]["text"] == "abcabc"


def test_logprobs_of_completions(echo: Live) -> None:
    whole = echo.post(COMPLETIONS, prompt="a\u20acb", logprobs=2).json()
    body = whole["choices"][0]["logprobs"]
    assert body["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b", "</s>"]  # one per token
    assert body["token_logprobs"] == [-0.5] * whole["usage"]["completion_tokens"]
    assert body["top_logprobs"][0] == {"a": -0.5, "!": -9999.0} and body["text_offset"] == [0, 1, 1, 1, 2, 3]
    marked = echo.post(COMPLETIONS, prompt="</s>ab", logprobs=0, echo=True, max_tokens=1).json()["choices"][0]
    assert marked["text"].startswith("</s>ab") and marked["logprobs"]["text_offset"][:4] == [0, 4, 5, 6]
    echoed = echo.post(COMPLETIONS, prompt="\u20acb", logprobs=0, echo=True).json()["choices"][0]
    assert echoed["text"] == "\u20acb\u20acb" and echoed["logprobs"]["text_offset"] == [0, 0, 0, 1, 2, 2, 2, 3, 4]
    chunks = echo.events(COMPLETIONS, prompt="\u20acb", logprobs=0, echo=True)
    offsets = [c["choices"][0]["logprobs"]["text_offset"] for c in chunks]
    assert [each for part in offsets for each in part] == echoed["logprobs"]["text_offset"]


def test_logprobs_of_a_chat(echo: Live) -> None:
    answer = echo.chat("hi", logprobs=True, top_logprobs=1).json()["choices"][0]
    rows = answer["logprobs"]["content"]
    assert "".join(row["token"] for row in rows) == answer["message"]["content"]
    assert rows[0]["top_logprobs"] == [{"token": "u", "logprob": -0.5, "bytes": [117]}]
    chunks = echo.events(CHAT, messages=USER, logprobs=True)
    streamed = [row for c in chunks if c["choices"][0]["logprobs"] for row in c["choices"][0]["logprobs"]["content"]]
    assert "".join(row["token"] for row in streamed) == "user: hello\nassistant:"


# ---- what reaches the engine


@pytest.fixture
def ear() -> Iterator[tuple[Live, FakeClient]]:
    client = FakeClient(lambda prompt, params: "ok")
    with live(client) as running:
        yield running, client


def test_every_field_reaches_the_engine(ear: tuple[Live, FakeClient]) -> None:
    server, client = ear
    same = {"n": 2, "seed": 7, "temperature": 0.3, "top_p": 0.9, "presence_penalty": 1, "frequency_penalty": -1}
    same |= {"min_p": 0.1, "repetition_penalty": 1.5, "min_tokens": 3, "ignore_eos": True}
    more = {"stop": "x", "logit_bias": {"5": 2.5}, "top_k": -1, "stop_token_ids": [4], "speculation": "off"}
    assert server.chat(**same, **more, max_tokens=7, max_completion_tokens=9).status_code == 200  # the newer name wins
    (params,) = client.seen
    assert {name: getattr(params, name) for name in same} == same and params.max_tokens == 9
    assert (params.stop, params.logit_bias, params.top_k, params.stop_ids) == (("x",), {5: 2.5}, 0, [4])
    assert params.num_draft == 0 and params.logprobs is None


def test_nulls_are_defaults_and_unknown_fields_are_ignored(ear: tuple[Live, FakeClient]) -> None:
    server, client = ear
    nulls = dict.fromkeys(["n", "stop", "temperature", "tools", "tool_choice", "logit_bias", "seed", "response_format"])
    assert server.chat(**nulls, store=True, metadata={"a": 1}, service_tier="auto", model=None).status_code == 200
    (params,) = client.seen
    assert params.temperature == 1.0 and params.n == 1 and params.num_draft is None
    assert params.max_tokens == 512 - len("user: hello\nassistant:")
    server.chat(speculation=5, max_tokens=3)
    assert client.seen[-1].num_draft == 5 and client.seen[-1].max_tokens == 3
    server.post(COMPLETIONS, prompt="x", speculation="auto")
    assert client.seen[-1].num_draft == AUTO and client.seen[-1].max_tokens == 16


def test_the_model_names_what_a_request_leaves_out() -> None:
    client = FakeClient(lambda prompt, params: "ok")
    client.info = replace(client.info, sampling={"temperature": 0.2, "top_p": 0.9, "top_k": 20})
    with live(client, sampling_defaults="top_k=7") as server:
        server.chat()
        server.chat(temperature=0.7, top_p=None)
        server.post(COMPLETIONS, prompt="x", top_k=0)
        assert [(p.temperature, p.top_p, p.top_k) for p in client.seen] == [(0.2, 0.9, 7), (0.7, 0.9, 7), (0.2, 0.9, 0)]
        told = {"temperature": 0.2, "top_p": 0.9, "top_k": 7}
        assert server.http.get("/v1/status").json()["sampling_defaults"] == told
        assert server.http.get("/v1/models").json()["data"][0]["sampling_defaults"] == told


def test_a_request_without_a_limit_of_tokens_has_one_of_repetition(ear: tuple[Live, FakeClient]) -> None:
    server, client = ear
    mine = {"max_pattern_size": 20, "min_count": 3}
    for body in ({}, {"max_tokens": 9}, {"max_completion_tokens": 9}, {"ignore_eos": True}, {"repetition_limit": 0}):
        server.chat(**body)
    server.chat(max_tokens=9, repetition_limit=50)
    server.post(COMPLETIONS, prompt="x", repetition_limit=30)
    assert [params.repetition_limit for params in client.seen] == [200, 0, 0, 0, 0, 50, 30]
    server.chat(repetition_detection=mine)
    server.chat(repetition_detection={"max_pattern_size": 0})
    assert [params.repetition for params in client.seen[-2:]] == [Repetition(20, 1, 3), None]
    for wrong in (
        {"max_pattern_size": 4, "min_count": 1},
        {"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 3},
    ):
        assert error_of(server.chat(repetition_detection=wrong), 400)["param"] == "repetition_detection"
    with live(client, repetition_limit=0) as server:
        server.chat()
    assert client.seen[-1].repetition is None


def test_a_text_that_was_ended_for_repetition_says_so(ear: tuple[Live, FakeClient]) -> None:
    server, client = ear
    client.stop_reason = REPETITION
    for path, body in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "x"})):
        (choice,) = server.post(path, **body).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition_detected")
        *others, last = [chunk["choices"][0] for chunk in server.events(path, **body)]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", "repetition_detected")
        assert not any("stop_reason" in chunk for chunk in others)


def test_response_formats_become_grammars(ear: tuple[Live, FakeClient]) -> None:
    server, client = ear
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    server.chat(response_format={"type": "json_object"})
    server.chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    server.chat(response_format={"type": "text"})
    object_grammar, schema_grammar, none = [params.grammar for params in client.seen]
    assert object_grammar and object_grammar.kind == "json_object" and none is None
    assert schema_grammar and json.loads(schema_grammar.text) == schema


def test_messages_in_all_their_forms(echo: Live) -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": ""},
    ]
    answer = echo.post(CHAT, messages=messages).json()["choices"][0]["message"]["content"]
    assert answer == "system: be kind\nuser: ab\nassistant: \nuser: \nassistant:"


# ---- tools and reasoning

HERMES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %} calls {{ c.function.name }} "
    "{{ c.function.arguments.city }}{% endfor %}\n{% endfor %}{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    '{# <think> <tool_call> "arguments" #}assistant:'
)
SAID = (
    "<think>\nhmm\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_and_reasoning_are_found(size: int) -> None:
    with live(FakeClient(lambda prompt, params: SAID, size=size, template=HERMES)) as server:
        (choice,) = server.chat(tools=[TOOL]).json()["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls" and message["reasoning_content"] == "hmm"
        assert message["content"] == "I look."
        calls = message["tool_calls"]
        assert [json.loads(call["function"]["arguments"])["city"] for call in calls] == ["Paris", "Rome"]
        assert len({call["id"] for call in calls}) == 2 and {call["type"] for call in calls} == {"function"}
        one = server.chat(tools=[TOOL], parallel_tool_calls=False).json()["choices"][0]["message"]
        assert len(one["tool_calls"]) == 1
        without = server.chat(tools=[TOOL], tool_choice="none").json()["choices"][0]
        assert "<tool_call>" in without["message"]["content"] and without["finish_reason"] == "stop"

        deltas = [c["choices"][0]["delta"] for c in server.events(CHAT, messages=USER, tools=[TOOL])]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "hmm"
        assert "".join(d.get("content") or "" for d in deltas) == "I look."
        pieces = [call for d in deltas for call in d.get("tool_calls", [])]
        assert [p["index"] for p in pieces if "id" in p] == [0, 1]
        arguments = "".join(p["function"]["arguments"] for p in pieces if p["index"] == 1)
        assert json.loads(arguments) == {"city": "Rome"}


def test_choices_reach_the_template_and_the_engine() -> None:
    prompts: list[str] = []
    client = FakeClient(lambda prompt, params: prompts.append(prompt) or "ok", template=HERMES)
    with live(client) as server:
        for choice in ("none", "auto", "required", {"type": "function", "function": {"name": "weather"}}):
            assert server.chat(tools=[TOOL], tool_choice=choice).status_code == 200
        grammars = [params.grammar for params in client.seen]
        assert grammars[:2] == [None, None] and all(g and g.kind == "lark" for g in grammars[2:])
        assert ["tools: [" in prompt for prompt in prompts] == [False, True, True, True]
        call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        answered = {"role": "tool", "tool_call_id": "c", "content": "snow"}
        server.post(CHAT, messages=[*USER, {"role": "assistant", "tool_calls": [call]}, answered])
        assert "calls weather Oslotool: snow" in prompts[-1]  # line ends after a block are not the template's
        unknown = {"type": "function", "function": {"name": "other"}}
        assert "weather" in error_of(server.chat(tools=[TOOL], tool_choice=unknown), 400)["message"]
        error_of(server.chat(tools=[TOOL, TOOL]), 400)


def test_a_call_that_is_cut_leaks_no_markup_and_loses_no_complete_call() -> None:
    said = ["<tool", "<tool_call>", '<tool_call>\n{"name":', SAID[SAID.index("<tool_call>") : SAID.index('"Rome')]]
    client = FakeClient(lambda prompt, params: said[0], template=HERMES)
    client.finish = FinishReason.LENGTH
    with live(client) as server:

        def asked(**body: Any) -> tuple[dict[str, Any], str]:
            """The answer, which is the same streamed."""
            (choice,) = server.chat(tools=[TOOL], **body).json()["choices"]
            chunks = [c["choices"][0] for c in server.events(CHAT, messages=USER, tools=[TOOL], **body)]
            calls = [call for c in chunks for call in c["delta"].get("tool_calls", [])]
            assert "".join(c["delta"].get("content") or "" for c in chunks) == (choice["message"]["content"] or "")
            whole = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", [])]
            assert "".join(call["function"]["arguments"] for call in calls) == "".join(whole)
            assert chunks[-1]["finish_reason"] == choice["finish_reason"]
            return choice["message"], choice["finish_reason"]

        while len(said) > 1:
            message, finish = asked(tool_choice="required")
            assert not message["content"] and "tool_calls" not in message and finish == "length"
            said.pop(0)
        message, finish = asked(tool_choice="required")
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"city": "Paris"}', '{"city": ']
        assert message["content"] is None and finish == "length"
        for choice in ("required", "auto"):  # the one call that was asked for is complete
            message, finish = asked(tool_choice=choice, parallel_tool_calls=False)
            assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"city": "Paris"}']
            assert finish == "tool_calls"
        named = {"type": "function", "function": {"name": TOOL["function"]["name"]}}
        for size, expected in ((-1, "length"), (0, "tool_calls"), (3, "tool_calls")):  # cut within its closing tag
            said[0] = SAID[SAID.index("<tool_call>") : SAID.index('"Paris"}') + len('"Paris"}') + size]
            message, finish = asked(tool_choice=named)
            assert len(message["tool_calls"]) == 1 and finish == expected


def test_a_call_that_repeats_itself_is_cut() -> None:
    """It ends by itself as far as the engine knows, and no client may take it for a call to run."""
    said = SAID[SAID.index("<tool_call>") : SAID.index('"Rome')]
    client = FakeClient(lambda prompt, params: said, template=HERMES)
    client.stop_reason = REPETITION
    with live(client) as server:
        (choice,) = server.chat(tools=[TOOL]).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", REPETITION)
        assert server.events(CHAT, messages=USER, tools=[TOOL])[-1]["choices"][0]["finish_reason"] == "length"
        said = '<tool_call>\n{"name":'
        (choice,) = server.chat(tools=[TOOL]).json()["choices"]
        assert not choice["message"]["content"] and choice["finish_reason"] == "stop"


def test_a_model_that_was_taught_no_calls_makes_one_unless_asked_for_several() -> None:
    client = FakeClient(lambda prompt, params: "ok")
    with live(client) as server:
        for body in ({}, {"parallel_tool_calls": False}, {"parallel_tool_calls": True}):
            server.chat(tools=[TOOL], tool_choice="required", **body)
    assert ["{0,15}" in params.grammar.text for params in client.seen if params.grammar] == [False, False, True]


HARMONY = "{% for m in messages %}<|channel|>{{ m.content }}<|message|>{% endfor %}{{ tools }}<|start|>assistant"


def test_a_tool_may_have_the_name_of_a_choice() -> None:
    client = FakeClient(lambda prompt, params: "ok")
    with live(client) as server:
        for name in ("auto", "required", "none"):
            tool = {"type": "function", "function": {"name": name}}
            assert server.chat(tools=[TOOL, tool], tool_choice=tool).status_code == 200
            assert client.seen[-1].grammar and "weather" not in client.seen[-1].grammar.text


def test_with_tools_and_a_response_format_the_model_may_call_or_answer() -> None:
    client, form = FakeClient(lambda prompt, params: "ok", template=HERMES), {"type": "json_object"}
    with live(client) as server:
        assert server.chat(tools=[TOOL], response_format=form).status_code == 200
        either = client.seen[-1].grammar
        assert either and either.kind == "lark" and "call" in either.text and "answer: %json" in either.text
        server.chat(tools=[TOOL], response_format=form, tool_choice="none")
        server.chat(response_format=form)
        assert client.seen[-1].grammar == client.seen[-2].grammar != either
        server.chat(tools=[TOOL], response_format=form, tool_choice="required")
        assert client.seen[-1].grammar and "answer" not in client.seen[-1].grammar.text


def test_tools_are_counted_as_they_will_be_shown() -> None:
    for template in (HERMES, NO_SYSTEM, None):
        options = {} if template is None else {"template": template}
        with live(FakeClient(lambda prompt, params: "ok", **options)) as server:
            asked = server.chat(tools=[TOOL]).json()["usage"]["prompt_tokens"]
            assert server.post("/tokenize", messages=USER, tools=[TOOL]).json()["count"] == asked
            assert server.post("/tokenize", messages=USER).json()["count"] < asked


def test_a_call_that_ends_without_arguments_has_none() -> None:
    """gpt-oss ends such a message at once, with a token that is not shown."""
    text = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    with live(FakeClient(lambda prompt, params: text, template=HARMONY)) as server:
        (call,) = server.chat(tools=[TOOL]).json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": "{}"}
        deltas = [c["choices"][0]["delta"] for c in server.events(CHAT, messages=USER, tools=[TOOL])]
        pieces = [piece["function"]["arguments"] for delta in deltas for piece in delta.get("tool_calls", [])]
        assert "".join(pieces) == "{}"
    text = "<tool_call>\n<function=weather>\n"  # in another format such a call has broken off
    with live(FakeClient(lambda prompt, params: text, template="<function= <parameter= {{ tools }}")) as server:
        (call,) = server.chat(tools=[TOOL]).json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": ""}


def test_nulls_within_earlier_calls_and_parts_of_a_refusal() -> None:
    prompts: list[str] = []
    call = {"id": "c", "type": None, "function": {"name": "weather", "arguments": None}}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    with live(FakeClient(lambda prompt, params: prompts.append(prompt) or "ok")) as server:
        messages = [*USER, {"role": "assistant", "tool_calls": [call]}, refused, *USER]
        assert server.post(CHAT, messages=messages, user=3).status_code == 200
        assert '{"name": "weather", "arguments": {}}' in prompts[0] and "I will not." in prompts[0]


def test_the_answer_has_the_name_that_was_asked_for() -> None:
    with live(FakeClient(lambda prompt, params: "ok"), served_name="a,b") as server:
        assert [server.chat(model=name).json()["model"] for name in ("a", "b", None)] == ["a", "b", "a"]
        assert server.post(COMPLETIONS, prompt="x", model="b").json()["model"] == "b"


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools_with_a_template_that_takes_no_system_prompt(choice: str) -> None:
    prompts: list[str] = []
    with live(FakeClient(lambda prompt, params: prompts.append(prompt) or "ok", template=NO_SYSTEM)) as server:
        assert server.chat("What is it?", tools=[TOOL], tool_choice=choice).status_code == 200
        assert prompts[0].startswith("<user>") and prompts[0].endswith("\n\nWhat is it?<assistant>")
        assert '"name": "weather"' in prompts[0] and "<system>" not in prompts[0]
        assert server.chat("Hi").status_code == 200 and prompts[1] == "<user>Hi<assistant>"
        refused = server.post(CHAT, messages=[{"role": "system", "content": "x"}, *USER], tools=[TOOL])
        assert "System role not supported" in error_of(refused, 400)["message"]


# ---- mistakes


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", "messages is missing; send it."),
        ({"messages": []}, "messages", "not empty"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'system'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "text only"),
        ({"messages": USER * 2001}, "messages", "2000"),
        ({"messages": USER, "temperature": -1}, "temperature", "positive"),
        ({"messages": USER, "temperature": "hot"}, "temperature", "number"),
        ({"messages": USER, "top_p": 0}, "top_p", "above 0"),
        ({"messages": USER, "n": 0}, "n", "between 1 and 64"),
        ({"messages": USER, "n": 65}, "n", "between 1 and 64"),
        ({"messages": USER, "max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be at least 1, or -1"),
        ({"messages": USER, "stop": ["x"] * 17}, "stop", "16"),
        ({"messages": USER, "stop": "x" * 257}, "stop", "256"),
        ({"messages": USER, "stop": ""}, "stop", "not empty"),
        ({"messages": USER, "logit_bias": {"x": 1}}, "logit_bias", 'has the key "x"; it must be a whole number'),
        ({"messages": USER, "logit_bias": {"1": 101}}, "logit_bias", "-100"),
        ({"messages": USER, "top_logprobs": 2}, "top_logprobs", "logprobs"),
        (
            {"messages": USER, "logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            "top_logprobs is 21; it must be between 0 and 20",
        ),
        ({"messages": USER, "speculation": 16}, "speculation", "speculation is 16; the drafter of this model allows 7"),
        ({"messages": USER, "speculation": -1}, "speculation", "at least 0"),
        (
            {"messages": USER, "logit_bias": {"320": 1}},
            "logit_bias",
            "logit_bias holds the token id 320; ids go from 0",
        ),
        ({"messages": USER, "stop_token_ids": [5, 999]}, "stop_token_ids", "stop_token_ids holds the token id 999"),
        ({"messages": USER, "speculation": "maybe"}, "speculation", "'auto'"),
        ({"messages": USER, "response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"messages": USER, "response_format": {"type": "yaml"}}, "response_format.type", "json_object"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"messages": USER, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "'messages'"),
        (
            {"messages": [{"role": "user", "content": "x" * 600}]},
            "messages",
            "is 512 tokens, including the answer; the conversation has 617 tokens",
        ),
        ({"messages": [{"role": "user", "content": "x" * 200_000}]}, "messages", "characters"),
    ],
)
def test_mistakes_of_a_chat(echo: Live, body: dict[str, Any], param: str, words: str) -> None:
    for stream in (False, True):
        error = error_of(echo.post(CHAT, **body, stream=stream), 400)
        assert error["param"] == param and words in error["message"], error
        assert error["type"] == "invalid_request_error" and error["message"].count("\n") == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [["x"]]}, "prompt[0][0]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["x"] * 257}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 3}, "n"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": [5, 320]}, "prompt"),
        ({"prompt": [[5], [320]]}, "prompt"),
        ({"prompt": "x", "speculation": 8}, "speculation"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x" * 512}, "prompt"),
    ],
)
def test_mistakes_of_a_completion(echo: Live, body: dict[str, Any], param: str) -> None:
    error = error_of(echo.post(COMPLETIONS, **body), 400)
    assert error["param"] == param, error


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b"[" * 100_000, b"1" * 9999])
def test_bodies_that_are_no_requests(echo: Live, raw: bytes) -> None:
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        error_of(echo.http.post(path, content=raw, headers={"Content-Type": "application/json"}), 400)
    error_of(echo.http.post(CHAT, content=b'{"messages": []}', headers={"Content-Type": "text/plain"}), 400)


def test_half_characters_and_numbers_that_are_none(echo: Live) -> None:
    headers = {"Content-Type": "application/json"}
    for body in (b'{"prompt": "\\ud800"}', b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "top_p": 1e999}'):
        error_of(echo.http.post(COMPLETIONS, content=body, headers=headers), 400)
    body = b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": "\\udfff"}, "user": "x"}'
    assert echo.http.post(CHAT, content=body, headers=headers).status_code == 200
    named = b'{"prompt": "x", "model": "\\ud800"}'
    assert echo.http.post(COMPLETIONS, content=named, headers=headers).status_code in (400, 404)


def test_wrong_names_routes_and_methods(echo: Live) -> None:
    error = error_of(echo.chat(model="gpt-7"), 404)
    assert "'gpt-7'" in error["message"] and "'smollm2'" in error["message"] and error["code"] == "model_not_found"
    assert error_of(echo.http.get("/v1/models/gpt-7"), 404)["param"] == "model"
    error = error_of(echo.http.get("/x" * 9000), 404)
    assert error["type"] == "not_found_error" and len(error["message"]) < 200
    assert echo.http.get(CHAT).headers["allow"] == "POST"
    assert error_of(echo.http.get(CHAT), 405)["message"] == f"{CHAT} does not take GET; use POST."
    for path, meant in (
        ("/v1/chat/completion", "POST /v1/chat/completions"),
        ("/chat/completions", "POST /v1/chat/completions"),
        ("/v1/complete", "POST /v1/completions"),
        ("/completions", "POST /v1/completions"),
        ("/v1/model", "GET /v1/models"),
        ("/v1/health", "GET /health"),
    ):
        assert (
            error_of(echo.http.post(path, json={}), 404)["message"]
            == f"There is no route {path}; did you mean {meant}?"
        )


def test_a_body_that_is_too_large() -> None:
    with live(FakeClient(lambda prompt, params: "ok"), max_body=2000) as server:
        assert "2,000 bytes" in error_of(server.chat("x" * 3000), 413)["message"]
        assert error_of(server.chat("x" * 100_000), 413)["code"] == "body_too_large"
        pieces = (b" " * 500 for _ in range(10))  # no length is announced
        error_of(server.http.post(CHAT, content=pieces, headers={"Content-Type": "application/json"}), 413)
        assert server.chat("x").status_code == 200


# ---- keys


def test_keys() -> None:
    anyone = httpx.Client(timeout=PATIENT)  # without a key
    with anyone, live(FakeClient(lambda prompt, params: "ok"), api_key="sesame") as server:
        assert server.chat().status_code == 200
        paths = ["/v1/models", "/metrics", "/v1/status", "/openapi.json", "/nothing"]
        for value in (None, "Bearer x", "Bearer", "sesame", "Basic sesame"):
            wrong = {"Authorization": value} if value else {}
            for path in paths:
                answer = anyone.get(server.url + path, headers=wrong)
                assert error_of(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            error_of(anyone.post(server.url + CHAT, headers=wrong, content=b"{"), 401)
        assert anyone.get(server.url + "/health").status_code == 200
        assert anyone.get(server.url + "/").status_code == 200
        error_of(anyone.get(server.url + "/health", headers={"Authorization": "Bearer \u00e9".encode()}), 401)
        assert anyone.get(server.url + "/v1/models", headers={"Authorization": "bearer  sesame"}).status_code == 200


# ---- when the engine is not there


def test_metrics_of_an_engine_that_is_busy_with_a_step_are_those_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(lambda prompt, params: "ok")
    told = client.status

    async def status() -> dict[str, Any]:
        return await told() | {"running": 3, "waiting": 2, "preemptions": 7}

    async def busy() -> dict[str, Any]:
        raise EngineError("the engine did not answer in 5 s: a long step runs", True)

    monkeypatch.setattr(client, "status", status)
    with live(client) as server:
        expected = [f"sparkdraft_num_{name}" for name in ("requests_running 3", "requests_waiting 2")]
        for answer in (status, busy):
            monkeypatch.setattr(client, "status", answer)
            text = server.http.get("/metrics").text
            assert all(line in text for line in [*expected, "sparkdraft_num_preemptions_total 7"]), text


def test_not_ready_says_how_far_it_is() -> None:
    client = FakeClient(lambda prompt, params: "ok")
    client.state, client.stage, client.progress, client.info = "starting", "weights", (3, 9), None
    with live(client, until_ready=False) as server:
        answer = server.http.get("/health")
        assert answer.status_code == 503 and answer.json()["stage"] == "weights"
        assert answer.json()["progress"] == {"done": 3, "total": 9} and answer.json()["status"] == "starting"
        error = server.chat()
        assert "weights, 3 of 9" in error_of(error, 503)["message"] and error.headers["retry-after"] == "7"
        assert server.http.get("/v1/models").json()["data"][0]["id"] == "smollm2"
        assert server.http.get("/v1/status").json()["plan"] is None
        client.state, client.last_error = "failed", "no such model"
        assert "no such model" in error_of(server.chat(), 503)["message"]
        assert server.http.get("/health").json() | {"progress": 0} == {
            "status": "failed",
            "stage": "weights",
            "progress": 0,
            "error": "no such model",
        }


def test_the_engine_refuses_and_dies() -> None:
    said: list[EngineError] = []
    with live(FakeClient(lambda prompt, params: said[-1])) as server:
        said.append(RequestRefused("the schema is wrong; mend it"))
        for stream in (False, True):
            assert error_of(server.chat(stream=stream), 400)["message"] == "The schema is wrong; mend it."
            held = server.chat(stream=stream, response_format={"type": "json_object"})
            assert error_of(held, 400)["param"] == "response_format"
            called = server.chat(stream=stream, tools=[TOOL], tool_choice="required")
            assert error_of(called, 400)["param"] == "tools"
        said.append(RequestFailed("the engine could not start the request: KeyError: 5"))
        for stream in (False, True):
            assert error_of(server.chat(stream=stream), 500)["code"] == "internal_error"
        said.append(EngineError("the engine stopped", True))
        for stream in (False, True):
            assert error_of(server.chat(stream=stream), 503)["code"] == "engine_unavailable"
        assert error_of(server.post(COMPLETIONS, prompt=["a", "b"]), 503)
        assert server.service.gate.num_inside == 0


def test_the_engine_dies_within_a_stream() -> None:
    class Dying(FakeClient):
        async def _events(self, *args: Any) -> Any:
            async for events in super()._events(*args):
                if events[-1].finish:
                    raise EngineError("the engine stopped", True)
                yield events

    with live(Dying(lambda prompt, params: "hello there")) as server:
        *chunks, last = server.events(CHAT, messages=USER)
        assert chunks[1]["choices"][0]["delta"] == {"content": "hel"}
        assert last["error"]["message"] == "The engine stopped." and last["error"]["type"] == "service_unavailable"
        with pytest.raises(Exception, match="The engine stopped"):
            list(server.openai.chat.completions.create(model="smollm2", messages=USER, stream=True))  # type: ignore[arg-type]


# ---- clients that go away, and too many of them


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_aborts(stream: bool) -> None:
    client = FakeClient(lambda prompt, params: "x" * 3000, delay=0.01)
    with live(client) as server:
        body = json.dumps({"messages": USER, "stream": stream, "n": 2}).encode()
        with socket.create_connection((server.http.base_url.host, server.http.base_url.port or 0)) as raw:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            raw.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            server.wait_for(lambda: len(client.seen) == 1)
            if stream:
                assert raw.recv(100).startswith(b"HTTP/1.1 200")
            assert server.service.gate.num_inside == 2
        server.wait_for(lambda: len(client.aborted) == 1 and server.service.gate.num_inside == 0)
        assert "sparkdraft_request_aborted_total 1" in server.http.get("/metrics").text


def test_a_full_queue_says_when_to_come_back() -> None:
    client = FakeClient(lambda prompt, params: "x" * 300)
    client.go_on.clear()
    with live(client, max_queue=1) as server:  # and four run
        threads = [threading.Thread(target=server.chat) for _ in range(5)]
        for thread in threads:
            thread.start()
        server.wait_for(lambda: server.service.gate.num_inside == 5)
        answer = server.chat()
        assert error_of(answer, 429)["code"] == "queue_full" and int(answer.headers["retry-after"]) >= 1
        client.go_on.set()
        for thread in threads:
            thread.join()
        assert server.service.gate.num_inside == 0 and server.chat().status_code == 200


def test_draining_refuses_and_finishes() -> None:
    client = FakeClient(lambda prompt, params: "x" * 90)
    client.go_on.clear()
    with live(client) as server:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(server.chat()))
        thread.start()
        server.wait_for(lambda: server.service.gate.num_inside == 1)
        server.server._loop = server.server.servers[0].get_loop()
        server.server.handle_exit(15, None)
        assert error_of(server.chat(), 503)["code"] == "draining"
        assert server.http.get("/health").json()["status"] == "draining"
        client.go_on.set()
        thread.join()
        assert answers[0].json()["choices"][0]["message"]["content"] == "x" * 90
        server.wait_for(lambda: server.server.should_exit)
        assert client.stopped


# ---- the other routes


def test_models_status_and_metrics(echo: Live) -> None:
    (card,) = echo.http.get("/v1/models").json()["data"]
    assert card == echo.http.get("/v1/models/smollm2").json() and card["max_model_len"] == 512
    status = echo.http.get("/v1/status").json()
    assert status["fallbacks"] == [{"name": "nothing real", "reason": "it is a fake"}]
    assert status["facts"][0] == {"name": "steps", "value": "counted", "reason": ""}
    assert status["plan"] == "a plan in words" and status["speculative_decoding"] == {"num_drafts": 5}
    echo.chat()
    text = echo.http.get("/metrics").text
    assert "sparkdraft_kv_cache_usage_perc 0.25" in text and "sparkdraft_num_requests_waiting 2" in text
    assert 'sparkdraft_spec_decode_num_accepted_tokens_per_pos_total{position="1"}' in text
    assert "sparkdraft_kv_cache_captured_rows 6" in text and "sparkdraft_num_preemptions_total 8" in text
    assert 'sparkdraft_kv_cache_attention_error{layer="0"} 0.5' in text
    for line in text.splitlines():
        name, value = line.rsplit(" ", 1)
        assert line.startswith("#") or (float(value) >= 0 and name.startswith(("sparkdraft_", "vllm:")))


def test_tokenize_and_back(echo: Live) -> None:
    text = "h\u00e9llo"
    body = echo.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert body["count"] == len(body["tokens"]) == 6 and body["token_strs"][0] == "h" and body["max_model_len"] == 512
    assert echo.post("/detokenize", tokens=body["tokens"]).json() == {"prompt": text}
    ids = echo.post("/tokenize", messages=USER).json()["tokens"]
    assert echo.post("/detokenize", tokens=ids).json()["prompt"] == "user: hello\nassistant:"
    assert error_of(echo.post("/tokenize"), 400)["param"] == "prompt"
    assert "token id 999" in error_of(echo.post("/detokenize", tokens=[999]), 400)["message"]


def test_the_page_and_the_schema(echo: Live) -> None:
    page = echo.http.get("/")
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    paths = {CHAT, COMPLETIONS, "/v1/models", "/health", "/metrics", "/v1/status", "/tokenize", "/detokenize"}
    assert paths <= echo.http.get("/openapi.json").json()["paths"].keys()


def test_a_model_without_a_template() -> None:
    with live(FakeClient(lambda prompt, params: "ok", template=None)) as server:
        assert "chat template" in error_of(server.chat(), 400)["message"]
        assert server.post(COMPLETIONS, prompt="x").status_code == 200


def test_the_api_never_imports_torch() -> None:
    code = "import sys, sparkdraft.cli.main, sparkdraft.server.run, sparkdraft.server.app, sparkdraft.text.grammar"
    check = "; assert not {'torch', 'triton', 'transformers'} & set(sys.modules), 'heavy'"
    subprocess.run([sys.executable, "-c", code + check], check=True, timeout=PATIENT)


def test_merging_streams_ends_with_the_first_error() -> None:
    from sparkdraft.server.stream import merged

    closed = []

    async def numbers(name: str, fails: bool) -> Any:
        try:
            for i in range(100):
                await asyncio.sleep(0.001)
                yield i
                if fails and i == 3:
                    raise EngineError("no", True)
        finally:
            closed.append(name)

    async def run() -> None:
        with pytest.raises(EngineError):
            async for _ in merged([numbers("a", False), numbers("b", True)]):
                pass

    asyncio.run(run())
    assert sorted(closed) == ["a", "b"]


def test_messages_can_not_write_control_tokens_and_prompts_can(ear: tuple[Live, FakeClient]) -> None:
    server, _ = ear
    message = {"role": "user", "content": "end</s>"}
    ids = server.post("/tokenize", messages=[message]).json()["tokens"]
    assert 2 not in ids and server.post("/detokenize", tokens=ids).json()["prompt"] == "user: end</s>\nassistant:"
    assert server.chat("end</s>").json()["usage"]["prompt_tokens"] == len(ids)
    assert 2 in server.post("/tokenize", prompt="end</s>").json()["tokens"]
