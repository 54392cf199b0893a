"""Ollama's API, as its official client uses it and as raw lines, against a scripted engine behind the real server."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

import httpx
import pytest

from sparkdraft import __version__
from sparkdraft.core import FinishReason, SamplingParams
from sparkdraft.operate.canary.findings import FAILED, TOOLS
from sparkdraft.server import stream
from sparkdraft.server.engine_client import EngineError
from tests.server.conftest import FakeClient, Live, live
from tests.text.test_families import GEMMA, GPT_OSS, QWEN3, TURNS

ollama = pytest.importorskip("ollama", reason="Ollama's client is not installed")

NAME = "small"
USER: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
THOUGHT = "<think>\nIt is a greeting.\n</think>\n\nGood morning."
SHOWS_ALL = (  # a template that shows what reaches it
    "{% for m in messages %}{{ m.role }}({{ m.name }}): {{ m.content }}{{ m.reasoning_content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{{ '\n' }}"
    '{% endfor %}{% if tools %}<tool_call> {"name":, "arguments": } {{ tools | length }}{% endif %}'
)


class Scripted:
    """A server that says a text, its client, and what reached the engine."""

    def __init__(self, said: Any, template: str | None, model_type: str) -> None:
        self.said, self.prompts = said, list[str]()
        self.engine = FakeClient(self._say, template=template)
        assert self.engine.info
        self.engine.info = replace(self.engine.info, model_type=model_type, max_model_len=4096)

    def begin(self, server: Live) -> None:
        self.server, self.client = server, ollama.Client(host=server.url)

    def _say(self, prompt: str, params: SamplingParams) -> Any:
        self.prompts.append(prompt)
        return self.said

    @contextmanager
    def saying(self, said: Any, size: int = 3) -> Iterator[Scripted]:
        """Another text for a while; the engine's other settings are restored too."""
        before, settings = self.said, dict(self.engine.__dict__)
        self.said, self.engine.size = said, size
        try:
            yield self
        finally:
            names = ("size", "delay", "finish", "stop_reason", "stopped")
            self.said = before
            self.engine.__dict__.update({name: settings[name] for name in names})

    @property
    def params(self) -> SamplingParams:
        return self.engine.seen[-1]

    def chat(self, **options: Any) -> Any:
        return self.client.chat(**({"model": NAME, "messages": USER} | options))

    def error(self, path: str = "/api/chat", status: int = 400, **body: Any) -> str:
        """The sentence of a request that is refused."""
        content = {"messages": USER} if path == "/api/chat" else {"prompt": "hello"}
        answer = self.server.post(path, **({"model": NAME} | content | body))
        assert answer.status_code == status, answer.text
        (said,) = answer.json().values()
        assert answer.json() == {"error": said} and said.endswith(".")
        return str(said)


@contextmanager
def scripted(
    said: Any = "Good morning.", template: str | None = QWEN3, model_type: str = "llama", **options: Any
) -> Iterator[Scripted]:
    found = Scripted(said, template, model_type)
    with live(found.engine, **({"served_name": f"{NAME},org/small"} | options)) as server:
        found.begin(server)
        yield found


@pytest.fixture(scope="module")
def plain() -> Iterator[Scripted]:
    with scripted() as found:
        yield found


@pytest.fixture(scope="module")
def shows() -> Iterator[Scripted]:
    with scripted(template=SHOWS_ALL) as found:
        yield found


def is_utc(text: str) -> bool:
    return re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", text) is not None


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson" and answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text[:-1].split("\n")]


# ---- about the model


def test_the_model_is_listed(plain: Scripted) -> None:
    found = plain.client.list().models
    assert [model.model for model in found] == [NAME, "org/small"]
    assert found[0].details.family == "llama" and found[0].details.families == ["llama"]
    assert re.fullmatch("[0-9a-f]{64}", found[0].digest) and found[0].digest == found[1].digest
    assert found[0].modified_at == datetime.fromisoformat("1970-01-01T00:00:01Z")
    raw = plain.server.http.get("/api/tags").json()["models"][0]
    assert raw["name"] == raw["model"] == NAME
    assert raw["details"]["parameter_size"] == raw["details"]["quantization_level"] == "", "not known, and not invented"
    assert plain.server.http.head("/api/tags").status_code == 200
    assert [model.model for model in plain.client.ps().models] == [NAME, "org/small"]
    assert plain.client.ps().models[0].context_length == 4096
    assert plain.client.ps().models[0].expires_at.year > 2200


