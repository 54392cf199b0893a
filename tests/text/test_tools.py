"""Tool formats: real texts against the calls they mean, any cut against the whole, grammars against the parsers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import llguidance
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from sparkdraft.core import GrammarSpec
from sparkdraft.text.events import Content, Event, OnlyCalls, Parser, Reasoning, ToolArguments, ToolCall, chain, joined
from sparkdraft.text.reasoning import answer_rule
from sparkdraft.text.style import chat_style
from sparkdraft.text.tools.base import ToolFormat, functions
from sparkdraft.text.tools.calls import JsonScanner
from sparkdraft.text.tools.gemma4 import Gemma4
from sparkdraft.text.tools.generic import Generic
from sparkdraft.text.tools.harmony import Harmony
from sparkdraft.text.tools.hermes import Hermes
from sparkdraft.text.tools.qwen3_xml import Qwen3Xml

PLACE = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x"]}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather\nin a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "place": {"$ref": "#/$defs/place"},
                    "exact": {"type": ["boolean", "null"]},
                },
                "required": ["city"],
                "$defs": {"place": PLACE},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
FORMATS: dict[str, ToolFormat] = {f.name: f for f in (Hermes(), Generic(), Qwen3Xml(), Gemma4(), Harmony())}
PARIS = {"city": "Paris", "days": 3, "tags": ["a", 'b "c"'], "place": {"x": 1.5}}
ARGUMENTS = json.dumps(PARIS)

# One call of get_weather with PARIS, then one of now, in each format's own words.
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "generic": f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "qwen3_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    '</parameter>\n<parameter=tags>\n["a", "b \\"c\\""]\n</parameter>\n<parameter=place>\n{"x": 1.5}\n</parameter>\n'
    "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,tags:[<|"|>a<|"|>,<|"|>b "c"<|"|>],'
    "place:{x:1.5}}<tool_call|><|tool_call>call:now{}<tool_call|>",
    "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
    "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
}


def run(parser: Parser, pieces: Sequence[str]) -> list[Event]:
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return joined(events + parser.finish())


def cut(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def plain(events: Sequence[Event]) -> list[Any]:
    """Without the ids, which are drawn."""
    return [(e.index, e.name) if isinstance(e, ToolCall) else e for e in events]


def read(name: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, the arguments as text."""
    events = run(FORMATS[name].parser(TOOLS), [text])
    calls = [[e.name, ""] for e in events if isinstance(e, ToolCall)]
    for event in events:
        if isinstance(event, ToolArguments):
            calls[event.index][1] += event.text
    return "".join(e.text for e in events if isinstance(e, Content)), [(name, text) for name, text in calls]


