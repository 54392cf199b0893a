"""Steps that the device takes by itself write what the host's own steps write, whoever comes, goes or needs the host.

On a CPU the same code runs eagerly, on kernels that give a row the same bits in any company; on a GPU it is recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.core import Batch, FinishReason, GrammarSpec, StepOutput
from sparkdraft.engine import device_steps as device_steps_module
from sparkdraft.engine.device_steps import RING, DeviceSteps
from sparkdraft.engine.slots import Chunks, Ran, StepKind
from sparkdraft.kernels.ops import IN_PROMPT
from sparkdraft.kernels.reference import accept_drafts, pack_rows
from tests.fakes.steps import Uncaptured, device_steps, on_device, on_host
from tests.models.tiny import write_tiny

TEXTS = [
    "def merge(a, b):",
    "The sea is",
    '{"name": "Ada", "born": 1815,',
    "Once upon a time there was a",
    "1, 2, 3, 4, 5,",
    "A list of the planets:",
]


no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])])
def make(request: pytest.FixtureRequest) -> Callable[[], LLM]:
    """On a GPU in float32: there a last bit may depend on the number of rows, and bfloat16 would show it."""
    device = str(request.param)
    options: dict[str, Any] = {"device": device, "dtype": "float32" if device == "cuda" else "auto"}
    return lambda: LLM("smollm2", ngram=False, max_seqs=6, kv_tokens=4096, **options)


@pytest.fixture(scope="module")
def host(make: Callable[[], LLM]) -> LLM:
    return on_host(make())


@pytest.fixture(scope="module")
def overlapped(make: Callable[[], LLM]) -> LLM:
    return on_device(make())


@pytest.fixture
def watched(overlapped: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Requests of each step that was launched."""
    launched: list[int] = []
    steps = device_steps(overlapped)
    launch = steps.launch

    def counted(batch: Batch) -> None:
        launched.append(len(batch.work))
        launch(batch)

    monkeypatch.setattr(steps, "launch", counted)
    yield launched
    assert not steps.num_unread and overlapped.engine.pool.num_free == overlapped.engine.plan.num_blocks


def written(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    results = llm.generate(TEXTS[: len(params)], params)
    return [c.ids for r in results for c in r.completions]


@pytest.mark.parametrize(
    "depth", [0, 3, pytest.param(6, marks=pytest.mark.slow), pytest.param(15, marks=pytest.mark.slow), None]
)
@pytest.mark.parametrize("streams", [1, 5])
def test_greedy_text_is_that_of_the_hosts_steps(
    host: LLM, overlapped: LLM, watched: list[int], depth: int | None, streams: int
) -> None:
    """Requests of different lengths, so that they leave one after the other."""
    params = [SamplingParams(max_tokens=20 + 5 * i, num_draft=depth, ignore_eos=True) for i in range(streams)]
    assert written(overlapped, params) == written(host, params)
    assert watched and max(watched) == streams


@pytest.mark.parametrize("depth", [0, 5])
def test_sampled_text_too(host: LLM, overlapped: LLM, watched: list[int], depth: int) -> None:
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.1}, {"temperature": 0.0}]
    params = [
        SamplingParams(**({"temperature": 0.8} | kind), max_tokens=24, seed=i, num_draft=depth)
        for i, kind in enumerate(kinds)
    ]
    assert written(overlapped, params) == written(host, params)
    assert len(watched) > 3


