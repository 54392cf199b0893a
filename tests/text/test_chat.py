"""Chat templates against transformers' rendering of the same messages, and what a template must not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkdraft.core import UserError
from sparkdraft.text.chat import render
from sparkdraft.text.template import about
from sparkdraft.weights.checkpoint import open_checkpoint

QWEN = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" %}
        {%- set ns.last_query_index = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}{% generation %}{{ content }}{% endgeneration %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- set call = call.function if call.function else call %}
                {{- '<tool_call>\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
                {%- if call.arguments is string %}{{- call.arguments }}
                {%- else %}{{- call.arguments | tojson }}{%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA = (
    "{{ bos_token }}{% if not date is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}"
    "{% for m in messages %}\n  {% if m.role == 'x' %}{{ raise_exception('no x here') }}{% endif %}\n"
    "[{{ m['role'] }}] {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}{{ date }}"
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be <brief> & 'kind'."}, {"role": "user", "content": " a\n b "}],
    [
        {"role": "user", "content": "日本 🎉"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"},
        {"role": "user", "content": "Why?"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "w", "arguments": {"city": "Zürich <b>"}}}],
        },
        {"role": "tool", "content": '{"t": 3}'},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "w", "parameters": {"b": 1, "a": "<é>"}}}]
SPECIAL: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def theirs() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"<s>": 0, "</s>": 1}, [])), **SPECIAL)


def compare(theirs: Any, template: str, chat: list[dict[str, Any]], prompt: bool, **extra: Any) -> None:
    expected = theirs.apply_chat_template(
        chat, chat_template=template, tokenize=False, add_generation_prompt=prompt, **extra
    )
    assert render(template, chat, prompt, **SPECIAL, **extra) == expected


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
def test_as_transformers_renders(theirs: Any, smollm2_path: Path, chat: list[dict[str, Any]], prompt: bool) -> None:
    template = open_checkpoint(str(smollm2_path)).chat_template
    assert template
    compare(theirs, template, chat, prompt)
    compare(theirs, LLAMA, chat, prompt)
    compare(theirs, LLAMA, chat, prompt, date="1 May")
    compare(theirs, QWEN, chat, prompt)
    compare(theirs, QWEN, chat, prompt, tools=TOOLS, enable_thinking=False)


def test_embedded_model(smollm2_path: Path) -> None:
    model = open_checkpoint(str(smollm2_path))
    text = render(model.chat_template, CHATS[0], **model.special)
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_no_template() -> None:
    with pytest.raises(UserError, match="no chat template"):
        render(None, CHATS[0])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("a\n\n{% if %}", r"^Line 3 of the chat template is wrong \(Expected an expression.*correct it, or send a"),
        (
            "{% for m in messages %}" * 25 + "{% endfor %}" * 25,
            r"^The chat template is wrong \(too many.* nested",
        ),
        ("{% break %}", r"^The chat template is wrong \('break' outside loop\): correct it"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "^The chat template is nested too deeply: correct it"),
        ("{{ messages | nothing }}", r"^Line 1 of the chat template is wrong \(No filter named 'nothing'"),
        ("{{ messages[0]['nothing']['more'] }}", "nothing"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
        ("{% include '/etc/passwd' %}", "loader|no loader"),
    ],
)
def test_template_errors(template: str, message: str) -> None:
    about(template)  # never raises
    with pytest.raises(UserError, match=message):
        render(template, CHATS[0])