def values(name: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    content, calls = read(name, text)
    return content, [(called, json.loads(arguments)) for called, arguments in calls]


def same_in_any_cut(make: Any, text: str, seed: int) -> list[Event]:
    """Also at every step: what was given out after a piece does not depend on how the text before was divided."""
    whole = run(make(), [text])
    rng = random.Random(seed)
    ends = sorted(rng.choices(range(len(text) + 1), k=5)) if text else []
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    for some in (cut(text, 1), cut(text, 2), cut(text, 3), cut(text, 7), pieces):
        assert plain(run(make(), some)) == plain(whole)
    for end in ends:
        early = joined(make().feed(text[:end]))
        parser = make()
        assert plain(joined([e for letter in text[:end] for e in parser.feed(letter)])) == plain(early)
    return whole


# ---- what the formats say


@pytest.mark.parametrize("name", CALLS)
def test_two_calls_with_text_before(name: str) -> None:
    before = (
        "<|channel|>final<|message|>Let me see.<|end|><|start|>assistant" if name == "harmony" else "Let me see.\n\n"
    )
    content, calls = values(name, before + CALLS[name])
    assert content == "Let me see."
    assert calls == [("get_weather", PARIS), ("now", {})]


@pytest.mark.parametrize("name", CALLS)
def test_ids_differ_and_indexes_count(name: str) -> None:
    calls = [e for e in run(FORMATS[name].parser(TOOLS), [CALLS[name]]) if isinstance(e, ToolCall)]
    assert [call.index for call in calls] == [0, 1]
    assert len({call.id for call in calls}) == 2 and all(call.id.startswith("call_") for call in calls)


@pytest.mark.parametrize("name", ["hermes", "generic", "gemma4", "harmony"])
def test_arguments_stream(name: str) -> None:
    parser, text = FORMATS[name].parser(TOOLS), CALLS[name]
    early = joined(parser.feed(text[: text.index("Par") + 3]))
    assert plain(early)[0] == (0, "get_weather")
    assert isinstance(early[1], ToolArguments) and early[1].text == '{"city": "Par'


def test_xml_values_come_when_they_are_complete() -> None:
    parser, text = Qwen3Xml().parser(TOOLS), CALLS["qwen3_xml"]
    middle = text.index("Par") + 3
    assert plain(parser.feed(text[:middle])) == [(0, "get_weather")]
    after = text.index("</parameter>") + len("</parameter>")
    assert parser.feed(text[middle:after]) == [ToolArguments(0, '{"city": "Paris"')]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("see <tool_call> in the docs", "see <tool_call> in the docs", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", {})]),
        ('<tool_call>{"name": "now", "arguments": "null"}</tool_call>', "", [("now", {})]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>ok', "ok", [("now", {"a": 1})]),
        ('<tool_call>{"name": "now", "parameters": {"a": 1}}</tool_call>', "", [("now", {"a": 1})]),
        ('<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", {"a": 1})]),
        ('<tool_call>{"name": "now", "arguments": {"a": 1}, "id": [1]}</tool_call>', "", [("now", {"a": 1})]),
        ('<tool_call>{"name": "now", "arguments": {"a": 1}}}</tool_call>', "", [("now", {"a": 1})]),
        ('<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call>', "", [("now", {"a": 1})]),
        ('<tool_call>{"name": "now", "arguments": {"a": "x\ny\\d", "b": [True, None]}}</tool_call>', "",
         [("now", {"a": "x\ny\\d", "b": [True, None]})]),
        ('<tool_call>{"name": "now", "arguments": {}}\n<tool_call>{"name": "now", "arguments": {}}', "",
         [("now", {}), ("now", {})]),
        ('<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n{"name": "f", "arguments": {}}\n</tool_call> So.', "So.",
         [("now", {"a": 1}), ("f", {})]),
        ('<tool_call>{"name": "now", "arguments": {}}\n{"a": 1}</tool_call>', '{"a": 1}</tool_call>', [("now", {})]),
        ('<tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>', "<tool_call>", [("now", {})]),
    ],
)  # fmt: skip
def test_hermes_as_models_write_it(text: str, content: str, calls: list[Any]) -> None:
    assert values("hermes", text) == (content, calls)
    same_in_any_cut(lambda: Hermes().parser(TOOLS), text, 0)


def test_half_a_call_stays_half() -> None:
    """Nothing of it is lost, and no client can run it."""
    text = '<tool_call>{"name": "now", "arguments": {"command": "rm -rf /tmp/x", "n": 12'
    assert read("hermes", text) == ("", [("now", '{"command": "rm -rf /tmp/x", "n": 12')])
    broken = '<tool_call>{"name": "now", "arguments": {"a": 1; "b"}}</tool_call> So.'
    assert read("hermes", broken) == ('; "b"}} So.', [("now", '{"a": 1')])
    for end in ("", "</parameter> x"):
        text = f"<tool_call><function=now><parameter=a>\nrm /tm{end}"
        assert read("qwen3_xml", text) == ("", [("now", f'{{"a": "rm /tm{end}')])
    for end in ("", "\n", "\n<para"):
        text = f"<tool_call><function=now><parameter=a>\nrm /tm\n</parameter>{end}"
        assert read("qwen3_xml", text) == (end.strip(), [("now", '{"a": "rm /tm"')])
    assert read("gemma4", '<|tool_call>call:now{a:<|"|>rm /tm') == ("", [("now", '{"a": "rm /tm')])
    assert read("gemma4", "<|tool_call>call:now{a:12") == ("", [("now", '{"a": 12')])


OPENINGS = dict.fromkeys(("hermes", "generic", "qwen3_xml"), ("<tool_call>",)) | {"gemma4": ("<|tool_call>",)}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_cut_anywhere_leave_no_markup_and_lose_no_complete_call(name: str) -> None:
    text, tags = CALLS[name], OPENINGS.get(name, ("<|channel|>", "<|call|>", "<|start|>"))
    second = text.index(tags[0], 5)
    for end in range(len(text) + 1):
        for pieces in ([text[:end]], cut(text[:end], 1), cut(text[:end], 7)):
            free, forced = FORMATS[name].parser(TOOLS), OnlyCalls(FORMATS[name].parser(TOOLS))
            events = [e for piece in pieces for e in free.feed(piece)] + free.finish(cut=True)
            kept = [e for piece in pieces for e in forced.feed(piece)] + forced.finish(cut=True)
            content = "".join(e.text for e in events if isinstance(e, Content))
            # without a grammar, half a tag may still be text
            assert any(tag.startswith(content.strip()) and tag != content.strip() for tag in tags), text[:end]
            assert [e for e in plain(joined(events)) if not isinstance(e, Content)] == plain(joined(kept))
            assert not any(isinstance(e, Content) for e in kept)
            if end >= second:
                arguments = "".join(e.text for e in kept if isinstance(e, ToolArguments) and e.index == 0)
                assert json.loads(arguments) == PARIS


def test_a_bare_call_that_is_cut_leaves_no_markup() -> None:
    whole = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    for end in range(whole.index(","), len(whole)):
        parser = FORMATS["generic"].parser(TOOLS)
        assert parser.feed(whole[:end]) + parser.finish(cut=True) == []
    assert read("generic", whole[:-1]) == (whole[:-1], []), "a whole answer is what the model wanted to say"


@pytest.mark.parametrize("text", ["Write <tool_call>", "<tool_call>\n", "<tool_call>{", '<tool_call>{"name": "n'])
def test_a_tag_that_a_whole_text_ends_in_is_text(text: str) -> None:
    for name in ("hermes", "generic", "qwen3_xml"):
        assert read(name, text) == (text, [])
    assert read("gemma4", "Write <|tool_call>call:n") == ("Write <|tool_call>call:n", [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "now", "arguments": {}}', "", [("now", {})]),
        ('{"name": "now", "arguments": null}', "", [("now", {})]),
        (' {"arguments": {"a": 1}, "name": "now"}\n{"name": "now", "arguments": {}}', "",
         [("now", {"a": 1}), ("now", {})]),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
        ('{"name": "now", "arguments": {}, "why": 1}', '{"name": "now", "arguments": {}, "why": 1}', []),
        ('{"name": "now", "arguments": {', '{"name": "now", "arguments": {', []),
        ('So: {"name": "now", "arguments": {}}', 'So: {"name": "now", "arguments": {}}', []),
        ('{"name": "now", "arguments": {}} Done.', "Done.", [("now", {})]),
    ],
)  # fmt: skip
def test_generic_takes_bare_objects(text: str, content: str, calls: list[Any]) -> None:
    assert values("generic", text) == (content, calls)


def test_an_object_that_is_no_call_goes_out_early() -> None:
    assert Generic().parser(TOOLS).feed('{"nam') == []
    assert Generic().parser(TOOLS).feed('{"title": "x"') == [Content('{"title": "x"')]
    assert Generic().parser(TOOLS).feed('{"name": "Bob",') == [Content('{"name": "Bob",')]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("<parameter=city>\nA\nB\n</parameter>", {"city": "A\nB"}),
        ("<parameter=city>42</parameter>", {"city": "42"}),
        ("<parameter=city>\n\n x \n\n</parameter>", {"city": "\n x \n"}),
        ("<parameter=days>\n 7 \n</parameter>", {"days": 7}),
        ("<parameter=days>7.0</parameter>", {"days": 7}),
        ("<parameter=days>soon</parameter>", {"days": "soon"}),
        ("<parameter=exact>True</parameter>", {"exact": True}),
        ("<parameter=exact>None</parameter>", {"exact": None}),
        ('<parameter=place>{"x": 1}</parameter>', {"place": {"x": 1}}),
        ("<parameter=tags>[1, oops</parameter>", {"tags": "[1, oops"}),
        ("<parameter=unknown>5</parameter>", {"unknown": "5"}),
        ("<parameter=city>a </function> b</parameter>", {"city": "a </function> b"}),
        ("<parameter=city>\nA\n<parameter=days>\n3\n</parameter>", {"city": "A", "days": 3}),
        ("<parameter=city>\nA\n<parameter=other>\n</parameter>", {"city": "A\n<parameter=other>"}),
        ("<parameter=city>\nA\n", {"city": "A"}),
        ("<parameter=city\nA\n</parameter>", {"city": "A"}),
        ('<parameter=city>\n<a>\n<parameter name="b">1</parameter>\n<parameter name="c"/>\n</a>\n</parameter>',
         {"city": '<a>\n<parameter name="b">1</parameter>\n<parameter name="c"/>\n</a>'}),
        ("<parameter=city>a</parameter> b</parameter>  <parameter=days>\n3\n</parameter>",
         {"city": "a</parameter> b", "days": 3}),
        ('<parameter=place>{"x": 1, "a": "</parameter>"}</parameter>', {"place": {"x": 1, "a": "</parameter>"}}),
        ("<parameter=city>a</parameter> b", {"city": "a</parameter> b"}),
        ('<parameter=city>\n<parameter name="b">\n1\n</parameter>\n</parameter>',
         {"city": '<parameter name="b">\n1\n</parameter>'}),
    ],
)  # fmt: skip
def test_xml_values_follow_the_schema(body: str, arguments: Any) -> None:
    text = f"<tool_call>\n<function=get_weather>\n{body}\n</function>\n</tool_call>"
    assert values("qwen3_xml", text) == ("", [("get_weather", arguments)])
    same_in_any_cut(lambda: Qwen3Xml().parser(TOOLS), text, 0)


