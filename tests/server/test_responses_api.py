"""/v1/responses against a scripted engine, as OpenAI's client and the Agents SDK use it, and with wrong bodies."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai.types.responses import Response
from pydantic import BaseModel

from sparkdraft.core import FinishReason, SamplingParams
from sparkdraft.server import stream
from sparkdraft.server.engine_client import EngineError
from sparkdraft.server.protocol.response_items import decoded, encoded
from sparkdraft.server.protocol.response_tools import InputReader
from tests.server.conftest import FakeClient, Live, live

PATH = "/v1/responses"
# Thoughts and calls as Qwen3 writes them; what was said stands after "role:", as the generation prompt does.
TEMPLATE = (
    "{# <think> <tool_call> arguments #}{% if tools %}tools: {{ tools|tojson }}{{ '\\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function|tojson }}</tool_call>{% endfor %}{{ '\\n' }}"
    "{% endfor %}assistant:"
)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Change files."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(?s:.*)/'}
PLAN = '<think>I look it up.</think>Let me see.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
PLAN += "</tool_call>"


class Scripted:
    """Says what it is told to, one text a request, and keeps the prompts."""

    def __init__(self, live: Live, client: FakeClient) -> None:
        self.live, self.client = live, client
        self.texts: list[str | EngineError] = []
        self.prompts: list[str] = []

    def says(self, *texts: str | EngineError) -> None:
        self.texts, self.prompts = list(texts), []

    def say(self, prompt: str, params: SamplingParams) -> str | EngineError:
        self.prompts.append(prompt)
        return self.texts.pop(0) if self.texts else "Hello."

    @property
    def responses(self) -> Any:
        return self.live.openai.responses

    def post(self, **body: Any) -> httpx.Response:
        return self.live.post(PATH, **body)

    def events(self, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, in the form that servers send them."""
        with self.live.http.stream("POST", PATH, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            blocks = response.read().decode().split("\n\n")
        assert blocks.pop() == ""  # the end, and nothing after the last event
        found = []
        for i, block in enumerate(blocks):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}" and found[-1]["sequence_number"] == i
        return found


@contextmanager
def scripted(**options: Any) -> Iterator[Scripted]:
    client = FakeClient(lambda prompt, params: server.say(prompt, params), template=TEMPLATE)
    assert client.info
    client.info = replace(client.info, max_model_len=8192)
    with live(client, **options) as running:
        server = Scripted(running, client)
        yield server


@pytest.fixture(scope="module")
def module_server() -> Iterator[Scripted]:
    with scripted() as server:
        yield server


@pytest.fixture
def server(module_server: Scripted) -> Iterator[Scripted]:
    module_server.says()
    module_server.client.finish = FinishReason.STOP
    yield module_server


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == f"response.{kind}"]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["message"].endswith(".") and len(error["message"]) > 12
    return error


# ---- text


def test_a_text_and_its_usage(server: Scripted) -> None:
    server.says("<think>Greet.</think>Hello!")
    response = server.responses.create(model="smollm2", input="hi", metadata={"a": "b"}, instructions="Be kind.")
    assert response.output_text == "Hello!" and response.status == "completed"
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "Greet." and response.output[0].summary == []
    assert server.prompts == ["system:Be kind.\nuser:hi\nassistant:"]
    usage = response.usage
    assert usage.input_tokens == len(server.prompts[0]) and usage.input_tokens_details.cached_tokens == 1
    assert usage.output_tokens == len("<think>Greet.</think>Hello!") + 1
    assert len("Greet.") <= usage.output_tokens_details.reasoning_tokens <= len("<think>Greet.</think>")
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert response.metadata == {"a": "b"} and response.instructions == "Be kind."


def test_a_response_has_every_field_that_openais_type_has(server: Scripted) -> None:
    body = server.post(input="hi", max_output_tokens=50, temperature=0.5, top_p=0.9, user="me").json()
    Response.model_validate(body)
    wanted = {field.alias or name for name, field in Response.model_fields.items()} | {"prompt_cache_diagnostics"}
    assert wanted <= body.keys()
    assert body["temperature"] == 0.5 and body["top_p"] == 0.9 and body["max_output_tokens"] == 50
    assert body["user"] == "me" and body["incomplete_details"] is body["error"] is None


def test_a_stream_has_openais_events_in_their_order(server: Scripted) -> None:
    server.says("<think>Greet.</think>Hello!")
    events = server.events(input="hi")
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_text.delta",
        "output_text.done",
        "completed",
    ]
    said = {
        kind: "".join(e["delta"] for e in of_kind(events, f"{kind}.delta"))
        for kind in ("output_text", "reasoning_text")
    }
    assert said == {"output_text": "Hello!", "reasoning_text": "Greet."}
    final = events[-1]["response"]
    done = [event["item"] for event in of_kind(events, "output_item.done")]
    assert done == final["output"] and [event["item"]["id"] for event in of_kind(events, "output_item.added")] == [
        item["id"] for item in final["output"]
    ]
    assert events[0]["response"]["id"] == final["id"] and events[0]["response"]["status"] == "in_progress"
    assert final["usage"]["output_tokens"] == len("<think>Greet.</think>Hello!") + 1