def test_the_digest_tells_models_apart(plain: Scripted) -> None:
    digest = plain.client.list().models[0].digest
    with scripted() as same, scripted(template=TURNS) as other:
        assert same.client.list().models[0].digest == digest != other.client.list().models[0].digest


@pytest.mark.parametrize("name", [NAME, f"{NAME}:latest", "org/small"])
def test_the_model_is_shown(plain: Scripted, name: str) -> None:
    found = plain.client.show(name)
    assert found.modelinfo["general.architecture"] == "llama" and found.modelinfo["llama.context_length"] == 4096
    assert found.modelinfo["general.basename"] == name
    assert found.capabilities == ["completion", "tools", "thinking"] and found.template == QWEN3
    assert found.parameters.split() == ["temperature", "1.0"]
    assert plain.server.post("/api/show", name=name).json()["capabilities"] == found.capabilities  # the older field


def test_capabilities_are_those_of_the_model() -> None:
    with scripted(template=TURNS) as without_thoughts:
        assert without_thoughts.client.show(NAME).capabilities == ["completion", "tools"]
    with scripted(template=None) as without_chat:
        assert without_chat.client.show(NAME).capabilities == ["completion"]
    with scripted(template=TURNS) as broken:
        assert broken.engine.info
        broken.engine.info.canary.append({"part": TOOLS, "status": FAILED})
        assert broken.client.show(NAME).capabilities == ["completion"]
        assert "not read" in broken.error(status=500, tools=[WEATHER])


def test_quantisation_is_named_where_it_is_known() -> None:
    for device, told in (("cpu", "quantised"), ("cuda", "")):
        with scripted() as found:
            assert found.engine.info
            found.engine.info.plan_facts.update(device=device, weights="quantised")
            assert found.client.show(NAME).details.quantization_level == told


def test_a_model_that_is_loading() -> None:
    with scripted() as found:
        text, found.server.service.text = found.server.service.text, None
        try:
            assert found.client.ps().models == []
            assert found.client.list().models[0].model == NAME
            assert "not ready yet" in found.error(status=503)
        finally:
            found.server.service.text = text


def test_versions(plain: Scripted) -> None:
    told = plain.server.http.get("/api/version").json()
    assert tuple(map(int, told["version"].split("."))) >= (0, 13, 4), "the version that Codex needs"
    assert told["sparkdraft"] == __version__
    assert plain.server.http.head("/api/version").status_code == 200
    assert plain.server.http.get("/version").json() == {"version": __version__}


# ---- chat


@pytest.mark.parametrize("name", [NAME, f"{NAME}:latest", "org/small", "org/small:latest"])
def test_a_chat(plain: Scripted, name: str) -> None:
    before = time.time()
    answer = plain.chat(model=name)
    assert (answer.model, answer.message.role, answer.message.content) == (name, "assistant", "Good morning.")
    assert answer.done and answer.done_reason == "stop" and not answer.message.tool_calls
    assert is_utc(answer.created_at)
    assert abs(datetime.fromisoformat(answer.created_at).timestamp() - before) < 60
    assert answer.prompt_eval_count == len(plain.engine.raw.encode(plain.prompts[-1]).ids)
    assert answer.eval_count == len("Good morning.") + 1  # letters are tokens here, and so is the end


def test_a_chat_as_a_stream(plain: Scripted) -> None:
    chunks = list(plain.chat(stream=True))
    assert "".join(chunk.message.content for chunk in chunks) == "Good morning." and len(chunks) == 6
    assert all(not chunk.done and chunk.eval_count is None for chunk in chunks[:-1])
    assert chunks[-1].done and chunks[-1].done_reason == "stop" and chunks[-1].message.content == ""
    assert chunks[-1].prompt_eval_count == plain.chat().prompt_eval_count
    assert all(is_utc(chunk.created_at) and chunk.message.role == "assistant" for chunk in chunks)


def test_the_asynchronous_client(plain: Scripted) -> None:
    async def said() -> str:
        chunks = await ollama.AsyncClient(host=plain.server.url).chat(NAME, USER, stream=True)
        return "".join([chunk.message.content async for chunk in chunks])

    assert asyncio.run(said()) == "Good morning."


