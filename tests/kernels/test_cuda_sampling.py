"""Edits, filters and draws in Triton against the torch reference: on a GPU, or few rows under TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.core import Request, SamplingParams
from sparkdraft.engine.sampler import Draws
from sparkdraft.kernels import cuda, reference
from sparkdraft.kernels.cuda.sampling import sample as kernel
from sparkdraft.kernels.ops import WIDEST
from tests.kernels.test_sampling import PARAMS, random_edits
from tests.kernels.triton_device import DEVICE, INTERPRET, gpu

pytestmark = pytest.mark.usefixtures("poisoned_empty")
COLUMNS = [5, 300] if INTERPRET else [5, 64, 1003, 49152, 151936]
EACH = 1 if INTERPRET else 32  # rows per set of parameters


@pytest.fixture(autouse=True)
def fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRET:
        monkeypatch.setattr(kernel, "PARTS", 2)


def rows_of(columns: int, params: list[SamplingParams]) -> tuple[Tensor, Draws]:
    requests = [Request("a", 0, [1], p, columns + i, 8) for i, p in enumerate(params) for _ in range(EACH)]
    logits = torch.randn(len(requests), columns + 3, generator=torch.Generator().manual_seed(columns)) * 3
    logits[:, 1] = float("-inf")
    draws = Draws.of(requests, [i % EACH for i in range(len(requests))], torch.device(DEVICE))
    assert draws
    return logits.to(DEVICE)[:, :columns], draws  # a row is longer than its columns


@gpu
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("subset", [False, True])
def test_it_draws_what_the_definition_draws(columns: int, subset: bool) -> None:
    logits, draws = rows_of(columns, [*PARAMS, SamplingParams()])
    ids = torch.randperm(columns, device=DEVICE) if subset else None
    wanted, gaps = reference.sample_sure(logits, *draws, ids, WIDEST)
    assert torch.equal(cuda.sample(logits, *draws, ids), wanted)
    found, found_gaps = cuda.sample_sure(logits, *draws, ids, WIDEST)
    assert torch.equal(found, wanted)
    torch.testing.assert_close(found_gaps, gaps, atol=2e-4, rtol=2e-4)


@gpu
def test_rows_without_parameters_take_their_largest() -> None:
    logits, _ = rows_of(300, PARAMS)
    logits[0, 7] = logits[0, 9] = 60.0  # equal ones: the first, and no gap
    logits[1, 8] = 50.0
    wanted, gaps = reference.sample_sure(logits, None, None, None, WIDEST)
    found, found_gaps = cuda.sample_sure(logits, None, None, None, WIDEST)
    assert torch.equal(found, wanted) and torch.equal(cuda.sample(logits, None, None), wanted)
    torch.testing.assert_close(found_gaps, gaps, atol=1e-4, rtol=1e-4)
    assert found_gaps[0].item() == pytest.approx(0.0, abs=1e-5) and found_gaps[1].item() == WIDEST


@gpu
def test_a_row_draws_the_same_whatever_rows_are_beside_it() -> None:
    logits, draws = rows_of(COLUMNS[-1], PARAMS)
    together = cuda.sample(logits, *draws)
    for row in range(0, len(logits), EACH):
        floats, integers = (part.view(3, -1)[:, row].contiguous() for part in draws)
        assert torch.equal(cuda.sample(logits[row : row + 1], floats, integers), together[row : row + 1])


@gpu
def test_ties_with_the_last_survivor_survive() -> None:
    rows = 12 if INTERPRET else 400
    requests = [Request("a", 0, [1], SamplingParams(temperature=1.0, top_k=3, top_p=0.999), 5, 8)] * rows
    draws = Draws.of(requests, list(range(rows)), torch.device(DEVICE))
    logits = torch.zeros(rows, 20, device=DEVICE)
    logits[:, 10:] = -50.0
    assert draws
    found = set(cuda.sample(logits, *draws).tolist())
    assert len(found) > 3 and found <= set(range(10)) and (INTERPRET or len(found) == 10)


@gpu
@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan")])
def test_rows_without_a_finite_logit_stay_inside(value: float) -> None:
    """The engine finds such a row by the logit of what it took (engine/accept.py)."""
    logits, draws = rows_of(64, [SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(temperature=1.0, top_k=2)])
    logits[:] = value
    if value > 0:
        logits[:, :5] = 1.0
    taken = cuda.sample(logits, *draws)
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