@pytest.mark.parametrize("drafter", ["auto", "none"])
def test_drafts_from_the_text_are_found_on_the_device(host: LLM, drafter: str) -> None:
    """Beside requests that do not repeat themselves; with and without a drafter for those."""
    options: dict[str, Any] = {"device": str(host.engine.plan.device), "dtype": host.engine.plan.dtype}
    if options["device"] == "cpu":
        options["dtype"] = "auto"
    llm = LLM("smollm2", drafter=drafter, max_seqs=6, kv_tokens=4096, **options)
    llm = llm if llm.engine.steps.ahead else on_device(llm)
    loop = "one two three four five six seven eight nine ten" + ", one two three four five six seven eight nine ten" * 3
    prompts = [loop, TEXTS[1], loop + ", one two"]
    for sampling in ({}, {"temperature": 0.5}):
        params = [SamplingParams(max_tokens=40, seed=i, num_draft=7, ignore_eos=True, **sampling) for i in range(3)]
        plain = [replace(each, num_draft=0) for each in params]
        expected, found = host.generate(prompts, plain), llm.generate(prompts, params)
        assert [r.completions[0].ids for r in found] == [r.completions[0].ids for r in expected]
        sources = [r.completions[0].speculation["sources"] for r in found]  # type: ignore[index]
        assert all(sources[i]["ngram"][1] > 4 for i in (0, 2)), sources


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_requests_draft_on_while_short_prompts_are_read(
    host: LLM, overlapped: LLM, watched: list[int], monkeypatch: pytest.MonkeyPatch, pays: bool, temperature: float
) -> None:
    """Where that pays the prompts take a pass of their own, and otherwise they run with the others' last ids."""
    steps, engine, passes = device_steps(overlapped), overlapped.engine, list[tuple[int, int, int]]()
    monkeypatch.setattr(engine.drafting, "pays_beside", lambda rows: pays)
    forward = steps.slots.forward

    def seen(kind: StepKind, chunks: Chunks | None = None) -> Ran:
        passes.append((len(watched), kind.depth, len(chunks.ids) if chunks else 0))
        return forward(kind, chunks)

    monkeypatch.setattr(steps.slots, "forward", seen)
    params = [SamplingParams(30, temperature=temperature, seed=i, num_draft=3, ignore_eos=True) for i in range(5)]
    for name in ("0", "1"):
        engine.add(overlapped.encode(TEXTS[int(name)]), params[int(name)], name)
    found = dict[str, list[int]]()
    for step in range(200):
        if step in (4, 7, 9):
            number = 2 + (4, 7, 9).index(step)
            engine.add(overlapped.encode(TEXTS[number]), params[number], str(number))
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.ids)
        if not engine.has_work:
            break
    assert [found[str(i)] for i in range(5)] == written(host, params)
    if not isinstance(steps._steps, Uncaptured):
        return  # a graph that is replayed calls nothing
    by_step = [[each[1:] for each in passes if each[0] == number] for number in range(3, len(watched) + 1)]
    beside = [step for step in by_step if any(rows for _, rows in step)]
    assert len(beside) == 3, "three prompts came while others decoded"
    for step in beside:
        assert step == ([(3, 0), (0, 16)] if pays else [(0, 16)])


