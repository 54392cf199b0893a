"""Bulk generation against the engine, its samples against the model's distribution, and corpora made from prompts."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sparkdraft.core import SamplingParams, UserError
from sparkdraft.llm import LLM
from sparkdraft.operate.bench.prompts import read_questions
from sparkdraft.train.corpus import Corpus, Finish
from sparkdraft.train.data import check_sources, evaluation_prompts, make_corpus
from sparkdraft.train.generate import BulkGenerator, Prompt, Written, cut_loop, seats_that_fit
from sparkdraft.train.prompts import Sieve, message_prompts, stop_ids, user_turn
from sparkdraft.train.target import Target, load_target
from tests.models.tiny import oracle_logits, write_tiny

CHAT = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
ON_GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny(tmp_path_factory.mktemp("tiny"), "qwen3", num_hidden_layers=2)
    (path / "chat_template.jinja").write_text(CHAT)
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(str(folder), device="cpu")


def some_prompts(count: int, max_new: int, seed: int = 0) -> list[Prompt]:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 17, 40]) for _ in range(count)]
    return [
        Prompt([rng.randrange(3, 259) for _ in range(n)], "code", 0.0, rng.randint(1, max_new), i)
        for i, n in enumerate(lengths)
    ]


def engine_ids(folder: Path, prompts: list[Prompt], context: int) -> list[list[int]]:
    llm = LLM(str(folder), dtype="float32", device="cpu", spec="off", max_model_len=context)
    params = [SamplingParams(max_tokens=p.max_new) for p in prompts]
    return [r.completions[0].ids for r in llm.generate([list(p.ids) for p in prompts], params)]


def in_order(written: list[Written]) -> list[Written]:
    return sorted(written, key=lambda w: w.prompt.tag)


def test_greedy_writes_what_the_engine_writes(folder: Path, target: Target) -> None:
    prompts = some_prompts(14, max_new=40)
    generator = BulkGenerator(target, 64, seats=4)
    expected = engine_ids(folder, prompts, 64)
    for _ in range(2):  # the second run finds seats as the first left them
        written = in_order(list(generator.run(prompts)))
        assert [w.ids.tolist() for w in written] == expected
    for each in written:
        ended = each.ids[-1] in target.tokenizer.eos_ids
        assert each.finish is (Finish.END if ended else Finish.LENGTH)
    assert generator.num_generated == 2 * sum(map(len, expected))


def test_a_run_that_was_left_early_leaves_nothing_behind(target: Target) -> None:
    generator = BulkGenerator(target, 64, seats=2)
    everything = [w.ids.tolist() for w in in_order(list(generator.run(some_prompts(5, 20))))]
    for _ in generator.run(some_prompts(5, 20)):
        break
    assert [w.ids.tolist() for w in in_order(list(generator.run(some_prompts(5, 20))))] == everything


def chi_square(samples: list[int], probability: np.ndarray) -> tuple[float, int]:
    """Over ids that should come up often enough, and all others together."""
    expected = probability * len(samples)
    often = np.flatnonzero(expected >= 5)
    counts = np.bincount(samples, minlength=len(probability))
    seen = np.append(counts[often], len(samples) - counts[often].sum())
    wanted = np.append(expected[often], len(samples) - expected[often].sum())
    return float(((seen - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum()), len(often)


def test_samples_follow_the_model(folder: Path, target: Target) -> None:
    prompt, warmth, count = [7, 90, 33], 0.8, 250
    generator = BulkGenerator(target, 16, seats=100, stop_ids=(), seed=5)
    both = [Prompt(prompt, "code", warmth, 2), Prompt(prompt, "code", 0.0, 2)]
    written = list(generator.run(both * count))
    greedy = {tuple(w.ids.tolist()) for w in written if not w.prompt.temperature}
    warm = [w.ids.tolist() for w in written if w.prompt.temperature]
    assert len(warm) == count and len(greedy) == 1, "greedy seats among warm ones stay greedy"
    first = (oracle_logits(folder, prompt)[-1] / warmth).softmax(-1).numpy()
    square, freedom = chi_square([ids[0] for ids in warm], first)
    assert freedom > 3 and square < freedom + 4 * (2 * freedom) ** 0.5
    common = int(first.argmax())  # what a decode step samples, after the most common first id
    second = (oracle_logits(folder, [*prompt, common])[-1] / warmth).softmax(-1).numpy()
    square, freedom = chi_square([ids[1] for ids in warm if ids[0] == common], second)
    assert freedom > 1 and square < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(("lead", "period"), [(0, 1), (5, 1), (3, 7), (40, 64), (0, 64)])
def test_loops_are_cut_after_two_periods(lead: int, period: int) -> None:
    cycle = np.arange(1, period + 1, dtype=np.int32)
    ids = np.concatenate((np.arange(500, 500 + lead, dtype=np.int32), np.tile(cycle, 1 + 200 // period)))
    for cut in (len(ids), len(ids) - period // 2):
        assert cut_loop(ids[:cut]).tolist() == ids[: lead + 2 * period].tolist()
    short = ids[: lead + 63 + period]  # one less than what makes a loop
    assert cut_loop(short).tolist() == short.tolist()


def test_the_device_finds_the_loops_that_the_host_cuts(target: Target) -> None:
    generator = BulkGenerator(target, 256, seats=6)
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 300, 200) for _ in range(6)]
    texts[1][100:] = 9  # period 1
    texts[2][60:] = np.tile(texts[2][:64], 3)[:140]  # period 64
    texts[3][:] = np.tile(texts[3][:65], 4)[:200]  # too long a period
    texts[4][:] = 8  # most of it is the prompt's
    texts[5][:] = 7  # ended by itself
    prompts = torch.tensor([10, 10, 10, 10, 140, 10])
    with torch.inference_mode():
        generator._written[:, :200] = torch.from_numpy(np.stack(texts))
        generator._length.fill_(200)
        generator._num_prompt.copy_(prompts)
        generator._state.copy_(torch.tensor([-1, -1, int(Finish.LENGTH), -1, -1, int(Finish.END)]))
        generator._find_loops()
    assert generator._state.tolist() == [-1, 2, 2, -1, -1, 0]
    lengths = [len(cut_loop(text[n:])) for text, n in zip(texts, prompts.tolist(), strict=True)]
    assert lengths == [190, 90 + 2, 50 + 128, 190, 60, 2]


def test_a_model_that_loops_is_cut(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "dull", "qwen3-tied", num_hidden_layers=1, initializer_range=0.02)
    target = load_target(str(folder), device="cpu", context=256)
    prompts = [Prompt(ids, "code", 0.0, 200, i) for i, ids in enumerate([[5, 6], [70, 71, 72]])]
    written = in_order(list(BulkGenerator(target, 256, seats=2).run(prompts)))
    assert {w.finish for w in written} == {Finish.LOOP}
    for each, whole in zip(written, engine_ids(folder, prompts, 256), strict=True):
        looping = np.array(whole[: len(each.ids) + 63], np.int32)  # of period 1, which it leaves again later
        assert each.ids.tolist() == whole[: len(each.ids)] == cut_loop(looping).tolist()


def test_seats_are_as_many_as_memory_holds(target: Target) -> None:
    few, more = (seats_that_fit(target.config, 512, 512, mib << 20, 4) for mib in (256, 512))
    assert 0 < few < more <= 4096 and seats_that_fit(target.config, 512, 512, 1 << 20, 4) == 0
    with pytest.raises(UserError, match="loaded for 512"):
        BulkGenerator(target, 513)


# ---- prompts


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    talk = [{"role": "system", "content": "Hm"}, {"role": "user", "content": "b"}]
    path.write_text(f'{{"prompt": "a", "class": "code"}}\n\n{json.dumps({"messages": talk})}\n')
    first, second = read_questions(path)
    assert (first.text, first.kind, second.messages, second.kind) == ("a", "code", talk, "given")
    (tmp_path / "p.txt").write_text("one\n\n  two \n")
    assert [q.text for q in read_questions(tmp_path / "p.txt")] == ["one", "two"]
    assert len(evaluation_prompts()) == 152


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", 'line 2 must be an object with either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', "line 2 must be an object"),
        ('{"prompt": " "}', "line 2: .* not empty"),
        ('{"prompt": "a", "class": 3}', "line 2: .*class"),
        ('{"messages": [{"role": "user"}]}', "line 2: .*content"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 2: the last message"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(UserError, match=message):
        read_questions(path)


def test_what_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\n \n")
    for file, count, size, message in (
        (str(tmp_path / "p.txt"), 0, 8, "holds no prompts"),
        (str(tmp_path / "q.txt"), 0, 8, "cannot be read"),
        (str(tmp_path / "p.csv"), 0, 8, "neither"),
        (None, 0, 8, "nothing to ask"),
        (None, -1, 8, "0 or more"),
        (None, 5, 0, "1 or more"),
    ):
        with pytest.raises(UserError, match=message):
            check_sources(file, count, size)
    with pytest.raises(UserError, match="greedy share is 2"):
        check_sources(None, 5, 8, greedy_share=2.0)
    with pytest.raises(UserError, match="-1 seats"):
        check_sources(None, 5, 8, seats=-1)


def test_the_users_turn_is_cut_out_of_the_template(target: Target) -> None:
    turn = user_turn(target, "Be kind.")
    assert turn.before == "<s>system\nBe kind.</s>\n<s>user\n" and turn.end_id == 2
    prompts = list(message_prompts(target, 60, seed=1))
    assert [p.ids for p in prompts] == [p.ids for p in message_prompts(target, 60, seed=1)]
    texts = {target.tokenizer.decode(p.ids, skip_special=False) for p in prompts}
    assert "<s>user\n" in texts and len(texts) > 20 and {p.temperature for p in prompts} == {1.0, 0.85}
    shouting = replace(target, chat_template="{{ messages|length }}")
    with pytest.raises(UserError, match="give it a file of prompts"):
        user_turn(shouting)


def test_only_good_messages_are_asked_and_each_once(target: Target) -> None:
    sieve = Sieve(target, stop_ids(target))

    def take(text: str, finish: Finish = Finish.END, opening: str = "") -> str | None:
        ids = target.tokenizer.encode(text, add_special=False)
        prompt = Prompt([1], "self", 1.0, 160, ("Be kind.", opening))
        question = sieve.take(Written(prompt, np.array(ids, np.int32), finish))
        return question.text if question else None

    assert take(" a cat?</s>", opening="What is") == "What is a cat?"
    assert take("What  is A CAT?", Finish.LENGTH) is None
    assert [take("</s>"), take("ab</s>"), take("a<s>bcd</s>"), take("abcd", Finish.LOOP)] == [None] * 4
    assert dict(sieve.dropped) == {"repeated": 1, "empty": 1, "short": 1, "special ids": 1, "loop": 1}


# ---- all of it


def test_a_corpus_of_both_sources(
    folder: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkdraft.train.prompts.MESSAGE_TOKENS", 16)
    given = ["Name three rivers.", evaluation_prompts()[3].upper() + "  ", "x" * 600, "Count to ten."]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "class": "q&a"}) + "\n" for text in given))
    seen: list[tuple[int, int]] = []
    summary = make_corpus(
        target, tmp_path / "made", str(path), 8, max_new=12, seats=8, report=lambda *done: seen.append(done)
    )
    corpus = Corpus(tmp_path / "made")
    own = summary["self_written"]
    assert own["asked"] == own["kept"] + sum(own["dropped"].values()) >= 8 and own["missing"] == 0
    assert summary["excluded"] == summary["too_long"] == 1
    assert summary["kinds"] == {"q&a": 2, "self": 8} and corpus.info.kinds == ("q&a", "self")
    assert len(corpus) == summary["documents"] == 2 + 8 and seen[-1] == (len(corpus),) * 2
    assert summary["tokens"] == int((corpus.length - corpus.num_prompt).sum()) and summary["tokens_per_second"] > 0
    assert summary["fingerprint"] == corpus.fingerprint
    prompts = [corpus.ids(i)[: corpus.num_prompt[i]].tolist() for i in range(len(corpus))]
    assert target.chat_ids([{"role": "user", "content": "Name three rivers."}]) in prompts
    greedy = [i for i in range(len(corpus)) if not corpus.temperature[i]]
    asked = [Prompt(prompts[i], "", 0.0, 12) for i in greedy]
    answers = [corpus.ids(i)[corpus.num_prompt[i] :].tolist() for i in greedy]
    assert greedy and answers == engine_ids(folder, asked, 512)


def test_a_target_without_a_template_is_refused(tmp_path: Path) -> None:
    bare = load_target(str(write_tiny(tmp_path / "bare", "qwen3", num_hidden_layers=1)), device="cpu")
    with pytest.raises(UserError, match="has no chat template"):
        make_corpus(bare, tmp_path / "made", synthesise=3)
    assert not (tmp_path / "made").exists()


def test_nothing_left_to_ask(target: Target, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(evaluation_prompts()[0])
    with pytest.raises(UserError, match="1 are evaluation prompts"):
        make_corpus(target, tmp_path / "made", str(tmp_path / "p.txt"))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no CUDA GPU")
def test_recorded_steps_write_what_eager_ones_write(folder: Path) -> None:
    target = load_target(str(folder), device="cuda")
    prompts = some_prompts(300, max_new=60)
    recorded, eager = (BulkGenerator(target, 128, seats=64) for _ in range(2))
    eager._recorded = {noisy: _Eager(eager, noisy) for noisy in (False, True)}
    first, second = (in_order(list(g.run(prompts))) for g in (recorded, eager))
    assert [w.ids.tolist() for w in first] == [w.ids.tolist() for w in second]
    warm = [Prompt(p.ids, p.kind, 1.0, p.max_new, p.tag) for p in prompts]
    again = [[w.ids.tolist() for w in in_order(list(recorded.run(warm)))] for _ in range(2)]
    assert again[0] != again[1] and len(again[0]) == 300, "every replay draws anew"


class _Eager:
    def __init__(self, generator: BulkGenerator, noisy: bool) -> None:
        self.generator, self.noisy = generator, noisy

    def replay(self) -> None:
        self.generator._step(self.noisy)
