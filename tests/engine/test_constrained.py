"""Grammars in the engine: with drafts or without, alone or in a batch, the text is the same and follows its grammar."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch

from sparkdraft.core import Batch, FinishReason, GrammarSpec, Request, SamplingParams, StepOutput, UserError, Work
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.proposer import Drafts
from sparkdraft.engine.sampler import Sampler, SampleRow
from sparkdraft.llm import LLM, Completion
from sparkdraft.text.grammar import GrammarCompiler
from tests.fakes import EOS, VOCAB, FakeBlock, fake_engine
from tests.text.test_grammar import letters

LONG = {"num_blocks": 400, "block_size": 4, "max_step_tokens": 64}
LETTERS = letters([])  # its ids are the fakes' ids
GRAMMARS = GrammarCompiler(LETTERS, VOCAB)
LIST = GrammarSpec("regex", "([a-m]{3}-[0-9]{2}; ?){4}(end|stop)")


def engine_of(block: FakeBlock | None = None, **options: Any) -> Engine:
    engine = fake_engine(block, **{**LONG, **options})
    engine.grammars, engine.tokenizer = GRAMMARS, LETTERS
    return engine


def drain(engine: Engine) -> list[StepOutput]:
    pieces = []
    while engine.has_work:
        pieces += engine.step()
    return pieces


def ids_of(pieces: list[StepOutput], name: str) -> list[int]:
    return [i for p in pieces if p.request_id == name for i in p.ids]


def text_of(pieces: list[StepOutput], name: str) -> str:
    return "".join(p.text for p in pieces if p.request_id == name)


class Guesser(FakeBlock):
    """Knows what plain decoding wrote, and drafts it with some ids changed to others, allowed or not."""

    def __init__(self, chance: float, texts: dict[str, list[int]]) -> None:
        super().__init__(chance)
        self.texts = texts

    def _draft(self, work: Work) -> Drafts:
        begin = len(work.request.output_ids)
        known = self.texts[work.request.id][begin:] + [EOS] * 16
        ids = [
            known[i] if self._random.random() < self.chance else self._random.randrange(VOCAB)
            for i in range(work.most_drafts)
        ]
        return Drafts(ids, [])


def some_params() -> dict[str, SamplingParams]:
    plain = SamplingParams(max_tokens=60)
    held = replace(plain, grammar=LIST)
    return {
        "free": replace(plain, temperature=0.8, seed=1),
        "greedy": held,
        "sampled": replace(held, temperature=1.5, top_p=0.9, seed=2),
        "penalised": replace(held, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4),
        "biased": replace(held, logit_bias={ord("c"): 3.0, ord("-"): -100.0, EOS: 50.0, 0: 100.0}),
        "json": replace(plain, grammar=GrammarSpec("json_object"), temperature=1.0, seed=3, logprobs=2),
        "long": replace(held, min_tokens=50, ignore_eos=True, temperature=1.0, seed=4),
        "stops": replace(held, stop=["-7", "; e"], temperature=1.0, seed=5),
    }


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("cuts", [True, False], ids=["cut", "uncut"])
@pytest.mark.parametrize("spec", [None, 7])
def test_drafted_text_is_plain_text_beside_others(
    chance: float, cuts: bool, spec: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = some_params()
    plain = engine_of()
    for name, p in params.items():
        plain.add([1, 2, 3, len(name)], p, name)
    expected = drain(plain)
    texts = {name: ids_of(expected, name) for name in params}
    drafted = engine_of(Guesser(chance, texts), ngram=True, spec=spec)
    if not cuts:  # rows behind a draft that breaks the grammar are run, and must do no harm
        monkeypatch.setattr(drafted.steps, "_drop_refused_drafts", lambda batch: None)
    for name, p in params.items():
        drafted.add([1, 2, 3, len(name)], p, name)
    got = drain(drafted)
    for name in params:
        assert ids_of(got, name) == texts[name], name
        assert text_of(got, name) == text_of(expected, name)
    for name in ("greedy", "sampled", "penalised", "biased", "long"):
        assert re.fullmatch(LIST.text, text_of(got, name)), name
    assert drafted.pool.num_free == plain.pool.num_free and not drafted._outputs


def test_a_draft_that_breaks_the_grammar_is_never_run_nor_committed() -> None:
    plain = engine_of()
    plain.add([7], SamplingParams(max_tokens=60, grammar=LIST), "a")
    texts = {"a": ids_of(drain(plain), "a")}
    engine = engine_of(Guesser(0.6, texts), spec=7)
    engine.add([7], SamplingParams(max_tokens=60, grammar=LIST), "a")
    run, cut = engine.runner.run, 0

    def checked(batch: Batch) -> torch.Tensor:
        nonlocal cut
        for work in batch.work:
            state = GRAMMARS.compile(LIST).start()
            state.advance(work.request.output_ids)
            assert state.num_valid(work.drafts) == work.num_draft
            cut += work.num_refused
        return run(batch)

    engine.runner.run = checked  # type: ignore[method-assign]
    pieces = drain(engine)
    assert ids_of(pieces, "a") == texts["a"] and cut
    stats = pieces[-1].speculation
    assert stats is not None and stats["num_draft_tokens"] >= cut  # they were drafted, and count as refused


def test_it_survives_preemption_and_is_dropped_with_the_request() -> None:
    rng = random.Random(5)
    jobs = {f"r{i}": SamplingParams(max_tokens=40, temperature=1, seed=i, grammar=LIST) for i in range(12)}
    prompts = {name: [rng.randrange(256) for _ in range(rng.randint(1, 12))] for name in jobs}
    alone = {}
    for name, params in jobs.items():
        engine = engine_of()
        engine.add(prompts[name], params, name)
        alone[name] = ids_of(drain(engine), name)
    engine = engine_of(Guesser(0.7, alone), num_blocks=26, max_model_len=64, max_seqs=6, max_step_tokens=40)
    preempted, schedule = 0, engine.scheduler.schedule

    def counted(depths: Any) -> Batch:
        nonlocal preempted
        batch = schedule(depths)
        preempted += len(batch.preempted)
        return batch

    engine.scheduler.schedule = counted  # type: ignore[method-assign]
    for name, params in jobs.items():
        engine.add(prompts[name], params, name)
    pieces = [piece for _ in range(6) for piece in engine.step()]
    engine.abort("r3")
    pieces += drain(engine)
    assert preempted and not engine._outputs
    for name in jobs:
        got = ids_of(pieces, name)
        assert got == (alone[name][: len(got)] if name == "r3" else alone[name])


def finish(engine: Engine, **params: Any) -> tuple[str, FinishReason | None, int]:
    engine.add([1], SamplingParams(**{"max_tokens": 30, **params}), "a")
    pieces = drain(engine)
    return text_of(pieces, "a"), pieces[-1].finish, len(ids_of(pieces, "a"))


@pytest.mark.parametrize("block", [None, FakeBlock(1.0)], ids=["plain", "drafted"])
def test_a_complete_text_ends_and_one_that_may_go_on_does_as_it_is_told(block: FakeBlock | None) -> None:
    word, run = GrammarSpec("regex", "abc"), GrammarSpec("regex", "(a|b)+")
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    for extra in ({}, {"ignore_eos": True}, {"min_tokens": 20}, {"max_tokens": 3}):
        assert finish(engine_of(block), grammar=word, **extra) == ("abc", stop, 3)
    assert finish(engine_of(block), grammar=word, max_tokens=2) == ("ab", length, 2)
    wants_end = {"grammar": run, "logit_bias": {EOS: 100.0}}
    assert finish(engine_of(block), **wants_end)[1:] == (stop, 2)
    assert finish(engine_of(block), **wants_end, ignore_eos=True)[1:] == (length, 30)
    assert finish(engine_of(block), **wants_end, min_tokens=9)[1:] == (stop, 10)
    assert finish(engine_of(block), grammar=GrammarSpec("regex", ""), ignore_eos=True) == ("", stop, 1)
    nothing = {"grammar": GrammarSpec("regex", ""), "min_tokens": 5, "keep_special": True}
    assert finish(engine_of(block), **nothing) == ("", stop, 1)
    assert finish(engine_of(block), grammar=word, stop_ids=[ord("b")]) == ("a", stop, 2)
    assert finish(engine_of(block), grammar=word, stop_ids=[ord("b")], min_tokens=3) == ("abc", stop, 3)


def test_a_text_past_the_parsers_limits_is_cut_and_says_so() -> None:
    engine = engine_of()
    engine.add([1], SamplingParams(max_tokens=30, grammar=GrammarSpec("regex", "(a|b)+")), "a")
    engine.step()
    (output,) = engine._outputs.values()
    assert output.grammar is not None
    output.grammar.advance([ord("x")])
    pieces = drain(engine)
    assert pieces[-1].finish is FinishReason.LENGTH


def test_siblings_each_have_a_state_and_a_bad_grammar_leaves_nothing_behind() -> None:
    engine = engine_of()
    engine.add([1], SamplingParams(n=3, temperature=2.0, seed=1, grammar=LIST, max_tokens=60), "a")
    pieces = drain(engine)
    texts = ["".join(p.text for p in pieces if p.index == i) for i in range(3)]
    assert len(set(texts)) == 3 and all(re.fullmatch(LIST.text, t) for t in texts)
    with pytest.raises(UserError, match="the regex cannot be used: unclosed group"):
        engine.add([1], SamplingParams(grammar=GrammarSpec("regex", "(")), "b")
    assert not engine._by_id and not engine._outputs and not engine.has_work
    with pytest.raises(UserError, match=r"a tokenizer\.json"):
        fake_engine(**LONG).add([1], SamplingParams(grammar=LIST))


def test_a_grammar_that_was_compiled_ahead_is_not_compiled_again() -> None:
    engine = engine_of()
    ahead = engine.grammars.compile(LIST)
    ahead.spent = True  # by another request meanwhile: the compiler would make a new one now
    engine.add([1], SamplingParams(grammar=LIST, max_tokens=60), "a", ahead)
    (output,) = engine._outputs.values()
    assert output.grammar is not None and output.grammar._grammar is ahead


def test_accepted_drafts_are_counted_from_the_front() -> None:
    engine = fake_engine(FakeBlock(1.0), spec=4, **LONG)
    engine.add([1], SamplingParams(max_tokens=13, ignore_eos=True), "a")
    pieces = drain(engine)
    assert [(len(p.ids), p.num_accepted) for p in pieces] == [(1, 0), (5, 4), (5, 4), (2, 1)]
    plain = ids_of(pieces, "a")
    engine.add([1], SamplingParams(max_tokens=13, ignore_eos=True, stop_ids=[plain[3]]), "b")
    assert [(len(p.ids), p.num_accepted) for p in drain(engine)] == [(1, 0), (3, 3)], "a stop among the drafts"
    off = fake_engine(FakeBlock(0.0), spec=4, **LONG)
    off.add([1], SamplingParams(max_tokens=5, ignore_eos=True), "a")
    assert all(p.num_accepted == 0 for p in drain(off))


def test_masks_come_last_and_rows_behind_a_broken_draft_stay() -> None:
    params = SamplingParams(logit_bias={5: 100.0}, repetition_penalty=2.0)
    request = Request("r", 0, [ord("a")], params, 0, 10)
    state = GRAMMARS.compile(GrammarSpec("regex", "ab[cd]")).start()
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = [SampleRow(request, [*b"abx"][:i], state) for i in range(4)]
    sampled = Sampler(VOCAB, frozenset({EOS}), torch.device("cpu"), max_seqs=4)(logits, rows).ids.tolist()
    assert sampled[:2] == [ord("a"), ord("b")] and sampled[2] in b"cd" and sampled[3] == 5
    assert logits.isfinite().sum(-1).tolist() == [1, 1, 2, VOCAB]


# ---- the embedded model

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "minimum": 0}},
        "required": ["city", "people"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 2, "maxItems": 4},
    {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "child": {"$ref": "#/$defs/leaf"},
            "kind": {"const": "tree"},
        },
        "required": ["id", "child", "kind"],
        "additionalProperties": False,
        "$defs": {"leaf": {"anyOf": [{"type": "boolean"}, {"type": "number", "minimum": -5, "maximum": 5}]}},
    },
    {
        "type": "object",
        "properties": {"when": {"type": "string", "format": "date"}, "ok": {"type": "boolean"}},
        "required": ["when", "ok"],
        "additionalProperties": False,
    },
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM("smollm2")


def asked(llm: LLM, schema: dict[str, Any]) -> list[int]:
    return llm.chat_ids([{"role": "user", "content": f"Answer in JSON that fits {json.dumps(schema)}"}])


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_sampled_text_of_the_embedded_model_fits_its_schema(llm: LLM, schema: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=6, n=2, grammar=_spec(schema))
    for completion in llm.generate([asked(llm, schema)], params)[0].completions:
        assert completion.finish is FinishReason.STOP, completion.text
        jsonschema.validate(json.loads(completion.text), schema)


@pytest.mark.slow
def test_greedy_text_of_the_embedded_model_is_the_same_drafted(llm: LLM) -> None:
    def written(depth: int | None) -> list[Completion]:
        plain = SamplingParams(max_tokens=40, num_draft=depth)
        jobs = [
            (asked(llm, SCHEMAS[0]), replace(plain, grammar=_spec(SCHEMAS[0]))),
            (asked(llm, SCHEMAS[1]), replace(plain, grammar=_spec(SCHEMAS[1]), frequency_penalty=1.0)),
            (asked(llm, SCHEMAS[2]), replace(plain, grammar=_spec(SCHEMAS[2]), logit_bias={17: 5.0, 42: -100.0})),
            (llm.encode("[" + '{"a": 1}, ' * 8), replace(plain, grammar=GrammarSpec("json_object"))),
            (llm.encode("The capital of France is"), plain),
        ]
        for i, (prompt, params) in enumerate(jobs):
            llm.engine.add(prompt, params, f"{depth}-{i}")
        done = {f"{depth}-{i}": Completion() for i in range(len(jobs))}
        while llm.engine.has_work:
            for piece in llm.engine.step():
                done[piece.request_id].add(piece)
        return list(done.values())

    expected = written(0)
    sources: set[str] = set()
    for depth in (1, 7, 15, None):
        got = written(depth)
        assert [c.ids for c in got] == [c.ids for c in expected], depth
        assert [c.finish for c in got] == [c.finish for c in expected]
        sources |= {s for c in got if c.speculation for s, n in c.speculation["sources"].items() if n[1]}
    assert sources == {"dflash", "ngram"}
    for completion, schema in zip(expected, SCHEMAS[:3], strict=False):
        jsonschema.validate(json.loads(completion.text), schema)


def test_special_tokens_are_kept_where_asked_for(llm: LLM) -> None:
    special = next(i for i in sorted(llm.tokenizer.special_ids) if i not in llm.tokenizer.eos_ids)
    params = SamplingParams(max_tokens=1, logit_bias={special: 100.0})
    prompt = llm.encode("Hello")
    name = llm.tokenizer.raw.id_to_token(special)
    assert llm.generate([prompt], params)[0].text == ""
    assert llm.generate([prompt], replace(params, keep_special=True))[0].text == name


def _spec(schema: dict[str, Any]) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))
