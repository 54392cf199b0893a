"""Recurrent layers through the whole engine: drafts, prefixes, preemption and company change no text.

What transformers computes, tests/models/test_parity.py holds them to.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.kernels.ops import FOLD
from tests.fakes.steps import on_device
from tests.models.recurrent import (
    Texts,
    all_is_free,
    complete,
    load,
    scripted,
    slots_of,
    states_of,
    texts,
)
from tests.models.tiny import TinyOf, oracle_logits, write_tiny

SEEDS = range(16)
PROMPTS = [[(31 * k + 7 * i * i + i) % 250 + 3 for i in range(5 + 2 * k)] for k in SEEDS]
PARAMS = [SamplingParams(6 + k % 5, temperature=0.8 * (k % 3 == 2), seed=k, ignore_eos=True) for k in SEEDS]
PROMPT = [(17 * i * i + 5 * i) % 250 + 3 for i in range(90)]
LONG, GREEDY = PROMPT[::-1][:65], SamplingParams(40, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen3_5", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tiny_of: TinyOf) -> Path:
    return tiny_of(request.param)


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    """One request at a time, nothing reused, nothing drafted."""
    return load(folder, prefix_cache=False)


@pytest.fixture(scope="module")
def long_text(plain: LLM) -> list[int]:
    return texts(plain, [LONG], GREEDY)[0]


@pytest.fixture(scope="module")
def each_alone(plain: LLM) -> Texts:
    return [texts(plain, [PROMPTS[k]], [PARAMS[k]])[0] for k in SEEDS]


def test_it_writes_what_the_oracle_would(folder: Path) -> None:
    llm = load(folder, dtype="float32", max_step_tokens=40)
    (text,) = texts(llm, [LONG], SamplingParams(20, ignore_eos=True))
    scores = oracle_logits(folder, [*LONG, *text])
    assert scores[len(LONG) - 1 : -1].argmax(-1).tolist() == text


def test_sixteen_requests_write_what_each_writes_alone(folder: Path, each_alone: Texts) -> None:
    """Once cold and once warm; four run at once, so slots are handed from one to the next."""
    assert len({tuple(ids) for ids in each_alone}) > 8
    together = load(folder)
    assert texts(together, PROMPTS, PARAMS) == each_alone
    assert texts(together, PROMPTS, PARAMS) == each_alone and slots_of(together).num_saved > 8
    assert all_is_free(together)


SLOW = [pytest.param(depth, marks=pytest.mark.slow) for depth in (1, 2, 5, 7, 11)]


@pytest.mark.parametrize("depth", [3, 15, *SLOW])
def test_drafts_that_are_rejected_at_every_position_change_nothing(
    folder: Path, long_text: list[int], depth: int
) -> None:
    llm = load(folder, spec="15", ngram=True)
    source = scripted(llm, [LONG], [long_text], depth, lambda step: step % (depth + 1))
    assert texts(llm, [LONG], GREEDY) == [long_text]
    stats = llm.engine.drafting.so_far()
    assert source.num_steps > 5 and stats.num_spec_steps == source.num_steps and all_is_free(llm)


def test_the_state_after_rejected_drafts_is_that_of_a_run_that_never_drafted(tmp_path: Path) -> None:
    """To the bit: in both runs until the state stands at 48 and ten more rows are recorded.

    32 heads: torch computes what is left over after its vectors of up to 16 numbers by another exp, and which rows that
    concerns would depend on their number.
    """
    folder = write_tiny(tmp_path, "qwen3_5", linear_num_key_heads=16, linear_num_value_heads=32)
    prompt, params, found = LONG[:33], SamplingParams(32, ignore_eos=True), []
    (text,) = texts(load(folder), [prompt], params)
    for depth in (0, 5):
        llm = load(folder, spec="15", ngram=True)
        if depth:
            scripted(llm, [prompt], [text], depth, lambda step: step % 6)
        llm.engine.add(prompt, replace(params, num_draft=depth))
        while not (running := llm.engine.scheduler.running) or running[0].num_computed < 58:
            llm.engine.step()
        states, slot = states_of(llm), slots_of(llm)._held[running[0]].slot
        assert states.base_of(slot) == 48 and running[0].num_computed < 64
        parts = (states.keys, states.updates, states.decays, states.inputs)
        kept = [part[:, slot, [p % part.shape[2] for p in range(48, 58)]] for part in parts]
        found.append([states.state[:, slot].clone(), *(part.clone() for part in kept)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_prefix_is_continued_from_every_border(folder: Path, plain: LLM) -> None:
    llm, params = load(folder), SamplingParams(6, ignore_eos=True)
    for border in range(FOLD, len(PROMPT), FOLD):
        assert complete(llm, [PROMPT[: border + 1]], SamplingParams(1))[0].num_cached == border - FOLD
        other = [*PROMPT[:border], 9, 8, 7, border]
        (found,) = complete(llm, [other], params)
        assert found.num_cached == border and [found.ids] == texts(plain, [other], params)
    assert all_is_free(llm)


def test_the_second_turn_of_a_chat_continues_from_the_first(folder: Path, plain: LLM, long_text: list[int]) -> None:
    llm = load(folder)
    (first,) = texts(llm, [LONG], GREEDY)
    turn = [*LONG, *first, 5, 6, 7, 8]
    (found,) = complete(llm, [turn], GREEDY)
    assert first == long_text and found.num_cached > len(LONG) + len(first) - 2 * FOLD
    assert [found.ids] == texts(plain, [turn], GREEDY)


def test_prompts_that_share_a_beginning(folder: Path, plain: LLM) -> None:
    """The second finds keys and values without a state, and saves one where the two part; the third continues there."""
    llm, params = load(folder), SamplingParams(5, ignore_eos=True)
    prompts = [[*PROMPT[:70], *(k + i for i in range(40))] for k in (100, 120, 140)]
    found = [complete(llm, [prompt], params)[0] for prompt in prompts]
    assert [each.num_cached for each in found] == [0, 0, 64]
    assert [each.ids for each in found] == [texts(plain, [prompt], params)[0] for prompt in prompts]


def test_requests_that_are_preempted_while_they_draft_write_the_same(folder: Path, each_alone: Texts) -> None:
    tight = load(folder, kv_tokens=80, max_model_len=80, spec="15", ngram=True)
    scripted(tight, PROMPTS, each_alone, 5, lambda step: step % 6)
    assert texts(tight, PROMPTS, PARAMS) == each_alone
    assert tight.engine.scheduler.num_preempted and all_is_free(tight)


def test_an_aborted_request_gives_everything_back(folder: Path, long_text: list[int]) -> None:
    llm = load(folder, spec="15", ngram=True)
    scripted(llm, [LONG], [long_text], 5, lambda step: 2)
    for _ in range(3):
        name = llm.engine.add(LONG, GREEDY)
        for _ in range(4):
            llm.engine.step()
        llm.engine.abort(name)
        assert all_is_free(llm)
    while llm.engine.has_work:
        llm.engine.step()
    assert texts(llm, [LONG], GREEDY) == [long_text]


def test_steps_that_the_device_takes_by_itself(folder: Path, each_alone: Texts, long_text: list[int]) -> None:
    """Requests end while a further step is in the air, so their last state may be past their text: no page is of it."""
    llm = on_device(load(folder))
    assert texts(llm, PROMPTS, PARAMS) == each_alone and texts(llm, PROMPTS, PARAMS) == each_alone
    assert texts(llm, [LONG], GREEDY) == [long_text] and texts(llm, [LONG], GREEDY) == [long_text]
    assert all_is_free(llm)


SHARED = [(160, 50), pytest.param(4000, 300, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("shared", "most"), SHARED)
def test_a_long_prefix_is_read_once(tmp_path: Path, shared: int, most: int) -> None:
    """A system prompt, and conversations that begin with it: the first one leaves the state at its end."""
    folder = write_tiny(tmp_path, "qwen3_5", max_position_embeddings=8192)
    options = {"kv_tokens": 3 * shared, "max_model_len": shared + 100}
    begin, params = [(13 * i * i + 3 * i) % 250 + 3 for i in range(shared)], SamplingParams(8, ignore_eos=True)
    llm, cold = load(folder, **options), load(folder, prefix_cache=False, **options)
    first, second = [*begin, 1], [*begin, *range(5, 35)]
    complete(llm, [first], params)
    (found,) = complete(llm, [second], params)
    assert len(second) - found.num_cached < most and [found.ids] == texts(cold, [second], params)


def test_a_slot_is_the_next_ones_without_what_it_held(folder: Path, plain: LLM, each_alone: Texts) -> None:
    llm = load(folder, max_seqs=1, prefix_cache=False)
    with torch.inference_mode():
        states = states_of(llm)
        for part in (states.state, states.keys, states.updates, states.decays, states.inputs):
            part.fill_(float("nan"))
        states.base.fill_(1 << 20)
    assert texts(llm, PROMPTS[:6], PARAMS[:6]) == each_alone[:6]
