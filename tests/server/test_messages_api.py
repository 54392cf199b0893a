"""Anthropic's Messages API: its client against a scripted engine, the prompts that bodies become, and errors."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from sparkdraft.core import REPETITION, FinishReason, StepOutput
from sparkdraft.server.engine_client import EngineError
from sparkdraft.server.protocol.anthropic import model_card, model_list
from tests.patience import PATIENT
from tests.server.conftest import FakeClient, Live, live

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER: Any = [{"role": "user", "content": "hello"}]
# As Qwen3's: tools in the system prompt, thoughts and calls of earlier turns, and a switch for thoughts.
AGENT = r"""
{%- macro turn(role, text) -%}{{ '<|im_start|>' ~ role ~ '\n' ~ text ~ '<|im_end|>\n' }}{%- endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\n' ~ (messages[0].content if messages[0].role == 'system' else '') ~ '\n' }}
    {%- for tool in tools %}{{- tool | tojson ~ '\n' }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- turn('user', '<tool_response>\n' ~ m.content ~ '\n</tool_response>') }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if m.reasoning_content %}{{- '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}{%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson ~ '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif not (loop.first and tools and m.role == 'system') %}
        {{- turn(m.role, m.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
CLOSED = "<think>\n\n</think>\n\n"  # how a prompt ends where thinking is off
EFFORTS = (
    "<|channel|><|message|>{% if tools %}{% endif %}{{ 'Effort: ' ~ (reasoning_effort or 'usual') }}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER_CALL = CALL.replace("Paris", "Rome")


class Scripted(FakeClient):
    """Says one text, keeps the prompts, and can end a text as the engine does for a stop string: 'hidden' is in the
    last ids and not in the text."""

    def __init__(self, said: str | EngineError, template: str = AGENT, **info: Any) -> None:
        self.said, self.prompts, self.hidden = said, [], ""
        super().__init__(lambda prompt, params: self.prompts.append(prompt) or self.said, template=template)
        assert self.info
        self.info = replace(self.info, **({"max_model_len": 8192} | info))

    def _event(self, *given: Any) -> StepOutput:
        event = super()._event(*given)
        if not (self.hidden and event.finish):
            return event
        ids = self.raw.encode(event.text + self.hidden, add_special_tokens=False).ids
        return replace(event, ids=ids)


class Serving:
    def __init__(self, live: Live, client: Scripted) -> None:
        self.live, self.engine = live, client
        self.client = anthropic.Anthropic(base_url=live.url, auth_token="none", max_retries=0, timeout=PATIENT)

    @property
    def prompt(self) -> str:
        return self.engine.prompts[-1]

    def ask(self, **body: Any) -> Message:
        """The whole message; the stream must give the same, apart from its id and from the ids of calls."""
        body = {"model": "smollm2", "max_tokens": 100, "messages": USER} | body
        whole = self.client.messages.create(**body)
        Message.model_validate(whole.model_dump())
        with self.client.messages.stream(**body) as stream:
            streamed = stream.get_final_message()
        assert comparable(streamed) == comparable(whole)
        return whole

    def post(self, path: str = MESSAGES, **body: Any) -> Any:
        return self.live.http.post(path, json={"max_tokens": 100, "messages": USER} | body)

    def events(self, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream as they are on the wire; each says its type twice."""
        body = {"max_tokens": 100, "messages": USER, "stream": True} | body
        with self.live.http.stream("POST", MESSAGES, json=body) as response:
            assert response.status_code == 200 and "text/event-stream" in response.headers["content-type"]
            *blocks, rest = response.read().decode().split("\n\n")
        assert rest == ""
        events = []
        for block in blocks:
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events

    def rendered(self, **body: Any) -> str:
        response = self.post(**body)
        assert response.status_code == 200, response.text
        return self.prompt


def comparable(message: Message) -> dict[str, Any]:
    found = message.model_dump(exclude={"id"})
    for block in found["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return found


@contextmanager
def serving(said: str | EngineError = "ok", template: str = AGENT, **info: Any) -> Iterator[Serving]:
    client = Scripted(said, template, **info)
    with live(client) as server:
        found = Serving(server, client)
        try:
            yield found
        finally:
            found.client.close()


@pytest.fixture(scope="module")
def ear() -> Iterator[Serving]:
    """Says "ok", and is asked for what it heard."""
    with serving() as server:
        yield server


# ---- answers


def test_a_text_and_its_usage() -> None:
    with serving("Good day.") as server:
        message = server.ask(system="Be brief.")
        (block,) = message.content
        assert (block.type, block.text) == ("text", "Good day.")
        assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "smollm2")
        usage, num_prompt = message.usage, len(server.prompt.encode())
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (num_prompt - 1, 1)
        assert (usage.cache_creation_input_tokens, usage.output_tokens) == (0, len("Good day.") + 1)
        assert message.id.startswith("msg_")


def test_the_events_of_a_stream() -> None:
    with serving(f"<think>\nhm\n</think>\n\nI look.\n{CALL}") as server:
        events = server.events(tools=[WEATHER], thinking={"type": "adaptive"})
        start = events[0]["message"]
        num_prompt = len(server.prompt.encode())
        assert start["content"] == [] and start["stop_reason"] is None and start["role"] == "assistant"
        assert start["usage"]["input_tokens"] == num_prompt
        types: list[str] = []
        for event in events[1:-2]:
            kind = event["delta"]["type"] if "delta" in event else event["type"]
            if not types or types[-1] != kind:
                types.append(kind)
        begin, end = "content_block_start", "content_block_stop"
        assert types == [
            *(begin, "thinking_delta", "signature_delta", end),
            *(begin, "text_delta", end),
            *(begin, "input_json_delta", end),
        ]
        assert [event["index"] for event in events if event["type"] == begin] == [0, 1, 2]
        signature = next(e["delta"]["signature"] for e in events if e.get("delta", {}).get("type") == "signature_delta")
        assert signature
        assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        usage = events[-2]["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_prompt and usage["output_tokens"] > 9
        assert events[-1] == {"type": "message_stop"}


def test_message_start_comes_before_the_prompt_is_read() -> None:
    with serving("late") as server:
        server.engine.go_on.clear()
        with server.live.http.stream("POST", MESSAGES, json={"max_tokens": 9, "messages": USER, "stream": True}) as got:
            lines = got.iter_lines()
            assert next(lines) == "event: message_start"
            told = next(line for line in lines if line == "event: ping")  # while nothing is written
            assert told and json.loads(next(lines).removeprefix("data: ")) == {"type": "ping"}
            server.engine.go_on.set()
            assert "event: message_stop" in list(lines)


def test_an_empty_answer_is_a_message() -> None:
    with serving("") as server:
        message = server.ask()
        assert [block.text for block in message.content] == [""] and message.stop_reason == "end_turn"
        kinds = [event["type"] for event in server.events()]
        assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]


def test_thoughts_are_a_block() -> None:
    with serving("<think>\nLet me see.\n</think>\n\nYes.") as server:
        thought, text = server.ask(thinking={"type": "enabled", "budget_tokens": 1024}).content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "Let me see.", "Yes.")
        assert thought.signature


def test_calls_one_and_several() -> None:
    with serving(f"Let me look.\n{CALL}\n{OTHER_CALL}") as server:
        text, paris, rome = server.ask(tools=[WEATHER]).content
        assert (text.text, paris.type, paris.name) == ("Let me look.", "tool_use", "get_weather")
        assert (paris.input, rome.input) == ({"city": "Paris"}, {"city": "Rome"})
        assert paris.id != rome.id
        server.engine.size = 1000  # a block begins empty, also where the whole call comes at once
        begun = [event["content_block"] for event in server.events(tools=[WEATHER]) if "content_block" in event]
        assert [block.get("input", block.get("text")) for block in begun] == ["", {}, {}]
        one = server.ask(tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert [block.type for block in one.content] == ["text", "tool_use"] and one.stop_reason == "tool_use"


def test_a_call_without_arguments() -> None:
    said = "<|channel|>commentary to=functions.now<|message|><|call|>"
    with serving(said, EFFORTS, model_type="gpt_oss") as server:
        message = server.ask(tools=[{"name": "now", "input_schema": {"type": "object"}}])
        (call,) = message.content
        assert (call.name, call.input, message.stop_reason) == ("now", {}, "tool_use")


def test_a_call_that_was_cut_has_no_input() -> None:
    said = CALL.partition("ris")[0]
    with serving(said) as server:
        server.engine.finish = FinishReason.LENGTH
        body = {"tools": [WEATHER], "max_tokens": len(said)}
        message = server.post(**body).json()
        (call,) = message["content"]
        assert (call["type"], call["input"], message["stop_reason"]) == ("tool_use", {}, "max_tokens")
        pieces = [e["delta"]["partial_json"] for e in server.events(**body) if "partial_json" in e.get("delta", {})]
        assert "".join(pieces) == '{"city": "Pa'


def test_tool_choice(ear: Serving) -> None:
    def grammar(**choice: Any) -> str:
        ear.post(tools=[WEATHER, WEATHER | {"name": "other"}], tool_choice=choice)
        found = ear.engine.seen[-1].grammar
        return found.text if found else ""

    assert grammar(type="auto") == "" and grammar(type="none") == ""
    assert "get_weather" in grammar(type="any") and "other" in grammar(type="any")
    named = grammar(type="tool", name="other")
    assert "other" in named and "get_weather" not in named
    assert "{0,15}" in grammar(type="any") and "{0,15}" not in grammar(type="any", disable_parallel_tool_use=True)
    assert "get_weather" not in ear.rendered(tools=[WEATHER], tool_choice={"type": "none"})


def test_structured_output(ear: Serving) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"title": {"type": "string"}}}}
    for body in ({"output_config": {"format": form, "effort": "high"}}, {"output_format": form}):
        ear.rendered(**body)
        grammar = ear.engine.seen[-1].grammar
        assert grammar and json.loads(grammar.text) == form["schema"]


def test_the_official_client_parses_structured_output() -> None:
    from pydantic import BaseModel

    class Title(BaseModel):
        title: str

    with serving('{"title": "Spring"}') as server:
        found = server.client.messages.parse(max_tokens=9, model="smollm2", messages=USER, output_format=Title)
        assert found.parsed_output == Title(title="Spring")
        assert server.engine.seen[-1].grammar and "title" in server.engine.seen[-1].grammar.text


# ---- why a text ended


def test_the_end_of_max_tokens_and_of_the_context() -> None:
    with serving("abcdef", max_model_len=128) as server:
        server.engine.finish = FinishReason.LENGTH
        assert server.ask(max_tokens=6).stop_reason == "max_tokens"
        room = 128 - len(server.prompt)
        server.engine.said = "x" * room
        assert server.ask(max_tokens=1000).stop_reason == "model_context_window_exceeded"
        assert server.ask(max_tokens=room).stop_reason == "max_tokens"


def test_the_stop_sequence_that_ended_a_text() -> None:
    with serving("one two") as server:
        server.engine.hidden = " three and more"  # the last token may reach beyond the sequence
        message = server.ask(stop_sequences=["four", " three", "three"])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " three")
        assert message.content[0].text == "one two"
        server.engine.hidden = ""
        assert server.ask(stop_sequences=["four"]).stop_reason == "end_turn"
        server.engine.said = "one four"  # a text that ended by itself
        assert server.ask(stop_sequences=["four"]).stop_reason == "end_turn"
        assert server.engine.seen[-1].stop == ("four",)


def test_a_text_that_repeats_itself() -> None:
    with serving("so so so") as server:
        server.engine.stop_reason = REPETITION
        assert server.ask(stop_sequences=["so"]).stop_reason == "end_turn"
        server.engine.said = CALL[:-20]
        assert server.post(tools=[WEATHER]).json()["stop_reason"] == "max_tokens"


def test_a_real_engine_ends_at_a_stop_sequence(tiny_server: Live) -> None:
    with anthropic.Anthropic(base_url=tiny_server.url, auth_token="none", max_retries=0, timeout=PATIENT) as client:
        body: Any = {"model": "tiny", "messages": USER, "max_tokens": 40, "extra_body": {"temperature": 0}}
        free = client.messages.create(**body)
        assert free.usage.output_tokens == 40 and free.stop_reason == "max_tokens"
        text = free.content[0].text
        stop = next(text[i : i + 2] for i in range(4, len(text)) if text[i : i + 2].isascii())
        ended = client.messages.create(**body, stop_sequences=["\x00\x01", stop])
        assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
        assert ended.content[0].text == text[: text.index(stop)]
        with client.messages.stream(**body, stop_sequences=[stop]) as stream:
            assert comparable(stream.get_final_message())["content"] == comparable(ended)["content"]
        usage = client.messages.create(**body).usage
        every = free.usage.input_tokens + free.usage.cache_read_input_tokens  # another test may have sent it before
        assert usage.cache_read_input_tokens == 16 and usage.input_tokens == every - 16


# ---- what reaches the model


def test_sampling_reaches_the_engine(ear: Serving) -> None:
    ear.post(temperature=0.3, top_p=0.9, top_k=20, max_tokens=7, stop_sequences=["x", "y"])
    params = ear.engine.seen[-1]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.3, 0.9, 20, 7)
    assert params.stop == ("x", "y") and params.n == 1
    assert ear.post(temperature=None, stop_sequences=None, tools=None, system=None).status_code == 200


def test_what_is_ignored(ear: Serving) -> None:
    plain = ear.rendered()
    more = {
        "metadata": {"user_id": "me"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "service_tier": "auto",
        "container": None,
        "cache_control": {"type": "ephemeral"},
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, {"type": "mcp_toolset"}],
        "new_field": [1, {"a": 2}],
    }
    assert ear.rendered(**more) == plain
    headers = {"anthropic-beta": "one-2026-01-01,two", "anthropic-version": "2023-06-01"}
    body = {"max_tokens": 5, "messages": USER, **more}
    response = ear.live.http.post(f"{MESSAGES}?beta=true", json=body, headers=headers)
    assert response.status_code == 200 and ear.prompt == plain


def test_thinking_and_its_switch(ear: Serving) -> None:
    for off in ({}, {"thinking": {"type": "disabled"}}, {"output_config": {"effort": "high"}}):
        assert ear.rendered(**off).endswith(CLOSED)
    for on in ({"type": "enabled", "budget_tokens": 2000}, {"type": "adaptive", "display": "omitted"}):
        for effort in ("low", "max", "unheard-of"):
            assert not ear.rendered(thinking=on, output_config={"effort": effort}).endswith(CLOSED)


def test_efforts_of_a_model_that_has_them() -> None:
    with serving("ok", EFFORTS, model_type="gpt_oss") as server:
        for asked, used in {
            "low": "low",
            "high": "high",
            "max": "high",
            "xhigh": "high",
            "unheard-of": "usual",
        }.items():
            body = {"thinking": {"type": "adaptive"}, "output_config": {"effort": asked}}
            assert f"Effort: {used}" in server.rendered(**body)
        assert "Effort: usual" in server.rendered()


def test_a_model_that_does_not_think_is_asked_anyway() -> None:
    with serving("ok", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}") as server:
        server.rendered(thinking={"type": "enabled", "budget_tokens": 9}, output_config={"effort": "high"})


def test_content_of_every_kind(ear: Serving) -> None:
    def shown(*blocks: Any) -> str:
        prompt = ear.rendered(messages=[{"role": "user", "content": list(blocks)}])
        return prompt.removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]

    text = {"type": "text", "text": "a text", "citations": None, "cache_control": {"type": "ephemeral"}}
    assert shown(text, text) == "a text\n\na text"
    assert shown({"type": "text", "text": ""}, text) == "a text"
    source = {"type": "text", "media_type": "text/plain", "data": "the body"}
    assert shown({"type": "document", "title": "T", "context": "C", "source": source}) == "T\n\nC\n\nthe body"
    for content in ("the body", [{"type": "text", "text": "the body"}]):
        assert shown({"type": "document", "source": {"type": "content", "content": content}}) == "the body"
    found = {"type": "search_result", "title": "T", "source": "https://example.org", "content": [text]}
    assert shown(found) == "T\n\nhttps://example.org\n\na text"


def test_results_of_calls(ear: Serving) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Paris", "q": '"'}}
    other = call | {"id": "c2", "input": {}}

    def shown(*results: Any) -> str:
        turn = {"role": "assistant", "content": [call, other]}
        return ear.rendered(messages=[*USER, turn, {"role": "user", "content": list(results)}])

    first = {"type": "tool_result", "tool_use_id": "c1", "content": "sun"}
    second = {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "rain"}]}
    prompt = shown(second, {"type": "text", "text": "go on"}, first)
    assert r'"arguments": {"city": "Paris", "q": "\""}' in prompt and '"arguments": {}' in prompt
    assert 0 < prompt.index("sun") < prompt.index("rain") < prompt.index("go on")
    assert prompt == shown(first, second, {"type": "text", "text": "go on"})
    assert "<tool_response>\nError: boom\n" in shown(first | {"content": "boom", "is_error": True})
    assert "<tool_response>\nerror 5\n" in shown(first | {"content": "error 5", "is_error": True})
    assert "<tool_response>\n\n</tool_response>" in shown({"type": "tool_result", "tool_use_id": "c1"})


def test_an_answer_that_was_begun_goes_on(ear: Serving) -> None:
    prompt = ear.rendered(messages=[*USER, {"role": "assistant", "content": "The answer is"}])
    assert prompt.endswith("<|im_start|>assistant\nThe answer is")
    for empty in ("", [], [{"type": "redacted_thinking", "data": "x"}]):
        assert ear.rendered(messages=[*USER, {"role": "assistant", "content": empty}]) == ear.rendered()


def test_count_tokens_counts_what_is_sent(ear: Serving) -> None:
    body: Any = {"messages": USER, "system": "Be brief.", "tools": [WEATHER], "thinking": {"type": "adaptive"}}
    count = ear.client.messages.count_tokens(model="smollm2", **body)
    message = ear.client.messages.create(model="smollm2", max_tokens=5, **body)
    assert count.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    seen = len(ear.engine.seen)
    assert ear.live.http.post(f"{COUNT}?beta=true", json={"messages": USER, "tools": []}).status_code == 200
    assert len(ear.engine.seen) == seen


# ---- the beginning of a prompt stays the same

SYSTEM: Any = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.2.3; cc_entrypoint=cli;"},
    {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "Answer briefly."},
]
FIRST: Any = {
    "role": "user",
    "content": [{"type": "text", "text": "<note>a</note>"}, {"type": "text", "text": "Run x"}],
}
LATER_SYSTEM: Any = {"role": "system", "content": [{"type": "text", "text": "Skills: none."}]}
TURN: Any = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "I run it.", "signature": "c2lnbmF0dXJl"},
        {"type": "text", "text": "Running."},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}},
    ],
}
RESULT: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun"}]}


def cached(message: Any) -> Any:
    """The message with cache_control on its last block."""
    *blocks, last = message["content"]
    return message | {"content": [*blocks, last | {"cache_control": {"type": "ephemeral"}}]}


def agent_turns() -> list[dict[str, Any]]:
    """Three bodies of one conversation as Claude Code sends them."""
    common = {"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "high"}}
    hidden = {"name": "placeholder", "description": "unused", "input_schema": {}, "defer_loading": True}
    tools = [WEATHER, hidden, WEATHER | {"name": "zoo"}]
    as_string = LATER_SYSTEM | {"content": "Skills: none."}
    rebilled = [{"type": "text", "text": SYSTEM[0]["text"] + " cch=5;"}, *SYSTEM[1:]]
    changed = {"role": "system", "content": [{"type": "text", "text": "The date has changed."}]}
    turns = [
        {"messages": [FIRST, cached(LATER_SYSTEM)], "system": SYSTEM},
        {"messages": [FIRST, as_string, TURN, cached(RESULT)], "system": rebilled},
        {"messages": [FIRST, as_string, TURN, RESULT, TURN, RESULT, cached(changed)], "system": SYSTEM},
    ]
    return [common | turn | {"tools": tools} for turn in turns]


def test_each_turn_begins_with_the_turn_before(ear: Serving) -> None:
    prompts = [ear.rendered(**body) for body in agent_turns()]
    for before, after in pairwise(prompts):
        assert after.startswith(before) and len(after) > len(before)
    assert "billing" not in prompts[0] and "placeholder" not in prompts[0]
    assert prompts[0].startswith("<|im_start|>system\nYou are an agent.\n\nAnswer briefly.\n{")
    user = "<|im_start|>user\n<note>a</note>\n\nRun x\n\nSkills: none.<|im_end|>\n"
    assert prompts[0].endswith(f"{user}<|im_start|>assistant\n")
    assert "<think>\nI run it.\n</think>\n\nRunning.\n<tool_call>" in prompts[1]
    assert prompts[2].count("<|im_start|>system") == 1 and "<|im_start|>user\nThe date has changed." in prompts[2]


def test_what_was_said_comes_back_as_it_was() -> None:
    """The client's own message, as its library returns it, makes the second prompt out of the first and the answer."""
    said = f"<think>\nI look.\n</think>\n\nLooking.\n{CALL}"
    with serving(said) as server:
        body: Any = {"model": "smollm2", "tools": [WEATHER], "thinking": {"type": "adaptive"}, "max_tokens": 200}
        answer = server.client.messages.create(**body, messages=USER)
        result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "sun"}
        begun = server.prompt
        turn = {"role": "assistant", "content": answer.content}
        server.client.messages.create(**body, messages=[*USER, turn, {"role": "user", "content": [result]}])
        assert server.prompt.startswith(f"{begun}{said}<|im_end|>\n")


def test_a_deferred_tool_is_written_where_it_was_found() -> None:
    typed = "<tool_call>\n<function=zoo>\n<parameter=days>\n7\n</parameter>\n</function>\n</tool_call>"
    zoo = WEATHER | {"name": "zoo", "description": "Bären", "defer_loading": True}
    search = {"name": "ToolSearch", "input_schema": {"type": "object"}}
    call = {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {"query": "zoo"}}
    found = [{"type": "tool_reference", "tool_name": name} for name in ("zoo", "gone")]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": found}
    turn = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    marks = "{#<function= <parameter= #}"  # of the format whose parser needs the schema
    with serving(typed, marks + AGENT) as server:
        tools = [search, zoo, WEATHER]
        before = server.rendered(messages=USER, tools=tools)
        assert "zoo" not in before and "get_weather" in before
        loaded = {"messages": [*USER, *turn], "tools": tools}
        after = server.rendered(**loaded)
        assert after.startswith(before.removesuffix(CLOSED))
        shown = after.partition("<tool_response>\n")[2].partition("\n</tool_response>")[0].split("\n\n")
        schema = {"name": "zoo", "description": "Bären", "parameters": WEATHER["input_schema"]}
        assert "Bären" in shown[0]
        assert [json.loads(each) for each in shown] == [{"type": "function", "function": schema}, {"name": "gone"}]
        (used,) = server.ask(**loaded).content
        assert (used.name, used.input) == ("zoo", {"days": 7})  # by its schema a number
        server.rendered(**loaded, tool_choice={"type": "any"})
        assert "zoo" in server.engine.seen[-1].grammar.text
        server.rendered(tools=tools, tool_choice={"type": "any"})
        assert "zoo" not in server.engine.seen[-1].grammar.text


# ---- errors


def error_of(response: Any, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["error"].keys() == {"type", "message"} and body["error"]["type"] == kind
    assert body["request_id"] in (None, response.headers["request-id"])
    message = body["error"]["message"]
    assert len(message.split()) > 2
    return message


def test_errors_as_the_official_client_reads_them(ear: Serving) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        ear.client.messages.create(model="claude", max_tokens=5, messages=USER)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError) as bad:
        ear.client.messages.create(model="smollm2", max_tokens=5, messages=[{"role": "user", "content": 5}])  # type: ignore[typeddict-item]
    assert "messages[0].content" in bad.value.message
    required = ear.live.http.post(MESSAGES, json={"messages": USER})
    assert error_of(required, 400, "invalid_request_error") == "max_tokens: Field required"
    assert error_of(ear.live.http.post(MESSAGES, json={"max_tokens": 5}), 400, "invalid_request_error")
    assert error_of(ear.live.http.post(COUNT, json={}), 400, "invalid_request_error") == "messages: Field required"
    for text in ("", "[]", "5", "{", '"x"'):
        error_of(ear.live.http.post(MESSAGES, content=text), 400, "invalid_request_error")
    error_of(ear.live.http.get(MESSAGES), 405, "invalid_request_error")


def test_a_prompt_that_is_too_long() -> None:
    with serving(max_model_len=512) as server:
        counted = server.live.http.post(COUNT, json={"messages": USER}).json()["input_tokens"]
        for size in (512 - counted + 5, 512, 900, 512 * 8 + 100, 100_000):
            messages = [{"role": "user", "content": "x" * size}]
            exact = counted - len("hello") + size
            for stream in (False, True):
                said = error_of(server.post(messages=messages, stream=stream), 400, "invalid_request_error")
                words = said.split()
                assert said == f"prompt is too long: {words[4]} tokens > 511 maximum" and int(words[4]) >= 512
                assert size > 900 or int(words[4]) == exact
            count = server.live.http.post(COUNT, json={"messages": messages})
            if size <= 900:
                assert count.json() == {"input_tokens": exact}
            else:
                assert error_of(count, 400, "invalid_request_error").startswith("prompt is too long: ")


def test_an_engine_that_fails() -> None:
    with serving(EngineError("the engine has died", True)) as server:
        said = error_of(server.post(), 503, "overloaded_error")
        start, error = server.events()
        assert start["type"] == "message_start" and error["request_id"].startswith("req_")
        assert error["error"] == {"type": "overloaded_error", "message": said}
        with (
            pytest.raises(anthropic.APIStatusError),
            server.client.messages.stream(model="smollm2", max_tokens=5, messages=USER) as stream,
        ):
            stream.get_final_message()
        server.engine.state = "failed"
        error_of(server.post(), 503, "overloaded_error")
        error_of(server.live.http.post(COUNT, json={"messages": USER}), 503, "overloaded_error")


def test_a_key_is_asked_for() -> None:
    client = Scripted("ok")
    with live(client, api_key="right") as server:
        headers = {"Authorization": "Bearer wrong"}
        refused = server.http.post(MESSAGES, json={"max_tokens": 5, "messages": USER}, headers=headers)
        error_of(refused, 401, "authentication_error")
        with anthropic.Anthropic(base_url=server.url, auth_token="right", max_retries=0) as official:
            assert official.messages.create(model="smollm2", max_tokens=5, messages=USER).content


BODY: Any = {
    "max_tokens": 5,
    "system": SYSTEM,
    "messages": [
        FIRST,
        TURN,
        RESULT,
        {"role": "system", "content": "more"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}]},
        {
            "role": "user",
            "content": [
                {"type": "document", "title": "T", "source": {"type": "text", "data": "d"}},
                {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "d"}]}},
                {"type": "search_result", "title": "T", "source": "s", "content": [{"type": "text", "text": "d"}]},
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "is_error": True,
                    "content": [{"type": "text", "text": "d"}],
                },
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "tool_reference", "tool_name": "zoo"}],
                },
            ],
        },
    ],
    "tools": [WEATHER, WEATHER | {"name": "zoo", "defer_loading": True}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "high"},
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
}
TEXTS, NUMBERS, FLAGS = (5, [], {}, ["a"], 1.5), ("a", [], {}, ["a"]), ("maybe", [], {}, 7)
LISTS, OBJECTS = (5, True, {"a": 1}, [5], [None], [[]]), (5, "a", [], [[]])
USER_BLOCK = ("messages", 5, "content")
WRONG: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
    (("max_tokens",), (*NUMBERS, 0, -1, 1.5, 2**40, None)),
    (("system",), LISTS),
    (("system", 1, "text"), (*TEXTS, None)),
    (("system", 1, "type"), (*TEXTS, None, "image", "tool_use")),
    (("messages",), (*LISTS, "a", [], None)),
    (("messages", 0), (5, "a", [], None, {})),
    (("messages", 0, "role"), (*TEXTS, None, "tool", "developer")),
    (("messages", 0, "content"), (*LISTS, None)),
    (("messages", 0, "content", 0), (5, "a", [], None, {}, {"type": "text"})),
    (("messages", 0, "content", 0, "type"), (*TEXTS, None, "tool_use", "thinking", "image", "new")),
    (("messages", 1, "content", 0, "thinking"), (*TEXTS, None)),
    (("messages", 1, "content", 2, "id"), (*TEXTS, None, "")),
    (("messages", 1, "content", 2, "name"), (*TEXTS, None, "", "n" * 129)),
    (("messages", 1, "content", 2, "input"), (*OBJECTS, None)),
    (("messages", 2, "content", 0, "tool_use_id"), (*TEXTS, None, "")),
    (("messages", 2, "content", 0, "content"), (5, {"a": 1}, [5])),
    ((*USER_BLOCK, 0, "source"), (5, [], None, {}, "text", {"type": "base64", "data": "JVBERi0="}, {"type": "url"})),
    ((*USER_BLOCK, 0, "source", "data"), (*TEXTS, None)),
    ((*USER_BLOCK, 1, "source", "content"), (*LISTS, None, [{"type": "image"}])),
    ((*USER_BLOCK, 2, "content"), (5, {"a": 1}, [5])),
    ((*USER_BLOCK, 3, "is_error"), FLAGS),
    ((*USER_BLOCK, 4, "content", 0, "tool_name"), (*TEXTS, None)),
    (("tools",), (*LISTS, "a", [WEATHER, WEATHER])),
    (("tools", 0, "name"), (*TEXTS, None, "", "a b", "n" * 129)),
    (("tools", 0, "description"), TEXTS),
    (("tools", 0, "input_schema"), (*OBJECTS, None)),
    (("tools", 1, "defer_loading"), FLAGS),
    (("tool_choice",), (*OBJECTS, {}, {"type": "tool"}, {"type": "tool", "name": "gone"})),
    (("tool_choice", "type"), (*TEXTS, None, "required")),
    (("tool_choice", "disable_parallel_tool_use"), FLAGS),
    (("thinking",), (*OBJECTS, {}, {"type": "perhaps"})),
    (("output_config",), OBJECTS),
    (("output_config", "effort"), TEXTS),
    (("output_config", "format"), (*OBJECTS, {"type": "json_schema"}, {"type": "text"})),
    (("output_format",), (*OBJECTS, {"type": "json_schema", "schema": 5})),
    (("stop_sequences",), (*LISTS, "a", [""], ["a"] * 17, ["a" * 300])),
    (("temperature",), (*NUMBERS, -1, 1e9)),
    (("top_p",), (*NUMBERS, 0, 1.5)),
    (("top_k",), (*NUMBERS, -2, 1.5)),
    (("stream",), FLAGS),
]  # fmt: skip
CASES = [(path, value) for path, values in WRONG for value in values]