def test_a_stream_is_lines_and_the_default(plain: Scripted) -> None:
    lines = lines_of(plain.server.post("/api/chat", model=NAME, messages=USER))
    assert len(lines) == 6 and lines[-1]["done"]
    assert lines_of(plain.server.post("/api/generate", model=NAME, prompt="hello", stream=None))[-1]["done"]
    whole = plain.server.post("/api/chat", model=NAME, messages=USER, stream=False)
    assert whole.headers["content-type"] == "application/json" and whole.json()["done"]


def test_unicode_line_ends_do_not_cut_a_line(plain: Scripted) -> None:
    with plain.saying("a\u2028b\x85c\nd", size=9) as found:
        assert "".join(chunk.message.content for chunk in found.chat(stream=True)) == "a\u2028b\x85c\nd"


def test_durations_are_measured(plain: Scripted) -> None:
    with plain.saying("abcdef", size=2) as found:
        found.engine.delay = 0.05  # before each of the three pieces
        answer = found.chat()
        waited, wrote = answer.prompt_eval_duration / 1e9, answer.eval_duration / 1e9
        assert waited >= 0.05 and wrote >= 0.1 and answer.load_duration == 0
        assert waited + wrote <= answer.total_duration / 1e9 < 60
    with plain.saying("a", size=9) as found:
        assert found.chat().eval_duration >= 1, "clients divide by it"


@pytest.mark.parametrize("stop_reason", [None, "repetition_detected"])
def test_why_a_text_ended(plain: Scripted, stop_reason: str | None) -> None:
    with plain.saying("Good morning.") as found:
        found.engine.stop_reason = stop_reason
        found.engine.finish = FinishReason.STOP if stop_reason else FinishReason.LENGTH
        assert found.chat().done_reason == list(found.chat(stream=True))[-1].done_reason
        assert found.chat().done_reason == ("stop" if stop_reason else "length")
        raw = found.server.post("/api/chat", model=NAME, messages=USER, stream=False).json()
        assert raw.get("stop_reason") == stop_reason


def test_messages_reach_the_template(shows: Scripted) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Weather?", "images": []},
        {
            "role": "assistant", "content": "", "thinking": "I ask both.",
            "tool_calls": [
                {"function": {"name": "get_weather", "arguments": {"city": "Ulm"}}},
                {"function": {"name": "get_time", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "noon", "tool_name": "get_time"},
        {"role": "tool", "content": "rain", "tool_name": "get_weather"},
        {"role": "system", "content": "Answer now."},
    ]  # fmt: skip
    shows.chat(messages=messages)
    assert shows.prompts[-1].split("\n") == [
        "system(): Be brief.", "", "Be kind.", "user(): Weather?",
        'assistant(): I ask both.[get_weather {"city": "Ulm"}][get_time {}]',
        "tool(get_time): noon", "tool(get_weather): rain", "user(): Answer now.", "",
    ]  # fmt: skip


def test_results_with_ids_follow_the_calls(shows: Scripted) -> None:
    calls = [{"id": each, "function": {"name": each, "arguments": {}}} for each in ("one", "two")]
    results = [{"role": "tool", "content": each, "tool_call_id": each} for each in ("two", "one")]
    messages = [*USER, {"role": "assistant", "tool_calls": calls}, *results]
    shows.server.post("/api/chat", model=NAME, messages=messages, stream=False)
    assert shows.prompts[-1].endswith("tool(): one\ntool(): two\n")


def test_an_empty_chat_loads_the_model(plain: Scripted) -> None:
    before = len(plain.engine.seen)
    for body in ({}, {"messages": []}, {"messages": None, "keep_alive": 0}):
        told = plain.server.post("/api/chat", model=NAME, **body)
        assert told.headers["content-type"] == "application/json" and is_utc(told.json()["created_at"])
        assert told.json()["done"] and told.json()["done_reason"] == "load"
        assert told.json()["message"] == {"role": "assistant", "content": ""}
    (line,) = plain.chat(messages=[], stream=True)
    assert line.done_reason == "load" and len(plain.engine.seen) == before


# ---- tools


def get_weather(city: str) -> str:
    """The weather in a city

    Args:
      city: where
    """
    return city


@pytest.mark.parametrize("tool", [WEATHER, get_weather, WEATHER | {"type": None}])
def test_a_call(plain: Scripted, tool: Any) -> None:
    with plain.saying(f"I look.{CALL}") as found:
        answer = found.chat(tools=[tool])
        (call,) = answer.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Ulm"})
        assert answer.message.content == "I look." and answer.done_reason == "stop"
        chunks = list(found.chat(tools=[tool], stream=True))
        with_calls = [chunk for chunk in chunks if chunk.message.tool_calls]
        assert len(with_calls) == 1 and not with_calls[0].done, "a call is one line, before the last one"
        assert with_calls[0].message.tool_calls == answer.message.tool_calls
        assert "".join(chunk.message.content for chunk in chunks) == "I look."
        assert "<tool_call>" in found.prompts[-1], "the template shows tools"


@pytest.mark.parametrize("size", [1, 7, 500])
def test_two_calls_are_two_lines(plain: Scripted, size: int) -> None:
    with plain.saying(f"{CALL}\n{CALL.replace('Ulm', 'Bonn')}", size=size) as found:
        body = {"model": NAME, "messages": USER, "tools": [WEATHER]}
        lines = lines_of(found.server.post("/api/chat", **body))
        calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
        assert [len(line["message"].get("tool_calls", ())) for line in lines].count(1) == 2
        assert [call["function"]["arguments"]["city"] for call in calls] == ["Ulm", "Bonn"]
        assert [call["function"]["index"] for call in calls] == [0, 1] and len({call["id"] for call in calls}) == 2
        whole = found.server.post("/api/chat", **body, stream=False).json()["message"]["tool_calls"]
        assert [call["function"] for call in whole] == [call["function"] for call in calls]


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.STOP])
def test_half_a_call_is_no_call(plain: Scripted, finish: FinishReason) -> None:
    end = CALL.index("}") + 1  # of the arguments
    for size in range(end - 20, end):
        with plain.saying(CALL[:size]) as found:
            found.engine.finish = finish
            answer = found.chat(tools=[WEATHER])
            assert answer.done_reason == ("length" if finish is FinishReason.LENGTH else "stop")
            assert not answer.message.tool_calls
    assert answer.message.content == 'get_weather {"city": "Ulm"', "what was written is shown"