def test_empty_slots_count_nothing(overlapped: LLM, watched: list[int]) -> None:
    """When some requests have ended, others move to their slots, and steps are padded with the slots that they left."""
    engine, penalised = overlapped.engine, SamplingParams(max_tokens=50, frequency_penalty=0.5, ignore_eos=True)
    for i in range(5):
        engine.add(overlapped.encode(TEXTS[i]), replace(penalised, max_tokens=6 if i < 2 else 50, num_draft=0), str(i))
    while any(len(request.output_ids) < 40 for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    edits = engine.sampler.edits
    for request in engine.scheduler.running:
        counted = int((edits.tables.counts[edits._slots[request]] % IN_PROMPT).sum())
        assert len(request.output_ids) <= counted <= len(request.output_ids) + request.most_unread
    while engine.has_work:
        engine.step()


def test_a_least_length_is_edited_only_until_it_is_reached(overlapped: LLM) -> None:
    engine, steps = overlapped.engine, device_steps(overlapped)
    engine.add([5, 6, 7], SamplingParams(max_tokens=12, min_tokens=4, num_draft=0, ignore_eos=True))
    draws = []
    while engine.has_work:
        engine.step()
        draws.append(steps._slots_draw)
    assert draws[1] and not draws[-1], draws


def test_a_step_runs_hardly_more_tokens_than_it_packs(
    overlapped: LLM, host: LLM, watched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve drafts of one request do not make the others run twelve rows too; and the text is the same."""
    steps, ran = device_steps(overlapped), list[tuple[StepKind, int]]()
    forward = steps.slots.forward

    def packed(kind: StepKind, chunks: Chunks | None = None) -> Ran:
        found = forward(kind, chunks)
        if found.rows:
            ran.append((kind, int(found.rows.query_start[-1])))
        return found

    monkeypatch.setattr(steps.slots, "forward", packed)
    monkeypatch.setattr(steps, "_steps", Uncaptured(lambda kind: steps.slots.step(kind)))  # a capture reads nothing
    depths = (12, 0, 3, 0, 1)
    params = [SamplingParams(max_tokens=30, num_draft=depth, ignore_eos=True, seed=7) for depth in depths]
    assert written(overlapped, params) == written(host, params)
    drafted = [(kind, tokens) for kind, tokens in ran if kind.depth == 15]
    assert drafted and all(tokens <= kind.rows <= max(16, 1.5 * tokens) for kind, tokens in drafted)
    assert any(2 * kind.rows < kind.seqs * (1 + kind.depth) for kind, _ in drafted)


def test_a_step_of_fewer_tokens_is_captured_when_that_pays(
    overlapped: LLM, watched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When larger steps have lost as much time as a capture takes."""
    steps, whole = device_steps(overlapped), StepKind(16, 15, 256, False)
    graphs = Uncaptured(lambda kind: None)
    graphs.record([whole])
    graphs.seconds = 0.1
    monkeypatch.setattr(steps, "_steps", graphs)
    monkeypatch.setattr(overlapped.engine.drafting, "saved", lambda num, tokens, fewer: (tokens - fewer) / 1e4)
    assert [steps._smaller(whole, 40, has_prompts=False).rows for _ in range(6)] == [256, 256, 256, 256, 48, 256]
    assert steps._smaller(whole, 250, has_prompts=False) == whole
    graphs.record([whole._replace(rows=48)])
    assert steps._smaller(whole, 33, has_prompts=False).rows == 48
    assert steps._smaller(whole, 70, has_prompts=False).rows == 256
    assert steps._smaller(whole, 70, has_prompts=True).rows == 96, "what is not captured can be of any size"
    few = StepKind(2, 3, 8, False)
    assert steps._smaller(few, 3, has_prompts=False) == few, "up to 16 tokens take the time of one"


def test_what_captured_steps_cost_is_known_before_the_first_request(
    overlapped: LLM, watched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, drafting = device_steps(overlapped), overlapped.engine.drafting
    told = list[tuple[int, ...]]()
    assert drafting.budget
    monkeypatch.setattr(drafting.budget, "measured", lambda tokens, num, *rest: told.append((tokens, num, *rest[1:])))
    kinds = [StepKind(size, depth, size * (1 + depth), False) for size in (1, 4) for depth in (0, 7)]
    with torch.inference_mode():
        DeviceSteps.measure(steps, Uncaptured(steps.slots.step), kinds)  # type: ignore[arg-type]
    assert {(tokens, num) for tokens, num, *_ in told} == {(1, 1), (8, 1), (4, 4), (32, 4)}
    for tokens, num, verify, draft, drafting_for, depth in told:
        assert verify > 0 and draft >= 0 and (drafting_for, depth) == ((0, 0) if tokens == num else (num, 7))
    monkeypatch.setattr(drafting, "has_experts", True)
    drafting.measured_at_start(4, 7, 32, 1.0, 0.5)
    assert len(told) == 8, "empty slots reach no expert"


class Clock:
    """Each look at it is a second after the last."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1
        return self.now


class SlowToRecord:
    """Recordings as a GPU makes them: a kind runs plainly once, is recorded the second time, and then replayed."""

    def __init__(self, run: Callable[[StepKind], torch.Tensor], clock: Clock) -> None:
        self.run, self.clock, self.visits, self.seconds = run, clock, Counter[StepKind](), 0.0

    def __contains__(self, kind: StepKind) -> bool:
        return self.visits[kind] > 1

    def replay(self, kind: StepKind) -> torch.Tensor:
        if kind not in self:
            self.clock.now += 500
        self.visits[kind] += 1
        return self.run(kind)


def test_recordings_do_not_multiply_with_what_clients_ask_for(
    overlapped: LLM, watched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, kinds = device_steps(overlapped), set[StepKind]()
    step = steps.slots.step
    monkeypatch.setattr(steps.slots, "step", lambda kind: (kinds.add(kind), step(kind))[1])
    monkeypatch.setattr(steps, "_steps", None)
    for top_k, top_p, min_p in product((0, 1, 5, 20, 50), (0.5, 0.95, 1.0), (0.0, 0.05)):
        for temperature in (0.0, 0.7):
            asked = SamplingParams(
                max_tokens=2, num_draft=0, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
            )
            overlapped.generate(TEXTS[:1], asked)
            overlapped.generate(TEXTS[:1], replace(asked, presence_penalty=0.5, logit_bias={3: 1.0}))
    assert len(kinds) == 2, "greedy, or anything else"


def test_what_is_learnt_of_a_steps_time_is_not_that_of_its_recording(
    overlapped: LLM, watched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before is not timed either, because the host reads it late."""
    device, drafting, seen = device_steps(overlapped), overlapped.engine.drafting, []
    clock = Clock()
    steps = SlowToRecord(device.slots.step, clock)
    monkeypatch.setattr(device, "_steps", steps)
    monkeypatch.setattr(device_steps_module, "time", clock)
    monkeypatch.setattr(drafting, "learn_drafted", lambda steps, rows, seconds, *_: seen.append((steps[0][1], seconds)))
    monkeypatch.setattr(drafting, "learn_plain", lambda requests, seconds, verify: seen.append((0, seconds)))
    depths = iter([0, 0, 0, 0, 3, 3, 3, 0, 3, 3] + [0] * 99)
    monkeypatch.setattr(drafting, "depths", lambda requests: dict.fromkeys(requests, next(depths)))
    overlapped.generate(TEXTS[:1], SamplingParams(max_tokens=24, ignore_eos=True))
    assert sum(steps.visits.values()) == len(watched) - 1 and len(steps.visits) == 2
    assert max(seconds for _, seconds in seen) < 100
    assert {depth for depth, seconds in seen if seconds} == {0, 3}, "of each depth some steps are timed"


@pytest.mark.gpu
@no_gpu
def test_sixteen_streams_that_come_and_go() -> None:
    """Twenty requests for sixteen places, greedy and sampled, drafted and not, of different lengths."""
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "ngram": False, "kv_tokens": 16384}
    overlapped, host = (LLM("smollm2", max_seqs=16, **options) for _ in range(2))
    on_host(host)
    params = [
        SamplingParams(max_tokens=20 + 9 * i, num_draft=(0, 3, 7)[i % 3], seed=i, temperature=0.8 * (i % 2))
        for i in range(20)
    ]
    asked = [TEXTS[i % len(TEXTS)] * (1 + i) for i in range(20)]
    ours, theirs = ([r.completions[0].ids for r in llm.generate(asked, params)] for llm in (overlapped, host))
    assert ours == theirs
    assert [host.generate([a], p)[0].completions[0].ids for a, p in zip(asked, params, strict=True)] == ours


def test_every_step_accepts_what_the_hosts_step_accepts(host: LLM, overlapped: LLM, watched: list[int]) -> None:
    params = [SamplingParams(max_tokens=60, num_draft=7, ignore_eos=True)] * 3
    ours, theirs = (llm.generate(TEXTS[:3], params) for llm in (overlapped, host))
    for mine, other in zip(ours, theirs, strict=True):
        a, b = mine.completions[0].speculation, other.completions[0].speculation
        assert a and b
        difference = sum(x != y for x, y in zip(a["acceptance_histogram"], b["acceptance_histogram"], strict=False))
        assert difference <= 2  # the host cuts its last drafts where the text ends; the device overshoots
        assert a["num_accepted_draft_tokens"] > 10


def test_grammars_and_log_probabilities_run_beside_others(host: LLM, overlapped: LLM, watched: list[int]) -> None:
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 40},
        {"max_tokens": 12, "repetition_penalty": 1.3},
        {"max_tokens": 12, "logprobs": 2},
        {"max_tokens": 12, "grammar": GrammarSpec("regex", "[a-z ]{40}")},
        {"max_tokens": 40, "min_tokens": 20},
    ]
    params = [SamplingParams(**kind) for kind in kinds]
    assert written(overlapped, params) == written(host, params)
    assert watched and max(watched) == len(kinds)


