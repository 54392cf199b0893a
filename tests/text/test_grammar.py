"""Grammars against brute force: every id of a small vocabulary, tried one by one, and languages that can be listed."""

from __future__ import annotations

import json
import random
import re
import threading
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from sparkdraft.core import GrammarSpec, TryLater, UserError
from sparkdraft.text import grammar
from sparkdraft.text.grammar import GrammarCompiler, GrammarState
from sparkdraft.text.reasoning import Think, after_thinking
from sparkdraft.text.tokenizer import BYTE_OF, Tokenizer
from sparkdraft.text.tools import FORMATS
from sparkdraft.weights.checkpoint import open_checkpoint
from tests.models.tiny import byte_tokenizer
from tests.patience import PATIENT

EOS = 256
WORDS = ['{"', '":', '",', "ab", "abc", "bc", "00", "\n ", "  ", "tr", "ue", "null", '"}', "é", "]}"]
VOCAB = 300  # more than the tokenizer has, as in padded checkpoints
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def letters(words: list[str]) -> Tokenizer:
    """Ids 0 to 255 are the bytes, 256 the end, then one id for each word, which encoding never makes."""
    raw = RawTokenizer(models.BPE(vocab=dict(BYTE_OF), merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["</s>"])
    raw.add_tokens(words)
    return Tokenizer(raw, {"eos_token": "</s>"})


COMPILER = GrammarCompiler(letters(WORDS), VOCAB)
BYTES = GrammarCompiler(letters([]), VOCAB)
SPECS = [
    GrammarSpec("json_object"),
    GrammarSpec("json_schema", json.dumps(PERSON)),
    GrammarSpec("json_schema", '{"enum": ["ab", "abc", 100, null, true]}'),
    GrammarSpec("regex", "(ab|bc)+0{2,5}é?"),
    GrammarSpec("lark", 'start: "a" mid* "c"\nmid: "b" | "(" mid ")"'),
]


def allowed(mask: np.ndarray) -> set[int]:
    return set(np.unpackbits(mask, bitorder="little").nonzero()[0].tolist())


def now(state: GrammarState) -> set[int]:
    return allowed(state.masks()[0])


def is_text(spec: GrammarSpec, text: str, compiler: GrammarCompiler = BYTES) -> bool:
    state = compiler.compile(spec).start()
    state.advance(list(text.encode()))
    return not state.failed and (state.finished or EOS in now(state))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.kind}-{s.text[:12]}")
def test_a_bit_is_set_for_exactly_the_ids_that_the_grammar_takes(spec: GrammarSpec) -> None:
    rng = random.Random(3)
    for compiler, exact in ((BYTES, True), (COMPILER, False)):
        for _ in range(8):
            state = compiler.compile(spec).start()
            for _ in range(12):
                ids, taken = now(state), {t for t in range(VOCAB) if state.num_valid([t]) == 1}
                assert ids and ids <= {*range(257 + len(WORDS))}
                # Where the bytes that follow are forced, only the tokenizer's own way of writing them is left.
                assert ids == taken if exact or len(ids) > 1 else ids <= taken
                assert now(state) == ids, "looking changes nothing"
                state.advance([rng.choice(sorted(ids))])
                assert not state.failed
                if state.finished:
                    break


