"""A mixture of experts by its definition: a router weighs the experts for each row, and the chosen ones are added up.

This is the form that every faster one is tested against: each expert is a list of its own matrices, every expert runs
on every row, and those that a row did not choose count with weight 0. Nothing depends on the data but numbers, so a
step can be recorded. A row's sum runs over the experts in their order, so it depends on that row alone.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from sparkdraft.kernels.norm import Norm, Normed
from sparkdraft.models.config import ModelConfig
from sparkdraft.models.layers import DenseSpec, ExpertsSpec
from sparkdraft.weights.linear import Linear
from sparkdraft.weights.loader import Loader


class Experts:
    """x += sum of weight * expert(norm(x)) over the chosen experts."""

    def __init__(
        self, spec: DenseSpec | ExpertsSpec, config: ModelConfig, load: Loader, name: str, ops: ModuleType
    ) -> None:
        assert isinstance(spec, ExpertsSpec) and not spec.shared_size and spec.activation == "silu", f"{name} is {spec}"
        self.spec, self.ops, hidden, inter = spec, ops, config.hidden_size, spec.intermediate_size
        self.router = load.linear({f"{name}.gate": spec.num_experts}, hidden)
        names = [f"{name}.experts.{e}" for e in range(spec.num_experts)]
        self.gate_up = [load.linear({f"{n}.gate_proj": inter, f"{n}.up_proj": inter}, hidden) for n in names]
        self.down = [load.linear({f"{n}.down_proj": hidden}, inter) for n in names]

    @property
    def matrices(self) -> list[Linear]:
        return [self.router, *self.gate_up, *self.down]

    def add_to(self, normed: Normed, then: Norm) -> Normed:
        h = self.ops.rms_norm(normed.x, *normed.norm)
        weights = route(self.router.linear(h), self.spec.top_k)
        total = torch.zeros_like(h, dtype=torch.float32)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            total += weights[:, expert : expert + 1] * down.linear(self.ops.silu_mul(gate_up.linear(h))).float()
        normed.x.add_(total.to(normed.x.dtype))
        return Normed(normed.x, then)


def route(logits: Tensor, top_k: int) -> Tensor:  # [rows, experts] -> float32 [rows, experts]
    """The weight of each expert for each row: its share among the row's 'top_k' likeliest, 0 for all others.

    Of equal logits the expert with the lower number is taken first: torch.topk promises no order.
    """
    chances = logits.float().softmax(-1)
    order = chances.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    kept = torch.zeros_like(chances).scatter(1, order, chances.gather(1, order))
    return kept / kept.sum(-1, keepdim=True)
