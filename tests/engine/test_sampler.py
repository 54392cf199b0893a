"""The sampler against plain definitions: sorted filters, exact probabilities, documented penalties, reproducible
seeds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sparkdraft.core import Request, SamplingParams
from sparkdraft.engine.accept import NONE
from sparkdraft.engine.sampler import (
    LOGPROB_ROWS,
    EditTables,
    Sampler,
    SampleRow,
    draws_of,
    read_logprobs,
    token_logprobs,
    top_logprobs,
)
from sparkdraft.kernels.ops import Draws
from sparkdraft.kernels.reference.sampling import allowed, keep, top_k_floor, top_p_floor

VOCAB = 50
CPU = torch.device("cpu")


def request(params: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None) -> Request:
    made = Request("r", 0, prompt or [1, 2], params, params.seed or 0, params.max_tokens)
    made.output_ids = output or []
    return made


def sample(logits: torch.Tensor, requests: list[Request], eos: frozenset[int] = frozenset()) -> list[int]:
    rows = [SampleRow(r) for r in requests]
    return Sampler(logits.shape[1], eos, CPU, max_seqs=len(rows))(logits.clone(), rows).ids.tolist()


def chances(logits: torch.Tensor, params: SamplingParams, draws: int = 40000, **state: list[int]) -> torch.Tensor:
    """How often each id is drawn, over many seeds. The parameters are checked once, not once per seed."""
    requests = [request(params, **state) for _ in range(draws)]
    for seed, made in enumerate(requests):
        made.seed = seed
    ids = torch.tensor(sample(logits.expand(draws, -1), requests))
    return torch.bincount(ids, minlength=logits.shape[-1]) / draws


def sorted_filter(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The same distribution, the long way: sort, cut, renormalise."""
    probs = (logits.double() / params.temperature).softmax(-1)
    probs = torch.where(probs >= params.min_p * probs.max(), probs, 0)
    order = probs.argsort(descending=True)
    if params.top_k:
        probs[order[params.top_k :]] = 0
    probs /= probs.sum()
    if params.top_p < 1:
        before = probs[order].cumsum(0) - probs[order]
        probs[order[before >= params.top_p]] = 0
    return probs / probs.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=0.9, top_k=12, top_p=0.8, min_p=0.02),
    ],
)
def test_draws_follow_the_sorted_definition(params: SamplingParams) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    expected = sorted_filter(logits, params)
    seen = chances(logits, params)
    assert bool((seen[expected == 0] == 0).all())
    error = (seen - expected).abs() / (expected / 40000).sqrt().clamp(min=1e-4)
    assert float(error.max()) < 5, "an id is drawn five standard deviations off its chance"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), top_p=st.floats(0.01, 0.999), top_k=st.integers(0, 60))
def test_floors_keep_what_sorting_keeps(seed: int, top_p: float, top_k: int) -> None:
    probs = (torch.randn(1, 200, generator=torch.Generator().manual_seed(seed)) * 3).softmax(-1)
    order = probs[0].argsort(descending=True)
    if top_k:
        kept = keep(probs, top_k_floor(probs, torch.tensor([top_k])))[0] > 0
        assert set(kept.nonzero().flatten().tolist()) == set(order[:top_k].tolist())
    kept = keep(probs, top_p_floor(probs, torch.tensor([top_p])))[0] > 0
    mass = probs[0][order].double().cumsum(0)
    count = int(kept.sum())
    assert float(mass[count - 1]) >= top_p - 1e-5
    assert count == 1 or float(mass[count - 2]) < top_p + 1e-5


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    rows = [
        request(SamplingParams()),
        request(SamplingParams(temperature=1.0, seed=7)),
        request(SamplingParams(temperature=1.0, seed=8, top_k=1)),
    ]
    together = sample(logits, rows)
    assert together[0] == int(logits[0].argmax()) and together[2] == int(logits[2].argmax())
    assert together == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(3)]


def test_a_seed_gives_the_same_draws_wherever_the_row_stands() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4))
    mine = request(SamplingParams(temperature=1.0, seed=99, top_p=0.9))
    first = sample(logits, [mine])
    others = torch.randn(5, VOCAB)
    crowd = [request(SamplingParams(temperature=0.5, seed=i, top_k=i)) for i in range(5)]
    assert sample(torch.cat((others, logits)), [*crowd, mine])[-1] == first[0]


def test_the_filters_of_others_leave_a_row_as_it_is() -> None:
    """Including ids whose probability is too small for a float: a filter that is off must not remove them."""
    params = [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.7, top_k=5, top_p=0.6, min_p=0.1),
        SamplingParams(temperature=0.7, top_k=3000),
        SamplingParams(temperature=0.7, top_p=0.6),
    ]
    logits = torch.linspace(0, -150, 200).expand(len(params), -1)

    def rows(params: list[SamplingParams]) -> Draws:
        draws = draws_of([request(p) for p in params], [0] * len(params), CPU)
        assert draws
        return draws

    together = allowed(logits, rows(params))
    assert not together[0].isinf().any() and not together[2].isinf().any()
    for row, own in enumerate(params):
        assert torch.equal(together[row : row + 1], allowed(logits[:1], rows([own])))