def test_openais_client_reads_every_event_and_collects_the_same_response(server: Scripted) -> None:
    server.says(PLAN)
    with server.responses.stream(model="smollm2", input="hi", tools=[WEATHER]) as events:
        for event in events:
            plain = event.to_dict(mode="json")
            if "snapshot" not in plain:
                type(event).model_validate(plain)
        final = events.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    stored = server.responses.retrieve(final.id)
    assert stored.to_dict()["output"] == [
        {k: v for k, v in item.items() if not k.startswith("parsed")}
        for item in server.live.http.get(f"{PATH}/{final.id}").json()["output"]
    ]
    raw = server.responses.create(model="smollm2", input="hi", stream=True)
    kinds = [type(event).model_validate(event.to_dict(mode="json")).type for event in raw]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_a_cut_text_is_incomplete(server: Scripted) -> None:
    server.client.finish = FinishReason.LENGTH
    server.says("Once upon", "Once upon")
    body = server.post(input="hi").json()
    assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete" and body["completed_at"] is None
    assert server.events(input="hi")[-1]["type"] == "response.incomplete"


def test_log_probabilities_are_those_of_the_text(server: Scripted) -> None:
    server.says("<think>a</think>bc")
    body = server.post(input="hi", include=["message.output_text.logprobs"], top_logprobs=1).json()
    Response.model_validate(body)
    part = body["output"][1]["content"][0]
    assert "".join(row["token"] for row in part["logprobs"]).endswith("bc") and part["logprobs"][0]["top_logprobs"]
    server.says("bc")
    events = server.events(input="hi", top_logprobs=1)
    rows = [row for event in of_kind(events, "output_text.delta") for row in event["logprobs"]]
    assert [row["token"] for row in rows][:2] == ["b", "c"]
    assert of_kind(events, "output_text.done")[0]["logprobs"] == rows
    server.says("bc")
    assert server.post(input="hi", top_logprobs=0).json()["output"][0]["content"][0]["logprobs"] == []


def test_pings_are_events_with_numbers_of_their_own(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PING", 0.05)
    server.client.go_on.clear()
    found = []
    try:
        with server.live.http.stream("POST", PATH, json={"input": "hi", "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    found.append(json.loads(line[6:]))
                if len(found) == 5:
                    server.client.go_on.set()
    finally:
        server.client.go_on.set()
    assert [event["type"] for event in found[1:5]] == ["response.in_progress"] * 4
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[-1]["type"] == "response.completed"


def test_the_probe_of_lm_studio_loads_nothing_and_is_answered(server: Scripted) -> None:
    assert server.post(model="smollm2", input="", max_output_tokens=1).status_code == 200
    assert server.prompts == ["user:\nassistant:"]


# ---- tools


def test_a_call_and_its_result(server: Scripted) -> None:
    server.says(PLAN, "It is sunny.")
    first = server.responses.create(input=[user("weather?")], tools=[WEATHER], include=["reasoning.encrypted_content"])
    call = first.output[-1]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [user("weather?"), *(item.to_dict() for item in first.output), result]
    assert server.responses.create(input=items, tools=[WEATHER]).output_text == "It is sunny."
    one, two = server.prompts
    assert two.startswith(one) and "<think>I look it up.</think>Let me see.<tool_call>" in two
    assert two.endswith("tool:sunny\nassistant:")


def test_a_streamed_call(server: Scripted) -> None:
    server.says(PLAN)
    events = server.events(input="weather?", tools=[WEATHER])
    (added,) = [event for event in of_kind(events, "output_item.added") if event["item"]["type"] == "function_call"]
    assert added["item"]["arguments"] == "" and added["item"]["status"] == "in_progress"
    deltas = of_kind(events, "function_call_arguments.delta")
    assert json.loads("".join(event["delta"] for event in deltas)) == {"city": "Paris"}
    assert (
        {event["item_id"] for event in deltas} == {added["item"]["id"]} == {events[-1]["response"]["output"][2]["id"]}
    )
    assert of_kind(events, "function_call_arguments.done")[0]["name"] == "get_weather"


def test_parallel_calls_are_items_of_their_own(server: Scripted) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
    server.says("\n".join(call % city for city in ("Rome", "Oslo")))
    events = server.events(input="weather?", tools=[WEATHER], parallel_tool_calls=True)
    output = events[-1]["response"]["output"]
    assert [json.loads(item["arguments"])["city"] for item in output] == ["Rome", "Oslo"]
    assert len({item["call_id"] for item in output}) == len({item["id"] for item in output}) == 2
    assert [event["output_index"] for event in of_kind(events, "output_item.done")] == [0, 1]
    server.says("\n".join(call % city for city in ("Rome", "Oslo")))
    assert len(server.post(input="weather?", tools=[WEATHER], parallel_tool_calls=False).json()["output"]) == 1


def test_a_cut_call_is_never_done(server: Scripted) -> None:
    server.client.finish = FinishReason.LENGTH
    server.says('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par')
    events = server.events(input="weather?", tools=[WEATHER])
    assert of_kind(events, "output_item.added") and not of_kind(events, "output_item.done")
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


TEXT = '*** Begin Patch\n+say("a\\b", "é", "\U0001f600")\n\t*** End Patch\n'


@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_input_of_a_custom_tool_is_text_also_while_it_streams(server: Scripted, ascii_only: bool) -> None:
    call = json.dumps({"name": "apply_patch", "arguments": {"input": TEXT}}, ensure_ascii=ascii_only)
    server.says(f"<tool_call>\n{call}\n</tool_call>", f"<tool_call>\n{call}\n</tool_call>", "Done.")
    events = server.events(input="patch it", tools=[PATCH | {"format": GRAMMAR}])
    deltas = [event["delta"] for event in of_kind(events, "custom_tool_call_input.delta")]
    assert "".join(deltas) == TEXT and len(deltas) > 5
    assert of_kind(events, "custom_tool_call_input.done")[0]["input"] == TEXT
    assert not of_kind(events, "function_call_arguments.delta")
    assert GRAMMAR["definition"] in server.prompts[0].replace('\\"', '"')
    first = server.responses.create(input="patch it", tools=[PATCH])
    (item,) = first.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", TEXT)
    result = {
        "type": "custom_tool_call_output",
        "call_id": item.call_id,
        "output": [{"type": "input_text", "text": "ok"}],
    }
    server.responses.create(input=[user("patch it"), item.to_dict(), result], tools=[PATCH])
    assert server.prompts[2].startswith(server.prompts[1]) and server.prompts[2].endswith("tool:ok\nassistant:")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\u00e9\\ud83d\\ude00\\n\\"b\\""}', 'aé\U0001f600\n"b"'),
        ('{ "input" :"x\\/y\\\\z", "other": "input"}', "x/y\\z"),
        ('{"input": "\\ud83d!\\udc00"}', "\ufffd!\ufffd"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"patch": "the only text"}', "the only text"),
        ('{"other": 1, "input": "late"}', "late"),
        ('{"a": "1", "b": "2"}', '{"a": "1", "b": "2"}'),
        ("{}", "{}"),
        ("", ""),
    ],
)
def test_an_input_is_read_from_pieces_of_any_size(arguments: str, text: str) -> None:
    for size in (1, 2, 3, 7, 100):
        reader = InputReader()
        pieces = [reader.feed(arguments[i : i + size]) for i in range(0, len(arguments), size)]
        assert "".join(pieces) + reader.finish() == text, size


def test_a_regular_expression_is_a_pattern_of_the_forced_call(server: Scripted) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-c]+"}
    server.says('<tool_call>\n{"name": "apply_patch", "arguments": {"input": "abc"}}\n</tool_call>')
    body = server.post(
        input="go", tools=[PATCH | {"format": form}], tool_choice={"type": "custom", "name": "apply_patch"}
    )
    assert body.json()["output"][0]["input"] == "abc"
    grammar = server.client.seen[-1].grammar
    assert grammar and "^(?:[a-c]+)$" in grammar.text
    broken = PATCH | {"format": form | {"definition": "[a-"}}
    for choice in ("required", {"type": "custom", "name": "apply_patch"}):
        error = error_of(server.post(input="go", tools=[broken], tool_choice=choice))
        assert "regular expression of the tool 'apply_patch'" in error["message"]
    assert server.post(input="go", tools=[broken]).status_code == 200  # where nothing is forced it only describes