def test_xml_with_forgotten_tags() -> None:
    bare = "I look.\n<function=get_weather>\n<parameter=city>\nA\n</parameter>\n</function>\n</tool_call>"
    assert values("qwen3_xml", bare) == ("I look.", [("get_weather", {"city": "A"})])
    prose = "Write <function=foo> for foo."
    assert values("qwen3_xml", prose) == (prose, [])
    open_end = "<tool_call>\n<function=now>\n</tool_call>after"
    assert values("qwen3_xml", open_end) == ("after", [("now", {})])
    as_json = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert values("qwen3_xml", as_json) == ("", [("now", {})])


@pytest.mark.parametrize("surplus", ["</parameter>", "</parameters>", "I hope so.", "</parameter>\n</parameter>"])
def test_what_stands_between_xml_parameters_is_part_of_none(surplus: str) -> None:
    given = f"<parameter=city>\nA\n</parameter>\n{surplus}\n<parameter=days>3</parameter>{surplus}\n"
    text = f"<tool_call>\n<function=get_weather>\n{given}</function>\n</tool_call>"
    content, calls = values("qwen3_xml", text)
    assert calls == [("get_weather", {"city": "A", "days": 3})] and content == surplus * 2
    same_in_any_cut(lambda: Qwen3Xml().parser(TOOLS), text, 0)


