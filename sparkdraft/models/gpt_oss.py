"""gpt-oss: every other layer has a window, all heads have a sink, all MLPs are experts, and everything has a bias.

Files hold the experts as MXFP4, or as floats that lie the other way round; in both, rows of gate and up alternate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdraft.kernels.ops import Activation, Ops
from sparkdraft.models import llama
from sparkdraft.models.common.config import ModelConfig, attention_of, decoder_config, experts_of, need, sliding_layers
from sparkdraft.models.common.keys import check_keys, only_values
from sparkdraft.models.common.layers import DenseSpec, ExpertsSpec, LayerSpec
from sparkdraft.util.fields import real

if TYPE_CHECKING:
    from sparkdraft.models.common.blocks import Decoder
    from sparkdraft.models.common.experts import Experts
    from sparkdraft.weights.loader import Loader

MODEL_TYPES = ("gpt_oss",)
READ = "num_experts num_local_experts num_experts_per_tok experts_per_token swiglu_limit initial_context_length"
THETA = 150000.0
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(config: Mapping[str, Any]) -> ModelConfig:
    unknown = check_keys(config, only_values("mlp_bias", True), READ)
    config = {"attention_bias": True, "rope_theta": THETA, "rms_norm_eps": 1e-5, **config}
    if not config.get("rope_scaling") and not config.get("rope_parameters"):
        config["rope_parameters"] = YARN
    limit = real(config, "swiglu_limit") or 7.0
    experts = ExpertsSpec(
        *experts_of(config, "num_local_experts num_experts", "num_experts_per_tok experts_per_token"),
        intermediate_size=need(config, "intermediate_size"),
        activation=Activation("clamped_swiglu", limit),
        bias=True,
    )
    attention = replace(attention_of(config), sinks=True)
    layers = [LayerSpec(replace(attention, window=window), experts) for _, window in sliding_layers(config, 2)]
    return decoder_config(config, layers, unknown_keys=unknown)


def build(config: ModelConfig, load: Loader, ops: Ops, context: int) -> Decoder:
    return llama.build(config, load, ops, context, _load_experts)


def _load_experts(spec: DenseSpec | ExpertsSpec, config: ModelConfig, load: Loader, name: str, ops: Ops) -> Experts:
    import torch

    from sparkdraft.models.common.experts import Experts
    from sparkdraft.weights.quant.stored import Stored

    def gate_then_up(matrix: Stored) -> list[Stored]:  # of floats no copy is made: a layer of all experts is large
        return [matrix[0::2], matrix[1::2]] if isinstance(matrix, torch.Tensor) else [matrix.take(order)]

    assert isinstance(spec, ExpertsSpec), f"{name} is {spec}"
    hidden, inter, count, place = config.hidden_size, spec.intermediate_size, spec.num_experts, f"{name}.experts"
    router = load.float_linear(f"{name}.router", count, hidden, bias=True)
    order = torch.cat((torch.arange(0, 2 * inter, 2), torch.arange(1, 2 * inter, 2)))  # gate, then up
    gate_up = load.expert_matrices(f"{place}.gate_up_proj", count, 2 * inter, hidden, turned=True)
    gate_up_bias = load.floats(f"{place}.gate_up_proj_bias", (count, 2 * inter))[:, order.to(load.device)]
    down = load.expert_matrices(f"{place}.down_proj", count, hidden, inter, turned=True)
    down_bias = load.floats(f"{place}.down_proj_bias", (count, hidden))
    return Experts(
        spec,
        router,
        load.keep_experts(list(map(gate_then_up, gate_up)), gate_up_bias),
        load.keep_experts([[matrix] for matrix in down], down_bias),
        ops,
    )