# ---- thinking


def test_thoughts_are_apart(plain: Scripted) -> None:
    with plain.saying(THOUGHT) as found:
        for ask in (found.chat, lambda **more: found.client.generate(NAME, "hello", **more)):
            whole, chunks = ask(), list(ask(stream=True))
            said = whole.message if ask == found.chat else whole
            text = said.content if ask == found.chat else said.response
            assert (text, said.thinking.strip()) == ("Good morning.", "It is a greeting.")
            parts = [chunk.message if ask == found.chat else chunk for chunk in chunks]
            assert "".join(part.thinking or "" for part in parts) == said.thinking
            assert chunks[-1].eval_count == whole.eval_count == len(THOUGHT) + 1


def test_think_is_the_switch_of_the_model(plain: Scripted) -> None:
    off = "<think>\n\n</think>\n\n"
    for think in (None, True, "low", "max"):
        plain.chat(think=think)
        assert not plain.prompts[-1].endswith(off)
    plain.chat(think=False)
    assert plain.prompts[-1].endswith(off)
    plain.client.generate(NAME, "hello", think=False)
    assert plain.prompts[-1].endswith(off)


def test_think_turns_on_what_is_off_by_default() -> None:
    with scripted(template=GEMMA, model_type="gemma4") as found:
        for think, thinks in ((None, False), (False, False), (True, True), ("high", True)):
            found.chat(think=think)
            assert ("<|think|>" in found.prompts[-1]) == thinks


def test_levels_of_thinking() -> None:
    with scripted("<|channel|>final<|message|>Yes.", GPT_OSS, "gpt_oss") as found:
        for think, level in ((None, "medium"), (True, "medium"), ("low", "low"), ("high", "high"), ("max", "high")):
            assert found.chat(think=think).message.content == "Yes."
            assert f"Reasoning: {level}" in found.prompts[-1]
        assert "low, medium, high" in found.error(think=False)


def test_a_model_that_does_not_think() -> None:
    with scripted(template=TURNS) as found:
        assert found.chat(think=False).message.content == "Good morning."
        for think in (True, "low"):
            assert found.error(think=think).startswith(f"'{NAME}' does not support thinking")


