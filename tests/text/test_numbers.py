"""Numbers under a grammar end, whatever the model prefers, and a schema's own bounds keep their meaning."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from sparkdraft.core import GrammarSpec
from sparkdraft.text.grammar import GrammarCompiler
from sparkdraft.text.reasoning import Think, after_thinking
from sparkdraft.text.tools import FORMATS
from tests.text.test_grammar import EOS, letters

MARKS = ["<|channel|>", "<|message|>", "<|constrain|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|end|>", "<|start|>"]
WORDS = ["11", "111", ".11", "1.1", "1e11", "1,", " 1", "0" * 12, "1" * 14, '"1', "1}", "\n1"]
VOCAB = 300
TOKENIZER = letters(WORDS)
TOKENIZER.raw.add_special_tokens(MARKS)
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)
PEOPLE = {
    "type": "object",
    "properties": {"people": {"type": "integer"}},
    "required": ["people"],
    "additionalProperties": False,
}
NUMBER = re.compile(r"-?(\d{1,18})(\.\d{1,17})?([eE][-+]?\d{1,2})?")


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


def written(spec: GrammarSpec, likes: str, most: int = 400, before: str = "") -> str:
    """What a model writes that likes these characters, the first one best, and the longest token of them."""
    state, text = COMPILER.compile(spec).start(), b""
    state.advance(list(before.encode()))
    order = {ord(letter): i for i, letter in enumerate(likes)}
    for _ in range(most):
        if state.finished:
            break
        ids = np.unpackbits(state.masks()[0], bitorder="little").nonzero()[0].tolist()
        pieces = {token: TOKENIZER.token_bytes(token, skip_special=False) for token in ids if token != EOS}
        if not pieces:
            break
        token = min(pieces, key=lambda i: (order.get(pieces[i][0], len(likes)), -len(pieces[i]), pieces[i]))
        state.advance([token])
        assert not state.failed
        text += pieces[token]
    return text.decode()


@pytest.mark.parametrize("likes", ["1", "0", "1.", ".1", "e1", "1e", "-.1", "E-1", ".0", "91"])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_a_number_ends_whatever_the_model_prefers(kind: str, likes: str) -> None:
    text = written(schema({"type": kind}), likes)
    assert NUMBER.fullmatch(text), text
    assert abs(json.loads(text)) < (10**18 if kind == "integer" else float("inf"))
    text = written(schema({**PEOPLE, "properties": {"people": {"type": kind, "minimum": 2}}}), likes + "}")
    assert NUMBER.fullmatch(str(re.findall(r":\s*(.*)}", text)[0])) and json.loads(text)["people"] >= 2


@pytest.mark.parametrize("likes", ["1", "1.", "1e"])
def test_so_does_one_in_free_json_and_after_thoughts(likes: str) -> None:
    free = written(GrammarSpec("json_object"), '{"' + ":" + likes + "}")
    thought = after_thinking(GrammarSpec("json_schema", json.dumps(PEOPLE)), Think(), "<think>")
    after = written(thought, likes + "}", before='say "1, 1</think>')
    for text in (free, after):
        numbers = re.findall(r"[-+.eE\d]{5,}", re.sub(r'"[^"]*"', "", text))
        assert all(NUMBER.fullmatch(number) for number in numbers), text
    assert json.loads(after)["people"] > 10**17


@pytest.mark.parametrize("name", FORMATS)
def test_so_does_one_in_a_call(name: str) -> None:
    nested = {**PEOPLE, "properties": {**PEOPLE["properties"], "at": {"type": "array", "items": {"type": "number"}}}}
    tool = {"function": {"name": "f", "parameters": {**nested, "required": ["people", "at"]}}}
    spec = FORMATS[name].constraint([tool], "f", False)
    assert spec is not None
    for likes in ("1", "1.", "1e"):
        text = written(spec, likes + "]}")
        parser = FORMATS[name].parser([tool])
        events = parser.feed(text) + parser.finish()
        arguments = json.loads("".join(getattr(event, "text", "") for event in events))
        assert 10**16 < arguments["people"] < 10**18
        assert all(NUMBER.fullmatch(number) for number in re.findall(r"[-+.eE\d]{5,}", text)), text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"type": "integer", "minimum": 10**17, "maximum": 10**18 - 1}, 10**17),
        ({"type": "number", "minimum": -5, "maximum": 5}, -5),
        ({"type": "integer", "multipleOf": 7}, 7 * 10**16),
        ({"enum": [1234567890123456768, "a"]}, 1234567890123456768),
        ({"const": 12345678901234568000000}, 12345678901234568000000),
    ],
)
def test_a_schemas_own_bounds_keep_their_meaning(value: dict[str, Any], shown: int) -> None:
    state = COMPILER.compile(schema(value)).start()
    for letter in str(shown):
        assert np.unpackbits(state.masks()[0], bitorder="little")[ord(letter)], letter
        state.advance([ord(letter)])
    assert not state.failed and (state.finished or np.unpackbits(state.masks()[0], bitorder="little")[EOS])


@pytest.mark.parametrize(
    "value",
    [
        {"type": "string"},
        {"type": "string", "pattern": "^[0-9]{40}$"},
        {"type": "string", "pattern": "^[0-9]+-[0-9]+$"},
        {"type": "string", "maxLength": 60},
    ],
)
def test_digits_in_a_string_are_not_bounded(value: dict[str, Any]) -> None:
    text = written(schema(value), "1", 45)
    assert re.search(r"1{25,}", text)


def test_drafted_rows_are_bounded_as_plain_rows() -> None:
    dice, spec = random.Random(1), schema({"type": "array", "items": {"type": "number"}})
    for text in ("[111111111111111111,1", "[1.11111111111111111e11,2", "[ 1" + "1" * 17 + "]"):
        state = COMPILER.compile(spec).start()
        start = dice.randrange(1, len(text))
        state.advance(list(text[:start].encode()))
        drafts = list(text[start:].encode())
        ahead = state.masks(drafts)
        for i, token in enumerate(drafts):
            assert (state.masks()[0] == ahead[i]).all()
            state.advance([token])
