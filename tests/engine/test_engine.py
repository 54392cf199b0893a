"""The engine over a fake model: every request gets the text it would get alone, and nothing leaks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdraft.core import FinishReason, SamplingParams, StepOutput, UserError
from sparkdraft.engine.engine import Engine
from tests.fakes import EOS, FakeRunner, fake_engine, hash_logits


def drain(engine: Engine) -> dict[tuple[str, int], list[int]]:
    out: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        collect(engine.step(), out)
    return out


def collect(pieces: list[StepOutput], out: dict[tuple[str, int], list[int]]) -> None:
    for piece in pieces:
        out.setdefault((piece.request_id, piece.index), []).extend(piece.ids)


def greedy(prompt: list[int], count: int) -> list[int]:
    """What the fake model writes, without any engine."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(hash_logits(ids).argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


def alone(prompt: list[int], params: SamplingParams) -> list[int]:
    engine = fake_engine()
    engine.add(prompt, params, "alone")
    return drain(engine)["alone", 0]


def test_one_request_is_the_models_own_greedy_text() -> None:
    engine = fake_engine()
    engine.add([1, 2, 3], SamplingParams(max_tokens=10), "a")
    assert drain(engine)["a", 0] == greedy([1, 2, 3], 10)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_many_requests_with_arrivals_aborts_and_a_small_pool_are_each_as_alone(temperature: float) -> None:
    rng = random.Random(5)
    engine = fake_engine(num_blocks=24, max_model_len=64, max_seqs=6, max_step_tokens=16)
    jobs = {}
    for i in range(64):
        shared = [7] * rng.choice([0, 0, 8, 12])
        prompt = shared + [rng.randrange(256) for _ in range(rng.randint(1, 30))]
        jobs[f"r{i}"] = (prompt, SamplingParams(max_tokens=rng.randint(1, 20), temperature=temperature, seed=i))
    waiting, out, aborted = list(jobs), {}, set()
    while waiting or engine.has_work:
        for _ in range(rng.randint(0, 3)):
            if waiting:
                name = waiting.pop()
                engine.add(*jobs[name], request_id=name)
        if rng.random() < 0.1 and engine._by_id:
            name = rng.choice(list(engine._by_id))
            engine.abort(name)
            aborted.add(name)
        collect(engine.step(), out)
    assert engine.pool.num_free == 24
    assert aborted and len(aborted) < 40
    for name, (prompt, params) in jobs.items():
        expected = alone(prompt, params)
        got = out.get((name, 0), [])
        assert got == (expected[: len(got)] if name in aborted else expected), name


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_interleaving_of_add_abort_and_step_frees_everything(data: st.DataObject) -> None:
    blocks = data.draw(st.integers(6, 20))
    engine = fake_engine(num_blocks=blocks, max_model_len=24, max_seqs=data.draw(st.integers(1, 5)), max_step_tokens=8)
    for action in data.draw(st.lists(st.sampled_from(["add", "add", "step", "step", "abort"]), max_size=30)):
        if action == "add":
            prompt = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
            engine.add(prompt, SamplingParams(max_tokens=data.draw(st.integers(1, 12)), n=data.draw(st.integers(1, 3))))
        elif action == "step":
            engine.step()
        elif engine._by_id:
            engine.abort(data.draw(st.sampled_from(sorted(engine._by_id))))
    drain(engine)
    assert engine.pool.num_free == blocks
    assert not engine._outputs and not engine._by_id and engine.sampler.edits.num_held == 0


@pytest.mark.parametrize("max_step_tokens", [1, 2, 3, 7, 19, 64])
def test_any_split_of_a_prompt_gives_the_same_tokens(max_step_tokens: int) -> None:
    engine = fake_engine(max_step_tokens=max_step_tokens, max_seqs=1)
    prompt = list(range(40))
    engine.add(prompt, SamplingParams(max_tokens=5), "a")
    assert drain(engine)["a", 0] == greedy(prompt, 5)


def test_a_second_request_computes_only_what_the_prefix_cache_lacks() -> None:
    engine = fake_engine(num_blocks=300, max_step_tokens=512)
    prompt = [i % 251 for i in range(500)]
    first = engine.add([*prompt, 1], SamplingParams(max_tokens=4))
    one = drain(engine)[first, 0]
    assert isinstance(engine.runner, FakeRunner)
    before = sum(engine.runner.rows_run)
    second = engine.add([*prompt, 1], SamplingParams(max_tokens=4))
    pieces = []
    while engine.has_work:
        pieces += engine.step()
    assert [i for p in pieces for i in p.ids] == one
    assert pieces[0].request_id == second and pieces[0].num_cached == 500
    assert sum(engine.runner.rows_run) - before == 1 + 3


def test_a_decoding_request_is_never_starved_by_a_long_prompt() -> None:
    engine = fake_engine(max_step_tokens=8)
    engine.add([1], SamplingParams(max_tokens=20, ignore_eos=True), "short")
    engine.step()
    engine.add(list(range(100)), SamplingParams(max_tokens=1), "long")
    assert isinstance(engine.runner, FakeRunner)
    for _ in range(5):
        engine.step()
        assert dict(engine.runner.steps[-1])["short"] == 1


