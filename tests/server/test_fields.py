"""Fields beyond the usual ones: each works as its documentation says, or is an error that names it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from sparkdraft.server.protocol.validation import CHAT_ONLY, COMPLETIONS_ONLY, INSTEAD, OFF, ON_BY_DEFAULT
from tests.server.conftest import TEMPLATE, FakeClient, Live, live

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"messages": USER, "prompt": "x"}
WEATHER = {"name": "weather", "description": "of a city", "parameters": {"type": "object"}}
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
HAIKU_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def error_of(response: httpx.Response, param: str) -> str:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    return str(error["message"])


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


# ---- fields that are refused


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", [name for name in INSTEAD if name not in ON_BY_DEFAULT])
def test_what_would_change_the_answer_is_refused_by_name(echo: Live, path: str, name: str) -> None:
    message = error_of(echo.post(path, **BODY, **{name: ["yes", "no"]}), name)
    assert message.startswith(f"{name} is not supported here; ") and message.endswith(".")
    wants_json = name in ("guided_json", "json_schema")  # {} is any JSON
    for value in (None, "", [], False, *OFF.get(name, ()), *([] if wants_json else [{}])):
        assert echo.post(path, **BODY, **{name: value}).status_code == 200, value
    assert echo.post(path, **BODY, **{name: {}}).status_code == (400 if wants_json else 200)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_beam_search", True),
        ("modalities", ["text", "audio"]),
        ("chat_template", "{{ messages }}"),
        ("lora", [{"id": 0, "scale": 0.5}]),
        ("include_reasoning", False),
        ("separate_reasoning", False),
        ("repeat_penalty", 1.1),
        ("verbosity", "low"),
        ("mirostat", 2),
    ],
)
def test_values_that_clients_send(echo: Live, name: str, value: Any) -> None:
    for path in (CHAT, COMPLETIONS):
        error_of(echo.post(path, **BODY, **{name: value}), name)


@pytest.mark.parametrize(("path", "names"), [(CHAT, COMPLETIONS_ONLY), (COMPLETIONS, CHAT_ONLY)])
def test_fields_of_the_other_endpoint(echo: Live, path: str, names: dict[str, str]) -> None:
    for name in names:
        assert "is not supported here; " in error_of(echo.post(path, **BODY, **{name: [{"x": 1}]}), name)


def test_a_chat_template_is_not_taken_by_tokenize_either(echo: Live) -> None:
    error_of(echo.post("/tokenize", messages=USER, chat_template="x"), "chat_template")


# ---- the end of the prompt


def tokenized(server: Live, **body: Any) -> str:
    ids = server.post("/tokenize", **body).json()["tokens"]
    return str(server.post("/detokenize", tokens=ids).json()["prompt"])


@pytest.mark.parametrize(("content", "left"), [("Old pond", "Old pond"), ("Old pond ", "Old pond"), ("", "")])
def test_the_last_message_is_continued(content: str, left: str) -> None:
    client = FakeClient(lambda prompt, params: prompt, template=HAIKU_TEMPLATE)
    messages = [*USER, {"role": "assistant", "content": content}]
    with live(client) as server:
        asked: dict[str, Any] = {"messages": messages, "continue_final_message": True}
        expected = f"<user>hello</user><assistant>{left}"
        assert text_of(server.post(CHAT, **asked)) == expected
        assert client.seen[-1].continues, "the blank before the next word is part of the text"
        assert text_of(server.post(CHAT, **asked, add_generation_prompt=False)) == expected
        assert tokenized(server, **asked) == expected
        for path in (CHAT, "/tokenize"):
            wrong = server.post(path, **asked, add_generation_prompt=True)
            assert "set only one" in error_of(wrong, "continue_final_message")
        called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
        wrong = server.post(CHAT, messages=[*USER, called], continue_final_message=True)
        assert "has tool calls" in error_of(wrong, "continue_final_message")


def test_a_template_that_keeps_blanks_keeps_those_of_a_continued_message(echo: Live) -> None:
    asked = [*USER, {"role": "assistant", "content": "Old  "}]
    assert text_of(echo.post(CHAT, messages=asked, continue_final_message=True)) == "user: hello\nassistant: Old  "


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    with live(FakeClient(lambda prompt, params: prompt, template="{{ messages | length }}")) as server:
        wrong = server.post(CHAT, messages=USER, continue_final_message=True)
        assert wrong.status_code == 400 and "cannot be continued" in wrong.text


def test_a_prompt_without_the_answers_beginning() -> None:
    with live(FakeClient(lambda prompt, params: prompt, template=HAIKU_TEMPLATE)) as server:
        assert text_of(server.chat("hello")) == "<user>hello</user><assistant>"
        assert text_of(server.chat("hello", add_generation_prompt=False)) == "<user>hello</user>"


def test_documents_reach_a_template_that_reads_them(echo: Live) -> None:
    documents = [{"title": "Ponds", "text": "Frogs jump."}]
    assert "put their text into a message" in error_of(echo.chat(documents=documents), "documents")
    assert echo.chat(documents=[]).status_code == 200
    template = "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}" + TEMPLATE
    with live(FakeClient(lambda prompt, params: prompt, template=template)) as server:
        assert text_of(server.chat("hello", documents=documents)).startswith("[Ponds: Frogs jump.]user: hello")


# ---- lengths


@pytest.mark.parametrize("keep", [1, 5, 400])
def test_a_prompt_is_truncated_from_the_left(echo: Live, keep: int) -> None:
    prompt = "".join(chr(97 + i % 26) for i in range(600))  # one token each, and 512 is the context
    assert text_of(echo.post(COMPLETIONS, prompt=prompt, truncate_prompt_tokens=keep)) == prompt[-keep:]
    ids = echo.post("/tokenize", prompt="abcdefgh").json()["tokens"]
    assert text_of(echo.post(COMPLETIONS, prompt=ids, truncate_prompt_tokens=3)) == "fgh"
    whole = f"user: {prompt}\nassistant:"
    assert text_of(echo.chat(prompt, truncate_prompt_tokens=keep)) == whole[-keep:]
    echoed = text_of(echo.post(COMPLETIONS, prompt=prompt, truncate_prompt_tokens=keep, echo=True))
    assert echoed == prompt[-keep:] * 2


def test_a_prompt_is_truncated_to_what_fits(echo: Live) -> None:
    prompt = "x" * 5000
    answer = echo.post(COMPLETIONS, prompt=prompt, truncate_prompt_tokens=-1, max_tokens=12).json()
    assert answer["usage"]["prompt_tokens"] == 500
    assert echo.post(COMPLETIONS, prompt=prompt, truncate_prompt_tokens=512).status_code == 400
    none_left = echo.post(COMPLETIONS, prompt=prompt, truncate_prompt_tokens=-1, max_tokens=512)
    assert "of the context of 512 tokens it leaves none for the prompt" in error_of(none_left, "max_tokens")
    for wrong in (0, -2):
        error_of(echo.post(COMPLETIONS, prompt="x", truncate_prompt_tokens=wrong), "truncate_prompt_tokens")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_minus_one_is_no_limit_on_an_answer(field: str) -> None:
    client = FakeClient(lambda prompt, params: "ok")
    with live(client) as server:
        assert server.chat(**{field: -1}).status_code == 200
        assert client.seen[-1].max_tokens >= 490, "the whole context"
        for wrong in (0, -2):
            message = error_of(server.chat(**{field: wrong}), field)
            assert message == f"{field} is {wrong}; it must be at least 1, or -1 for as many as fit in the context."
        assert server.post(COMPLETIONS, prompt="x", max_tokens=-1).status_code == 200
        assert client.seen[-1].max_tokens >= 490


def test_a_prompt_is_scored(tiny_server: Live) -> None:
    asked: dict[str, Any] = {"prompt": ["hello", "abc"], "echo": True, "logprobs": 2}
    scored = tiny_server.post(COMPLETIONS, **asked, max_tokens=0).json()
    written = tiny_server.post(COMPLETIONS, **asked, max_tokens=1, temperature=0).json()
    for choice, other in zip(scored["choices"], written["choices"], strict=True):
        size = len(choice["logprobs"]["tokens"])
        assert choice["finish_reason"] == "length" and size == len(other["logprobs"]["tokens"]) - 1
        assert choice["logprobs"]["tokens"] == other["logprobs"]["tokens"][:size]
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
            other["logprobs"]["token_logprobs"][1:size], abs=1e-3
        )
    assert [choice["text"] for choice in scored["choices"]] == ["hello", "abc"]
    assert scored["usage"]["completion_tokens"] == 0 and scored["usage"]["prompt_tokens"] > 0
    streamed = tiny_server.events(COMPLETIONS, prompt="hello", echo=True, max_tokens=0)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "hello"
    assert streamed[-1]["choices"][0]["finish_reason"] == "length"
    wrong = tiny_server.post(COMPLETIONS, prompt="hello", max_tokens=0)
    assert "set echo to true" in error_of(wrong, "max_tokens")


# ---- log-probabilities of prompts


def test_log_probabilities_of_a_prompt(tiny_server: Live) -> None:
    body: dict[str, Any] = {"prompt": "hello", "max_tokens": 1, "temperature": 0}
    echoed = tiny_server.post(COMPLETIONS, **body, echo=True, logprobs=0, prompt_logprobs=3).json()["choices"][0]
    rows = echoed["prompt_logprobs"]
    ids = tiny_server.post("/tokenize", prompt="hello").json()["tokens"]
    assert len(rows) == len(ids) and rows[0] is None
    for token, row, logprob in zip(ids[1:], rows[1:], echoed["logprobs"]["token_logprobs"][1:], strict=False):
        assert row[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-5) and 3 <= len(row) <= 4
        best = sorted((entry for entry in row.values() if entry["rank"]), key=lambda entry: entry["rank"])
        assert [entry["rank"] for entry in best] == [1, 2, 3]
        assert best == sorted(best, key=lambda entry: -entry["logprob"])
    assert all(len(top) == 1 for top in echoed["logprobs"]["top_logprobs"][1 : len(ids)]), "logprobs asked for none"
    chat = tiny_server.chat("hello", max_tokens=1, prompt_logprobs=0).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(row) == 1 for row in chat["prompt_logprobs"][1:])
    assert "prompt_logprobs" not in tiny_server.chat("hello", max_tokens=1).json()
    error_of(tiny_server.chat("hello", prompt_logprobs=21), "prompt_logprobs")
    assert "cannot be streamed" in error_of(
        tiny_server.chat("hello", prompt_logprobs=1, stream=True), "prompt_logprobs"
    )


# ---- functions, the older form of tools


@pytest.mark.parametrize("choice", [None, "auto", {"name": "weather"}])
def test_functions_are_called_and_answered_in_the_older_form(choice: Any) -> None:
    prompts: list[str] = []
    client = FakeClient(lambda prompt, params: prompts.append(prompt) or f"<tool_call>\n{CALL}\n</tool_call>")
    with live(client, tool_parser="hermes") as server:
        asked: dict[str, Any] = {"messages": USER, "functions": [WEATHER], "function_call": choice}
        answer = server.post(CHAT, **asked).json()["choices"][0]
        assert answer["finish_reason"] == "function_call" and "tool_calls" not in answer["message"]
        call = answer["message"]["function_call"]
        assert call["name"] == "weather" and json.loads(call["arguments"]) == {"city": "Oslo"}
        assert (client.seen[-1].grammar is not None) == isinstance(choice, dict)
        chunks = [chunk["choices"][0] for chunk in server.events(CHAT, **asked)]
        calls = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
        assert calls[0]["name"] == "weather" and chunks[-1]["finish_reason"] == "function_call"
        assert json.loads("".join(call["arguments"] for call in calls)) == {"city": "Oslo"}
        history = [
            *USER,
            {"role": "assistant", "content": None, "function_call": call},
            {"role": "function", "name": "weather", "content": "3 degrees"},
        ]
        assert server.post(CHAT, messages=history, functions=[WEATHER]).status_code == 200
        assert "tool: 3 degrees" in prompts[-1]
        old = server.openai.chat.completions.create(model="smollm2", messages=USER, functions=[WEATHER])  # type: ignore
        assert old.choices[0].message.function_call.name == "weather"  # type: ignore[union-attr]


def test_mistakes_with_functions(echo: Live) -> None:
    tool = {"type": "function", "function": WEATHER}
    assert "send only tools" in error_of(echo.chat(functions=[WEATHER], tools=[tool]), "functions")
    both = echo.chat(tools=[tool], tool_choice="required", function_call="none")
    assert "send only tools" in error_of(both, "function_call")
    wrong = echo.chat(functions=[WEATHER], function_call={"name": "time"})
    assert error_of(wrong, "function_call") == "function_call names 'time'; the functions are weather."
    assert "there are no functions" in error_of(echo.chat(function_call={"name": "time"}), "function_call")
    assert "same name" in error_of(echo.chat(functions=[WEATHER, WEATHER]), "functions")
    assert echo.chat(functions=[WEATHER], function_call="none").status_code == 200


# ---- smaller ones


def test_usage_in_every_chunk(echo: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path in (CHAT, COMPLETIONS):
        chunks = echo.events(path, **(BODY if path == CHAT else {"prompt": "hello"}), stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[0] < counts[-1]


def test_special_tokens_stay_in_the_text_if_asked() -> None:
    client = FakeClient(lambda prompt, params: "ok")
    with live(client) as server:
        for keep in (True, False):
            server.post(COMPLETIONS, prompt="x", skip_special_tokens=not keep)
            assert client.seen[-1].keep_special == keep
            server.chat(skip_special_tokens=not keep)
            assert client.seen[-1].keep_special == keep