def changed(path: tuple[Any, ...], value: Any) -> Any:
    body = copy.deepcopy(BODY)
    at = body
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    return body


def test_wrong_values_are_named(ear: Serving) -> None:
    assert ear.live.http.post(MESSAGES, json=BODY).status_code == 200
    assert len(CASES) > 200
    for path, value in CASES:
        said = error_of(ear.live.http.post(MESSAGES, json=changed(path, value)), 400, "invalid_request_error")
        assert str(path[0]) in said or "tools" in said, (path, value, said)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in entries:
        yield (*path, key)
        yield from paths_of(each, (*path, key))


def test_no_body_is_the_servers_fault(ear: Serving) -> None:
    """Any value anywhere: an answer or an error of the client."""
    nested: Any = []
    for _ in range(200):
        nested = [nested]
    values = (None, 5, "", "\ud800", [], {}, [None], {"\ud800": "\ud800"}, nested)
    statuses = set()
    for path in paths_of(BODY):
        for value in values:
            content, headers = json.dumps(changed(path, value)), {"content-type": "application/json"}
            response = ear.live.http.post(MESSAGES, content=content, headers=headers)
            statuses.add(response.status_code)
            assert response.status_code == 200 or error_of(response, 400, "invalid_request_error"), (path, value)
    assert statuses == {200, 400}


