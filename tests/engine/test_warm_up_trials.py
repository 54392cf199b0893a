"""The requests that a server runs before it is ready: which batches, and how deep each drafts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sparkdraft.engine.backend import trials


@pytest.mark.parametrize(
    ("device", "has_experts", "max_depth", "depths"),
    [
        ("cpu", False, 15, {0, 1, 3}),
        ("cpu", True, 15, {0, 1, 3}),
        ("cuda", False, 15, {0, 1, 3}),
        ("cuda", True, 15, {0, 1, 3, 15}),  # how cheap the last of many rows are is measured
        ("cuda", True, 3, {0, 1, 3}),
        ("cuda", True, 1, {0, 1}),
        ("cuda", True, 0, {0}),
    ],
)
def test_every_batch_is_tried_at_the_depths_that_could_pay(
    device: str, has_experts: bool, max_depth: int, depths: set[int]
) -> None:
    plan = SimpleNamespace(device=device, max_model_len=4096, max_seqs=8, max_step_tokens=512)
    found = trials(plan, max_depth, has_experts)  # type: ignore[arg-type]
    batches = [(trial.seqs, trial.params.num_draft) for trial in found if trial.seqs > 1]
    assert sorted(batches) == sorted((seqs, depth) for seqs in (2, 4, 8) for depth in depths), "each once"
