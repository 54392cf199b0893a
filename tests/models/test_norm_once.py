"""The norm that experts, their router, the shared expert and its gate read is computed once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkdraft.kernels import reference
from sparkdraft.kernels.ops import SILU, Norm, Normed
from sparkdraft.models.common.blocks import GatedMLP
from sparkdraft.models.common.experts import Experts, SharedExperts
from sparkdraft.models.common.layers import ExpertsSpec
from sparkdraft.weights.linear import DenseExperts, DenseLinear

HIDDEN, INTER, COUNT, ROWS = 32, 16, 4, 20


def layer() -> tuple[Experts, SharedExperts]:
    made = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made) / 4

    spec = ExpertsSpec(COUNT, 2, INTER)
    gate_up, down = DenseExperts(random(COUNT, 2 * INTER, HIDDEN)), DenseExperts(random(COUNT, HIDDEN, INTER))
    experts = Experts(spec, DenseLinear(random(COUNT, HIDDEN)), gate_up, down, reference)  # type: ignore[arg-type]
    mlp: Any = GatedMLP.__new__(GatedMLP)
    mlp.ops, mlp.activation = reference, SILU
    mlp.gate_up, mlp.down = DenseLinear(random(2 * INTER, HIDDEN)), DenseLinear(random(HIDDEN, INTER))
    return experts, SharedExperts(experts, mlp, DenseLinear(random(1, HIDDEN)))


@pytest.mark.parametrize("kind", [0, 1])
def test_all_readers_of_a_norm_share_it(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, norm, step = layer()[kind], Norm(torch.rand(HIDDEN), 1e-6), SimpleNamespace(live=None)
    x = torch.randn(ROWS, HIDDEN)
    monkeypatch.setattr(Normed, "applied", lambda self, rms_norm: rms_norm(self.x, *self.norm))
    alone = mlp.add_to(Normed(x.clone(), norm), step, norm).x  # type: ignore[arg-type]
    monkeypatch.undo()
    calls: list[int] = []
    rms_norm = reference.rms_norm
    monkeypatch.setattr(reference, "rms_norm", lambda *given: calls.append(1) or rms_norm(*given))
    assert torch.equal(mlp.add_to(Normed(x.clone(), norm), step, norm).x, alone)  # type: ignore[arg-type]
    assert len(calls) == 1
