"""Several callers of one LLM in one thread: each gets the pieces of its own requests, in any order of calls."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdraft.core import Batch, GrammarSpec, SamplingParams, StepOutput, UserError
from sparkdraft.llm import LLM
from tests.models.tiny import write_tiny

PROMPTS = [[5, 6, 7], [20, 30, 40, 50], [9] * 20, [100, 101]]
CHAT = [{"role": "user", "content": "hello"}]


def params(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), "llama")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return LLM(str(folder), dtype="float32", max_model_len=128, max_seqs=3)


def test_a_wrong_chat_template_is_said_at_start(llm: LLM, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    wrong = LLM(str(folder), dtype="float32", max_model_len=128, max_seqs=3)
    said = {note.name: note.reason for note in wrong.fallbacks()}
    assert said["chats are refused"].startswith("line 2 of the chat template is wrong")
    assert "chats are refused" not in {note.name for note in llm.fallbacks()}
    with pytest.raises(UserError, match="Line 2 of the chat template is wrong"):
        wrong.chat(CHAT)


def test_a_chat_template_without_an_end_is_said_at_start(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama")
    (folder / "chat_template.jinja").write_text("{{ 'x' * 10 ** 10 }}")
    wrong = LLM(str(folder), dtype="float32", max_model_len=128, max_seqs=3)
    said = {note.name: note.reason for note in wrong.fallbacks()}
    assert said["chats are refused"] == "the chat template takes more than 1,024 MiB of memory for a greeting"
    with pytest.raises(UserError, match="takes more than 1,024 MiB of memory"):
        wrong.chat(CHAT)
    assert wrong.generate(["x"], params(2))[0].completions[0].ids


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """What each prompt gives alone: 8, 12, 16 and 20 ids."""
    return [llm.generate([p], params(8 + 4 * i))[0].completions[0].ids for i, p in enumerate(PROMPTS)]


def ids(pieces: Iterator[StepOutput]) -> list[int]:
    return [token for piece in pieces for token in piece.ids]


def nothing_is_left(llm: LLM) -> bool:
    while llm.engine.has_work:
        llm.engine.step()
    return llm.engine.pool.num_free == llm.plan.num_blocks and not llm._inboxes


@pytest.mark.parametrize("seed", range(6))
def test_streams_read_in_any_order_give_what_each_gives_alone(llm: LLM, alone: list[list[int]], seed: int) -> None:
    rng = random.Random(seed)
    streams = [llm.stream(p, params(8 + 4 * i)) for i, p in enumerate(PROMPTS)]
    got: list[list[int]] = [[] for _ in PROMPTS]
    live = list(range(len(PROMPTS)))
    while live:
        i = rng.choice(live)
        piece = next(streams[i], None)
        if piece is None:
            live.remove(i)
        else:
            got[i] += piece.ids
    assert got == alone and nothing_is_left(llm)


def test_two_streams_read_alternately(llm: LLM, alone: list[list[int]]) -> None:
    first, second = llm.stream(PROMPTS[0], params(8)), llm.stream(PROMPTS[1], params(12))
    pairs = list(itertools.zip_longest(first, second))
    assert ids(a for a, _ in pairs if a) == alone[0]
    assert ids(b for _, b in pairs if b) == alone[1]


def test_generate_and_chat_while_streams_are_open(llm: LLM, alone: list[list[int]]) -> None:
    expected = llm.chat(CHAT, params(6)).ids
    first, second = llm.stream(PROMPTS[0], params(8)), llm.stream(PROMPTS[3], params(20))
    begin = ids(itertools.islice(first, 3)), ids(itertools.islice(second, 1))
    both = llm.generate(PROMPTS[1:3], [params(12), params(16)])
    assert [r.completions[0].ids for r in both] == alone[1:3]
    assert llm.chat(CHAT, params(6)).ids == expected
    assert (begin[0] + ids(first), begin[1] + ids(second)) == (alone[0], alone[3])
    assert nothing_is_left(llm)


def test_several_completions_of_a_stream_beside_another(llm: LLM) -> None:
    drawn = params(6, n=3, temperature=1.0, seed=4)
    expected = [c.ids for c in llm.generate([PROMPTS[2]], drawn)[0].completions]
    other, got = llm.stream(PROMPTS[0], params(30)), [[], [], []]
    for piece in llm.stream(PROMPTS[2], drawn):
        got[piece.index] += piece.ids
        next(other)
    assert got == expected
    other.close()
    assert nothing_is_left(llm)


def test_ids_may_be_those_of_numpy(llm: LLM, alone: list[list[int]]) -> None:
    for prompts in (np.array(PROMPTS[0]), [np.array(PROMPTS[0])], np.array([PROMPTS[0]]), [*np.array(PROMPTS[0])]):
        assert [r.completions[0].ids for r in llm.generate(prompts, params(8))] == alone[:1]
    with pytest.raises(UserError, match=r"a token id is 1\.5; it must be a whole number"):
        llm.generate([[1.5]])  # type: ignore[list-item]
    assert nothing_is_left(llm)


def test_a_stream_can_be_stopped_before_its_first_piece(llm: LLM, alone: list[list[int]]) -> None:
    kept, asked = llm.stream(PROMPTS[3], params(20)), iter([False, False, True])
    begin = ids(itertools.islice(kept, 2))
    assert len(ids(llm.stream(PROMPTS[1], params(50), stopped=lambda: next(asked)))) == 2
    assert not list(llm.stream(PROMPTS[1], params(50), stopped=lambda: True))
    assert begin + ids(kept) == alone[3] and nothing_is_left(llm)


def test_a_stream_that_is_left_aborts_and_the_other_goes_on(llm: LLM, alone: list[list[int]]) -> None:
    kept, left = llm.stream(PROMPTS[3], params(20)), llm.stream(PROMPTS[1], params(50))
    begin = ids(itertools.islice(kept, 2))
    next(left)
    left.close()
    assert len(llm._inboxes) == 1 and len(llm.engine.scheduler.running) == 1
    assert begin + ids(kept) == alone[3]
    assert nothing_is_left(llm)


def test_a_stream_that_is_collected_in_the_middle_of_a_step(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = llm.engine.runner.run

    def collect_and_run(batch: Batch) -> Any:
        monkeypatch.setattr(llm.engine.runner, "run", run)  # once: a collection takes long among many objects
        gc.collect()
        return run(batch)

    cycle: dict[str, Any] = {"stream": llm.stream(PROMPTS[1], params(50))}
    cycle["self"] = cycle
    next(cycle["stream"])
    kept = llm.stream(PROMPTS[0], params(8))
    del cycle  # only the garbage collector finds it now
    monkeypatch.setattr(llm.engine.runner, "run", collect_and_run)
    assert ids(kept) == alone[0]
    assert nothing_is_left(llm)


def test_where_one_prompt_is_refused_none_of_them_runs(llm: LLM) -> None:
    with pytest.raises(UserError, match="the prompt is empty"):
        llm.generate([[5, 6], []], params(4))
    assert not llm._inboxes and nothing_is_left(llm)


def test_a_caller_whose_pieces_somebody_else_took_is_told_so(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], params(4))
    next(stream)
    while llm.engine.has_work:
        llm.engine.step()
    with pytest.raises(AssertionError, match="was it stepped elsewhere"):
        list(stream)


def test_a_step_that_is_broken_off_is_told_to_every_stream(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ran is lost for each of its callers; no caller gets a text with a gap, and the engine continues."""
    first, second = llm.stream(PROMPTS[0], params(8)), llm.stream(PROMPTS[1], params(12))
    next(first), next(second)
    monkeypatch.setattr(llm.engine.scheduler, "commit", lambda *args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        list(first)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="interrupted within a step"):
        list(second)
    assert llm.generate([PROMPTS[2]], params(16))[0].completions[0].ids == alone[2]
    assert nothing_is_left(llm)


def test_thoughts_are_not_part_of_the_answer(tmp_path: Path) -> None:
    """A grammar makes the model write what a model that thinks would."""
    folder = write_tiny(tmp_path, "llama")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{# <think></think> #}")
    llm = LLM(str(folder), dtype="float32", max_model_len=128, max_seqs=1)
    written = GrammarSpec("regex", "<think>They greet me[.]</think>Good day!")
    answer = llm.chat(CHAT, SamplingParams(max_tokens=60, grammar=written))
    assert (answer.reasoning, answer.text) == ("They greet me.", "Good day!")
