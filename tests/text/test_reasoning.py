"""Thoughts apart from answers: real templates' marks, any cut against the whole, and grammars that leave room."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import llguidance
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from sparkdraft.core import GrammarSpec
from sparkdraft.text.events import Content, Event, Parser, Reasoning, ToolArguments, ToolCall, chain, joined
from sparkdraft.text.reasoning import Gemma4Thoughts, HarmonyAnalysis, ReasoningFormat, Think, after_thinking
from sparkdraft.text.style import chat_style
from sparkdraft.text.tools.hermes import Hermes
from sparkdraft.text.tools.qwen3_xml import Qwen3Xml

FORMATS: dict[str, ReasoningFormat] = {f.name: f for f in (Think(), Gemma4Thoughts(), HarmonyAnalysis())}
QWEN3 = (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)
QWEN35 = QWEN3.replace("{%- endif %}", "{%- else %}{{- '<think>\\n' }}{%- endif %}")


def run(parser: Parser, pieces: Sequence[str]) -> list[Event]:
    return joined([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


def cut(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize(
    ("prompt", "text", "events"),
    [
        ("", "<think>\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Content("Yes.")]),
        ("", "\n<think>\n\n</think>\n\nYes.", [Content("Yes.")]),
        ("", "Yes, <think> is a tag.", [Content("Yes, <think> is a tag.")]),
        ("", " Yes.\n", [Content(" Yes.\n")]),
        ("", "<think>Hm. ", [Reasoning("Hm. ")]),
        ("", "<think>a < b </thin</think>c</think>", [Reasoning("a < b </thin"), Content("c</think>")]),
        ("assistant\n<think>\n", "Hm.\n</think>\n\nYes.", [Reasoning("Hm."), Content("Yes.")]),
        ("assistant\n<think>\n", "<think>\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Content("Yes.")]),
        ("assistant\n<think>\n\n</think>\n\n", "Yes.", [Content("Yes.")]),
    ],
)
def test_think(prompt: str, text: str, events: list[Event]) -> None:
    for size in (1, 2, 3, 7, 99):
        assert run(Think()(prompt), cut(text, size)) == events


@pytest.mark.parametrize(
    ("prompt", "text", "events"),
    [
        ("", "<|channel>thought\nHm.<channel|>Yes.", [Reasoning("Hm."), Content("Yes.")]),
        ("", "<|channel>thought<channel|>Yes.", [Content("Yes.")]),
        ("", "Yes.", [Content("Yes.")]),
        ("<|turn>model\n<|channel>thought\n", "Hm.<channel|>Yes.", [Reasoning("Hm."), Content("Yes.")]),
        ("<|turn>model\n<|channel>thought\n<channel|>", "Yes.", [Content("Yes.")]),
        ("", "<|channel>thought\nA<channel|>B<|channel>thought\nC<channel|>D",
         [Reasoning("A"), Content("B"), Reasoning("C"), Content("D")]),
        ("", "<|channel>thought\nA<|tool_call>call:f{}", [Reasoning("A"), Content("<|tool_call>call:f{}")]),
    ],
)  # fmt: skip
def test_gemma4(prompt: str, text: str, events: list[Event]) -> None:
    for size in (1, 2, 3, 7, 99):
        assert run(Gemma4Thoughts()(prompt, calls=True), cut(text, size)) == events


def test_thoughts_stream() -> None:
    parser = Think()("<think>\n")
    assert parser.feed("One two") == [Reasoning("One two")]
    assert parser.feed(" three </thi") == [Reasoning(" three")]
    assert parser.feed("nk>\n\nYes") == [Content("Yes")]


@pytest.mark.parametrize(
    ("model_type", "template", "name"),
    [
        ("qwen3", QWEN3, "think"),
        ("gemma4", "{{ '<|channel>thought\\n' }}", "gemma4"),
        ("gpt_oss", "<|channel|>analysis<|message|>", "harmony"),
        ("gpt_oss", None, "harmony"),
        ("llama", "{{ message['content'] }}", None),
        ("llama", None, None),
    ],
)
def test_the_template_chooses(model_type: str, template: str | None, name: str | None) -> None:
    form = chat_style(model_type, template).reasoning
    assert (form.name if form else None) == name


def test_a_template_that_opens_the_tag() -> None:
    assert run(Think(QWEN35)(), ["Hm.</think>Yes."]) == [Reasoning("Hm."), Content("Yes.")]
    assert run(Think(QWEN3)(), ["Yes."]) == [Content("Yes.")]
    assert run(Think(QWEN35)("<think>\n\n</think>\n\n"), ["Yes."]) == [Content("Yes.")]  # the prompt knows better


def test_a_call_ends_thoughts_that_were_not_closed() -> None:
    text = "I call.\n<tool_call>\n<function=f>\n</function>\n</tool_call>"
    tools = [{"type": "function", "function": {"name": "f"}}]
    for size in (1, 3, 99):
        events = run(chain(Think()("<think>\n", calls=True), Qwen3Xml().parser(tools)), cut(text, size))
        assert events[0] == Reasoning("I call.")
        assert isinstance(events[1], ToolCall) and events[2:] == [ToolArguments(0, "{}")]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (Think(), '<think>\nIt is <tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>.\n</think>\n\nYes.'),
        (Think(), "<think>\nIt is <tool_call>\n<function=x>\n</function>\n</tool_call>.\n</think>\n\nYes."),
        (Gemma4Thoughts(), "<|channel>thought\nIt is <|tool_call>call:x{}<tool_call|>.<channel|>Yes."),
    ],
)
def test_without_tools_a_quoted_call_does_not_end_thoughts(form: ReasoningFormat, text: str) -> None:
    for size in (1, 3, 999):
        thought, answer = run(chain(form(""), None), cut(text, size))
        assert isinstance(thought, Reasoning) and thought.text.endswith(("</tool_call>.", "<tool_call|>."))
        assert answer == Content("Yes.")


def test_chain_of_less() -> None:
    assert run(chain(None, None), ["a", "<think>b"]) == [Content("a<think>b")]
    assert run(chain(Think()(""), None), ["<think>a</think>b"]) == [Reasoning("a"), Content("b")]
    events = run(chain(None, Hermes().parser([])), ['<tool_call>{"name": "f", "arguments": {}}</tool_call>'])
    assert len(events) == 2 and isinstance(events[0], ToolCall)


FRAGMENTS = ["<think>", "</think>", "<|channel>", "<channel|>", "thought\n", "<tool_call>\n<function=f>", "\n", "a",
             "<|channel|>", "analysis", "<|message|>", "<|end|>", "<|tool_call>", '<tool_call>\n{"name": ']  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text("ab<>|/ \n", max_size=3)), max_size=10),
    name=st.sampled_from(list(FORMATS)),
    prompt=st.sampled_from(["", "<think>\n", "<|channel>thought\n"]),
    size=st.sampled_from([1, 2, 3, 7]),
)
@example(parts=["<think>", " a ", "</think>", " b"], name="think", prompt="", size=1)
def test_any_cut_gives_the_same(parts: list[str], name: str, prompt: str, size: int) -> None:
    text = "".join(parts)
    calls = name == "think"
    whole = run(chain(FORMATS[name](prompt, calls), Hermes().parser([]) if calls else None), [text])
    events = run(chain(FORMATS[name](prompt, calls), Hermes().parser([]) if calls else None), cut(text, size))
    named = [e for e in events if not isinstance(e, ToolCall)]
    assert named == [e for e in whole if not isinstance(e, ToolCall)] and len(events) == len(whole)


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=30), name=st.sampled_from(list(FORMATS)))
def test_text_without_marks_is_content(text: str, name: str) -> None:
    events = run(FORMATS[name](""), cut(text, 2))
    assert "".join(e.text for e in events if isinstance(e, Content)) == text


@cache
def embedded() -> tuple[RawTokenizer, llguidance.LLTokenizer]:
    from sparkdraft.text.tokenizer import Tokenizer
    from sparkdraft.weights.checkpoint import open_checkpoint

    raw = Tokenizer.of(open_checkpoint("smollm2")).raw
    return raw, llguidance.LLTokenizer(raw.to_str(), n_vocab=raw.get_vocab_size())


def check(grammar: str, text: str) -> bool:
    """Whether a grammar takes a whole text, in the embedded model's tokens."""
    raw, vocabulary = embedded()
    matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = raw.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def test_a_held_answer_comes_after_free_thoughts() -> None:
    schema = GrammarSpec("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    spec = after_thinking(schema, Think(), "<think>\n")
    assert check(spec.text, 'Hm. {"a": x\n</think>\n\n{"a": 1}') and not check(spec.text, 'Hm.\n</think>\n\n{"a": "x"}')
    assert not check(spec.text, '{"a": 1}')  # it is in the thoughts still
    optional = after_thinking(schema, Think(), "assistant\n")
    assert check(optional.text, '{"a": 1}') and check(optional.text, '<think>\nHm.\n</think>\n\n{"a": 1}')
    assert after_thinking(schema, Think(), "<think>\n\n</think>\n\n") == schema
    assert after_thinking(schema, None, "") == schema
    pattern = after_thinking(GrammarSpec("regex", "[a-c]+/d"), Think(), "<think>\n")
    assert check(pattern.text, "Hm.</think>ab/d")
    assert "final" in after_thinking(schema, HarmonyAnalysis(), "").text