# ---- format and options


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(("form", "kind"), [("json", "json_object"), (SCHEMA, "json_schema"), ({}, "json_schema")])
def test_format_is_a_grammar(form: Any, kind: str) -> None:
    with scripted('{"city": "Ulm"}', TURNS) as found:
        for ask in ({"raw": True}, {}):
            found.client.generate(NAME, "hello", format=form, **ask)
            assert found.params.grammar and found.params.grammar.kind == kind
        found.chat(format=form)
        assert found.params.grammar and found.params.grammar.kind == kind
        assert found.params.grammar.text == ("" if form == "json" else json.dumps(form))
        found.chat(format="")
        assert found.params.grammar is None


def test_options_are_sampling(plain: Scripted) -> None:
    given = {
        "temperature": 0.5, "top_p": 0.75, "top_k": 30, "min_p": 0.05, "seed": 7, "num_predict": 12, "stop": ["END"],
        "repeat_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": 0.125, "repeat_last_n": -1,
    }  # fmt: skip
    for ask in (lambda **more: plain.chat(**more), lambda **more: plain.client.generate(NAME, "hi", **more)):
        ask(options=given)
        params = plain.params
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.75, 30, 0.05)
        assert (params.seed, params.max_tokens, params.stop) == (7, 12, ("END",))
        assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, 0.25, 0.125)
    plain.client.generate(NAME, "hi", raw=True, options=given)
    assert (plain.params.max_tokens, plain.params.repetition_penalty, plain.params.seed) == (12, 1.5, 7)


def test_the_ends_of_num_predict_and_seed(plain: Scripted) -> None:
    plain.chat(options={"num_predict": 12.0, "seed": -1})
    assert plain.params.max_tokens == 12 and plain.params.seed is None
    for number in (-1, -2):
        plain.chat(options={"num_predict": number})
        assert plain.params.max_tokens > 4096 and plain.params.repetition_limit > 0, "as if nothing were asked for"
    plain.chat(options={"stop": "END"})
    assert plain.params.stop == ("END",)


@pytest.mark.parametrize(
    "options",
    [
        {"num_ctx": 1 << 20}, {"num_ctx": 16}, {"num_gpu": 99, "num_thread": 4, "num_batch": 512, "main_gpu": 1},
        {"use_mmap": True, "use_mlock": True, "low_vram": True, "numa": True, "f16_kv": True, "vocab_only": False},
        {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "typical_p": 1.0, "tfs_z": 1.0, "num_keep": 4},
        {"repeat_last_n": 64, "penalize_newline": False, "repeat_penalty": 1.0}, {"penalize_newline": True},
        {"repeat_penalty": 1.2, "repeat_last_n": -1, "penalize_newline": True}, {"draft_num_predict": 4}, {"new": 1},
    ],
)  # fmt: skip
def test_options_that_change_nothing_here(plain: Scripted, options: dict[str, Any]) -> None:
    answer = plain.server.post("/api/chat", model=NAME, messages=USER, options=options, keep_alive="5m", stream=False)
    assert answer.status_code == 200, answer.text
    assert answer.json()["message"]["content"] == "Good morning."


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mirostat": 2}, "mirostat is not supported"),
        ({"typical_p": 0.5}, "typical_p is not supported"),
        ({"tfs_z": 0.5}, "tfs_z is not supported"),
        ({"repeat_penalty": 1.2, "repeat_last_n": 64}, "options.repeat_last_n is 64"),
        ({"presence_penalty": 1, "repeat_last_n": 0}, "options.repeat_last_n is 0"),
        ({"frequency_penalty": 1, "penalize_newline": False}, "options.penalize_newline is false"),
        ({"temperature": -1}, "options.temperature is -1"),
        ({"top_p": 2}, "options.top_p is 2"),
        ({"min_p": 2}, "options.min_p is 2"),
        ({"top_k": -5}, "options.top_k is -5"),
        ({"repeat_penalty": 0}, "options.repeat_penalty is 0"),
        ({"presence_penalty": 3}, "options.presence_penalty is 3"),
        ({"num_predict": 0}, "options.num_predict is 0"),
        ({"num_predict": -3}, "options.num_predict is -3"),
    ],
)
def test_options_that_cannot_be_kept(plain: Scripted, options: dict[str, Any], words: str) -> None:
    for path in ("/api/chat", "/api/generate"):
        assert plain.error(path, options=options).startswith(words)