def test_tools_of_namespaces_are_called_and_returned_with_both_names(server: Scripted) -> None:
    def space(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
        return {"type": "namespace", "name": name, "description": f"About {name}.", "tools": list(tools)}

    tools = [space("one", WEATHER, CLOCK), space("two", WEATHER, PATCH), {"type": "web_search"}]
    names = {"one__get_weather": ("one", "get_weather"), "two__get_weather": ("two", "get_weather")}
    names |= {"get_time": ("one", "get_time"), "apply_patch": ("two", "apply_patch")}
    for name, (space_name, own) in names.items():
        arguments = {"input": "x"} if own == "apply_patch" else {"city": "Rome"}
        server.says(f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>")
        first = server.responses.create(input="go", tools=tools)
        (call,) = first.output
        assert (call.namespace, call.name) == (space_name, own)
        assert all(f'"name": "{each}"' in server.prompts[0] for each in names)
        server.responses.create(input=[user("go"), call.to_dict()], tools=tools)
        assert f'"name": "{name}"' in server.prompts[1].rpartition("<tool_call>")[2]
    assert server.prompts[0].count("About one.") == 1


def test_hosted_tools_are_left_out_unless_they_are_chosen(server: Scripted) -> None:
    kinds = ["web_search", "web_search_preview", "web_search_preview_2025_03_11", "file_search", "code_interpreter"]
    kinds += ["image_generation", "local_shell", "computer_use_preview", "mcp", "tool_search"]
    assert server.post(input="hi", tools=[{"type": kind} for kind in kinds]).status_code == 200
    assert "tools:" not in server.prompts[0]
    for kind in kinds:
        error = error_of(server.post(input="hi", tools=[{"type": kind}], tool_choice={"type": kind}))
        assert kind in error["message"] and error["param"] == "tool_choice"
    assert "no tools" in error_of(server.post(input="hi", tools=[{"type": "mcp"}], tool_choice="required"))["message"]


def test_a_forced_call(server: Scripted) -> None:
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        server.says("<think>So.</think>" + PLAN.partition("Let me see.")[2])
        body = server.post(input="hi", tools=[WEATHER, CLOCK], tool_choice=choice).json()
        assert [item["type"] for item in body["output"]] == ["reasoning", "function_call"]
        grammar = server.client.seen[-1].grammar
        assert grammar and ("get_time" in grammar.text) == (choice == "required")
    assert server.post(input="hi", tools=[WEATHER], tool_choice="none").json()["output"][0]["type"] == "message"
    assert "tools:" not in server.prompts[-1]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_leave_the_prompt_as_it_is(server: Scripted, mode: str) -> None:
    tools = [WEATHER, CLOCK, PATCH, {"type": "web_search"}]
    allowed = [{"type": "function", "name": "get_weather"}, {"type": "custom", "name": "apply_patch"}, {"type": "mcp"}]
    server.says("Hello.", PLAN)
    server.post(input="hi", tools=tools)
    body = server.post(input="hi", tools=tools, tool_choice={"type": "allowed_tools", "mode": mode, "tools": allowed})
    assert body.status_code == 200, body.text
    assert body.json()["tool_choice"]["mode"] == mode and server.prompts[0] == server.prompts[1]
    grammar = server.client.seen[-1].grammar
    assert grammar and "get_time" not in grammar.text
    assert "get_weather" in grammar.text and "apply_patch" in grammar.text


def test_a_search_for_tools_that_the_client_runs(server: Scripted) -> None:
    search = {
        "type": "tool_search",
        "execution": "client",
        "description": "Find tools.",
        "parameters": CLOCK["parameters"],
    }
    found = [{"type": "namespace", "name": "ns", "description": "", "tools": [WEATHER]}]
    server.says('<tool_call>\n{"name": "tool_search", "arguments": {"query": "rain"}}\n</tool_call>', PLAN)
    first = server.responses.create(input="rain?", tools=[search])
    (call,) = first.output
    assert (call.type, call.execution, call.arguments) == ("tool_search_call", "client", {"query": "rain"})
    output = {"type": "tool_search_output", "call_id": call.call_id, "execution": "client", "status": "completed"}
    items = [user("rain?"), call.to_dict(), output | {"tools": found}]
    second = server.responses.create(input=items, tools=[search])
    assert (second.output[-1].namespace, second.output[-1].name) == ("ns", "get_weather")
    assert server.prompts[1].startswith(server.prompts[0])
    assert '"description": "The weather of a city."' in server.prompts[1].removeprefix(server.prompts[0])


def test_tools_among_the_items(server: Scripted) -> None:
    more = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [{"type": "namespace", "name": "f", "tools": [CLOCK]}],
    }
    developer = {"type": "message", "role": "developer", "content": "Be quick."}
    server.post(input=[more, developer, user("hi")])
    assert server.prompts[0].startswith("tools: [") and "get_time" in server.prompts[0].partition("\n")[0]
    server.post(input=[developer, user("hi"), {"role": "assistant", "content": "Yes?"}, user("go")], tools=[WEATHER])
    server.post(
        input=[developer, user("hi"), {"role": "assistant", "content": "Yes?"}, more, user("go")], tools=[WEATHER]
    )
    one, two = server.prompts[1:]
    assert two.startswith(one[: one.index("user:go")]) and "get_time" in two


# ---- conversations


def test_a_coding_agents_turn_extends_the_one_before(server: Scripted) -> None:
    agent = {
        "model": "smollm2",
        "tools": [
            WEATHER,
            {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [CLOCK]},
            {"type": "web_search"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto", "effort": "xhigh"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"turn_id": "1"},
        "text": {"verbosity": "low"},
    }
    opening = [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {
            "type": "message",
            "id": "msg_2",
            "role": "developer",
            "content": [{"type": "input_text", "text": "More"}, {"type": "input_text", "text": " rules."}],
        },
        {"type": "message", "id": "msg_3", "role": "user", "content": [{"type": "input_text", "text": "Where I am."}]},
        user("What is the weather?"),
    ]
    server.says(PLAN, "<think>Now I know.</think>Sunny.", "Bye.")
    done = [event["item"] for event in of_kind(server.events(input=opening, **agent), "output_item.done")]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    later = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "A note."}]}
    items = [
        *opening,
        *done,
        {"type": "function_call_output", "id": "fco_1", "call_id": done[2]["call_id"], "output": "sunny"},
    ]
    done = [event["item"] for event in of_kind(server.events(input=items, **agent), "output_item.done")]
    server.events(input=[*items, *done, later, user("Bye")], **agent)
    one, two, three = server.prompts
    assert two.startswith(one) and three.startswith(two)
    assert "system:Rules.\n\nMore rules.\nuser:Where I am.\nuser:What is the weather?\nassistant:" in one
    assert three.removeprefix(two) == "<think>Now I know.</think>Sunny.\nuser:A note.\nuser:Bye\nassistant:"


