"""Ids against transformers on the same files, and the bytes of every token against the library's own decoding."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from sparkdraft.core import UserError
from sparkdraft.text.tokenizer import Tokenizer, byte_alphabet
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.gguf_tokenizer import DIGITS, RULES, build

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "12345 67,890.12 0x1F 3.14e-10 ½ ² Ⅷ ٣٤",
    "\n\n1. one\n\n2. two   3",
    "don't I'LL we've he's",
    "café naïve Ω straße 日本語テスト 한국어 עברית العربية हिन्दी 🎉👩‍👩‍👧‍👦🇩🇪",
    "e\u0301 and é, \u00a0nbsp\u2003wide\u200bzero",
    "def f(x):\n    return {'a': [x ** 2, ~x]}  # comment\n\n\tif x:\r\n\t\tpass\n",
    "a  b   c    d\t\te \n \n  f   ",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text <|endoftext|> <jupyter_start>x<repo_name>y <|im_start",
    "\x00\x01\x7f\x80 tail",
    "x" * 3000 + " " + "0" * 50,
]
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, this is a test of the tokenizer",
    "numbers 12345 and 67",
    "café au lait über straße",
] * 20


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.of(open_checkpoint(str(smollm2_path)))


@pytest.fixture(scope="module")
def reference(smollm2_path: Path, smollm2_reader: Any) -> Any:
    import gguf
    from transformers import AutoTokenizer

    with pytest.MonkeyPatch.context() as patch:  # transformers opens the file three times, at four seconds each
        patch.setattr(gguf, "GGUFReader", lambda path: smollm2_reader)
        return AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)


def train(sentencepiece: bool) -> RawTokenizer:
    raw = RawTokenizer(models.BPE())
    if sentencepiece:
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    else:
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(CORPUS, trainer)
    return raw


def sentencepiece_settings() -> dict[str, Any]:
    """The metadata of a small SentencePiece model, as llama.cpp's converter would write it."""
    pieces = [token for token, _ in sorted(train(True).get_vocab().items(), key=lambda entry: entry[1])]
    rank = {piece: -float(i) for i, piece in enumerate(piece for piece in pieces if len(piece) > 1)}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces],
        "tokenizer.ggml.scores": [0.0] * 259 + [rank.get(piece, -1000.0 - i) for i, piece in enumerate(pieces)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def byte_level_settings(pre: str) -> dict[str, Any]:
    import json

    model = json.loads(train(False).to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda entry: entry[1])]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + special + ["<think>"],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3] * 3 + [4],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 2,
    }


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(smollm2: Tokenizer, reference: Any, text: str) -> None:
    assert smollm2.encode(text) == reference.encode(text)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text(" \n\t0123456789ab'.<|>é"))
def test_ids_on_any_text(smollm2: Tokenizer, reference: Any, text: str) -> None:
    assert smollm2.encode(text) == reference.encode(text)


def test_where_llama_cpp_cuts_digits_otherwise(smollm2: Tokenizer) -> None:
    """llama.cpp's rule, and the model's training, make one word of the blanks before a digit; see RULES."""
    raw = RawTokenizer.from_str(smollm2.raw.to_str())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    assert raw.encode("1 22 a3 (4)").ids == smollm2.encode("1 22 a3 (4)")
    assert raw.encode("\n\n1").tokens == ["ĊĊ", "1"] and smollm2.raw.encode("\n\n1").tokens == ["Ċ", "Ċ", "1"]
    assert RULES["starcoder"] is DIGITS