def test_masks_are_those_of_a_language_that_can_be_listed() -> None:
    texts = [json.dumps(v).encode() for v in ["ab", "abc", 100, None, True]]
    for text in texts:
        for cut in range(len(text)):
            state = BYTES.compile(SPECS[2]).start()
            state.advance(list(text[:cut]))
            following = {t[cut] for t in texts if t.startswith(text[:cut]) and len(t) > cut}
            assert now(state) == following | ({EOS} if text[:cut] in texts else set())


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.kind}-{s.text[:12]}")
def test_drafted_rows_have_the_masks_of_plain_rows(spec: GrammarSpec) -> None:
    rng = random.Random(4)
    for _ in range(12):
        state, text = COMPILER.compile(spec).start(), []
        for _ in range(6):
            drafts, plain = [], COMPILER.compile(spec).start()
            plain.advance(text)
            expected = [plain.masks()[0]]
            for _ in range(5):
                drafts.append(rng.choice(sorted(allowed(expected[-1]))))
                plain.advance(drafts[-1:])
                expected.append(plain.masks()[0])
                if plain.finished:
                    break
            wrong = rng.choice(sorted({*range(VOCAB)} - allowed(expected[-1]) - {EOS}))
            got = state.masks([*drafts, wrong, 5, 6])
            assert state.num_valid([*drafts, wrong]) == len(drafts)
            assert np.array_equal(got, np.stack(expected))
            keep = rng.randint(1, len(drafts))
            state.advance(drafts[:keep])
            text += drafts[:keep]
            if state.finished:
                break


def test_the_end_comes_with_the_last_letter_or_when_it_is_chosen() -> None:
    state = BYTES.compile(GrammarSpec("regex", "ab?")).start()
    state.advance([ord("a")])
    assert not state.finished and now(state) == {ord("b"), EOS}
    chosen = BYTES.compile(GrammarSpec("regex", "ab?")).start()
    chosen.advance([ord("a"), EOS])
    assert chosen.finished and not chosen.failed
    state.advance([ord("b")])
    assert state.finished and now(state) == {EOS} and len(state.masks([EOS, 5])) == 1
    state.advance([EOS])
    assert not state.failed
    state = BYTES.compile(GrammarSpec("regex", "ab?")).start()
    state.advance([ord("b")])
    assert state.failed and state.finished and now(state)


def test_a_limit_met_along_drafts_does_not_reach_the_text() -> None:
    """A matcher that met a limit stays failed: the state must return to where it was."""
    state = BYTES.compile(SPECS[3]).start()
    state.advance(list(b"ab"))
    before = now(state)
    state._matcher.consume_token(7)  # puts it into that state
    assert state._matcher.is_error()
    state.masks([ord("b")])
    assert now(state) == before and not state.failed and not state.finished


