"""Conversations of several turns: each answer is what the model says to all that precedes it, whoever writes them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdraft.core import SamplingParams, UserError
from sparkdraft.llm import LLM
from sparkdraft.train import prompts
from sparkdraft.train.batches import Batches
from sparkdraft.train.corpus import Corpus, Finish
from sparkdraft.train.data import make_corpus, read_lengths
from sparkdraft.train.generate import (
    BulkGenerator,
    EngineModel,
    EngineWriter,
    Prompt,
    Writer,
    Written,
    cut_loop,
    open_engine,
)
from sparkdraft.train.prompts import Glue, Talk
from sparkdraft.train.target import ChatModel, Target, load_target
from tests.models.tiny import write_tiny
from tests.train.test_generate import CHAT, engine_ids, in_order, some_prompts

GOAL = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny(tmp_path_factory.mktemp("tiny"), "qwen3", num_hidden_layers=2)
    (path / "chat_template.jinja").write_text(CHAT)
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(str(folder), device="cpu")


@pytest.fixture(scope="module")
def served(folder: Path) -> EngineModel:
    return open_engine(str(folder), 8192, 4, device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def short_messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prompts, "MESSAGE_TOKENS", 12)
    monkeypatch.setattr("sparkdraft.train.prompts.MESSAGE_TOKENS", 12)
    yield


def writer_of(kind: str, target: Target, served: EngineModel, max_len: int, ends: frozenset[int]) -> Writer:
    if kind == "bulk":
        return BulkGenerator(target, max_len, 3, stop_ids=ends, seed=4)
    return EngineWriter(served, max_len, ends, seed=4)


def talks(model: ChatModel, count: int) -> list[Talk]:
    glue = Glue.of(model)
    assert glue
    firsts = [Prompt(model.chat_ids([{"role": "user", "content": f"say {i}"}]), "any", 0.0, 20) for i in range(count)]
    return [Talk(model, glue, first, GOAL, set(), random.Random(i)) for i, first in enumerate(firsts)]


def test_the_words_between_turns_are_the_templates(target: Target) -> None:
    glue = Glue.of(target)
    assert glue and glue.to_user == "</s>\n<s>user\n" and glue.end_id == 2 and 2 in glue.ends
    assert target.tokenizer.decode(glue.to_answer, skip_special=False) == "</s>\n<s>assistant\n"
    forgetful = CHAT.replace("m.content", "(m.content if loop.last else m.content[:3])")
    assert Glue.of(replace(target, chat_template=forgetful)) is None


@pytest.mark.parametrize("kind", ["bulk", "engine"])
def test_every_answer_follows_from_all_that_precedes_it(
    kind: str, folder: Path, target: Target, served: EngineModel
) -> None:
    """What is kept of earlier turns is what running all of them again would give."""
    everything = talks(target, 5)
    writer = writer_of(kind, target, served, GOAL, everything[0].glue.ends)
    ended = [w.prompt.tag for w in writer.run((t.begin() for t in everything), follow=lambda w: w.prompt.tag.follow(w))]
    assert sorted(map(id, ended)) == sorted(map(id, everything))
    assert sum(len(t.answers) for t in everything) > 2 * len(everything) and max(len(t.ids) for t in everything) <= GOAL
    llm = LLM(str(folder), dtype="float32", device="cpu", spec="off", max_model_len=256)
    for talk in everything:
        assert talk.ids[: len(talk.first.ids)] == list(talk.first.ids)
        for begin, end in talk.answers:
            said = talk.ids[begin:end]
            assert talk.ids[:begin][-len(talk.glue.to_answer) :] == talk.glue.to_answer
            params = SamplingParams(max_tokens=len(said), stop_ids=tuple(talk.glue.ends), ignore_eos=True)
            assert llm.generate([talk.ids[:begin]], params)[0].completions[0].ids == said
        between = [talk.ids[a:b] for (_, a), (b, _) in zip(talk.answers, talk.answers[1:], strict=False)]
        texts = [target.tokenizer.decode(ids, skip_special=False) for ids in between]
        assert all("<s>user\n" in text and text.endswith("</s>\n<s>assistant\n") for text in texts), texts


def test_bad_messages_are_written_again(target: Target) -> None:
    talk = talks(target, 1)[0]
    encode = target.tokenizer.encode

    def said(text: str, prompt: Prompt, finish: Finish = Finish.END) -> Written:
        return Written(prompt, np.array(encode(text, add_special=False), np.int32), finish)

    asked = talk.follow(said("I am.</s>", talk.begin()))
    assert asked and talk.opening is not None and asked.held == len(talk.ids) - 1
    talk.leave_out.add("what is the sea?")
    for text, finish in (("</s>", Finish.END), ("a<s>bcd</s>", Finish.END), ("abcd", Finish.LOOP)):
        asked = talk.follow(said(text, asked, finish))
        assert asked and talk.opening is not None and list(asked.ids[: asked.held]) == talk.ids[: asked.held]
    talk.opening = ""
    assert talk.follow(said("What is the  sea?</s>", asked)) is None, "the fourth time is the last"
    assert dict(talk.dropped) == {"empty": 1, "special ids": 1, "loop": 1, "excluded": 1} or "short" in talk.dropped
    assert talk.answers == [(len(talk.first.ids), len(talk.ids))]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_engine_writes_what_it_serves(folder: Path, served: EngineModel, temperature: float) -> None:
    prompts = [replace(p, temperature=temperature) for p in some_prompts(9, max_new=40)]
    writer = EngineWriter(served, 64, seed=1)
    written = in_order(list(writer.run(prompts)))
    assert [w.prompt for w in written] == prompts and writer.num_generated == sum(len(w.ids) for w in written)
    if temperature == 0:
        assert [w.ids.tolist() for w in written] == engine_ids(folder, prompts, 64)
    again = in_order(list(EngineWriter(served, 64, seed=1).run(prompts)))
    assert [w.ids.tolist() for w in again] == [w.ids.tolist() for w in written], "the same seed, the same texts"
    stops = iter([False] * 6 + [True])
    assert len(list(writer.run(prompts, stopped=lambda: next(stops)))) < 9
    assert not writer.engine.scheduler.has_work, "what was not finished is aborted"
    for each in written:
        assert each.finish is (Finish.END if each.ids[-1] in served.tokenizer.eos_ids else Finish.LENGTH)


def test_the_engines_loops_are_cut(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "dull", "qwen3-tied", num_hidden_layers=1, initializer_range=0.02)
    model = open_engine(str(folder), 256, 2, device="cpu", dtype="float32")
    prompts = [Prompt(ids, "code", 0.0, 200, i) for i, ids in enumerate([[5, 6], [70, 71, 72]])]
    written = in_order(list(EngineWriter(model, 256).run(prompts)))
    assert {w.finish for w in written} == {Finish.LOOP}
    for each, whole in zip(written, engine_ids(folder, prompts, 256), strict=True):
        assert each.ids.tolist() == whole[: len(each.ids)] == cut_loop(np.array(whole[: len(each.ids) + 63])).tolist()


@pytest.mark.parametrize("kind", ["bulk", "engine"])
def test_a_corpus_has_its_share_of_conversations(
    kind: str, target: Target, served: EngineModel, tmp_path: Path
) -> None:
    model = target if kind == "bulk" else served
    summary = make_corpus(model, tmp_path, synthesise=8, max_new=16, seats=4, lengths=((120, 0.25), (200, 0.25)))
    corpus = Corpus(tmp_path)
    turns = np.diff(corpus.first_span)
    assert len(corpus) == 8 == summary["documents"] and 0 < summary["conversations"] == (turns > 1).sum() < 8
    assert summary["answers"] == turns.sum() and summary["tokens"] == np.diff(corpus.spans).sum()
    assert corpus.length.max() <= 200 and corpus.length[turns == 1].max() <= 16 + corpus.num_prompt.max()
    batches = Batches(corpus, 512, 96, (8,), 512, seed=0)
    batch = batches.take(0)
    inside = [False] * 512
    bounds, documents = batch.bounds.tolist(), batches._epoch(0)
    for i, start in enumerate(bounds[:-1]):
        for begin, end in corpus.answers(int(documents[i % len(documents)])).tolist():
            inside[start + begin : start + end - 1] = [True] * (end - 1 - begin)
    assert all(inside[anchor] for anchor in batch.anchors.tolist()), "an anchor is in an answer, and a label follows"
    again = make_corpus(model, tmp_path, synthesise=8, max_new=16, seats=4, lengths=((120, 0.25), (200, 0.25)))
    assert again["documents"] == 0 and again["held"] == 8


def ask(folder: Path, name: str, prompts: list[str]) -> str:
    path = folder / f"{name}.txt"
    path.write_text("\n".join(prompts))
    return str(path)


def conversations(folder: Path) -> set[bytes]:
    """The prompts of the documents that have several answers."""
    corpus = Corpus(folder)
    several = np.flatnonzero(np.diff(corpus.first_span) > 1)
    return {corpus.ids(int(i))[: corpus.num_prompt[i]].tobytes() for i in several}


def test_a_corpus_that_is_continued_has_the_conversations_of_an_unbroken_one(target: Target, tmp_path: Path) -> None:
    file, written = ask(tmp_path, "some", [f"say {i}" for i in range(16)]), 0

    def count(done: int, total: int) -> None:
        nonlocal written
        written = done

    options: dict[str, Any] = {"max_new": 16, "seats": 4, "lengths": ((160, 0.3),), "seed": 1}
    make_corpus(target, tmp_path / "whole", file, **options)
    first = make_corpus(target, tmp_path / "parts", file, report=count, until=lambda: written > 7, **options)
    assert first["stopped"] and not conversations(tmp_path / "parts"), "short texts come first"
    assert not make_corpus(target, tmp_path / "parts", file, **options)["stopped"]
    assert conversations(tmp_path / "parts") == conversations(tmp_path / "whole") and conversations(tmp_path / "whole")


def test_conversations_that_are_cut_short_are_kept_and_it_is_said(target: Target, tmp_path: Path) -> None:
    file, looks = ask(tmp_path, "some", ["say a", "say b", "say c"]), iter(range(1000))
    options: dict[str, Any] = {"max_new": 16, "seats": 4, "lengths": ((160, 1.0),)}
    cut = make_corpus(target, tmp_path / "c", file, until=lambda: next(looks) > 4, **options)
    assert cut["documents"] == 3 == cut["cut"] and cut["left"] == 0 and cut["stopped"]
    assert Corpus(tmp_path / "c").length.max() < 120
    assert not make_corpus(target, tmp_path / "c", file, **options)["stopped"], "they stay as short as they are"


@pytest.mark.parametrize("kind", ["bulk", "engine"])
def test_a_prompt_longer_than_a_conversation_is_answered(
    kind: str, target: Target, served: EngineModel, tmp_path: Path
) -> None:
    file = ask(tmp_path, "long", ["word " * 60, "word " * 85, "short"])
    model = target if kind == "bulk" else served
    summary = make_corpus(model, tmp_path / "c", file, max_new=16, seats=4, lengths=((100, 1.0), (400, 0.0)))
    corpus = Corpus(tmp_path / "c")
    assert summary["documents"] == 3 and sorted(corpus.num_prompt > 400) == [False, False, True]
    assert corpus.length[corpus.num_prompt < 400].max() <= 400 and (np.diff(corpus.first_span) > 1).sum() == 2


def test_lengths_are_read(tmp_path: Path) -> None:
    assert read_lengths("2048:0.03, 8192:0.5") == ((2048, 0.03), (8192, 0.5)) and read_lengths("") == ()
    for text in ("2048", "a:1", "0:0.1", "9:0.6,8:0.6", "9:-1", "9:nan"):
        with pytest.raises(UserError, match="--lengths is"):
            read_lengths(text)
