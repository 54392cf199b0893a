"""Streaming against decoding in one go, for both families of tokenizers and any ids; stop strings in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from sparkdraft.core import Request, SamplingParams
from sparkdraft.engine.output import Output
from sparkdraft.text.detokenize import Detokenizer, StopFinder
from sparkdraft.text.tokenizer import Tokenizer
from sparkdraft.weights.checkpoint import open_checkpoint

# Up to the last plane with characters in it: the embedded model's vocabulary lacks the bytes of the others.
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], max_codepoint=0x3FFFF))


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.of(open_checkpoint(str(smollm2_path)))


def sentencepiece(metaspace: bool = False) -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for piece in ["▁", "▁▁", "▁the", "t", "h", "e", "▁日", "日", "é", ".", "▁a▁b"]:
        vocab[piece] = len(vocab)
    raw = RawTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Metaspace() if metaspace else decoders.Sequence(steps)
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(raw, {"bos_token": "<s>", "eos_token": "</s>"})


def pieces(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    stream = Detokenizer(tokenizer, skip_special)
    return [*(stream.push(token) for token in ids), stream.finish()]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
def test_any_ids(smollm2: Tokenizer, ids: list[int], skip: bool) -> None:
    text = "".join(pieces(smollm2, ids, skip))
    assert text == b"".join(smollm2.token_bytes(token, skip) for token in ids).decode(errors="replace")
    assert text == smollm2.decode(ids, skip_special=skip)


@settings(max_examples=200, deadline=None)
@given(text=ANY_TEXT)
def test_no_half_characters(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    stream = Detokenizer(smollm2)
    seen = ""
    for token in ids:
        piece = stream.push(token)
        seen += piece
        assert "�" not in piece or "�" in text
    assert seen + stream.finish() == smollm2.decode(ids)


def test_an_emoji_comes_whole(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🎉")
    assert len(ids) > 1 and pieces(smollm2, ids) == [""] * (len(ids) - 1) + ["🎉", ""]
    assert pieces(smollm2, ids[:-1])[-1] == "�"


@settings(max_examples=300, deadline=None)
@given(data=st.data(), metaspace=st.booleans())
def test_sentencepiece(data: st.DataObject, metaspace: bool) -> None:
    tokenizer = sentencepiece(metaspace)
    plain = [index for index in range(tokenizer.vocab_size) if not 3 <= index < 259]  # whole characters
    ids = data.draw(st.lists(st.sampled_from(plain), max_size=12))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)
    stream = Detokenizer(tokenizer, continues=True)
    text = "".join(map(stream.push, ids)) + stream.finish()
    assert text == b"".join(map(tokenizer.token_bytes, ids)).decode()


@settings(max_examples=100, deadline=None)
@given(text=ANY_TEXT.filter(bool))
def test_byte_fallback(text: str) -> None:
    tokenizer = sentencepiece()
    ids = [1, *(3 + byte for byte in text.encode()), 2]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == text.removeprefix(" ")


def test_a_text_that_continues_its_prompt_keeps_the_blank_before_its_first_word() -> None:
    tokenizer = sentencepiece()
    word = 3 + 256 + 2  # "▁the"
    for continues, text in ((False, "the"), (True, " the")):
        request = Request("r", 0, [1], SamplingParams(continues=continues), 0, 9)
        assert Output(request, tokenizer).push([word]).text == text


def whole(text: str, stops: list[str]) -> tuple[str, bool]:
    """The shortest beginning of the text that ends with a stop, cut before the longest stop that it ends with."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    finder = StopFinder(stops)
    out, stopped = "", False
    for piece in pieces:
        text, stopped = finder.push(piece)
        out += text
        if stopped:
            break
    return out + finder.finish(), stopped


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", max_size=4), max_size=4),
)
def test_any_cut_gives_the_same(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == whole("".join(pieces), stops)


@given(text=st.text("ab", max_size=20), stop=st.text("ab", min_size=1, max_size=5))
def test_nothing_is_held_that_could_go(text: str, stop: str) -> None:
    finder = StopFinder([stop])
    out, stopped = finder.push(text)
    if not stopped:
        held = text[len(out) :]
        assert len(held) < len(stop) and (not held or stop.startswith(held))
        longer = [n for n in range(len(held) + 1, len(stop)) if text.endswith(stop[:n])]
        assert not longer


def test_across_a_border() -> None:
    finder = StopFinder(["\n\nUser:"])
    assert finder.push("Hi\n") == ("Hi", False)
    assert finder.push("\nUs") == ("", False)
    assert finder.push("er: more") == ("", True)
    assert finder.push("never") == ("", True) and finder.finish() == ""


def test_a_false_start_is_given_back() -> None:
    finder = StopFinder(["STOP"])
    assert [finder.push(piece)[0] for piece in ("aST", "O", "b")] == ["a", "", "STOb"]
    assert finder.push("S") == ("", False) and finder.finish() == "S"


def test_no_stops_hold_nothing() -> None:
    assert StopFinder([]).push("text") == ("text", False)
    assert StopFinder([""]).push("text") == ("text", False)