def test_blanks_between_pieces_of_json_are_few() -> None:
    spec = SPECS[1]
    for text in ('{"name":"a","age":1}', '{"name": "a", "age": 1}', '{\n  "name": "a  b",\n  "age": 1\n}'):
        assert is_text(spec, text), text
    for text in ('{"name":  "a","age":1}', '{\n\n"name":"a","age":1}', ' {"name":"a","age":1}', '{"name":"a"}'):
        assert not is_text(spec, text), text
    own = {**PERSON, "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": " +", "lenient": True}}
    assert not is_text(GrammarSpec("json_schema", json.dumps(own)), '{"name":  "a","age":1}')


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", "{", "the JSON schema is not JSON"),
        ("json_schema", "[1]", "the JSON schema is not a JSON object; send one"),
        ("json_schema", '{"type": "strin"}', "the JSON schema cannot be used: Invalid type: strin; change that part"),
        ("json_schema", '{"type": "string", "pattern": "("}', "unclosed group"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"minimum": 5, "maximum": 3, "type": "integer"}', "minimum .5. is greater than maximum"),
        (
            "json_schema",
            '{"oneOf": [{}, {"type": "string"}]}',
            "oneOf constraints are not supported, use anyOf; change",
        ),
        ("json_schema", '{"$ref": "https://example.com/x"}', "not present"),
        ("json_schema", '{"items":' * 120 + "{}" + "}" * 120 + "x", "not JSON"),
        ("json_schema", '{"x": NaN, "y": "\\ud800"}', "the JSON schema cannot be used"),
        ("json_schema", " " * 70_000 + "{}", "has 70,002 bytes and 65,536 are allowed; shorten it"),
        ("json_schema", '{"$ref": "#"}', "cannot be used: no text satisfies it; change it so that one does"),
        ("json_schema", json.dumps({"properties": {f"p{i}": {"type": "null"} for i in range(1500)}}), "too complex"),
        ("regex", "a(", "the regex cannot be used: unclosed group"),
        ("regex", "a\ud800", "not valid Unicode"),
        ("lark", "start: x", "the grammar cannot be used: .*unknown name"),
        ("lark", "start: <|nope|>", "unknown special token"),
        ("yaml", "", "grammar kind is 'yaml'; it must be one of json_object, "),
    ],
)
def test_what_can_not_be_used_is_refused_in_one_sentence(kind: str, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        BYTES.compile(GrammarSpec(kind, text))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def nested(levels: int) -> str:
    """As people nest: an object with one property, each two levels of JSON."""
    return '{"properties":{"a":' * levels + "{}" + "}}" * levels


@pytest.mark.parametrize("levels", [1, 30, 49])
def test_a_schema_may_be_nested_a_hundred_deep(levels: int) -> None:
    for form in (None, Think()):
        spec = after_thinking(GrammarSpec("json_schema", nested(levels)), form, "<think>\n")
        assert now(BYTES.compile(spec).start())
    assert now(BYTES.compile(GrammarSpec("json_schema", '{"items":' * 99 + "{}" + "}" * 99)).start())


@pytest.mark.parametrize("levels", [50, 64, 70, 200, 5000])
def test_a_schema_nested_deeper_is_refused_before_it_is_compiled(levels: int) -> None:
    says = "the JSON schema has (more than 100 objects and arrays within each other, the limit; flatten|.* bytes)"
    spec = GrammarSpec("json_schema", nested(levels))
    with pytest.raises(UserError, match=says):
        BYTES.compile(spec)
    with pytest.raises(UserError, match=says):
        BYTES.compile(after_thinking(spec, Think(), "<think>\n"))
    with pytest.raises(UserError, match=says):
        BYTES.compile(GrammarSpec("json_schema", '{"items":' * levels * 2 + "{}" + "}" * levels * 2))


class Panic(BaseException):
    """As pyo3's, which no `except Exception` sees."""


@pytest.mark.parametrize("error", [ValueError("a\nb"), MemoryError(), RecursionError("deep"), Panic("index 9")])
def test_whatever_the_compiler_raises_is_the_users_to_read(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def broken(*args: object) -> None:
        raise error

    monkeypatch.setattr(grammar, "_matcher", broken)
    with pytest.raises(UserError, match=r"the regex cannot be used: .*; change that part of it") as caught:
        BYTES.compile(GrammarSpec("regex", "never seen before"))
    assert "\n" not in str(caught.value)


def test_compiling_has_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    monkeypatch.setattr(grammar, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(grammar, "_matcher", lambda *args: done.wait(PATIENT))
    with pytest.raises(UserError, match=r"the regex takes more than 0.05 s to compile, the limit; make it smaller"):
        BYTES.compile(GrammarSpec("regex", "a long one"))
    done.set()
    monkeypatch.undo()
    assert now(BYTES.compile(GrammarSpec("regex", "a long one")).start()) == {ord("a")}


def test_compilations_that_take_too_long_are_counted_and_no_more_are_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    done, begun = threading.Event(), []
    for thread in grammar._late:  # of other tests
        thread.join()
    with monkeypatch.context() as patch:
        patch.setattr(grammar, "MAX_SECONDS", 0.05)
        patch.setattr(grammar, "_matcher", lambda *args: begun.append(args) or done.wait(PATIENT))
        for i in range(grammar.MAX_LATE):
            with pytest.raises(UserError, match=r"takes more than 0.05 s"):
                BYTES.compile(GrammarSpec("regex", f"late {i}"))
        with pytest.raises(TryLater, match="2 grammars that took too long still compile, the limit; send") as later:
            BYTES.compile(GrammarSpec("regex", "one more"))
        assert later.value.retry_after == 1
        assert len(begun) == grammar.MAX_LATE
    late = list(grammar._late)
    done.set()
    for thread in late:
        thread.join()
    assert now(BYTES.compile(GrammarSpec("regex", "one more")).start()) == {ord("o")}


@pytest.mark.parametrize("pattern", ["^.*a.{900}b.*$", "(.*a.{200}b|.*c.{200}d)*"])
def test_a_regex_whose_masks_are_costly_is_refused(pattern: str) -> None:
    """Each step would compute thousands of states: 11 ms and more, while every request waits."""
    embedded = Tokenizer.of(open_checkpoint("smollm2"))
    with pytest.raises(UserError, match=r"^the regex is too complex: .*; make it smaller$"):
        GrammarCompiler(embedded, embedded.vocab_size).compile(GrammarSpec("regex", pattern))


def test_the_cache_holds_a_bounded_number_of_grammars_each_of_bounded_size() -> None:
    compiler = GrammarCompiler(letters([]), VOCAB)
    specs = [GrammarSpec("regex", f"a{i}") for i in range(grammar.NUM_CACHED + 3)]
    first = compiler.compile(specs[0])
    for spec in specs[1:]:
        compiler.compile(spec)
        assert compiler.compile(specs[0]) is first, "the one that is used stays"
    assert len(compiler._compiled) == grammar.NUM_CACHED and specs[1] not in compiler._compiled


def test_a_grammar_that_met_a_limit_is_compiled_anew_for_the_next_request() -> None:
    """All its requests share one lexer: if that is full, none of them could continue."""
    compiler = GrammarCompiler(letters([]), VOCAB)
    first = compiler.compile(SPECS[3])
    state = first.start()
    state._matcher.consume_token(7)  # a matcher that met a limit is in the same state
    state.masks()
    second = compiler.compile(SPECS[3])
    assert first.spent and second is not first and not second.spent
    assert compiler.compile(SPECS[3]) is second


@pytest.mark.slow
def test_long_strings_with_a_limit_are_written_to_their_end_by_one_request_after_the_other() -> None:
    embedded = Tokenizer.of(open_checkpoint("smollm2"))
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4000}}, "required": ["a"]}
    compiler, spec = GrammarCompiler(embedded, embedded.vocab_size), GrammarSpec("json_schema", json.dumps(schema))
    for words in ("some words, and ", "other words; ütf "):
        state = compiler.compile(spec).start()
        text = json.dumps({"a": (words * 300)[:4000]}, ensure_ascii=False)
        for token in embedded.encode(text, add_special=False):
            assert token in now(state)
            state.advance([token])
        assert state.finished and not state.failed