def test_images_are_refused_in_words(ear: Serving) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    said = error_of(ear.post(messages=[{"role": "user", "content": [image]}]), 400, "invalid_request_error")
    assert said.startswith("messages[0].content[0] is an image, and this server reads text only")
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
    said = error_of(ear.post(messages=[{"role": "user", "content": [pdf]}]), 400, "invalid_request_error")
    assert "messages[0].content[0].source" in said and "reads text only" in said


def test_limits_of_sizes(ear: Serving) -> None:
    def refused(**body: Any) -> str:
        return error_of(ear.post(**body), 400, "invalid_request_error")

    tools = [WEATHER | {"name": f"t{i}"} for i in range(129)]
    assert "tools has 129 tools that are not deferred, and 128 is the limit" in refused(tools=tools)
    deferred = [tool | {"defer_loading": True} for tool in tools]
    assert ear.post(tools=deferred).status_code == 200
    calls = [TURN["content"][2]] * 129
    assert "129 tool_use blocks" in refused(messages=[*USER, {"role": "assistant", "content": calls}, RESULT])
    results = [{"role": "user", "content": RESULT["content"] * 1001} for _ in range(2)]
    assert "messages has 2002 messages" in refused(messages=results)
    assert "Two tools have the name 'get_weather'" in refused(tools=[WEATHER, WEATHER])
    assert "messages has no content" in refused(messages=[{"role": "assistant", "content": ""}])