def test_reasoning_comes_back_as_content_or_encoded(server: Scripted) -> None:
    carried = encoded("Because of é.")
    assert base64.b64decode(carried).decode() == decoded(carried) == "Because of é."
    foreign = "gAAAAABm" + base64.b64encode(bytes(range(128, 200))).decode()
    for content, secret, seen in [
        ([{"type": "reasoning_text", "text": "Plain."}], carried, "<think>Plain.</think>"),
        (None, carried, "<think>Because of é.</think>"),
        ([], carried, "<think>Because of é.</think>"),
        (None, foreign, ""),
        (None, None, ""),
    ]:
        item = {"type": "reasoning", "id": "rs_1", "summary": [], "content": content, "encrypted_content": secret}
        server.says()
        assert server.post(input=[user("a"), item, {"role": "assistant", "content": "b"}, user("c")]).status_code == 200
        assert server.prompts == [f"user:a\nassistant:{seen}b\nuser:c\nassistant:"]
    server.says("<think>Hm.</think>Yes.", "<think>Hm.</think>Yes.")
    with_it = server.post(input="a", include=["reasoning.encrypted_content"]).json()
    assert decoded(with_it["output"][0]["encrypted_content"]) == "Hm."
    assert server.post(input="a").json()["output"][0]["encrypted_content"] is None