def test_xml_with_an_object_as_its_body() -> None:
    call = '<function=now>{"a": {"b": "</function>"}}</function>'
    for text in (call, f"<tool_call>\n{call}\n</tool_call>", call.replace("{", "\n {", 1)):
        assert values("qwen3_xml", f"{text}\n{text} Done.") == ("Done.", [("now", {"a": {"b": "</function>"}})] * 2)
        same_in_any_cut(lambda text=text: Qwen3Xml().parser(TOOLS), text, 0)
    assert read("qwen3_xml", call[: call.index("</")]) == ("", [("now", '{"a": {"b": "')])


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("", {}),
        ('a:<|"|>x, y} "z"\n<|"|>', {"a": 'x, y} "z"\n'}),
        ("a:-1.5e3,b:true,c:null,d:[],e:{}", {"a": -1500.0, "b": True, "c": None, "d": [], "e": {}}),
        ('a:[[1,2],{b:<|"|>c<|"|>}]', {"a": [[1, 2], {"b": "c"}]}),
        ('<|"|>a b<|"|>:1,"c":2', {"a b": 1, "c": 2}),
        ('a:["x",\'y\'],b:{"m": "fast"}', {"a": ["x", "y"], "b": {"m": "fast"}}),
        ('q:weather in Tokyo<|"|>', {"q": "weather in Tokyo"}),
        ('q:Paris, France<|"|>,n:5', {"q": "Paris, France", "n": 5}),
        ('q:Paris,n:<|"|>x<|"|>', {"q": "Paris", "n": "x"}),
        ("q:Paris", {"q": "Paris"}),
        ("a:1, b : 2 ,", {"a": 1, "b": 2}),
    ],
)
def test_gemma_values(body: str, arguments: Any) -> None:
    text = f"Well.<|tool_call>call:get_weather{{{body}}}<tool_call|><|tool_response>"
    assert values("gemma4", text) == ("Well.", [("get_weather", arguments)])


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
        " to=functions.now<|channel|>commentary json<|message|>",
        "<|channel|>analysis to=functions.now code<|message|>",
        "<|channel|>commentary to=functions.now\n<|constrain|>json\n<|message|>\n",
        "<|start|>assistant to=functions.now<|channel|>commentary <|constrain|>json<|message|>",
    ],
)
def test_harmony_headers(header: str) -> None:
    for end in ("", "<|call|>", "\n<|end|>"):
        assert values("harmony", header + '{"a": 1}' + end) == ("", [("now", {"a": 1})])