@pytest.mark.parametrize("num_draft", [0, 3])
def test_penalties_biases_and_least_lengths_stay_on_the_device(
    host: LLM, overlapped: LLM, watched: list[int], num_draft: int
) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.3},
        {"min_tokens": 20, "logit_bias": {2: 100.0}},
        {"temperature": 0.8, "seed": 5, "frequency_penalty": -0.3},
        {"temperature": 0.8, "seed": 6, "top_p": 0.9, "presence_penalty": 1.5, "logit_bias": {260: -5.0}},
    ]
    # The first two end early: their slots are taken by others, and empty slots are run beside those.
    params = [
        SamplingParams(max_tokens=8 if i < 2 else 60, num_draft=num_draft, ignore_eos=i != 2, **kind)
        for i, kind in enumerate(kinds)
    ]
    for _ in range(2):  # the second time in slots that the first one has used
        assert written(overlapped, params) == written(host, params)
    assert max(watched) == len(kinds)


@pytest.mark.slow
def test_requests_that_come_while_others_overlap(host: LLM, overlapped: LLM, watched: list[int]) -> None:
    params = SamplingParams(max_tokens=30, num_draft=3, ignore_eos=True)
    alone = [written(host, [params] * 6)[i] for i in range(6)]
    engine, seen = overlapped.engine, {str(i): [] for i in range(6)}  # type: ignore[var-annotated]
    arrivals = {0: 0, 3: 1, 4: 2, 9: 3, 10: 4, 17: 5}  # step -> text
    for step in range(400):
        if step in arrivals:
            engine.add(overlapped.encode(TEXTS[arrivals[step]]), params, str(arrivals[step]))
        for piece in engine.step() if engine.has_work else ():
            seen[piece.request_id] += piece.ids
    assert [seen[str(i)] for i in range(6)] == alone
    assert len(watched) > 6