SAME = [
    ('{"enum": [[1, 2]]}', ["[1,2]", "[1, 2]", "[\n    1,\n    2\n]"], ["[1," + " " * 40 + "2]", "[1,  2]", "[1,\t2]"]),
    ('{"type": "object"}', ['{"a": 1}'], ['{"a":' + " " * 40 + "1}"]),
    (
        '{"enum": [[1, 2]], "x-guidance": {"whitespace_pattern": " *", "item_separator": ";", "lenient": true}}',
        ["[1, 2]"],
        ["[1," + " " * 40 + "2]", "[1;2]"],
    ),
]
LENIENT = {"not": {"type": "string"}, "uniqueItems": True, "if": {"type": "string"}, "oneOf": [{}, {"type": "string"}]}


@pytest.mark.parametrize(("schema", "good", "bad"), SAME)
def test_an_answer_is_held_the_same_with_thoughts_before_it(schema: str, good: list[str], bad: list[str]) -> None:
    plain = GrammarSpec("json_schema", schema) if "enum" in schema else GrammarSpec("json_object")
    thinking = after_thinking(plain, Think(), "<think>\n")
    for text in good + bad:
        assert is_text(plain, text) is (text in good), text
        assert is_text(thinking, "Hm.</think>" + text) is (text in good), text