def test_harmony_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>First, a call."
        "<|end|><|start|>assistant<|channel|>final<|message|>Hello <b>you</b>.<|return|>"
    )
    events = run(Harmony().parser(TOOLS), [text])
    assert events == [Reasoning("Hm."), Content("First, a call.Hello <b>you</b>.")]
    assert values("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>") == ("", [("now", {})])
    assert values("harmony", "Plain text, to=you.") == ("Plain text, to=you.", [])
    odd = "<|channel|>commentary to=functions.now<|message|>no JSON"
    assert values("harmony", odd) == (odd, [])


@pytest.mark.parametrize(
    "header",
    [
        "<|start|>assistant<|channel|>final",
        "<|channel|>commentary to=functions.now <|constrain|>json",
        "<|start|>assistant to=functions.now<|channel|>commentary json",
    ],
)
def test_half_a_harmony_header_is_nothing(header: str) -> None:
    first = "<|channel|>analysis<|message|>Hm.<|end|>"
    for size in range(header.index("|>") + 2, len(header) + 1):
        half = header[:size]
        if half.rpartition("<")[2] != half and ">" not in half.rpartition("<")[2]:
            continue  # a special token comes whole
        assert same_in_any_cut(lambda half=half: Harmony().parser(TOOLS), first + half, 0) == [Reasoning("Hm.")], half
    quoted = "<|channel|>final<|message|>Write <|channel|> and its name."
    assert values("harmony", quoted) == ("Write <|channel|> and its name.", [])


# ---- any text, in any pieces

FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "now", ', '"arguments": {', '"a": ', '"b"', "}}", "{", "1,"],
    "qwen3_xml": ["<tool_call>", "</tool_call>", "<function=now>", "<function=get_weather>", "<parameter=city>",
                  "<parameter=days>", "</parameter>", "</function>", "\n", "7", "true", "{}", "</parameter> ",
                  "<parameter n"],
    "gemma4": ["<|tool_call>", "<tool_call|>", "call:now{", '<|"|>', "a:", "b", ",", "}", "[", "]", "'", '"', "1"],
    "harmony": ["<|channel|>", "analysis", "commentary ", "to=functions.now", "<|message|>", "<|end|>", "<|call|>",
                "<|start|>", "assistant", '{"a": 1}', "{", "<|constrain|>json"],
}  # fmt: skip
FRAGMENTS["generic"] = FRAGMENTS["hermes"]


def texts(name: str) -> st.SearchStrategy[str]:
    letters = st.text('ab<|>{}[]":,/\\ \n=t1é', max_size=4)
    parts = st.one_of(st.sampled_from(FRAGMENTS[name]), letters, st.sampled_from([CALLS[name]]))
    return st.lists(parts, max_size=12).map("".join)


@pytest.mark.parametrize("name", FORMATS)
def test_any_cut_gives_the_same_events_and_nothing_is_lost(name: str) -> None:
    @settings(max_examples=80, deadline=None)
    @given(text=texts(name), seed=st.integers(0, 99))
    @example(text=CALLS[name], seed=0)
    def check(text: str, seed: int) -> None:
        events = same_in_any_cut(lambda: FORMATS[name].parser(TOOLS), text, seed)
        if not any(isinstance(e, ToolCall) for e in events) and (name != "harmony" or "<|" not in text):
            assert "".join(e.text for e in events if isinstance(e, Content)) == text

    check()


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40), name=st.sampled_from(list(FORMATS)))
def test_plain_text_is_content(text: str, name: str) -> None:
    events = run(FORMATS[name].parser(TOOLS), cut(text, 3))
    assert "".join(e.text for e in events if isinstance(e, Content)) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=4)


@settings(max_examples=100, deadline=None)
@given(value=OBJECTS, indent=st.sampled_from([None, 2]), ascii_only=st.booleans(), size=st.integers(1, 9))
def test_any_object_comes_through(value: dict[str, Any], indent: int | None, ascii_only: bool, size: int) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    for name in ("hermes", "generic"):
        events = run(
            FORMATS[name].parser(TOOLS), cut(f'<tool_call>{{"name":"f","arguments":{text}}}</tool_call>', size)
        )
        assert plain(events) == [(0, "f"), ToolArguments(0, text)]
    scanner, out = JsonScanner(), ""
    for piece in cut(text + "rest", size):
        out += scanner.push(piece)[1]
    assert scanner.done and out == text


