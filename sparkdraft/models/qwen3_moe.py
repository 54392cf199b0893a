"""Qwen3 with experts (Qwen3-30B-A3B and its kin): Qwen3's attention; most layers have experts in place of their MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparkdraft.models import llama
from sparkdraft.models.common.config import (
    ModelConfig,
    attention_of,
    decoder_config,
    expert_layers,
    experts_of,
    need,
    refuse_windows,
)
from sparkdraft.models.common.keys import check_keys, only_values
from sparkdraft.models.common.layers import DenseSpec, ExpertsSpec, LayerSpec
from sparkdraft.util.fields import flag

MODEL_TYPES = ("qwen3_moe",)

build = llama.build  # norms and experts are in the layers' specs
READ = """
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step
    mlp_only_layers
"""


def read(config: Mapping[str, Any]) -> ModelConfig:
    only = only_values("mlp_bias shared_expert_intermediate_size", False) | only_values("qk_norm use_qk_norm", True)
    unknown = check_keys(config, only, READ)
    attention = replace(attention_of(config), qk_norm=True)
    refuse_windows(config, slides_by_default=False)
    experts = ExpertsSpec(
        *experts_of(config, "num_experts num_local_experts", "num_experts_per_tok"),
        intermediate_size=need(config, "moe_intermediate_size"),
        renormalise=flag(config, "norm_topk_prob"),
    )
    mlp = DenseSpec(need(config, "intermediate_size"))
    layers = [LayerSpec(attention, experts if chosen else mlp) for chosen in expert_layers(config)]
    return decoder_config(config, layers, unknown_keys=unknown)