def test_results_follow_the_order_of_their_calls(server: Scripted) -> None:
    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "get_time", "arguments": "{}"} for i in range(3)]
    outputs = [{"type": "function_call_output", "call_id": f"c{i}", "output": f"result {i}"} for i in (2, 0, 1)]
    server.post(input=[user("go"), *calls, *outputs], tools=[CLOCK])
    assert server.prompts[0].endswith("tool:result 0\ntool:result 1\ntool:result 2\nassistant:")


def test_a_response_continues_a_stored_one(server: Scripted) -> None:
    server.says(PLAN, "It is sunny.", "You are welcome.")
    first = server.responses.create(input="weather?", tools=[WEATHER], instructions="Be kind.")
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sunny"}
    second = server.responses.create(
        input=[result], tools=[WEATHER], previous_response_id=first.id, instructions="Be kind."
    )
    third = server.responses.create(
        input="thanks", previous_response_id=second.id, tools=[WEATHER], instructions="Be kind."
    )
    one, two, three = server.prompts
    assert two.startswith(one) and three.startswith(two) and three.endswith("It is sunny.\nuser:thanks\nassistant:")
    assert third.previous_response_id == second.id
    server.responses.create(input="x", previous_response_id=third.id)  # instructions are not carried over
    assert server.prompts[-1].startswith("user:weather?")


def test_stored_responses_are_found_listed_and_deleted(server: Scripted) -> None:
    server.says("One.", "Two.")
    first = server.responses.create(input="a")
    second = server.responses.create(input=[user("b"), user("c")], previous_response_id=first.id)
    assert server.responses.retrieve(second.id).to_dict() == second.to_dict()
    listed = list(server.responses.input_items.list(second.id, order="asc", limit=2))  # over two pages
    assert [item.content[0].text for item in listed] == ["a", "One.", "b", "c"]
    assert [item.id for item in server.responses.input_items.list(second.id)] == [item.id for item in reversed(listed)]
    for item in listed:
        type(item).model_validate(item.to_dict())
    page = server.live.http.get(f"{PATH}/{second.id}/input_items", params={"limit": 1}).json()
    assert page["has_more"] and page["first_id"] == page["last_id"] == page["data"][0]["id"]
    server.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        server.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match=f"Previous response with id '{first.id}' not found."):
        server.responses.create(input="a", previous_response_id=first.id)
    assert server.responses.create(input="d", previous_response_id=second.id).output_text == "Hello."


def test_a_streamed_response_is_stored_when_its_last_event_comes(server: Scripted) -> None:
    *_, last = server.events(input="hi")
    assert server.live.http.get(f"{PATH}/{last['response']['id']}").json() == last["response"]


def test_what_shall_not_be_stored_is_not(server: Scripted) -> None:
    response = server.responses.create(input="hi", store=False)
    for path in (f"{PATH}/{response.id}", f"{PATH}/{response.id}/input_items"):
        assert "not found" in error_of(server.live.http.get(path), 404)["message"]
    assert "not found" in error_of(server.live.http.delete(f"{PATH}/{response.id}"), 404)["message"]


def test_an_item_can_be_referred_to(server: Scripted) -> None:
    server.says("One.")
    first = server.responses.create(input=[user("a") | {"id": "msg_mine"}])
    references = [{"type": "item_reference", "id": "msg_mine"}, {"id": first.output[0].id}, user("b")]
    server.responses.create(input=references)
    assert server.prompts[-1] == "user:a\nassistant:One.\nuser:b\nassistant:"
    error = error_of(server.post(input=[{"type": "item_reference", "id": "msg_none"}]))
    assert "msg_none" in error["message"] and error["param"] == "input[0].id"


def test_a_key_finds_only_its_own_responses(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.ann]\nkey = "key-of-ann-123456"\n[keys.bob]\nkey = "key-of-bob-123456"\n')
    with scripted(api_keys_file=str(keys)) as server:
        url = f"{server.live.url}{PATH}"
        ann, bob = ({"Authorization": f"Bearer key-of-{name}-123456"} for name in ("ann", "bob"))
        name = httpx.post(url, json={"input": "hi"}, headers=ann).json()["id"]
        assert httpx.get(f"{url}/{name}", headers=bob).status_code == 404
        assert httpx.delete(f"{url}/{name}", headers=bob).status_code == 404
        body = {"input": "a", "previous_response_id": name}
        assert httpx.post(url, json=body, headers=bob).status_code == 404
        assert httpx.post(url, json=body, headers=ann).status_code == 200
        assert httpx.get(f"{url}/{name}", headers=ann).json()["id"] == name