# ---- GET /v1/models


def test_models_in_anthropics_shape() -> None:
    found = model_list(["a", "b"], 1, 4096)
    assert [card["id"] for card in found["data"]] == ["a", "b"] and not found["has_more"]
    assert (found["first_id"], found["last_id"]) == ("a", "b")
    card = anthropic.types.ModelInfo.model_validate(model_card("a", 1, 4096))
    assert (card.display_name, card.max_input_tokens, card.created_at.year) == ("a", 4096, 1970)


def test_an_image_in_a_result_is_left_out_and_said(ear: Serving) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    called = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image]}
    turns = [{"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    assert "An image was left out" in ear.rendered(messages=[*USER, *turns], tools=[WEATHER])


def test_a_call_that_broke_off_is_not_to_be_run() -> None:
    with serving('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par') as broken:
        message = broken.post(tools=[WEATHER]).json()
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    assert not calls or message["stop_reason"] == "max_tokens", message


def test_a_tool_is_defined_at_its_first_reference_only(ear: Serving) -> None:
    tool = WEATHER | {"defer_loading": True, "description": "y" * 1000}
    called = {"type": "tool_use", "id": "t", "name": "search", "input": {}}
    found = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "tool_reference", "tool_name": "get_weather"}] * 50,
    }
    turns = [{"role": "assistant", "content": [called]}, {"role": "user", "content": [found]}]
    assert ear.rendered(messages=[*USER, *turns], tools=[tool]).count("y" * 1000) == 1


def test_blocks_within_blocks_are_refused_in_words(ear: Serving) -> None:
    block: dict[str, Any] = {"type": "text", "text": "x"}
    for _ in range(240):
        block = {"type": "search_result", "title": "t", "source": "s", "content": [block]}
    answer = ear.post(messages=[{"role": "user", "content": [block]}])
    assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text