def test_an_abort_before_a_launched_step_is_read_loses_nothing(host: LLM, overlapped: LLM, watched: list[int]) -> None:
    params = SamplingParams(max_tokens=40, num_draft=3, ignore_eos=True)
    alone = written(host, [params] * 3)
    engine, seen, ends = overlapped.engine, {"0": [], "1": [], "2": []}, {}  # type: ignore[var-annotated]
    for i in range(3):
        engine.add(overlapped.encode(TEXTS[i]), params, str(i))
    while engine.has_work:
        for piece in engine.step():
            seen[piece.request_id] += piece.ids
            if piece.finish:
                ends[piece.request_id] = piece.finish
        if len(seen["1"]) > 8:
            engine.abort("1")
    assert ends == {"0": FinishReason.LENGTH, "1": FinishReason.ABORT, "2": FinishReason.LENGTH}
    assert seen["0"] == alone[0] and seen["2"] == alone[2] and seen["1"] == alone[1][: len(seen["1"])]


def test_a_paused_drafter_catches_up(
    host: LLM, overlapped: LLM, watched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter's cache is a function of the text alone, however plain and drafted steps alternate."""
    pattern = [0] * (RING + 3) + [5, 0, 0, 3] + [0] * 5 + [15, 15]

    def caches(llm: LLM, depths: list[int]) -> tuple[list[int], torch.Tensor]:
        engine, turn = llm.engine, iter(depths)
        monkeypatch.setattr(engine.drafting, "depths", lambda rs: {r: d for r in rs if (d := next(turn, 0))})
        # on a busy machine the host may find that drafts could not pay, and show the drafter nothing
        monkeypatch.setattr(engine.drafting.proposer, "may_pass_over", False)
        engine.add(llm.encode(TEXTS[0]), SamplingParams(max_tokens=60, ignore_eos=True), "x")
        request = engine._by_id["x"][0]
        while len(request.output_ids) < 50:
            engine.step()
        with torch.inference_mode():
            engine.drain()
        assert engine.drafting.proposer
        with torch.inference_mode():
            if llm is overlapped:
                device_steps(llm).catch_up()
            engine.drafting.proposer.flush([request])
        kv = engine.drafting.proposer.drafter.kv  # type: ignore[attr-defined]
        positions = torch.arange(request.num_prompt + 45, device=kv.k[0].device)
        blocks = torch.tensor(request.blocks.tolist(), device=kv.k[0].device)[positions // 16]
        kept = torch.stack([k[blocks, :, positions % 16] for k in kv.k])
        engine.abort("x")
        assert [output.finish for output in engine.step()] == [FinishReason.ABORT]
        return request.output_ids[:50], kept

    text, expected = caches(host, [0] * 99)
    for depths in ([0] * 99, pattern, pattern[::-1]):
        found, kept = caches(overlapped, depths)
        assert found == text
        torch.testing.assert_close(kept, expected, rtol=0, atol=0 if kept.device.type == "cpu" else 1e-3)
    overlapped.engine.step()


def test_accepting() -> None:
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3]])
    samples = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 4, 4]])

    def count(drafts: torch.Tensor | None, samples: torch.Tensor, kept: list[int]) -> list[int]:
        many, stamp = [torch.full((4,), 9, dtype=torch.int32) for _ in range(3)], torch.zeros(1, dtype=torch.int64)
        most = torch.tensor(kept, dtype=torch.int32)
        rows = pack_rows(many[0], torch.zeros(4, 2, dtype=torch.int32), many[1], drafts, most, 16, stamp)
        packed = torch.empty(samples.numel(), dtype=torch.int64)
        packed[rows.places.flatten().long()] = samples.flatten()
        result, _ = accept_drafts(drafts, packed, most, *many, rows, stamp)
        assert result[:, samples.shape[1] + 1].tolist() == [min(k, samples.shape[1] - 1) for k in kept]
        return result[:, samples.shape[1]].tolist()

    assert count(drafts, samples, [9] * 4) == [3, 1, 0, 2]
    assert count(drafts, samples, [1, 1, 3, 0]) == [1, 1, 0, 0]
    assert count(None, samples[:, :1], [9] * 4) == [0, 0, 0, 0]