@settings(max_examples=100, deadline=None)
@given(text=st.text("{}[]\",:\\u0aTrue1-.e \n'", max_size=30))
def test_the_scanner_says_done_only_of_json(text: str) -> None:
    scanner, out = JsonScanner(), ""
    for letter in "{" + text:
        if scanner.done or scanner.broken:
            break
        out += scanner.push(letter)[1]
    if scanner.done:
        assert isinstance(json.loads(out), dict)
    try:
        assert isinstance(json.loads("{" + text), dict)
    except ValueError:
        return
    assert scanner.done


# ---- which format, and how it is forced


@pytest.mark.parametrize(
    ("model_type", "template", "name"),
    [
        ("qwen3", '{% if tools %}<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}', "hermes"),
        ("qwen3_moe", "{% for tool in tools %}<tool_call>\n<function=example>\n<parameter=p>", "qwen3_xml"),
        ("gemma4", "{{- '<|tool_call>call:' + name -}} <tool_call|> tools", "gemma4"),
        ("gpt_oss", "<|start|>assistant<|channel|>commentary<|message|> tools", "harmony"),
        ("llama", "{{ '<|im_start|>' + message['role'] }}", "generic"),
        ("llama", "{% if tools %}<|python_tag|>", "generic"),
        ("glm4", "{% if tools %}<tool_call>{function-name}\n<arg_key>", "generic"),
        ("llama", None, "generic"),
    ],
)  # fmt: skip
def test_the_template_chooses(model_type: str, template: str | None, name: str) -> None:
    assert chat_style(model_type, template).tools.name == name


SPECIAL = ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|channel|>", "<|message|>",
           "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"]  # fmt: skip


@pytest.fixture(scope="module")
def raw() -> RawTokenizer:
    """The embedded model's tokenizer with the special tokens of all formats."""
    from sparkdraft.text.tokenizer import Tokenizer
    from sparkdraft.weights.checkpoint import open_checkpoint

    raw = RawTokenizer.from_str(Tokenizer.of(open_checkpoint("smollm2")).raw.to_str())
    raw.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return raw


@pytest.fixture(scope="module")
def vocabulary(raw: RawTokenizer) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(raw.to_str(), n_vocab=raw.get_vocab_size())