# ---- structure and effort


class City(BaseModel):
    name: str
    people: int


def test_structured_output(server: Scripted) -> None:
    server.says('{"name": "Rome", "people": 3}')
    parsed = server.responses.parse(model="smollm2", input="a city", text_format=City)
    assert parsed.output_parsed == City(name="Rome", people=3) and parsed.text.format.type == "json_schema"
    grammar = server.client.seen[-1].grammar
    assert grammar and "people" in grammar.text
    server.post(input="x", text={"format": {"type": "json_object"}})
    assert server.client.seen[-1].grammar


@pytest.mark.parametrize("effort", ["none", "low", "xhigh", "max", "unheard-of", None])
def test_no_effort_is_refused(server: Scripted, effort: str | None) -> None:
    assert server.post(input="hi", reasoning={"effort": effort, "summary": "detailed"}).status_code == 200


def test_sampling_reaches_the_engine(server: Scripted) -> None:
    server.post(input="hi", temperature=0.25, top_p=0.5, max_output_tokens=7, seed=3, top_k=5, truncation="auto")
    params = server.client.seen[-1]
    assert (params.temperature, params.top_p, params.max_tokens, params.seed, params.top_k) == (0.25, 0.5, 7, 3, 5)


# ---- errors


def test_a_conversation_that_is_too_long(server: Scripted) -> None:
    long = "long " * 2000
    for truncation in ("auto", "disabled", None):
        error = error_of(server.post(input=long, truncation=truncation))
        assert error["code"] == "context_length_exceeded" and error["param"] == "input"
    events = server.events(input=long)
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 8192" in failed["error"]["message"]
    assert not server.prompts


def test_a_failure_within_a_stream(server: Scripted) -> None:
    server.says(EngineError("the engine has died", True))
    *_, last = list(server.responses.create(input="hi", stream=True))
    assert last.type == "response.failed" and last.response.error.code == "server_error"
    type(last).model_validate(last.to_dict(mode="json"))
    assert "engine has died" in last.response.error.message
    server.says(EngineError("the engine has died", True))
    assert server.post(input="hi").status_code == 503
    assert server.live.http.get(f"{PATH}/{last.response.id}").status_code == 404


def test_a_wrong_model(server: Scripted) -> None:
    assert error_of(server.post(input="hi", model="other"), 404)["code"] == "model_not_found"


