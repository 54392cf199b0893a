"""Edits, filters and draws in Triton against the torch reference: on a GPU, or few rows under TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.core import Request, SamplingParams
from sparkdraft.engine.sampler import draws_of
from sparkdraft.kernels import cuda, reference
from sparkdraft.kernels.cuda.sampling import sample as kernel
from sparkdraft.kernels.ops import WIDEST, Draws
from tests.kernels.test_sampling import COMMITTED, PARAMS, random_edits, sampled_case
from tests.kernels.triton_device import DEVICE, INTERPRET, gpu

pytestmark = pytest.mark.usefixtures("poisoned_empty")
COLUMNS = [5, 300] if INTERPRET else [5, 64, 1003, 49152, 151936]
EACH = 1 if INTERPRET else 32  # rows per set of parameters


@pytest.fixture(autouse=True)
def fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRET:
        cut_small(monkeypatch)


def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few hundred columns take every way through the kernels."""
    small = {"GROUP": 8, "FIRST_BLOCK": 64, "PARTS": 2, "BLOCK": 64, "WIDE_BLOCK": 64, "MOST": 16, "CHUNK": 8}
    for name, value in small.items():
        monkeypatch.setattr(kernel, name, value)


def rows_of(columns: int, params: list[SamplingParams]) -> tuple[Tensor, Draws]:
    requests = [Request("a", 0, [1], p, columns + i, 8) for i, p in enumerate(params) for _ in range(EACH)]
    logits = torch.randn(len(requests), columns + 3, generator=torch.Generator().manual_seed(columns)) * 3
    logits[:, 1] = float("-inf")
    draws = draws_of(requests, [i % EACH for i in range(len(requests))], torch.device(DEVICE))
    assert draws
    return logits.to(DEVICE)[:, :columns], draws  # a row is longer than its columns


@gpu
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("subset", [False, True])
def test_it_draws_what_the_definition_draws(columns: int, subset: bool) -> None:
    logits, draws = rows_of(columns, [*PARAMS, SamplingParams()])
    ids = torch.randperm(columns, device=DEVICE) if subset else None
    wanted, gaps = reference.sample_sure(logits, draws, ids, WIDEST)
    assert torch.equal(cuda.sample(logits, draws, ids), wanted)
    found, found_gaps = cuda.sample_sure(logits, draws, ids, WIDEST)
    assert torch.equal(found, wanted)
    torch.testing.assert_close(found_gaps, gaps, atol=2e-4, rtol=2e-4)


@gpu
def test_rows_without_parameters_take_their_largest() -> None:
    logits, _ = rows_of(300, PARAMS)
    logits[0, 7] = logits[0, 9] = 60.0  # equal ones: the first, and no gap
    logits[1, 8] = 50.0
    wanted, gaps = reference.sample_sure(logits, None, None, WIDEST)
    found, found_gaps = cuda.sample_sure(logits, None, None, WIDEST)
    assert torch.equal(found, wanted) and torch.equal(cuda.sample(logits, None), wanted)
    torch.testing.assert_close(found_gaps, gaps, atol=1e-4, rtol=1e-4)
    assert found_gaps[0].item() == pytest.approx(0.0, abs=1e-5) and found_gaps[1].item() == WIDEST


@gpu
def test_a_row_draws_the_same_whatever_rows_are_beside_it() -> None:
    logits, draws = rows_of(COLUMNS[-1], PARAMS)
    together = cuda.sample(logits, draws)
    for row in range(0, len(logits), EACH):
        one = Draws(draws.slots[row : row + 1], draws.positions[row : row + 1], draws.floats, draws.integers)
        assert torch.equal(cuda.sample(logits[row : row + 1], one), together[row : row + 1])


