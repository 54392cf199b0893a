"""Which parsers, switches and stops a model gets: from its template, its family's line, or the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from sparkdraft.core import UserError
from sparkdraft.text import reasoning, tools
from sparkdraft.text.chat import render, variables_of
from sparkdraft.text.families import FAMILIES, REASONING_PARSERS, TOOL_PARSERS, family_of
from sparkdraft.text.style import EFFORTS, chat_style
from sparkdraft.text.tokenizer import Tokenizer
from sparkdraft.weights.checkpoint import open_checkpoint
from tests.models.tiny import write_tiny

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENS = TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
XML = "{% if tools %}<tool_call>\n<function=f>\n<parameter=p>\nv\n</parameter>\n</function>\n</tool_call>{% endif %}"
HERMES = '{% if tools %}<tool_call>\n{"name": <n>, "arguments": <a>}\n</tool_call>{% endif %}'
SWITCHED = OPENS + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
QWEN3 = HERMES + SWITCHED
QWEN35 = XML + SWITCHED.replace("{% endif %}", "{% else %}<think>\n{% endif %}")
CODER = XML + OPENS
THINKING_ONLY = HERMES + OPENS + "<think>\n"
GEMMA = (
    "{% if enable_thinking is defined and enable_thinking %}<|think|>{% endif %}{% for m in messages %}<|turn>"
    "{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}{% if tools %}<|tool_call>call:f{}<tool_call|>{% endif %}"
    "<|turn>model\n{% if not (enable_thinking is defined and enable_thinking) %}<|channel>thought\n<channel|>"
    "{% endif %}"
)
GPT_OSS = (
    "{% macro effort() %}{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "{{ 'Reasoning: ' + reasoning_effort }}{% endmacro %}<|start|>system<|message|>{{ effort() }}<|end|>"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}<|channel|>commentary{% endif %}<|start|>assistant"
)
ASKED = [{"role": "user", "content": "hi"}]


def prompt(model_type: str, template: str, effort: str | None = None, **kwargs: Any) -> str:
    """As the server makes it."""
    return render(template, ASKED, **(chat_style(model_type, template).thinking.variables(effort) | kwargs))


def test_the_table_names_parsers_that_exist() -> None:
    assert set(REASONING_PARSERS) == reasoning.FORMATS.keys() and set(TOOL_PARSERS) == tools.FORMATS.keys()
    for family in FAMILIES.values():
        assert family.reasoning in ("auto", *REASONING_PARSERS) and family.tools in ("auto", *TOOL_PARSERS)
        assert not set(family.stops) & set(family.parts)


@pytest.mark.parametrize(
    ("model_type", "template", "thoughts", "calls"),
    [
        ("qwen3", QWEN3, "think", "hermes"),
        ("qwen3_moe", QWEN3, "think", "hermes"),
        ("qwen3_moe", CODER, None, "qwen3_xml"),  # Qwen3-Coder
        ("qwen3_next", CODER, None, "qwen3_xml"),  # Qwen3-Coder-Next
        ("qwen3_next", THINKING_ONLY, "think", "hermes"),
        ("qwen3_5", QWEN35, "think", "qwen3_xml"),
        ("qwen3_5_moe_text", QWEN35, "think", "qwen3_xml"),
        ("gemma4", GEMMA, "gemma4", "gemma4"),
        ("gemma4_text", None, "gemma4", "gemma4"),
        ("gpt_oss", GPT_OSS, "harmony", "harmony"),
        ("gpt_oss", OPENS, "harmony", "harmony"),  # it speaks harmony whatever the template
        ("llama", GPT_OSS, "harmony", "harmony"),  # by the marks of a template alone
        ("llama", OPENS, None, "generic"),
    ],
)
def test_who_reads_what(model_type: str, template: str | None, thoughts: str | None, calls: str) -> None:
    style = chat_style(model_type, template)
    assert (style.reasoning.name if style.reasoning else None) == thoughts and style.tools.name == calls
    named = {fact.name: fact for fact in style.facts}
    assert named["reasoning parser"].value == (thoughts or "none") and named["tool parser"].value == calls
    assert all(named[name].reason for name in ("reasoning parser", "tool parser"))


def test_reasons_say_who_decided() -> None:
    def reasons(*args: str) -> list[str]:
        return [fact.reason for fact in chat_style(*args).facts[:2]]

    assert reasons("qwen3", QWEN3) == [
        "the chat template has <think>", "the chat template has <tool_call> and arguments and tools",
    ]  # fmt: skip
    assert reasons("gpt_oss", OPENS) == ["all gpt_oss models write so"] * 2
    assert reasons("gpt_oss", OPENS, "none", "hermes") == [
        "asked for by reasoning_parser", "asked for by tool_parser",
    ]  # fmt: skip
    asked = chat_style("gpt_oss", GPT_OSS, "none", "generic")
    assert asked.reasoning is None and asked.tools.name == "generic"
    assert chat_style("llama", OPENS, "think").reasoning.name == "think"  # type: ignore[union-attr]


# ---- thinking


@pytest.mark.parametrize(("model_type", "template"), [("qwen3", QWEN3), ("qwen3_5", QWEN35)])
def test_qwen_thinks_unless_told_not_to(model_type: str, template: str) -> None:
    off = "<think>\n\n</think>\n\n"
    for effort in (None, "minimal", "low", "medium", "high", "xhigh"):
        assert not prompt(model_type, template, effort).endswith(off)
    assert prompt(model_type, template, "none").endswith(off)
    assert prompt(model_type, template, enable_thinking=False).endswith(off)
    assert not prompt(model_type, template, "none", enable_thinking=True).endswith(off)  # named is named


def test_gemma_thinks_when_told_to() -> None:
    for text in (prompt("gemma4", GEMMA), prompt("gemma4", GEMMA, "none")):
        assert text.endswith("<|turn>model\n<|channel>thought\n<channel|>") and "<|think|>" not in text
    for text in (prompt("gemma4", GEMMA, "low"), prompt("gemma4", GEMMA, enable_thinking=True)):
        assert text.endswith("<|turn>model\n") and text.startswith("<|think|>")
    eager = GEMMA.replace("enable_thinking is defined and enable_thinking", "enable_thinking | default(true)")
    assert render(eager, ASKED).startswith("<|think|>") and "<|think|>" not in prompt("gemma4", eager)


def test_gpt_oss_thinks_as_much_as_it_is_told() -> None:
    assert "Reasoning: medium" in prompt("gpt_oss", GPT_OSS)
    for effort in ("low", "medium", "high"):
        assert f"Reasoning: {effort}" in prompt("gpt_oss", GPT_OSS, effort)
    assert "Reasoning: low" in prompt("gpt_oss", GPT_OSS, "high", reasoning_effort="low")
    for effort in ("none", "minimal", "xhigh", "HIGH", ""):
        with pytest.raises(UserError, match="this model has low, medium, high"):
            prompt("gpt_oss", GPT_OSS, effort)


def test_efforts_that_a_model_does_not_have_are_told() -> None:
    for effort in ("none", "minimal"):
        assert prompt("qwen3_moe", CODER, effort) == prompt("qwen3_moe", CODER)
    for effort in ("low", "high"):
        with pytest.raises(UserError, match="does not think"):
            prompt("qwen3_moe", CODER, effort)
        assert prompt("qwen3_next", THINKING_ONLY, effort) == prompt("qwen3_next", THINKING_ONLY)
    with pytest.raises(UserError, match="no switch"):
        prompt("qwen3_next", THINKING_ONLY, "none")
    for template in (QWEN3, CODER, THINKING_ONLY):
        with pytest.raises(UserError, match=f"one of {', '.join(EFFORTS)}"):
            prompt("qwen3", template, "much")
    with pytest.raises(UserError, match="no switch"):
        prompt("gpt_oss", OPENS, "none")  # a family that has efforts, with a template that does not look at them
    seen = "{{ reasoning_effort }}" + QWEN3  # a template of no known family that knows efforts
    assert prompt("llama", seen, "much").startswith("much")


def test_variables_are_those_that_a_template_looks_at() -> None:
    assert {"enable_thinking", "messages", "add_generation_prompt", "tools"} == variables_of(QWEN3)
    assert "reasoning_effort" in variables_of(GPT_OSS) and "enable_thinking" not in variables_of(CODER)
    said = "{# enable_thinking #}{{ 'enable_thinking' }}{% for m in messages %}{{ m.thinking }}{% endfor %}"
    assert variables_of(said) == {"messages"}
    assert variables_of("{% if %}") == variables_of(None) == frozenset()


# ---- stops


def vocabulary(*special: str) -> RawTokenizer:
    """Ids from 100 on for these, in order."""
    raw = RawTokenizer(models.BPE(vocab={chr(0x4E00 + i): i for i in range(100)}, merges=[]))
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(special))
    return raw


HARMONY = vocabulary("<|return|>", "<|end|>", "<|call|>", "<|endoftext|>")
RETURN, END, CALL, TEXT_END = range(100, 104)


def stops(raw: RawTokenizer, config: dict[str, Any], generation: dict[str, Any], eos: str = "") -> set[int]:
    return set(Tokenizer(raw, {"eos_token": eos} if eos else {}, config, generation).eos_ids)


@pytest.mark.parametrize(
    "generation",
    [
        {"eos_token_id": [RETURN, TEXT_END, CALL]},
        {"eos_token_id": [RETURN, TEXT_END]},  # older copies
        {"eos_token_id": [RETURN, TEXT_END, END]},  # and GGUF files, whose end of a turn is that of a message
    ],
)
def test_gpt_oss_stops_after_calls_and_not_after_messages(generation: dict[str, Any]) -> None:
    config = {"model_type": "gpt_oss", "eos_token_id": RETURN}
    assert stops(HARMONY, config, generation, "<|return|>") == {RETURN, TEXT_END, CALL}


def test_gpt_oss_without_a_word_in_its_files() -> None:
    assert stops(HARMONY, {"model_type": "gpt_oss"}, {}, "<|end|>") == {RETURN, CALL}


def test_the_first_file_that_names_stops_is_heard() -> None:
    raw = vocabulary("<a>", "<b>", "<c>", "<d>")
    nested = {"model_type": "other", "text_config": {"eos_token_id": 102}}
    assert stops(raw, nested | {"eos_token_id": [101]}, {"eos_token_id": [100, 7]}) == {100, 7}
    assert stops(raw, nested | {"eos_token_id": [101]}, {}) == {101}
    assert stops(raw, nested, {"eos_token_id": []}) == {102}
    assert stops(raw, nested | {"eos_token_id": None}, {"temperature": 1.0}, "<d>") == {102, 103}
    assert stops(raw, {"model_type": "other"}, {}) == set()


@pytest.mark.parametrize("wrong", ["x", ["</s>"], 2.5, {"a": 1}, [None]])
def test_an_end_that_is_no_id_is_one_sentence(wrong: Any) -> None:
    with pytest.raises(UserError, match=r"eos_token_id in the model's generation_config.json or .*whole number"):
        stops(vocabulary("<a>"), {"model_type": "other"}, {"eos_token_id": wrong})


def test_qwen35_stops_at_the_end_of_a_turn_that_its_config_does_not_name() -> None:
    raw = vocabulary("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    config = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "eos_token_id": 100}}
    assert stops(raw, config, {}) == {100, 102} == stops(raw, config, {"eos_token_id": [102, 100]})


def test_gemma_stops_where_a_tools_result_would_follow() -> None:
    raw = vocabulary("<eos>", "<turn|>", "<|tool_response>")
    config = {"model_type": "gemma4", "eos_token_id": [100, 101], "text_config": {"eos_token_id": 100}}
    assert stops(raw, config, {}) == {100, 101, 102} == stops(raw, config, {"eos_token_id": [100, 101, 102]})


def test_stops_of_a_folder(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("eos_token_id") == 2
    (folder / "config.json").write_text(json.dumps(config | {"text_config": {"eos_token_id": 7}}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert Tokenizer.of(open_checkpoint(str(folder))).eos_ids == {7}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert Tokenizer.of(open_checkpoint(str(folder))).eos_ids == {5, 6}


def test_an_unknown_family_is_no_mistake() -> None:
    assert family_of("mamba") == family_of("") and not family_of("mamba").stops