FUNCTION_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
WRONG: list[dict[str, Any]] = [
    {},
    {"input": None},
    {"input": 3},
    {"input": {}},
    {"input": []},
    {"input": [3]},
    {"input": ["hi"]},
    {"input": [{}]},
    {"input": [{"type": "message"}]},
    {"input": [{"type": "message", "role": "user"}]},
    {"input": [{"role": "user", "content": 3}]},
    {"input": [{"role": "user", "content": None}]},
    {"input": [{"role": "king", "content": "x"}]},
    {"input": [{"role": [], "content": "x"}]},
    {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
    {"input": [{"role": "user", "content": [{"text": "x"}]}]},
    {"input": [{"role": "user", "content": ["x"]}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
    {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]},
    {"input": [{"type": "strange"}]},
    {"input": [{"type": {}}]},
    {"input": [{"type": ["message"], "role": "user", "content": "x"}]},
    {"input": [{"type": "compaction", "encrypted_content": "x"}]},
    {"input": [{"type": "local_shell_call", "call_id": "x"}]},
    {"input": [{"type": "web_search_call", "id": "ws_1"}]},
    {"input": [{"id": 3}]},
    {"input": [{"type": "item_reference"}]},
    {"input": [{"type": "item_reference", "id": {}}]},
    {"input": [{k: v for k, v in FUNCTION_CALL.items() if k != "name"}]},
    {"input": [{k: v for k, v in FUNCTION_CALL.items() if k != "call_id"}]},
    {"input": [FUNCTION_CALL | {"arguments": {}}]},
    {"input": [FUNCTION_CALL | {"name": ""}]},
    {"input": [FUNCTION_CALL | {"namespace": 3}]},
    {"input": [FUNCTION_CALL] * 200},
    {"input": [{"type": "function_call_output", "call_id": "c"}]},
    {"input": [{"type": "function_call_output", "output": "c"}]},
    {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
    {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "x"}]},
    {"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": 3}]},
    {"input": [{"type": "reasoning", "content": "x"}]},
    {"input": [{"type": "reasoning", "encrypted_content": 3}]},
    {"input": [{"type": "additional_tools"}]},
    {"input": [{"type": "additional_tools", "tools": [{"type": "function"}]}]},
    {"input": [{"type": "tool_search_output", "tools": {}}]},
    {"input": [{"role": "user", "content": "x"}] * 2001},
    {"input": [{}] * 10_001},
    {"input": "hi", "instructions": 3},
    {"input": "hi", "background": True},
    {"input": "hi", "conversation": "conv_1"},
    {"input": "hi", "prompt": {"id": "pmpt_1"}},
    {"input": "hi", "messages": [{"role": "user", "content": "x"}]},
    {"input": "hi", "max_tokens": 5},
    {"input": "hi", "response_format": {"type": "json_object"}},
    {"input": "hi", "max_output_tokens": 0},
    {"input": "hi", "max_output_tokens": "many"},
    {"input": "hi", "max_output_tokens": 10**400},
    {"input": "hi", "temperature": -1},
    {"input": "hi", "temperature": "hot"},
    {"input": "hi", "top_p": 0},
    {"input": "hi", "top_logprobs": -1},
    {"input": "hi", "top_logprobs": 999},
    {"input": "hi", "n": 2},
    {"input": "hi", "stream": "maybe"},
    {"input": "hi", "truncation": "some"},
    {"input": "hi", "metadata": []},
    {"input": "hi", "metadata": {"a": 1}},
    {"input": "hi", "metadata": {str(i): "x" for i in range(17)}},
    {"input": "hi", "include": "reasoning.encrypted_content"},
    {"input": "hi", "reasoning": "high"},
    {"input": "hi", "reasoning": {"effort": 3}},
    {"input": "hi", "text": {"format": "json"}},
    {"input": "hi", "text": {"format": {"type": "xml"}}},
    {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x"}}},
    {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": 3}}},
    {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["x" * 70_000]}}}},
    {"input": "hi", "previous_response_id": 3},
    {"input": "hi", "previous_response_id": "resp_none"},
    {"input": "hi", "previous_response_id": ""},
    {"input": "hi", "tools": {}},
    {"input": "hi", "tools": [3]},
    {"input": "hi", "tools": [{}]},
    {"input": "hi", "tools": [{"type": 3}]},
    {"input": "hi", "tools": [{"type": "functoin", "name": "x"}]},
    {"input": "hi", "tools": [{"type": "function"}]},
    {"input": "hi", "tools": [{"type": "function", "function": {"name": "x"}}]},
    {"input": "hi", "tools": [{"type": "function", "name": "x y"}]},
    {"input": "hi", "tools": [{"type": "function", "name": "x", "parameters": []}]},
    {"input": "hi", "tools": [CLOCK, CLOCK]},
    {"input": "hi", "tools": [CLOCK, {"type": "custom", "name": "get_time"}]},
    {"input": "hi", "tools": [CLOCK | {"name": f"f{i}"} for i in range(200)]},
    {"input": "hi", "tools": [PATCH | {"format": "lark"}]},
    {"input": "hi", "tools": [PATCH | {"format": {"type": "grammar"}}]},
    {"input": "hi", "tools": [PATCH | {"format": {"type": "grammar", "syntax": "ebnf", "definition": "x"}}]},
    {"input": "hi", "tools": [PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": "x" * 70_000}}]},
    {"input": "hi", "tools": [{"type": "namespace", "name": "x"}]},
    {"input": "hi", "tools": [{"type": "namespace", "name": "x", "tools": [{"type": "function"}]}]},
    {
        "input": "hi",
        "tools": [{"type": "namespace", "name": "x", "tools": [{"type": "namespace", "name": "y", "tools": [CLOCK]}]}],
    },
    {"input": "hi", "tool_choice": "required"},
    {"input": "hi", "tools": [CLOCK], "tool_choice": "always"},
    {"input": "hi", "tools": [CLOCK], "tool_choice": {}},
    {"input": "hi", "tools": [CLOCK], "tool_choice": {"type": "function"}},
    {"input": "hi", "tools": [CLOCK], "tool_choice": {"type": "function", "name": "other"}},
    {"input": "hi", "tools": [CLOCK], "tool_choice": {"type": "custom", "name": "get_time"}},
    {"input": "hi", "tools": [CLOCK], "tool_choice": {"type": "function", "name": {}}},
    {"input": "hi", "tools": [CLOCK], "tool_choice": {"type": []}},
    {"input": "hi", "tools": [CLOCK], "tool_choice": {"type": "allowed_tools"}},
    {"input": "hi", "tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
    {"input": "hi", "tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ["x"]}},
    {"input": "hi", "tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "mode": {}, "tools": [CLOCK]}},
    {
        "input": "hi",
        "tools": [CLOCK],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]},
    },
    {"input": "hi", "tools": [CLOCK], "tool_choice": 3},
    {"input": "hi", "chat_template_kwargs": {"messages": []}},
]


@pytest.mark.parametrize("streamed", [False, True])
def test_wrong_bodies_get_a_sentence(server: Scripted, streamed: bool) -> None:
    assert len(WRONG) > 100
    for body in WRONG:
        response = server.post(**body, **({"stream": True} if streamed and "stream" not in body else {}))
        shown = json.dumps(body)[:200]
        assert response.status_code in (400, 404), f"{response.status_code} for {shown}: {response.text[:300]}"
        error = error_of(response, response.status_code)
        assert "param" in error and len(error["message"]) < 400, shown
    assert not server.prompts  # nothing of them reached the engine


def nested(depth: int) -> dict[str, Any]:
    return {"x": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    "body",
    [
        {"input": [user("a") | {"more": float("nan")}]},
        {"input": [user("a") | {"more": nested(300)}]},
        {"input": "a", "tools": [{"type": "web_search", "x": float("inf")}]},
        {"input": "a", "tools": [{"type": "web_search", "x": nested(300)}]},
        {"input": "a", "tools": [CLOCK], "tool_choice": {"type": "function", "name": "get_time", "x": float("nan")}},
        {"input": "a", "text": {"format": {"type": "text", "schema": {"x": float("nan")}}}},
        {"input": "a", "tools": [PATCH | {"format": GRAMMAR | {"definition": "\ud800"}}]},
        {"input": [user("\ud800")]},
    ],
)
def test_what_json_or_unicode_do_not_have_is_refused(server: Scripted, body: dict[str, Any]) -> None:
    for more in ({}, {"stream": True}, {"store": False}):
        sent = json.dumps(body | more)
        error_of(server.live.http.post(PATH, content=sent, headers={"Content-Type": "application/json"}))
    assert not server.prompts


def test_odd_unicode_that_no_model_reads_is_no_obstacle(server: Scripted) -> None:
    body = json.dumps({"input": [user("a") | {"id": "\ud800"}], "metadata": {"a": "\ud800"}, "user": "\ud800"})
    response = server.live.http.post(PATH, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 200 and response.json()["metadata"] == {"a": "?"}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (
            {"input": [user("a"), {"role": "user", "content": [{"type": "input_image"}]}]},
            "input[1].content[0]",
            "an image",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]", "reads text only"),
        ({"input": "a", "background": True}, "background", "background"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "send the schema"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", "is missing"),
        ({"input": "a", "tools": [{"type": "function", "name": ""}]}, "tools[0].name", "tools[0].name is"),
        ({"input": "a", "tools": [{"type": "magic"}]}, "tools[0].type", '"magic"'),
    ],
)
def test_a_mistake_is_named_with_its_place(server: Scripted, body: dict[str, Any], param: str, words: str) -> None:
    error = error_of(server.post(**body))
    assert error["param"] == param and words in error["message"]


def test_questions_about_responses_that_are_wrong(server: Scripted) -> None:
    name = server.responses.create(input="hi").id
    get = server.live.http.get
    for params in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "msg_none"}):
        error_of(get(f"{PATH}/{name}/input_items", params=params))
    assert "cannot be streamed" in error_of(get(f"{PATH}/{name}", params={"stream": "true"}))["message"]
    error_of(get(f"{PATH}/resp_none"), 404)