def test_drafts_before_a_stop_are_counted_as_accepted_all_of_them(overlapped: LLM, watched: list[int]) -> None:
    def pieces(**more: Any) -> list[StepOutput]:
        return list(overlapped.stream(TEXTS[4], SamplingParams(max_tokens=48, num_draft=7, ignore_eos=True, **more)))

    def is_new(index: int, whole: list[StepOutput]) -> bool:
        before = [token for piece in whole[:index] for token in piece.ids]
        return whole[index].num_accepted > 1 and whole[index].ids[0] not in before

    whole = pieces()
    index = next(i for i in range(len(whole)) if is_new(i, whole))
    cut = pieces(stop_ids=[whole[index].ids[0]])  # the text ends with the first of several drafts that are right
    assert [p.ids for p in cut] == [*(p.ids for p in whole[:index]), whole[index].ids[:1]]
    assert watched and cut[-1].num_accepted == 1 and cut[-1].speculation is not None
    assert cut[-1].speculation["num_accepted_draft_tokens"] == sum(p.num_accepted for p in cut)


@pytest.mark.parametrize("length", [32, 33, 65])
def test_all_texts_of_a_prompt_begin_though_its_last_chunk_is_one_row(length: int, tmp_path: Path) -> None:
    """Such a request looks like one that decodes. Its other texts begin with its first id, in a step of the host's."""
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "max_seqs": 4, "max_step_tokens": 32, "kv_tokens": 1024}
    llm = on_device(LLM(str(write_tiny(tmp_path, "qwen3")), dtype="float32", spec="off", ngram=False, **options))
    prompt = [3 + i % 200 for i in range(length)]
    (result,) = llm.generate([prompt], SamplingParams(max_tokens=4, n=2, ignore_eos=True))
    assert [len(text.ids) for text in result.completions] == [4, 4]
