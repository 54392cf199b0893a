"""Families of models through the API: efforts, switches and parsers without a flag, and parts that are no text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from sparkdraft.core import UserError
from sparkdraft.server.config import ServerConfig
from tests.server.conftest import FakeClient, Live, live
from tests.text.test_families import CODER, GEMMA, GPT_OSS, QWEN3

CHAT = "/v1/chat/completions"
SAID = "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant<|channel|>final<|message|>Yes."
PIXEL = "data:image/png;base64,iVBORw0KGgo="


@contextmanager
def served(model_type: str, template: str, said: str = "ok", **options: Any) -> Iterator[tuple[Live, list[str]]]:
    """A server of such a model, and the prompts that reach it."""
    prompts: list[str] = []
    client = FakeClient(lambda prompt, params: prompts.append(prompt) or said, template=template)
    assert client.info
    client.info = replace(client.info, model_type=model_type)
    with live(client, **options) as server:
        yield server, prompts


def facts(server: Live) -> dict[str, dict[str, str]]:
    return {fact["name"]: fact for fact in server.http.get("/v1/status").json()["facts"]}


def test_gpt_oss_needs_no_flag() -> None:
    with served("gpt_oss", GPT_OSS, SAID) as (server, prompts):
        for effort, word in ((None, "medium"), ("low", "low"), ("high", "high")):
            message = server.chat(reasoning_effort=effort).json()["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("hmm", "Yes.")
            assert f"Reasoning: {word}" in prompts[-1]
        server.chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
        assert "Reasoning: high" in prompts[-1]
        for stream in (False, True):
            refused = server.chat(reasoning_effort="none", stream=stream)
            error = refused.json()["error"]
            assert refused.status_code == 400 and error["param"] == "reasoning_effort"
            assert "this model has low, medium, high" in error["message"]
        told = facts(server)
        assert told["reasoning parser"]["value"] == told["tool parser"]["value"] == "harmony"
        assert "gpt_oss" in told["reasoning parser"]["reason"] and "low, medium, high" in told["thinking"]["value"]


def test_a_flag_wins() -> None:
    with served("gpt_oss", GPT_OSS, SAID, reasoning_parser="none", tool_parser="hermes") as (server, _):
        message = server.chat().json()["choices"][0]["message"]
        assert "hmm" in message["content"] and not message.get("reasoning_content")
        assert facts(server)["tool parser"] == {
            "name": "tool parser", "value": "hermes", "reason": "asked for by tool_parser",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [("reasoning_parser", "qwen3"), ("tool_parser", "none"), ("tool_parser", "")]
)
def test_a_flag_that_names_no_parser(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{name} is '{value}'; it must be one of auto"):
        ServerConfig(**{name: value})  # type: ignore[arg-type]


def test_gemma_thinks_only_when_asked() -> None:
    with served("gemma4", GEMMA) as (server, prompts):
        server.chat()
        server.post("/tokenize", messages=[{"role": "user", "content": "hello"}])
        assert prompts[-1].endswith("<channel|>")
        for asked in ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"enable_thinking": True}}):
            server.chat(**asked)
            assert "<|think|>" in prompts[-1]
        assert facts(server)["thinking"]["value"].startswith("off unless enable_thinking")


def test_qwen_models_by_their_templates() -> None:
    with served("qwen3_moe", QWEN3) as (server, prompts):
        for effort, ends in (("none", True), ("high", False)):
            server.chat(reasoning_effort=effort)
            assert prompts[-1].endswith("<think>\n\n</think>\n\n") == ends
    with served("qwen3_moe", CODER) as (server, _):
        assert (facts(server)["reasoning parser"]["value"], facts(server)["tool parser"]["value"]) == (
            "none",
            "qwen3_xml",
        )
        refused = server.chat(reasoning_effort="high")
        assert refused.status_code == 400 and "does not think" in refused.json()["error"]["message"]
        assert server.chat(reasoning_effort="none").status_code == 200


def test_only_with_tools_does_a_call_end_thoughts() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "now"}}]
    with served("qwen3", QWEN3, f"<think>\nIt is {call}.\n</think>\n\nYes.") as (server, _):
        for asked in ({}, {"tools": tools, "tool_choice": "none"}):
            message = server.chat(**asked).json()["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == (f"It is {call}.", "Yes.")
        message = server.chat(tools=tools).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "It is" and message["tool_calls"][0]["function"]["name"] == "now"


# ---- parts that are no text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": PIXEL}}, "is an image"),
        ({"type": "input_image", "image_url": PIXEL}, "is an image"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "is audio"),
        ({"type": "video_url", "video_url": {"url": "http://localhost/x.mp4"}}, "is a video"),
        ({"type": "file", "file": {"file_id": "f"}}, "is a file"),
        ({"type": "smell"}, "is no text"),
    ],
)
def test_only_text_is_read_and_nothing_else_is_queued(
    echo: Live, part: dict[str, Any], words: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []
    gate = echo.service.gate
    monkeypatch.setattr(gate, "enter", lambda count, enter=gate.enter: entered.append(count) or enter(count))
    content = [{"type": "text", "text": "What is this?"}, part]
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": content}]
    paths = (CHAT, "/tokenize")
    for path in paths:
        answer = echo.post(path, messages=messages, stream=stream)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "messages[1].content[1]"
        assert words in error["message"] and "this server reads text only" in error["message"]
    assert not entered
    assert echo.post(CHAT, messages=[{"role": "user", "content": content[:1]}]).status_code == 200 and entered == [1]


def test_a_text_part_without_its_text(echo: Live) -> None:
    error = echo.post(CHAT, messages=[{"role": "user", "content": [{"type": "text"}]}]).json()["error"]
    assert error["param"] == "messages[0].content[0]" and "has no text" in error["message"]