def test_log_probabilities(plain: Scripted) -> None:
    whole = plain.chat(logprobs=True, top_logprobs=1)
    assert "".join(row.token for row in whole.logprobs) == "Good morning."
    assert whole.logprobs[0].logprob == whole.logprobs[0].top_logprobs[0].logprob == -0.5
    chunks = list(plain.chat(stream=True, logprobs=True))
    assert "".join(row.token for chunk in chunks for row in chunk.logprobs or []) == "Good morning."
    assert plain.chat(top_logprobs=3).logprobs is None and plain.params.logprobs is None
    assert plain.client.generate(NAME, "hi", raw=True, logprobs=True).logprobs[0].token == "G"
    assert plain.error(logprobs=True, top_logprobs=50).startswith("top_logprobs is 50")


def test_log_probabilities_of_markup_come_with_the_next_line(plain: Scripted) -> None:
    with plain.saying(CALL, size=500) as found:
        lines = lines_of(found.server.post("/api/chat", model=NAME, messages=USER, tools=[WEATHER], logprobs=True))
        assert "".join(row["token"] for line in lines for row in line.get("logprobs", ())) == CALL


# ---- generate


def test_generate(plain: Scripted) -> None:
    answer = plain.client.generate(NAME, "hello", system="Be brief.")
    assert answer.response == "Good morning." and answer.done_reason == "stop" and answer.eval_count == 14
    assert plain.prompts[-1].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>")
    chunks = list(plain.client.generate(NAME, "hello", stream=True))
    assert "".join(chunk.response for chunk in chunks) == "Good morning." and chunks[-1].done


def test_a_raw_prompt_is_as_it_stands(plain: Scripted) -> None:
    answer = plain.client.generate(NAME, "Once upon", raw=True, think=False, system="", template="", context=[])
    assert plain.prompts[-1] == "Once upon" and answer.response == "Good morning." and plain.params.continues
    with scripted(THOUGHT, template=None) as base:
        assert base.client.generate(NAME, "Once upon", raw=True).response == THOUGHT
        assert "no chat template" in base.error("/api/generate")


@pytest.mark.parametrize("prompt", ["", None])
def test_an_empty_prompt_loads_the_model(plain: Scripted, prompt: str | None) -> None:
    before = len(plain.engine.seen)
    assert plain.client.generate(NAME, prompt, keep_alive=-1).done_reason == "load"
    (line,) = plain.client.generate(NAME, prompt, stream=True)
    assert line.done and line.done_reason == "load" and line.response == "" and len(plain.engine.seen) == before


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"suffix": "end"}, "suffix is not supported"),
        ({"context": [1, 2]}, "context is not supported"),
        ({"images": ["aGk="]}, "images is not empty"),
        ({"raw": True, "system": "x"}, "raw leaves out"),
        ({"raw": True, "think": True}, "raw leaves out"),
    ],
)
def test_fields_of_generate_that_cannot_be_kept(plain: Scripted, body: dict[str, Any], words: str) -> None:
    assert plain.error("/api/generate", **body).startswith(words)


# ---- with the real engine


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_the_real_engine(tiny_server: Live) -> None:
    client = ollama.Client(host=tiny_server.url)
    name, options = "tiny:latest", {"temperature": 0, "num_predict": 24}
    whole = client.chat(name, USER, options=options)
    chunks = list(client.chat(name, USER, options=options, stream=True))
    assert "".join(chunk.message.content for chunk in chunks) == whole.message.content
    assert whole.done_reason == "length" and whole.eval_count == chunks[-1].eval_count == 24
    assert 0 < whole.prompt_eval_duration + whole.eval_duration <= whole.total_duration
    assert len(client.chat(name, USER, options=options, logprobs=True).logprobs) == 24
    raw = client.generate(name, "hello", raw=True, options=options)
    assert raw.prompt_eval_count < whole.prompt_eval_count and raw.eval_count == 24
    for ask in ({}, {"raw": True}):
        assert json.loads(client.generate(name, "hello", format=CITY, **ask).response) == {"city": "Ulm"}
    message = client.chat(name, USER, format=CITY, tools=[{"type": "function", "function": {"name": "f"}}]).message
    assert message.tool_calls or json.loads(message.content) == {"city": "Ulm"}, "a call, or an answer in the format"
    with pytest.raises(ollama.ResponseError, match="JSON schema cannot be used") as caught:
        client.chat(name, USER, format={"type": "string", "pattern": "("})
    assert caught.value.status_code == 400


