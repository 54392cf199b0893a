"""Fields of vLLM, SGLang and llama.cpp: constraints of the text, ids in the answer, and a choice among the tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer

from sparkdraft.core import GrammarSpec
from sparkdraft.server.prompts import CALL_MARKS, ModelText, free_text
from sparkdraft.server.protocol.chat import ChatRequest
from sparkdraft.text.grammar import GrammarCompiler
from sparkdraft.text.tokenizer import Tokenizer
from sparkdraft.text.tools import FORMATS
from tests.models.tiny import byte_tokenizer
from tests.server.conftest import FakeClient, Live, live
from tests.server.test_fields import error_of, text_of
from tests.text.test_families import GEMMA, GPT_OSS, HERMES, QWEN3, QWEN35, THINKING_ONLY

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER: Any = [{"role": "user", "content": "hello"}]
DAY = {"type": "object", "properties": {"day": {"enum": [1, 2]}}, "required": ["day"], "additionalProperties": False}
DAYS = r'\{\s*"day"\s*:\s*[12]\s*\}'
GBNF = 'root ::= item ("," item)?\nitem ::= "x" [0-9]{2}'
LARK = 'start: item ("," item)?\nitem: "x" /[0-9]{2}/'
ITEMS = r"x\d\d(,x\d\d)?"
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"{name}s"}} for name in ("read", "write", "rm")
]
# Field, its value, and a regex of what may be written.
CONSTRAINTS: list[tuple[str, Any, str]] = [
    ("structured_outputs", {"json": DAY}, DAYS),
    ("structured_outputs", {"json": json.dumps(DAY)}, DAYS),
    ("structured_outputs", {"regex": "a/b|[cd]{3}"}, "a/b|[cd]{3}"),
    ("structured_outputs", {"choice": ["yes", 'n"o\\', "é\n"]}, 'yes|n"o\\\\|é\n'),
    ("structured_outputs", {"grammar": GBNF, "regex": None, "_backend": None}, ITEMS),
    ("structured_outputs", {"grammar": LARK}, ITEMS),
    ("guided_json", DAY, DAYS),
    ("guided_json", json.dumps(DAY), DAYS),
    ("guided_regex", r"[0-9]{2}\/[0-9]|x\\", r"[0-9]{2}/[0-9]|x\\"),
    ("guided_choice", ["left", "right"], "left|right"),
    ("guided_grammar", LARK, ITEMS),
    ("guided_grammar", GBNF, ITEMS),
    ("regex", "^[ab]{4}$", "[ab]{4}"),
    ("ebnf", GBNF, ITEMS),
    ("grammar", GBNF, ITEMS),
    ("grammar", "%llguidance {}\n" + LARK, ITEMS),
    ("json_schema", DAY, DAYS),
    ("json_schema", json.dumps(DAY), DAYS),
    ("response_format", {"type": "json_object", "schema": DAY}, DAYS),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "day", "schema": DAY}}, DAYS),
]


def compiler(*special: str) -> tuple[RawTokenizer, GrammarCompiler]:
    raw = byte_tokenizer()
    raw.add_special_tokens(list(special))
    return raw, GrammarCompiler(Tokenizer(raw, {"eos_token": "</s>"}), raw.get_vocab_size())


def takes(spec: GrammarSpec | None, text: str, *special: str) -> bool:
    """Whether the engine would let a model write this text and end there."""
    assert spec is not None
    raw, compiled = compiler(*special)
    state = compiled.compile(spec).start()
    state.advance(raw.encode(text, add_special_tokens=False).ids)
    return not state.failed and (state.finished or bool(state.masks()[0][0] & 4))  # bit 2 is </s>


def model_text(template: str, model_type: str = "llama", tool_parser: str = "auto") -> ModelText:
    info = FakeClient(lambda prompt, params: "", template=template).info
    assert info
    return ModelText(replace(info, model_type=model_type, max_model_len=8192), {}, tool_parser=tool_parser)


def request(**body: Any) -> ChatRequest:
    asked = ChatRequest.model_validate({"messages": USER} | body)
    asked.check()
    return asked


# ---- constraints


@pytest.mark.parametrize(
    ("field", "value", "pattern"), CONSTRAINTS, ids=[f"{c[0]}-{i}" for i, c in enumerate(CONSTRAINTS)]
)
def test_every_answer_follows_its_constraint(tiny_server: Live, field: str, value: Any, pattern: str) -> None:
    client = tiny_server.openai
    asked: Any = {"model": "tiny", "temperature": 1.0, "max_tokens": 60, "n": 3, "extra_body": {field: value}}
    chat = client.chat.completions.create(messages=USER, **asked)
    texts = [choice.message.content or "" for choice in chat.choices]
    plain = client.completions.create(prompt="hello", **asked)
    texts += [choice.text for choice in plain.choices]
    assert {choice.finish_reason for choice in (*chat.choices, *plain.choices)} == {"stop"}
    assert len(texts) == 6 and all(re.fullmatch(pattern, text) for text in texts), texts


def test_any_json_object(smollm2: Live) -> None:
    for body in ({"structured_outputs": {"json_object": True}}, {"guided_json": {"type": "object"}}):
        answer = smollm2.chat(
            "Answer with JSON: the city Paris and its country.", temperature=0, max_tokens=200, **body
        )
        assert isinstance(json.loads(text_of(answer)), dict)


def test_a_stream_follows_its_constraint_too(tiny_server: Live) -> None:
    chunks = tiny_server.events(CHAT, messages=USER, guided_choice=["left", "right"], temperature=1.0)
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) in ("left", "right")


BROKEN: dict[str, Any] = {
    "guided_regex": "(a",
    "guided_grammar": "start: nothing",
    "structured_outputs": {"regex": "a[2"},
    "guided_json": "{",
    "json_schema": {"type": "strong"},
}


@pytest.mark.parametrize("field", BROKEN)
def test_a_grammar_that_cannot_be_compiled_is_a_400(tiny_server: Live, field: str) -> None:
    for path, body in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "x"})):
        for stream in (False, True):
            message = error_of(tiny_server.post(path, **body, **{field: BROKEN[field]}, stream=stream), field)
            assert re.search("cannot be used|is not JSON", message) and message.endswith(".")


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"guided_json": 5}, "guided_json", "it must be an object or a string"),
        ({"guided_choice": ["a", 5]}, "guided_choice[1]", "it must be a string"),
        ({"grammar": "root ::= a"}, "grammar", "to the rule a, which it does not define"),
        ({"ebnf": 'a ::= "a"'}, "ebnf", "no rule named root"),
        ({"regex": "x" * 70_000}, "regex", "it must be a string of at most 65536 characters"),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json", "65,536 is the limit"),
        ({"regex": "a", "ebnf": "b"}, "ebnf", "regex and ebnf both constrain the answer"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "response_format and regex both"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs", "send only one of them"),
        ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs", "has none of json, regex, choice"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "has 2 of json, regex, choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag is not supported"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, "structured_outputs", "not supported"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "is an empty list"),
        ({"structured_outputs": 5}, "structured_outputs", "it must be an object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "has no json_schema.schema"),
    ],
)
def test_mistakes_in_constraints(echo: Live, body: dict[str, Any], param: str, told: str) -> None:
    for path, more in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "x"})):
        message = error_of(echo.post(path, **more, **body), param)
        assert told in message and message.endswith(".")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "rm"}}])
def test_a_constraint_of_the_text_and_a_call_that_must_come(echo: Live, choice: Any) -> None:
    message = error_of(echo.chat(regex="a", tools=TOOLS, tool_choice=choice), "regex")
    assert message == "regex constrains the text and tool_choice asks for a call; send only one."


def test_values_that_constrain_nothing() -> None:
    client = FakeClient(lambda prompt, params: "ok")
    with live(client) as server:
        fields = {field for field, _, _ in CONSTRAINTS} - {"response_format"}
        asked: list[dict[str, Any]] = [{field: off} for field in fields for off in (None, "", [], False)]
        asked += [{"response_format": {"type": "text"}}, {"structured_outputs": {}}]
        asked += [{"structured_outputs": {"json": None, "json_object": False, "_backend": None}}]
        for body in asked:
            for path, more in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "x"})):
                assert server.post(path, **more, **body).status_code == 200, body
                assert client.seen[-1].grammar is None, body
        for field in ("guided_json", "json_schema"):
            assert server.chat(**{field: {}}).status_code == 200
            assert client.seen[-1].grammar == GrammarSpec("json_schema", "{}"), "any JSON"


@pytest.mark.parametrize(
    ("field", "value", "pattern"), CONSTRAINTS, ids=[f"{c[0]}-{i}" for i, c in enumerate(CONSTRAINTS)]
)
def test_a_constraint_holds_after_the_thoughts(field: str, value: Any, pattern: str) -> None:
    good = next(t for t in ('{"day": 1}', "a/b", "yes", "x12", "12/3", "left", "abab") if re.fullmatch(pattern, t))
    text = model_text(THINKING_ONLY)
    for tools in (None, TOOLS):
        spec = text.prompt(request(**{field: value}, tools=tools)).params.grammar
        assert takes(spec, f"I wonder {{[</think>\n\n{good}")
        assert not takes(spec, good) and not takes(spec, f"hm</think>\n\nwell, {good}")
        call = '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'
        assert takes(spec, f"hm</think>\n\n{call}") == bool(tools)
    asked = request(**{field: value}, chat_template_kwargs={"enable_thinking": False})
    assert takes(model_text(QWEN3).prompt(asked).params.grammar, good), "its thoughts are closed"


# ---- ids


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def test_ids_of_a_chat() -> None:
    said = 'Hi.\n<tool_call>\n{"name": "rm", "arguments": {"a": [1, 2]}}\n</tool_call>'
    client = FakeClient(lambda prompt, params: said)
    raw = client.raw
    with live(client, tool_parser="hermes") as server:
        asked: Any = {"messages": USER, "tools": TOOLS, "return_token_ids": True, "n": 2}
        whole = server.post(CHAT, **asked).json()
        prompt = server.post("/tokenize", messages=USER, tools=TOOLS).json()["tokens"]
        assert whole["prompt_token_ids"] == prompt
        for choice in whole["choices"]:
            assert raw.decode(choice["token_ids"]) == said and choice["token_ids"][-1] == 2, "with the end"
            assert choice["message"]["tool_calls"][0]["function"]["name"] == "rm"
        chunks = server.events(CHAT, **asked)
        assert chunks[0]["prompt_token_ids"] == prompt
        assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
        for choice in whole["choices"]:
            parts = [c["choices"][0]["token_ids"] for c in chunks if c["choices"][0]["index"] == choice["index"]]
            assert len(parts) > 4 and joined(parts) == choice["token_ids"]
        plain = server.chat(stream=False).json()
        assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


def test_ids_of_completions() -> None:
    client = FakeClient(lambda prompt, params: f"{prompt}!", size=2)
    with live(client) as server:
        asked: Any = {"prompt": ["ab", "cde"], "return_token_ids": True, "n": 2}
        whole = server.post(COMPLETIONS, **asked).json()["choices"]
        prompts = [server.post("/tokenize", prompt=prompt).json()["tokens"] for prompt in asked["prompt"]]
        assert [choice["prompt_token_ids"] for choice in whole] == [prompts[i // 2] for i in range(4)]
        assert [client.raw.decode(choice["token_ids"]) for choice in whole] == ["ab!", "ab!", "cde!", "cde!"]
        chunks = [chunk["choices"][0] for chunk in server.events(COMPLETIONS, **asked)]
        for choice in whole:
            parts = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
            assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
            assert not any("prompt_token_ids" in part for part in parts[1:])
            assert joined(part["token_ids"] for part in parts) == choice["token_ids"]


def test_ids_are_the_engines_own(tiny_server: Live) -> None:
    for path, body in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "hello"})):
        asked = body | {"max_tokens": 12, "ignore_eos": True, "temperature": 0, "skip_special_tokens": False}
        answer = tiny_server.post(path, **asked, return_token_ids=True).json()
        choice, usage = answer["choices"][0], answer["usage"]
        assert len(choice["token_ids"]) == usage["completion_tokens"] == 12
        ids = answer["prompt_token_ids"] if path == CHAT else choice["prompt_token_ids"]
        assert ids == tiny_server.post("/tokenize", **body).json()["tokens"] and len(ids) == usage["prompt_tokens"]
        written = tiny_server.post("/detokenize", tokens=choice["token_ids"]).json()["prompt"]
        assert written.startswith((choice["message"]["content"] if path == CHAT else choice["text"]).rstrip("\ufffd"))
        streamed = tiny_server.events(path, **asked, return_token_ids=True)
        assert joined(chunk["choices"][0]["token_ids"] for chunk in streamed) == choice["token_ids"]


# ---- some of the tools


def choice_of(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def call_of(form: str, name: str) -> str:
    return {
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>',
        "generic": f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>',
        "qwen3_xml": f"<tool_call>\n<function={name}>\n</function>\n</tool_call>",
        "gemma4": f"<|tool_call>call:{name}{{}}<tool_call|>",
        "harmony": f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{}}",
    }[form]


SPECIAL = {
    "gemma4": ("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'),
    "harmony": ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"),
}
MODELS = {  # the template of each format, and what comes before an answer and a call
    "hermes": (HERMES + "{% for m in messages %}{{ m.content }}{% endfor %}", "llama", ""),
    "generic": ("{% for m in messages %}{{ m.content }}{% endfor %}", "llama", ""),
    "qwen3_xml": (QWEN35, "qwen3_5", "hm</think>\n\n"),
    "gemma4": (GEMMA, "gemma4", ""),
    "harmony": (GPT_OSS, "gpt_oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"),
}


def test_every_format_is_known() -> None:
    assert CALL_MARKS.keys() == FORMATS.keys() == MODELS.keys()


@pytest.mark.parametrize("form", MODELS)
def test_a_call_of_another_tool_is_not_written(form: str) -> None:
    template, model_type, before = MODELS[form]
    special = SPECIAL.get(form, ())
    text = model_text(template, model_type)
    assert text.tools.name == form
    auto, required = (
        text.prompt(request(tools=TOOLS, tool_choice=choice_of(mode, "read", "write"))) for mode in ("auto", "required")
    )
    for name in ("read", "write", "rm"):
        for prompt in (auto, required):
            assert takes(prompt.params.grammar, before + call_of(form, name), *special) == (name != "rm"), name
    final = "<|channel|>final<|message|>" if form == "harmony" else ""
    for said in ("Done.", "", "a < b <t <tool <tool_cal", "<table><|x", "\n\n{}"):
        assert takes(auto.params.grammar, before + final + said, *special), said
        assert not takes(required.params.grammar, before + final + said, *special), said
    if form != "harmony":  # its calls are messages, which follow no text
        for said in ("Let me look.\n", "<<"):
            assert takes(auto.params.grammar, before + said + call_of(form, "read"), *special)
            assert not takes(auto.params.grammar, before + said + call_of(form, "rm"), *special)
    free = text.prompt(request(tools=TOOLS))
    assert auto.ids == free.ids and free.params.grammar is None, "the prompt begins as before"


def test_text_without_marks() -> None:
    spec = GrammarSpec("lark", "start: free\n" + free_text(("<tool_call>", "<function=")))
    for said in ("<function", "<functio=", "<<function", "tool_call>", "x<tool_call", "<tool_<tool_call"):
        assert takes(spec, said), said
    for said in ("<function=", "a<tool_call>", "<<function=x", "<tool_<tool_call>", "<function<function="):
        assert not takes(spec, said), said


def test_what_reads_as_a_call_of_another_tool_is_no_call() -> None:
    """Calls without tags, and calls within thoughts, which no grammar keeps from the model."""
    bare, thought = (
        '{"name": "%s", "arguments": {}}',
        "<tool_call>\n<function=%s>\n</function>\n</tool_call>\n</think>ok",
    )
    for said, template, model_type in ((bare, MODELS["generic"][0], "llama"), (thought, QWEN35, "qwen3_5")):
        client = FakeClient(lambda prompt, params, said=said: said % "rm", template=template)
        assert client.info
        client.info = replace(client.info, model_type=model_type, max_model_len=8192)
        with live(client) as server:
            free = server.chat(tools=TOOLS).json()["choices"][0]
            assert free["message"]["tool_calls"][0]["function"]["name"] == "rm"
            held = server.chat(tools=TOOLS, tool_choice=choice_of("auto", "read")).json()["choices"][0]
            assert "tool_calls" not in held["message"] and held["finish_reason"] == "stop"


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_a_real_model_calls_only_allowed_tools(smollm2: Live, mode: str) -> None:
    for seed in range(3):
        answer = smollm2.openai.chat.completions.create(
            model=smollm2.service.name,
            messages=[{"role": "user", "content": "Remove the file a.txt with rm."}],
            tools=TOOLS,  # type: ignore[arg-type]
            tool_choice=choice_of(mode, "read", "write"),  # type: ignore[arg-type]
            temperature=1.0,
            seed=seed,
            max_tokens=48,
        )
        calls = answer.choices[0].message.tool_calls or []
        assert all(call.type == "function" and call.function.name in ("read", "write") for call in calls)
        assert calls or mode == "auto"


@pytest.mark.parametrize(
    ("choice", "param", "told"),
    [
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools", "is missing"),
        (choice_of("never", "rm"), "tool_choice.allowed_tools.mode", "it must be 'auto' or 'required'"),
        (choice_of("auto"), "tool_choice.allowed_tools.tools", "is an empty list"),
        (choice_of("auto", "mv"), "tool_choice", "tool_choice names 'mv'; the tools are read, write, rm."),
        ("sometimes", "tool_choice", "it must be 'none', 'auto', 'required' or an object"),
        ({"type": "function"}, "tool_choice.function", "is missing"),
    ],
)
def test_mistakes_in_a_choice(echo: Live, choice: Any, param: str, told: str) -> None:
    assert told in error_of(echo.chat(tools=TOOLS, tool_choice=choice), param)


# ---- what other protocols set


def test_deferred_tools_are_not_shown_and_can_be_called() -> None:
    for form in ("hermes", "generic"):
        text = model_text("{{ tools | tojson if tools }}" + MODELS[form][0], tool_parser=form)
        prompts = []
        for deferred in ((), ("write",), ("read", "write", "rm")):
            named = {"type": "function", "function": {"name": "write"}}
            asked = request(tools=TOOLS, tool_choice=named, deferred_tools=["rm"], _deferred_tools=["rm"])
            assert not asked.deferred_tools, "a body cannot set it"
            asked.deferred_tools = deferred
            prompt = text.prompt(asked)
            assert takes(prompt.params.grammar, call_of(form, "write"))
            prompts.append(text.tokenizer.decode(prompt.ids))
        assert ["writes" in prompt for prompt in prompts] == [True, False, False]
        assert ["reads" in prompt for prompt in prompts] == [True, True, False]


def effort_of(text: ModelText, effort: str | None) -> str:
    asked = request(reasoning_effort=effort)
    asked.effort_is_hint = True
    return text.tokenizer.decode(text.prompt(asked).ids)


def test_an_effort_that_is_a_hint_is_never_refused() -> None:
    efforts = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "unheard-of", None)
    levels = [re.findall(r"Reasoning: (\w+)", effort_of(model_text(GPT_OSS, "gpt_oss"), each))[0] for each in efforts]
    assert levels == ["low", "low", "low", "medium", "high", "high", "high", "medium", "medium"]
    closed = [effort_of(model_text(QWEN35, "qwen3_5"), each).endswith("</think>\n\n") for each in efforts]
    assert closed == [True] + [False] * 8
    for template in (THINKING_ONLY, MODELS["generic"][0]):  # thinking without a switch, and none
        prompts = {effort_of(model_text(template), each) for each in efforts}
        assert len(prompts) == 1
    with live(FakeClient(lambda prompt, params: "ok")) as server:
        assert "does not think" in error_of(server.chat(reasoning_effort="high"), "reasoning_effort")
        error_of(server.chat(reasoning_effort="high", effort_is_hint=True), "reasoning_effort")


# ---- an answer that continues


@pytest.fixture(scope="module")
def thinker() -> Iterator[tuple[Live, list[str], list[str]]]:
    """A model that thinks and calls tools, with the prompts that reach it; says what the test puts into a list."""
    prompts: list[str] = []
    said: list[str] = []
    client = FakeClient(lambda prompt, params: prompts.append(prompt) or said[-1], template=QWEN3)
    assert client.info
    client.info = replace(client.info, model_type="qwen3")
    with live(client) as server:
        yield server, prompts, said


def test_a_continued_answer_with_tools_and_thoughts(thinker: tuple[Live, list[str], list[str]]) -> None:
    server, prompts, said = thinker
    messages = [*USER, {"role": "assistant", "content": "I look for"}]
    asked: Any = {"messages": messages, "continue_final_message": True, "tools": TOOLS}
    call = call_of("hermes", "read")
    for add in (None, False):
        said.append(f" it.\n{call}")
        choice = server.post(CHAT, **asked, add_generation_prompt=add).json()["choices"][0]
        assert prompts[-1].endswith("<|im_start|>assistant\nI look for")
        assert choice["message"]["content"] == " it." and choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "read"
    assert "set only one" in error_of(server.post(CHAT, **asked, add_generation_prompt=True), "continue_final_message")
    # Thoughts that the last message opened go on as thoughts.
    said.append("they ask.\n</think>\n\nHi.")
    asked["messages"] = [*USER, {"role": "assistant", "content": "<think>\n"}]
    message = server.post(CHAT, **asked).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("they ask.", "Hi.")
    # A grammar holds from where the message ends.
    client: Any = server.service.client
    asked["messages"] = messages
    server.post(CHAT, **asked | {"tools": None}, regex=" it[.]")
    assert takes(client.seen[-1].grammar, " it.")
    server.post(CHAT, **asked, tool_choice="required")
    assert takes(client.seen[-1].grammar, call) and not takes(client.seen[-1].grammar, " it.")


def test_a_prompt_without_the_answers_beginning_with_tools_and_thoughts(
    thinker: tuple[Live, list[str], list[str]],
) -> None:
    server, prompts, said = thinker
    said.append(f"<think>\nthey ask\n</think>\n\nHi.\n{call_of('hermes', 'rm')}")
    message = server.chat(tools=TOOLS, add_generation_prompt=False).json()["choices"][0]["message"]
    assert prompts[-1].endswith("hello<|im_end|>\n")
    assert (message["reasoning_content"], message["content"]) == ("they ask", "Hi.")
    assert message["tool_calls"][0]["function"]["name"] == "rm"