@pytest.mark.parametrize("key", LENIENT)
def test_no_schema_can_ask_to_be_held_less(key: str) -> None:
    own = {"lenient": True, "coerce_one_of": True}
    spec = GrammarSpec("json_schema", json.dumps({key: LENIENT[key], "x-guidance": own}))
    for form in (None, Think()):
        with pytest.raises(UserError, match=f"cannot be used: .*({key}|unsupported keywords)"):
            BYTES.compile(after_thinking(spec, form, "<think>\n"))


def test_a_tokenizer_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match="grammars need an end-of-text id"):
        GrammarCompiler(Tokenizer(byte_tokenizer()), 320).compile(SPECS[0])


@pytest.mark.parametrize("wrap", ['{"properties":{"a":%s}}', '{"prefixItems":[%s]}', '{"type":"array","items":%s}'])
def test_a_long_chain_of_references_does_not_overflow_the_stack(wrap: str) -> None:
    """The compiler recurses along it; on a usual stack most of these end the process."""
    links = [f'"{i:x}":' + wrap % f'{{"$ref":"#/$defs/{i + 1:x}"}}' for i in range(1100)]
    schema = f'{{"$ref":"#/$defs/0","$defs":{{{",".join(links)},"{1100:x}":{{}}}}}}'
    assert now(BYTES.compile(GrammarSpec("json_schema", schema)).start())


def test_one_grammar_is_compiled_once_and_from_any_thread() -> None:
    compiler = GrammarCompiler(letters([]), VOCAB)
    made = []
    threads = [threading.Thread(target=lambda i=i: made.append(compiler.compile(SPECS[i % 2]))) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 6 and compiler.compile(SPECS[0]) is compiler.compile(SPECS[0])
    first, second = compiler.compile(SPECS[3]).start(), compiler.compile(SPECS[3]).start()
    first.advance([ord("a")])
    assert now(first) == {ord("b")} and now(second) == {ord("a"), ord("b")}, "states share nothing"


def test_other_tokenizers_of_ours() -> None:
    """The byte tokenizer of tiny checkpoints, whose ids are not bytes, and the embedded model's, made from a GGUF."""
    tiny = Tokenizer(byte_tokenizer(), {"eos_token": "</s>"})
    embedded = Tokenizer.of(open_checkpoint("smollm2"))
    text = '{"name": "Zoë 😀 \\n", "age": 12, "ok": true}'
    for tokenizer, vocab in ((tiny, 320), (embedded, embedded.vocab_size)):
        state = GrammarCompiler(tokenizer, vocab).compile(SPECS[1]).start()
        for token in tokenizer.encode(text, add_special=False):
            ids = now(state)
            assert token in ids and all(not tokenizer.is_special(i) for i in ids) and max(ids) < vocab
            state.advance([token])
        assert state.finished and now(state) == set(tokenizer.eos_ids)


MARKS = ["<|channel|>", "<|message|>", "<|constrain|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|end|>", "<|start|>"]
NUMBER_WORDS = ["11", "111", ".11", "1.1", "1e11", "1,", " 1", "0" * 12, "1" * 14, '"1', "1}", "\n1"]
NUMBER_VOCAB = 300
TOKENIZER = letters(NUMBER_WORDS)
TOKENIZER.raw.add_special_tokens(MARKS)
NUMBER_COMPILER = GrammarCompiler(TOKENIZER, NUMBER_VOCAB)
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
    state, text = NUMBER_COMPILER.compile(spec).start(), b""
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
    state = NUMBER_COMPILER.compile(schema(value)).start()
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
    rng, spec = random.Random(1), schema({"type": "array", "items": {"type": "number"}})
    for text in ("[111111111111111111,1", "[1.11111111111111111e11,2", "[ 1" + "1" * 17 + "]"):
        state = NUMBER_COMPILER.compile(spec).start()
        start = rng.randrange(1, len(text))
        state.advance(list(text[:start].encode()))
        drafts = list(text[start:].encode())
        ahead = state.masks(drafts)
        for i, token in enumerate(drafts):
            assert (state.masks()[0] == ahead[i]).all()
            state.advance([token])