# ---- errors


def test_errors_reach_the_client(plain: Scripted) -> None:
    for ask in (
        lambda: plain.chat(model="other"),
        lambda: list(plain.chat(model="other", stream=True)),
        lambda: plain.client.show("other"),
    ):
        with pytest.raises(ollama.ResponseError, match="model 'other' not found") as caught:
            ask()
        assert caught.value.status_code == 404
    assert plain.error(status=404, model=f"{NAME}:q4").startswith(f"model '{NAME}:q4' not found")
    for path, body in (("/api/chat", {"model": ""}), ("/api/generate", {"model": None}), ("/api/show", {"model": ""})):
        assert plain.error(path, **body).startswith("model is required")


def test_a_long_prompt_is_refused(plain: Scripted) -> None:
    assert "maximum context length is 4096" in plain.error(messages=[{"role": "user", "content": "a " * 9000}])
    assert "maximum context length is 4096" in plain.error("/api/generate", prompt="a " * 9000, raw=True)


def test_an_error_before_the_stream_is_a_status(plain: Scripted) -> None:
    with plain.saying(EngineError("the engine ended", True)) as found:
        with pytest.raises(ollama.ResponseError, match="engine ended") as caught:
            list(found.chat(stream=True))
        assert caught.value.status_code == 503


def test_an_error_in_a_stream_is_its_last_line(plain: Scripted) -> None:
    with plain.saying("abcdefghi") as found:
        found.engine.delay = 0.05
        with found.server.http.stream("POST", "/api/chat", json={"model": NAME, "messages": USER}) as answer:
            lines = answer.iter_lines()
            assert json.loads(next(lines))["message"]["content"] == "abc"
            found.engine.stopped = True
            rest = [json.loads(line) for line in lines]
        assert rest[-1].keys() == {"error"} and "shutting down" in rest[-1]["error"]


