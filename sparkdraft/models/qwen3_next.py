"""Qwen3-Next and Qwen3-Coder-Next: three recurrent layers to one of gated attention, and experts with a shared one.

Qwen3.5 (models/qwen3_5.py) has the same layers; what both need is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdraft.kernels.ops import Ops
from sparkdraft.models import llama
from sparkdraft.models.common.config import (
    FULL,
    ModelConfig,
    attention_of,
    decoder_config,
    expert_layers,
    experts_of,
    layer_count,
    need,
    types_of,
)
from sparkdraft.models.common.keys import check_keys, damaged, only_values
from sparkdraft.models.common.layers import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, RecurrentSpec
from sparkdraft.util.fields import flag, whole

if TYPE_CHECKING:
    from sparkdraft.models.common.blocks import Decoder
    from sparkdraft.weights.loader import Loader

MODEL_TYPES = ("qwen3_next",)
RECURRENT = "linear_attention"
INTERVAL = 4  # every so many layers one has attention
ROTATED = 0.25  # share of each head that is rotated
# mamba_ssm_dtype: states are float32 whatever it says. The numbers of mtp layers concern a drafter in the same file.
READ = """
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
    full_attention_interval partial_rotary_factor mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings
    num_nextn_predict_layers
"""
EXPERTS_READ = "num_experts num_local_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size"
ONLY = {
    **only_values("attention_bias mlp_bias use_sliding_window", False),
    **only_values("attn_output_gate", True),
    **only_values("output_gate_type", "swish", "silu"),
}


def read(config: Mapping[str, Any]) -> ModelConfig:
    own = "norm_topk_prob decoder_sparse_step mlp_only_layers"
    unknown = check_keys(config, ONLY, f"{READ} {EXPERTS_READ} {own}")
    experts = replace(experts_with_shared(config), renormalise=flag(config, "norm_topk_prob", True))
    chosen, mixers = expert_layers(config), mixers_of(config)
    mlp = experts if all(chosen) else DenseSpec(need(config, "intermediate_size"))
    layers = [LayerSpec(mixer, experts if has else mlp) for mixer, has in zip(mixers, chosen, strict=True)]
    return decoder_config(config, layers, norm_plus_one=True, unknown_keys=unknown)


def mixers_of(config: Mapping[str, Any]) -> list[AttentionSpec | RecurrentSpec]:
    """Each layer's gated attention or recurrence."""
    rotated = {"partial_rotary_factor": config.get("partial_rotary_factor") or ROTATED}
    attention = replace(attention_of({**config, **rotated}, partial=True), qk_norm=True, gated=True)
    keys, values = need(config, "linear_num_key_heads"), need(config, "linear_num_value_heads")
    if values % keys:
        raise damaged(f"linear_num_value_heads {values} and linear_num_key_heads {keys}, which does not divide it")
    dims = need(config, "linear_key_head_dim"), need(config, "linear_value_head_dim")
    recurrent = RecurrentSpec(keys, values, *dims, conv_width=need(config, "linear_conv_kernel_dim"))
    every = whole(config, "full_attention_interval") or INTERVAL
    otherwise = [FULL if (i + 1) % every == 0 else RECURRENT for i in range(layer_count(config))]
    return [attention if each == FULL else recurrent for each in types_of(config, otherwise, (FULL, RECURRENT))]


def experts_with_shared(config: Mapping[str, Any]) -> ExpertsSpec:
    return ExpertsSpec(
        *experts_of(config, "num_experts num_local_experts", "num_experts_per_tok"),
        intermediate_size=need(config, "moe_intermediate_size"),
        shared_size=need(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )


def build(config: ModelConfig, load: Loader, ops: Ops, context: int) -> Decoder:
    return llama.build(config, load, ops, context, has_others=True)