def test_n_completions_share_the_prompt_and_differ() -> None:
    engine = fake_engine()
    engine.add(list(range(20)), SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=3, ignore_eos=True), "a")
    out = drain(engine)
    assert len({tuple(ids) for ids in out.values()}) == 3
    assert isinstance(engine.runner, FakeRunner)
    assert sum(engine.runner.rows_run) < 20 + 2 * 8 + 3 * 6  # the siblings found the prompt in the cache


def test_stops_at_ids_strings_and_lengths() -> None:
    text = greedy([5], 30)

    def run(**params: object) -> StepOutput:
        engine = fake_engine()
        engine.add([5], SamplingParams(**{"max_tokens": 30, **params}), "a")  # type: ignore[arg-type]
        pieces = []
        while engine.has_work:
            pieces += engine.step()
        last = pieces[-1]
        return StepOutput("a", 0, [i for p in pieces for i in p.ids], "".join(p.text for p in pieces), last.finish)

    assert run(max_tokens=3).finish is FinishReason.LENGTH
    stopped = run(stop_ids=[text[4]])
    assert stopped.finish is FinishReason.STOP and stopped.ids == text[: text.index(text[4]) + 1]
    longer = run(stop_ids=[text[4]], min_tokens=12)
    assert len(longer.ids) >= 12 and text[4] not in longer.ids[:11]


def test_a_stop_string_across_tokens_is_cut_out() -> None:
    ascii_only = dict.fromkeys((*range(32), *range(127, EOS + 1)), -100.0)

    def run(stop: list[str]) -> tuple[str, FinishReason | None]:
        engine = fake_engine()
        engine.add(list(b"start"), SamplingParams(max_tokens=40, stop=stop, logit_bias=ascii_only))
        text, finish = "", None
        while engine.has_work:
            for piece in engine.step():
                text, finish = text + piece.text, piece.finish
                assert not any(s in text for s in stop)
        return text, finish

    full, finish = run([])
    assert len(full) == 40 and finish is FinishReason.LENGTH
    stop = full[6:9]
    assert run(["never", stop]) == (full[: full.index(stop)], FinishReason.STOP)


@pytest.mark.parametrize("min_tokens", [1, 8, 9, 12, 40])
def test_a_stop_string_within_the_first_min_tokens_does_not_count(min_tokens: int) -> None:
    ascii_only = dict.fromkeys((*range(32), *range(127, EOS + 1)), -100.0)

    def run(**params: Any) -> tuple[str, FinishReason | None]:
        engine = fake_engine()
        engine.add(list(b"start"), SamplingParams(max_tokens=40, logit_bias=ascii_only, **params))
        pieces = []
        while engine.has_work:
            pieces += engine.step()
        return "".join(p.text for p in pieces), pieces[-1].finish

    full, _ = run()
    stop = full[8]  # the ninth token
    later = full.find(stop, min_tokens)
    expected = (full, FinishReason.LENGTH) if later < 0 else (full[:later], FinishReason.STOP)
    assert run(stop=[stop], min_tokens=min_tokens) == expected


def test_bad_requests_are_refused_with_a_sentence() -> None:
    engine = fake_engine(max_model_len=16)
    for prompt, params, words in [
        ([], {}, "empty"),
        ([1] * 16, {}, "16 tokens and the context holds 16"),
        ([999], {}, "token id 999"),
        ([1], {"logit_bias": {300: 1.0}}, "logit_bias"),
        ([1], {"stop_ids": [300]}, "stop_ids"),
    ]:
        with pytest.raises(UserError, match=words):
            engine.add(prompt, SamplingParams(**params))  # type: ignore[arg-type]
    assert not engine.has_work


def test_the_context_ends_a_request_that_asks_for_more() -> None:
    engine = fake_engine(max_model_len=16)
    engine.add([1] * 10, SamplingParams(max_tokens=100, ignore_eos=True), "a")
    pieces = []
    while engine.has_work:
        pieces += engine.step()
    assert sum(len(p.ids) for p in pieces) == 6 and pieces[-1].finish is FinishReason.LENGTH


def test_an_id_in_use_is_refused_and_an_unknown_one_aborts_quietly() -> None:
    engine = fake_engine()
    engine.add([1], SamplingParams(), "a")
    with pytest.raises(UserError, match="is in use"):
        engine.add([1], SamplingParams(), "a")
    engine.abort("nobody")
    engine.abort("a")
    (piece,) = engine.step()
    assert piece.finish is FinishReason.ABORT and not engine.has_work


def test_logprobs_are_the_models_own() -> None:
    engine = fake_engine()
    engine.add([1, 2], SamplingParams(max_tokens=2, logprobs=3, temperature=2.0, seed=1), "a")
    (piece,) = engine.step()
    assert piece.logprobs is not None
    truth = hash_logits([1, 2]).log_softmax(-1)
    (entry,) = piece.logprobs
    assert entry.id == piece.ids[0]
    assert entry.logprob == pytest.approx(float(truth[entry.id]), abs=1e-6)
    assert [i for i, _ in entry.top] == torch.topk(truth, 3).indices.tolist()
