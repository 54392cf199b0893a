"""How sure a draft is: ids as the sampler picks them, gaps as torch defines them, by the kernels and the reference."""

from __future__ import annotations

import pytest
import torch

from sparkdraft.core import Request, SamplingParams
from sparkdraft.engine.sampler import draws_of, ids_of, pick, pick_sure
from sparkdraft.kernels import native, reference
from sparkdraft.kernels.ops import WIDEST, Draws, Ops
from sparkdraft.kernels.reference.sampling import scores

COLUMNS = 1000
OPS = [reference] + ([] if native.unavailable_reason() else [native])
PARAMS = {
    "greedy": [SamplingParams()],
    "drawn": [SamplingParams(temperature=0.7, seed=3), SamplingParams(temperature=1.3, seed=4)],
    "filtered": [SamplingParams(temperature=0.9, top_p=0.8, top_k=40, min_p=0.01, seed=5)],
    "mixed": [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.95, seed=6)],
}


def rows_of(kind: str, each: int = 40) -> tuple[torch.Tensor, Draws | None]:
    """Logits from flat to sharp, and how they are sampled."""
    requests = [Request(str(i), 0, [1], p, p.seed or 0, 9) for i, p in enumerate(PARAMS[kind])]
    rows = len(requests) * each
    sharp = torch.linspace(0.3, 6, rows).unsqueeze(1)
    logits = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(1)) * sharp
    return logits, draws_of(requests, [7] * len(requests), torch.device("cpu"), each)


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.NAME)
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("subset", [False, True])
def test_ids_are_those_that_the_sampler_picks(ops: Ops, kind: str, subset: bool) -> None:
    logits, draws = rows_of(kind)
    ids = torch.randperm(5000, generator=torch.Generator().manual_seed(2))[:COLUMNS] if subset else None
    sure = pick_sure(ops, logits.clone(), draws, ids)
    assert sure.ids.tolist() == pick(ops, logits.clone(), draws, ids).tolist()
    top, columns = logits.max(-1)
    others = logits.scatter(1, columns.unsqueeze(1), float("-inf"))
    gaps = top - others.masked_fill(others < top.unsqueeze(1) - WIDEST, float("-inf")).logsumexp(-1)
    if draws:
        best = scores(logits, draws, ids).topk(2)
        greedy = draws.floats[0, draws.slots.long()] == 0
        columns, gaps = (
            columns.where(greedy, best.indices[:, 0]),
            gaps.where(greedy, best.values[:, 0] - best.values[:, 1]),
        )
    assert sure.ids.tolist() == ids_of(columns, ids).tolist()
    torch.testing.assert_close(sure.gaps, gaps.clamp(max=WIDEST), atol=2e-4, rtol=2e-4)
    assert sure.gaps.min() < 1 and len({round(gap, 3) for gap in sure.gaps.tolist()}) > 20


def test_a_greedy_gap_is_the_logit_of_the_probability() -> None:
    logits = torch.randn(5, 50)  # all of them within WIDEST of each other
    chance = logits.softmax(-1).amax(-1)
    torch.testing.assert_close(
        reference.sample_sure(logits, None, None, WIDEST)[1],
        torch.log(chance / (1 - chance)),
        atol=1e-4,
        rtol=1e-4,
    )


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.NAME)
def test_the_surest_and_the_only_one(ops: Ops) -> None:
    logits = torch.zeros(2, 40)
    logits[:, 3] = 50.0
    draws = draws_of([Request("a", 0, [1], SamplingParams(temperature=0.5), 1, 9)], [3], torch.device("cpu"), 2)
    for given in (None, draws):
        sure = pick_sure(ops, logits.clone(), given)
        assert sure.ids.tolist() == [3, 3] and sure.gaps.tolist() == [WIDEST, WIDEST]