def test_top_p_of_one_keeps_the_least_likely_id() -> None:
    probs = torch.linspace(0, -80, 200).softmax(0).expand(2, -1)
    floors = top_p_floor(probs, torch.tensor([1.0, 0.5]))
    assert float(floors[0]) == 0 < float(floors[1])


def test_penalties_as_documented() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3)
    made = request(params, prompt=[3, 4], output=[5, 5, 6])
    expected = logits[0].clone()
    for token in (3, 4, 5, 6):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    expected[5] -= 0.4 + 2 * 0.3
    expected[6] -= 0.4 + 0.3
    got = logits.clone()
    Sampler(VOCAB, frozenset(), CPU)(got, [SampleRow(made)])
    torch.testing.assert_close(got[0], expected)


def test_counts_follow_the_output_and_are_forgotten() -> None:
    sampler = Sampler(VOCAB, frozenset(), CPU)
    made = request(SamplingParams(frequency_penalty=2.0))
    flat = torch.zeros(1, VOCAB)
    for step in range(4):
        ids = sampler(flat.clone(), [SampleRow(made)]).ids.tolist()
        assert ids[0] not in made.output_ids, step
        made.output_ids += ids
    sampler.forget(made)
    assert sampler.edits.num_held == 0


def test_bias_and_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 5
    assert sample(logits, [request(SamplingParams(logit_bias={7: 10.0}))]) == [7]
    assert sample(logits, [request(SamplingParams(min_tokens=1))], eos=frozenset({9})) != [9]
    assert sample(logits, [request(SamplingParams(min_tokens=1), output=[1])], eos=frozenset({9})) == [9]
    assert sample(logits, [request(SamplingParams(min_tokens=1))], eos=frozenset({9, VOCAB, -1})) != [9]
    tables = EditTables(4, VOCAB, frozenset({9}), torch.device("cpu"))
    asks = [tables.asks(request(SamplingParams(min_tokens=2), output=[1] * n)) for n in (0, 1, 2)]
    assert asks == [True, True, False], "only its first ids are edited"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_draws_what_a_cpu_draws() -> None:
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(6))
    rows = [request(SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=i)) for i in range(64)]
    gpu = Sampler(5000, frozenset(), torch.device("cuda"))(logits.cuda(), [SampleRow(r) for r in rows]).ids.tolist()
    cpu = sample(logits, rows)
    assert sum(a == b for a, b in zip(gpu, cpu, strict=True)) >= 63  # a sum in another order may move one border


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_graph_finds_log_probabilities() -> None:
    """A capture fails where something waits for the host."""
    first, second = 3 * torch.randn(2, LOGPROB_ROWS + 6, 150_001, generator=torch.Generator().manual_seed(3))
    logits, chosen = first.cuda(), torch.arange(len(first), device="cuda")
    top_logprobs(logits, chosen, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table = top_logprobs(logits, chosen, 5)
    for numbers in (second, first):
        logits.copy_(numbers)
        graph.replay()
        torch.testing.assert_close(table.cpu(), top_logprobs(numbers, chosen.cpu(), 5))


class Calls(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("top", [0, 1, 5])
def test_log_probabilities_of_many_rows_are_chosen_at_once(top: int) -> None:
    logits = 3 * torch.randn(LOGPROB_ROWS, 300, generator=torch.Generator().manual_seed(1))
    logits[3, 7], logits[4, 8] = float("-inf"), float("nan")
    chosen, scores = [(7 * i) % 300 for i in range(len(logits))], logits.log_softmax(-1)
    with Calls() as calls:
        rows = token_logprobs(logits, chosen, top)
    assert calls.count["topk"] == 1 and calls.count["_local_scalar_dense"] == 0
    for i, (row, token) in enumerate(zip(rows, chosen, strict=True)):
        best = torch.topk(scores[i], top)
        assert row.id == token and repr(row.logprob) == repr(float(scores[i, token]))
        assert repr(row.top) == repr(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))


@pytest.mark.parametrize("rows", [0, 1, LOGPROB_ROWS, 2 * LOGPROB_ROWS + 5])
def test_tables_of_log_probabilities_are_read_for_requests_that_want_fewer(rows: int) -> None:
    """Rows are split, so that the memory is bounded; ids past 2 ** 16 stay what they are; NONE is no id."""
    logits = torch.randn(rows, 150_001, generator=torch.Generator().manual_seed(2))
    logits[:, 149_999] = 9.0
    chosen = [NONE if i % 5 == 4 else 1000 * i for i in range(rows)]
    with Calls() as calls:
        table = top_logprobs(logits, torch.tensor(chosen, dtype=torch.int32), 7)
    assert table.shape == (rows, 15) and calls.count["_local_scalar_dense"] == 0
    assert calls.count["_log_softmax"] == max(-(-rows // LOGPROB_ROWS), 1)
    for row, token, own in zip(read_logprobs(table, chosen, 2), chosen, logits.log_softmax(-1), strict=True):
        assert row.id == token and row.logprob == float(own[max(token, 0)])
        assert [i for i, _ in row.top] == own.topk(2).indices.tolist() and row.top[0] == (149_999, float(own[149_999]))