def test_building_is_quick(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(str(smollm2_path))
    start = time.process_time()
    checkpoint.tokenizer_json()
    assert time.process_time() - start < 10.0  # 0.1 s of a core; minutes where each token is searched for in a list


def test_ends_and_special_ids(smollm2: Tokenizer) -> None:
    assert smollm2.eos_ids == {2} and smollm2.vocab_size == 49152
    assert smollm2.special_ids == set(range(17)) and smollm2.is_special(2) and not smollm2.is_special(17)
    several = Tokenizer(smollm2.raw, {"eos_token": "<|im_end|>"}, {"eos_token_id": 0}, {"eos_token_id": [2, 5]})
    assert several.eos_ids == {2, 5}


def test_bytes_of_every_token(smollm2: Tokenizer) -> None:
    for token in range(smollm2.vocab_size):
        expected = smollm2.decode([token], skip_special=False)
        assert smollm2.token_bytes(token, skip_special=False).decode(errors="replace") == expected, token
    assert smollm2.token_bytes(1) == b"" and smollm2.token_bytes(1, skip_special=False) == b"<|im_start|>"
    assert smollm2.token_bytes(10**6) == smollm2.token_bytes(-1) == b""


def test_byte_alphabet() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256)) and byte_alphabet()["Ġ"] == 32


def test_decode_is_the_way_back(smollm2: Tokenizer) -> None:
    for text in TEXTS:
        if "\x01" not in text:  # the vocabulary lacks some bytes
            assert smollm2.decode(smollm2.encode(text), skip_special=False) == text


@pytest.mark.parametrize("text", ["\ud800", "ok \udcff", b"caf\xe9".decode("utf-8", "surrogateescape")])
def test_lone_surrogates(smollm2: Tokenizer, text: str) -> None:
    with pytest.raises(UserError, match="not valid UTF-8"):
        smollm2.encode(text)


def test_sentencepiece_as_transformers_reads_it(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "spm.gguf", settings=sentencepiece_settings())
    ours = Tokenizer.of(open_checkpoint(str(path)))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="spm.gguf")
    for text in [*TEXTS, *CORPUS[:4], "the<s>quick</s> fox<unk>", " the", "  the", "▁the the"]:
        ids = ours.encode(text, add_special=False)
        assert ids == theirs.encode(text), text  # transformers leaves out the begin that the file asks for
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert ours.strips_space and ours.eos_ids == {2}
    assert ours.token_bytes(3 + 0xE2) == b"\xe2"


def test_qwen_as_transformers_reads_it(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "q.gguf", "qwen3", byte_level_settings("qwen2"))
    ours = Tokenizer.of(open_checkpoint(str(path)))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="q.gguf")
    for text in [*TEXTS, *CORPUS[:4]]:
        assert ours.encode(text) == theirs.encode(text), text
    assert len(ours.encode("<think>")) == 1 and not ours.special_ids & set(ours.encode("<think>"))


def test_llama3_rule() -> None:
    meta = byte_level_settings("llama-bpe")
    raw = build(meta, Path("x"))
    words = [word for word, _ in raw.pre_tokenizer.pre_tokenize_str("It's 12345\n\n  x")]
    assert words == ["It", "'s", "Ġ", "123", "45", "ĊĊ", "Ġ", "Ġx"]
    assert (
        raw.encode("a").ids[0] == meta["tokenizer.ggml.bos_token_id"]
    )  # Llama 3 starts, even where the file is silent


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "klingon"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer"),
        ({"tokenizer.ggml.merges": ["q zzz"]}, "inconsistent"),
    ],
)
def test_what_cannot_be_built(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(byte_level_settings("gpt-2") | change, Path("x"))


def test_other_decoders() -> None:
    raw = RawTokenizer(models.BPE())
    with pytest.raises(UserError, match="no decoder"):
        Tokenizer(raw)
    raw.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="WordPiece"):
        Tokenizer(raw)


def test_added_tokens_are_plain_text() -> None:
    raw = train(False)
    raw.decoder = decoders.ByteLevel()
    raw.add_tokens([AddedToken("<tool call>"), AddedToken("<日>")])
    tokenizer = Tokenizer(raw)
    for token in ("<tool call>", "<日>"):
        index = raw.token_to_id(token)
        assert index is not None and tokenizer.token_bytes(index).decode() == token == tokenizer.decode([index])


def test_no_text_is_cut_or_padded() -> None:
    raw = train(False)
    raw.decoder = decoders.ByteLevel()
    raw.enable_truncation(4)
    raw.enable_padding(length=16)
    assert Tokenizer(raw).decode(Tokenizer(raw).encode("hello world, " * 9)) == "hello world, " * 9