def test_pings_are_lines_without_text(plain: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PING", 0.05)
    with plain.saying("abcdef") as found:
        for path, body in (("/api/chat", {"messages": USER}), ("/api/generate", {"prompt": "hello"})):
            found.engine.delay = 0.2
            chunks = lines_of(found.server.post(path, model=NAME, **body))
            texts = [chunk["message"]["content"] if path == "/api/chat" else chunk["response"] for chunk in chunks]
            assert texts[0] == "abc" and "".join(texts) == "abcdef", "a status is still possible before the first text"
            assert texts.count("") >= 2 and [chunk["done"] for chunk in chunks].count(True) == 1
        assert "".join(chunk.message.content for chunk in found.chat(stream=True)) == "abcdef"


def test_a_client_that_hangs_up_ends_its_request(plain: Scripted) -> None:
    with plain.saying("x" * 3000) as found:
        found.engine.delay = 0.02
        with found.server.http.stream("POST", "/api/chat", json={"model": NAME, "messages": USER}) as answer:
            next(answer.iter_lines())
        found.server.wait_for(lambda: found.engine.aborted)


def test_routes_that_change_models_are_refused_by_name(plain: Scripted) -> None:
    client = plain.client
    for path, ask in {
        "/api/pull": lambda: client.pull("other"),
        "/api/push": lambda: list(client.push("other", stream=True)),
        "/api/create": lambda: client.create("other", from_=NAME),
        "/api/copy": lambda: client.copy(NAME, "other"),
        "/api/delete": lambda: client.delete(NAME),
    }.items():
        with pytest.raises(ollama.ResponseError, match=f"{path} is not supported: .*'{NAME}'.*--model") as caught:
            ask()
        assert caught.value.status_code == 400
    for path, ask in {
        "/api/embed": lambda: client.embed(NAME, "x"),
        "/api/embeddings": lambda: client.embeddings(NAME, "x"),
    }.items():
        with pytest.raises(ollama.ResponseError, match=f"{path} is not supported: .*embeddings"):
            ask()


def test_the_served_model_is_pulled_already(plain: Scripted) -> None:
    assert plain.client.pull(f"{NAME}:latest").status == "success"
    assert [line.status for line in plain.client.pull(NAME, stream=True)] == ["success"]


def test_a_key_is_asked_for_in_ollamas_shape() -> None:
    with scripted(api_key="right") as found:
        with pytest.raises(ollama.ResponseError, match="No API key") as caught:
            found.chat()
        assert caught.value.status_code == 401
        key = {"Authorization": "Bearer right"}
        assert ollama.Client(host=found.server.url, headers=key).chat(NAME, USER).done


ONE = {"role": "user", "content": "x"}
CALLED: Any = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
MALFORMED: list[tuple[str, Any]] = [
    *(("/api/chat", raw) for raw in (b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 9999, b"1" * 9999)),
    *(
        ("/api/chat", {"model": NAME, "messages": messages})
        for messages in (
            "hello", {}, 1, [1], [[]], ["hello"], [{}], [{"content": "x"}], [ONE | {"role": "robot"}],
            [ONE | {"role": None}], [ONE | {"content": 1}], [ONE | {"content": ["x"]}], [ONE | {"content": {}}],
            [ONE | {"images": ["aGk="]}], [ONE | {"images": "aGk="}], [ONE | {"thinking": 1}],
            [ONE | {"tool_name": []}], [ONE | {"tool_call_id": 1}], [ONE] * 2001,
            [CALLED | {"tool_calls": {}}], [CALLED | {"tool_calls": [{}]}], [CALLED | {"tool_calls": ["f"]}],
            [CALLED | {"tool_calls": [{"function": {"name": "", "arguments": {}}}]}],
            [CALLED | {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
            [CALLED | {"tool_calls": [{"function": {"name": "f", "arguments": []}}]}],
            [CALLED | {"tool_calls": [{"function": {"name": "f", "arguments": {"x": float("nan")}}}]}],
            [CALLED | {"tool_calls": [{"function": {"name": "f" * 200, "arguments": {}}}]}],
        )
    ),
    *(
        ("/api/chat", {"model": NAME, "messages": [ONE]} | more)
        for more in (
            {"model": 1}, {"model": ["x"]}, {"stream": "maybe"}, {"stream": 2}, {"format": "xml"}, {"format": 1},
            {"format": ["json"]}, {"format": {"x": float("inf")}}, {"format": {"x": "y" * 70000}}, {"think": "deeply"},
            {"think": 3}, {"think": {}}, {"options": []}, {"options": "hot"}, {"options": {"temperature": "hot"}},
            {"options": {"temperature": float("nan")}}, {"options": {"top_k": 1.5}}, {"options": {"seed": 1 << 64}},
            {"options": {"seed": "x"}}, {"options": {"num_predict": 1 << 40}}, {"options": {"num_predict": "all"}},
            {"options": {"stop": [""]}}, {"options": {"stop": 1}}, {"options": {"stop": ["x"] * 99}},
            {"options": {"stop": ["x" * 999]}}, {"options": {"num_ctx": "big"}}, {"options": {"mirostat": "x"}},
            {"options": {"repeat_last_n": {}}}, {"options": {"penalize_newline": "no way"}}, {"keep_alive": {}},
            {"tools": {}}, {"tools": ["f"]}, {"tools": [{}]}, {"tools": [{"type": "function"}]},
            {"tools": [{"type": "web", "function": {"name": "f"}}]}, {"tools": [{"function": {"name": "a b"}}]},
            {"tools": [{"function": {"name": "f", "parameters": []}}]}, {"tools": [WEATHER, WEATHER]},
            {"tools": [WEATHER] * 200}, {"logprobs": "x"}, {"logprobs": True, "top_logprobs": -1},
            {"logprobs": True, "top_logprobs": "x"},
        )
    ),
    *(
        ("/api/generate", {"model": NAME, "prompt": "x"} | more)
        for more in (
            {"prompt": 1}, {"prompt": ["x"]}, {"prompt": {}}, {"system": 1}, {"raw": "x"}, {"template": 1},
            {"context": "x"}, {"images": "x"}, {"suffix": []}, {"format": 7}, {"options": 1}, {"model": {}},
        )
    ),
    *(("/api/show", body) for body in ({}, [], {"model": 1}, {"name": []}, {"model": "other"}, b"x")),
    *(("/api/pull", body) for body in ({}, {"model": 1}, b"{")),
    ("/api/delete", {}), ("/api/nothing", {}), ("/api/tags", {}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_body_gets_one_sentence(plain: Scripted, path: str, body: Any) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = plain.server.http.post(path, content=raw, headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json().keys() == {"error"} and answer.headers["content-type"] == "application/json"
    assert re.fullmatch(r".{10,600}[.?]", answer.json()["error"], re.DOTALL), answer.text