# ---- OpenAI's Agents SDK


def run_agent(server: Scripted, run: Callable[[Agent[Any]], Any]) -> Any:
    set_tracing_disabled(True)

    @function_tool
    def get_weather(city: str) -> str:
        return f"sunny in {city}"

    async def within() -> Any:
        client = openai.AsyncOpenAI(base_url=f"{server.live.url}/v1", api_key="none", max_retries=0)
        async with client:
            model = OpenAIResponsesModel(model="smollm2", openai_client=client)
            return await run(Agent(name="a", instructions="Be brief.", model=model, tools=[get_weather]))

    return asyncio.run(within())


def test_the_agents_sdk_runs_a_tool(server: Scripted) -> None:
    async def run(agent: Agent[Any]) -> Any:
        return await Runner.run(agent, "weather in Paris?")

    server.says(PLAN, "It is sunny.")
    result = run_agent(server, run)
    assert result.final_output == "It is sunny."
    one, two = server.prompts
    assert two.startswith(one) and two.endswith("tool:sunny in Paris\nassistant:")


def test_the_agents_sdk_streams_and_uses_the_store(server: Scripted) -> None:
    async def run(agent: Agent[Any]) -> Any:
        result = Runner.run_streamed(agent, "weather in Paris?", auto_previous_response_id=True)
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds and "run_item_stream_event" in kinds
        return result

    server.says(PLAN, "It is sunny.")
    result = run_agent(server, run)
    assert result.final_output == "It is sunny."
    assert server.prompts[1].startswith(server.prompts[0]) and "sunny in Paris" in server.prompts[1]


def test_an_input_that_broke_off_is_never_done(server: Scripted) -> None:
    """Half a command is a command: a client would run it."""
    said = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "rm -rf /tmp/build'
    server.says(said, said)
    events = server.events(input="clean up", tools=[PATCH])
    assert not [e for e in of_kind(events, "output_item.done") if e["item"]["type"] == "custom_tool_call"]
    assert not of_kind(events, "custom_tool_call_input.done")
    last = events[-1]["response"]
    assert last["status"] == "incomplete" and last["output"][-1]["status"] == "incomplete"


def test_small_references_do_not_become_large_texts(server: Scripted) -> None:
    big = {"type": "function", "name": "big", "description": "x" * 3000, "parameters": {}}
    found = {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "function", "name": "big"}] * 100}
    server.says("ok")
    server.responses.create(input=[user("hi"), found], tools=[big])
    assert server.prompts[-1].count("x" * 3000) <= 2, "in the header, and once where it was found"
    server.says("ok")
    first = server.responses.create(input=[user("hi")])
    twice = [{"type": "item_reference", "id": first.output[0].id}] * 2
    assert "more than once" in error_of(server.post(input=twice))["message"]


def test_nested_and_many_tools_are_refused_in_words(server: Scripted) -> None:
    nested: dict[str, Any] = {"type": "function", "name": "f"}
    for _ in range(150):
        nested = {"type": "namespace", "name": "n", "tools": [nested]}
    assert "one level up" in error_of(server.post(input="hi", tools=[nested]))["message"]
    many = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": f"f{i}"} for i in range(5000)]}
    assert "at most 128" in error_of(server.post(input="hi", tools=[many]))["message"]
