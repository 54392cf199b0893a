"""A mixture of experts: a router sends each token to a few gated MLPs, and their weighted results are added up.

A checkpoint holds experts one by one, or all of a layer in one tensor; both are kept as one `ExpertLinear` per
projection. Beside the experts that a router chooses there may be one that all tokens pass through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from sparkdraft.kernels.ops import Norm, Normed, Ops, Routing
from sparkdraft.models.common.blocks import MLP, GatedMLP, Step
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import DenseSpec, ExpertsSpec
from sparkdraft.weights.linear import ExpertLinear, Linear
from sparkdraft.weights.loader import Loader


class Experts:
    """x += sum of weight * expert(norm(x)) over the chosen experts."""

    def __init__(
        self,
        spec: DenseSpec | ExpertsSpec,
        router: Linear,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        ops: Ops,
        scale: Tensor | None = None,  # float32 [experts]: multiplies an expert's weight
    ) -> None:
        assert isinstance(spec, ExpertsSpec) and not spec.shared_size, spec
        self.spec, self.ops, self.router, self.gate_up, self.down, self.scale = spec, ops, router, gate_up, down, scale

    @property
    def matrices(self) -> list[Linear | ExpertLinear]:
        return [self.router, self.gate_up, self.down]

    def route(self, normed: Normed, step: Step) -> Routing:
        spec = self.spec
        return self.ops.norm_route(normed, self.router, spec.top_k, spec.renormalise, self.scale, step.live)

    def add_to(self, normed: Normed, step: Step, then: Norm) -> Normed:
        normed = normed_once(normed, self.ops)
        routing = self.route(normed, step)
        return self.ops.add_experts(normed, routing, self.gate_up, self.down, self.spec.activation, then)

    def result(self, normed: Normed, routing: Routing) -> Tensor:  # [tokens, hidden], not added to the stream yet
        return self.ops.norm_experts(normed, routing, self.gate_up, self.down, self.spec.activation)


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """x += experts(norm(x)) + sigmoid(gate(norm(x))) * mlp(norm(x)): one expert is for every token.

    The gate is a number per token, so it may as well multiply the last matrix's input, which is made before the stream
    is changed.
    """

    experts: Experts
    mlp: GatedMLP
    gate: Linear  # [1, hidden]

    @property
    def matrices(self) -> list[Linear | ExpertLinear]:
        return [*self.experts.matrices, *self.mlp.matrices, self.gate]

    def add_to(self, normed: Normed, step: Step, then: Norm) -> Normed:
        ops = self.experts.ops
        normed = normed_once(normed, ops)
        inside, down = self.mlp.result(normed)
        ops.sigmoid_gate(inside, ops.norm_linear(normed, self.gate))
        self.experts.add_to(normed, step, then)
        return ops.add_linear(normed.x, inside, down, then)


def normed_once(normed: Normed, ops: Ops) -> Normed:
    """The stream with its norm, which two to four matrices read here. Where the norm is part of their kernels, its
    statistics are prepared already."""
    if normed.scaled is not None or normed.whole is not None:
        return normed
    return normed._replace(whole=ops.rms_norm(normed.x, *normed.norm))


LoadExperts = Callable[[DenseSpec | ExpertsSpec, ModelConfig, Loader, str, Ops], MLP]


def load_experts(spec: DenseSpec | ExpertsSpec, config: ModelConfig, load: Loader, name: str, ops: Ops) -> MLP:
    """The names of Qwen: 'name'.gate is the router, the experts are under 'name'.experts, singly or in one tensor."""
    assert isinstance(spec, ExpertsSpec), f"{name} is {spec}"
    router = load.float_linear(f"{name}.gate", spec.num_experts, config.hidden_size)
    own = replace(spec, shared_size=0, shared_gate=False)
    experts = Experts(own, router, *load_expert_matrices(spec, config.hidden_size, load, f"{name}.experts"), ops)
    if not spec.shared_size:
        return experts
    assert spec.shared_gate, f"{name}: {spec}"
    shared = GatedMLP(DenseSpec(spec.shared_size, spec.activation), config, load, f"{name}.shared_expert", ops)
    return SharedExperts(experts, shared, load.float_linear(f"{name}.shared_expert_gate", 1, config.hidden_size))


def load_expert_matrices(
    spec: ExpertsSpec, hidden: int, load: Loader, name: str
) -> tuple[ExpertLinear, ExpertLinear]:  # gate and up, down
    inter, count = spec.intermediate_size, spec.num_experts
    gate_up = load.experts(name, {"gate_proj": inter, "up_proj": inter}, hidden, count, "gate_up_proj")
    return gate_up, load.experts(name, {"down_proj": hidden}, inter, count, "down_proj")