class Judge:
    """Whether a grammar takes a whole text, in the tokenizer's own cut."""

    def __init__(self, raw: RawTokenizer, vocabulary: llguidance.LLTokenizer) -> None:
        self._raw, self._vocabulary = raw, vocabulary

    def accepts(self, grammar: str, text: str) -> bool:
        matcher = llguidance.LLMatcher(self._vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        ids = self._raw.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def judge(raw: RawTokenizer, vocabulary: llguidance.LLTokenizer) -> Judge:
    return Judge(raw, vocabulary)


def split(name: str) -> list[str]:
    """The two calls of CALLS, each alone and without a mark that ends the text."""
    mark = {"gemma4": "<|tool_call>call:now", "harmony": "<|start|>assistant"}.get(name, "\n<tool_call>")
    at = CALLS[name].rindex(mark)
    first, second = CALLS[name][:at], CALLS[name][at:].removeprefix("\n").removeprefix("<|start|>assistant")
    return [first.removesuffix("<|call|>"), second.removesuffix("<|call|>")]


@pytest.mark.parametrize("name", FORMATS)
def test_choices_are_held_by_grammar(name: str, judge: Judge) -> None:
    form, (weather, now) = FORMATS[name], split(name)
    wrong = weather.replace("get_weather", "get_whatever")
    several = form.constraint(TOOLS, None, True)
    single = form.constraint(TOOLS, None, False)
    named = form.constraint(TOOLS, "now", True)
    assert several and single and named and several.kind == "lark"
    for spec in (several, single):
        assert judge.accepts(spec.text, weather) and judge.accepts(spec.text, now)
        assert not judge.accepts(spec.text, "Hello.") and not judge.accepts(spec.text, wrong)
    assert judge.accepts(named.text, now) and not judge.accepts(named.text, weather)
    if name != "harmony":  # one call ends its text
        assert judge.accepts(several.text, CALLS[name])
        assert not judge.accepts(single.text, CALLS[name]) and not judge.accepts(named.text, CALLS[name])
    assert values(name, weather)[1] == [("get_weather", PARIS)]


@pytest.mark.parametrize("name", FORMATS)
def test_types_are_held_too(name: str, judge: Judge) -> None:
    spec, weather = FORMATS[name].constraint(TOOLS, "get_weather", False), split(name)[0]
    assert spec
    bad = {"qwen3_xml": ("\n3\n", "\nsoon\n"), "gemma4": ("days:3", "days:no")}.get(name, ('"days": 3', '"days": "no"'))
    assert bad[0] in weather and not judge.accepts(spec.text, weather.replace(*bad))
    missing = {"qwen3_xml": ("<parameter=city>\nParis\n</parameter>\n", ""), "gemma4": ('city:<|"|>Paris<|"|>,', "")}
    assert not judge.accepts(spec.text, weather.replace(*missing.get(name, ('"city": "Paris", ', ""))))


def test_forced_xml_values_are_those_that_the_parser_reads(judge: Judge) -> None:
    """Also a value that holds closing tags; one that the parser would end earlier is not written."""
    spec = Qwen3Xml().constraint(TOOLS, "get_weather", False)
    note = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"], "additionalProperties": False}
    both = Qwen3Xml().constraint([{"type": "function", "function": {"name": "now", "parameters": note}}], None, False)
    assert spec and both
    allowed = ["", "A\nB", '<a>\n<parameter name="b">1</parameter>\n<parameter name="c"/>\n</a>', "b</parameter> </a>",
               "a </function> b", "b</parameter>\n</functions>", "</tool_call>", "</parameter"]  # fmt: skip
    refused = ["a\n</parameter>\nb", "</parameter> b",
               "a</parameter>\n<parameter=b>", "a</parameter></function> b", "a</parameter> </tool_call> b",
               "a</function>\n</tool_call> b"]  # fmt: skip
    for value in allowed + refused:
        for more, others in (("", {}), ("<parameter=days>\n3\n</parameter>\n", {"days": 3})):
            given = f"<parameter=city>\n{value}\n</parameter>\n{more}"
            text = f"<tool_call>\n<function=get_weather>\n{given}</function>\n</tool_call>"
            is_read = values("qwen3_xml", text) == ("", [("get_weather", {"city": value} | others)])
            assert judge.accepts(spec.text, text) == is_read == (value in allowed), text
        given = f"<parameter=a>\n{value}\n</parameter>\n<parameter=b>\n{value}\n</parameter>\n"
        text = f"<tool_call>\n<function=now>\n{given}</function>\n</tool_call>"
        assert judge.accepts(both.text, text) == (value in allowed), text


THOUGHTS = {
    "hermes": ("qwen3", "<think>\n{tools}</think>", "<think>\nI call it.\n</think>\n\n"),
    "qwen3_xml": ("qwen3_5", "<think>\n</think>", "<think>\nI call it.\n</think>\n\n"),
    "gemma4": ("gemma4", "<|channel>thought", "<|channel>thought\nI call it.<channel|>"),
    "harmony": ("gpt_oss", "", "<|channel|>analysis<|message|>I call it.<|end|><|start|>assistant"),
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts_may_come_before_forced_calls(name: str, judge: Judge) -> None:
    model_type, template, thought = THOUGHTS[name]
    form, reasoning, call = FORMATS[name], chat_style(model_type, template).reasoning, split(name)[0]
    assert reasoning
    spec = form.constraint(TOOLS, None, True, reasoning.grammar("user: hi"))
    assert spec and judge.accepts(spec.text, thought + call) and judge.accepts(spec.text, call)
    events = same_in_any_cut(lambda: chain(reasoning("user: hi", calls=True), form.parser(TOOLS)), thought + call, 1)
    assert events[0] == Reasoning("I call it.") and plain(events)[1] == (0, "get_weather") and len(events) == 3


@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_may_leave_the_choice_between_calls_and_an_answer(name: str, judge: Judge) -> None:
    form, call = FORMATS[name], split(name)[0]
    model_type, template, thought = THOUGHTS.get(name, ("llama", "", ""))
    reasoning = chat_style(model_type, template).reasoning
    thinking, before = (reasoning.grammar("user: hi"), reasoning.before_answer) if reasoning else ("", "")
    rule = answer_rule(GrammarSpec("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'))
    spec = form.constraint(TOOLS, None, True, thinking, f"{before}answer\n{rule}")
    assert spec
    answer = ("<|channel|>final<|message|>" if name == "harmony" else "") + '{"a": 1}'
    for text in (call, answer, thought + call, thought + answer):
        assert judge.accepts(spec.text, text), text
    assert not judge.accepts(spec.text, "Hello.") and not judge.accepts(spec.text, answer.replace("1", '"x"'))


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" * 5000])
def test_numbers_that_cannot_be_written_again_make_no_call(number: str) -> None:
    odd = f'<tool_call>{{"arguments": {{"x": {number}}}, "name": "now"}}</tool_call>'
    for name in ("hermes", "generic"):
        for event in run(FORMATS[name].parser(TOOLS), [odd]):
            assert not isinstance(event, ToolArguments) or "Infinity" not in event.text


ODD: list[Any] = [
    None,
    {},
    [],
    {"type": "string"},
    {"type": "object"},
    {"type": "object", "properties": None, "required": "city"},
    {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}, "b": {"$ref": "https://else.where/x.json"}}},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
    {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"type": 7}}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y["}}, "required": ["a", "zz"]},
    {"type": "object", "properties": {"a b<c>": True, "": {}, "ok": {"enum": [1, None, "x"]}}},
    {"type": "object", "properties": {"n": {"type": ["integer", "null"]}}, "additionalProperties": {"type": "string"}},
    {"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]},
    {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {}}}}, "oneOf": 3},
    {"type": "object", "properties": {f"p{i}": {"type": "string", "enum": ["x" * 99] * 20} for i in range(60)}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {
        f"d{i}": {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(700)
    } | {"d700": {"type": "string"}}},
    {"type": "object", "properties": {k: {"$ref": "#/$defs/tree"} for k in "abcdefgh"}, "$defs": {
        "tree": {"anyOf": [{"type": "string"}, *({"$ref": "#/$defs/node"} for _ in range(8))]},
        "node": {"type": "object", "properties": {k: {"$ref": "#/$defs/tree"} for k in "abcdefgh"}},
    }},
    {"type": "object", "properties": {"a": {"type": "array"}, "b": {"type": "object"}, "c": {}}},
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_odd_schemas_never_raise_and_always_compile(name: str, vocabulary: llguidance.LLTokenizer) -> None:
    form = FORMATS[name]
    for schema in ODD:
        tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": schema}}]
        for only in (None, "odd"):
            spec = form.constraint(tools, only, True)
            assert spec and len(spec.text) < 60_000
            grammar = llguidance.LLMatcher.grammar_from_lark(spec.text)
            error = llguidance.LLMatcher.validate_grammar(grammar, vocabulary)
            assert not error or error.startswith("WARNING"), (schema, error)
        form.instructions(tools)
        run(form.parser(tools), [CALLS[name].replace("get_weather", "odd")])
    assert form.constraint([], None, True) is None and form.constraint(TOOLS, "unknown", True) is None


def test_functions_of_odd_tools() -> None:
    odd: list[Any] = [None, 3, {}, {"function": None}, {"function": {"name": 3}}, {"name": "flat"}, *TOOLS, TOOLS[1]]
    assert [function.name for function in functions(odd)] == ["flat", "get_weather", "now"]


# ---- what the model is told


def test_generic_instructions_show_a_call_that_parses() -> None:
    text = Generic().instructions(TOOLS)
    assert text and "- get_weather: The weather in a city. {" in text
    assert "plain text" not in text  # response_format may ask for JSON
    line = next(line for line in text.splitlines() if line.startswith("<tool_call>"))
    assert values("generic", line) == ("", [("get_weather", {"city": "..."})])
    assert "only a call of now" in (Generic().instructions(TOOLS, only="now") or "")
    assert Generic().instructions([]) is None and Hermes().instructions(TOOLS) is None


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}},
        {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "oops"}},
    ]},
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "never"}]},
]  # fmt: skip


def test_history_for_a_template_without_tools() -> None:
    messages = Generic().history(HISTORY)
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"].splitlines()[0] == '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
    both = "<tool_response>\nnoon\n</tool_response>\n<tool_response>\nnever\n</tool_response>"
    assert messages[2]["content"] == both


def test_history_for_gemma_and_harmony() -> None:
    messages = Gemma4().history(HISTORY)
    assert [m["role"] for m in messages] == ["user", "assistant"]
    assert messages[1]["tool_responses"] == [{"name": "now", "response": "noon"}, {"name": "now", "response": "never"}]
    thought: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    assert Harmony().history([thought])[0]["thinking"] == "Hm." and "thinking" not in thought


def test_history_for_templates_that_walk_arguments() -> None:
    calls = Hermes().history(HISTORY)[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"a": 1}, {"arguments": "oops"}]
    assert HISTORY[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