@gpu
def test_ties_with_the_last_survivor_survive() -> None:
    rows = 12 if INTERPRET else 400
    requests = [Request("a", 0, [1], SamplingParams(temperature=1.0, top_k=3, top_p=0.999), 5, 8)] * rows
    draws = draws_of(requests, list(range(rows)), torch.device(DEVICE))
    logits = torch.zeros(rows, 20, device=DEVICE)
    logits[:, 10:] = -50.0
    assert draws
    found = set(cuda.sample(logits, draws).tolist())
    assert len(found) > 3 and found <= set(range(10)) and (INTERPRET or len(found) == 10)


FILTERS = [
    SamplingParams(temperature=1.0, top_k=14),  # more than are collected where many are equal
    SamplingParams(temperature=5.0, top_k=40, top_p=0.5),  # more than are compared with each other
    SamplingParams(temperature=5.0, top_k=100, min_p=0.2),
    SamplingParams(temperature=5.0, top_p=0.02),  # most draws are not kept
    SamplingParams(temperature=1.0, top_p=0.6, min_p=0.1),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05),
]


@gpu
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_every_way_to_a_draw_is_the_definition(
    params: SamplingParams, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small(monkeypatch)
    columns, rows = 301, 2 if INTERPRET else 200
    logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).to(DEVICE) * 3
    logits = logits.round() if rounded else logits  # with many ties
    draws = draws_of([Request("a", 0, [1], params, 17, 8)], [4], torch.device(DEVICE), rows)
    wanted, gaps = reference.sample_sure(logits, draws, None, WIDEST)
    found, found_gaps = cuda.sample_sure(logits, draws, None, WIDEST)
    assert torch.equal(found, wanted) and torch.equal(cuda.sample(logits, draws), wanted)
    torch.testing.assert_close(found_gaps, gaps, atol=2e-4, rtol=2e-4)


@gpu
def test_rows_without_a_slot_take_their_largest() -> None:
    logits, draws = rows_of(64, PARAMS)
    draws = draws._replace(slots=draws.slots.where(torch.arange(len(logits), device=DEVICE) % 2 > 0, -1))
    assert torch.equal(cuda.sample(logits, draws), reference.sample(logits, draws))
    assert torch.equal(cuda.sample(logits, draws)[::2], logits.argmax(-1)[::2])


@gpu
@pytest.mark.parametrize("with_rows, with_ends", [(True, True), (True, False), (False, True)])
def test_sampled_rows_are_those_of_the_definition(with_rows: bool, with_ends: bool) -> None:
    rows, ends, *state = sampled_case(DEVICE)
    given = rows if with_rows else None, ends if with_ends else None, *state
    for found, wanted in zip(cuda.sampled_rows(*given), reference.sampled_rows(*given), strict=True):
        assert torch.equal(found, wanted)


@gpu
def test_committed_ids_are_counted() -> None:
    slots, samples, accepted = (torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in COMMITTED)
    wanted = torch.randint(0, 9, (3, 50), dtype=torch.int32, device=DEVICE)
    found = wanted.clone()
    for number in (accepted, None):
        reference.count_ids(wanted, slots, samples, number)
        cuda.count_ids(found, slots, samples, number)
        assert torch.equal(found, wanted)


@gpu
@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan")])
def test_rows_without_a_finite_logit_stay_inside(value: float) -> None:
    """The engine finds such a row by the logit of what it took (engine/accept.py)."""
    logits, draws = rows_of(64, [SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(temperature=1.0, top_k=2)])
    logits[:] = value
    if value > 0:
        logits[:, :5] = 1.0
    taken = cuda.sample(logits, draws)
    assert int(taken.min()) >= 0 and int(taken.max()) < 64
    assert not bool((logits.gather(1, taken.unsqueeze(1)).isfinite()).any())


@gpu
@pytest.mark.parametrize("columns", COLUMNS)
def test_edits_are_those_of_the_definition(columns: int) -> None:
    edits, logits = random_edits(columns, DEVICE), torch.randn(6, columns, device=DEVICE)
    expected, found = logits.clone(), logits.clone()
    reference.edit_logits(expected, edits)
    cuda.edit_logits(found, edits)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(found[3], logits[3])
