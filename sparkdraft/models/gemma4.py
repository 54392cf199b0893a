"""Gemma 4's text models, dense and with experts: Gemma 3's norms, values that are normed, full layers without values.

Full layers have larger heads and fewer K/V heads, and take their values from the key projection. Layers of the 26B have
experts beside their MLP. What E2B and E4B have besides (an input per layer, shared keys and values) is refused, and
pictures and sounds are not read (models/common/keys.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdraft.core import UserError
from sparkdraft.kernels.ops import GELU_TANH, Ops
from sparkdraft.models.common.config import (
    FULL,
    SLIDING,
    ModelConfig,
    attention_of,
    decoder_config,
    experts_of,
    need,
    sliding_layers,
    softcap_of,
)
from sparkdraft.models.common.keys import check_keys, only_values, text_config
from sparkdraft.models.common.layers import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec
from sparkdraft.util.fields import flag, mapping

if TYPE_CHECKING:
    from sparkdraft.models.common.blocks import Decoder
    from sparkdraft.models.common.sandwich import Sublayer
    from sparkdraft.weights.loader import Loader

MODEL_TYPES = ("gemma4", "gemma4_text")
READ = """
    attention_k_eq_v per_layer_config global_head_dim num_global_key_value_heads final_logit_softcapping
    enable_moe_block num_experts top_k_experts moe_intermediate_size use_double_wide_mlp vocab_size_per_layer_input
"""
ONLY = {
    **only_values("hidden_act hidden_activation", "gelu_pytorch_tanh"),
    **only_values("hidden_size_per_layer_input num_kv_shared_layers", 0),  # of E2B and E4B
    **only_values("use_bidirectional_attention", False, "vision"),  # which concerns pictures
    **only_values("mlp_bias", False),
}
PATTERN = 6  # five layers slide, the sixth does not
ROPES = {
    SLIDING: {"rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
GLOBAL_HEAD_DIM = 512


def read(config: Mapping[str, Any]) -> ModelConfig:
    text, outer = text_config(config)
    unknown = check_keys(text, ONLY, READ)
    text["rope_parameters"] = text.get("rope_parameters") or ROPES
    mlp = _mlp(text)
    kinds = sliding_layers(text, PATTERN, last_is_full=True)  # whatever the file says, as in transformers
    layers = [LayerSpec(_attention(text, i, each, window), mlp) for i, (each, window) in enumerate(kinds)]
    text.setdefault("tie_word_embeddings", True)
    return decoder_config(
        text,
        layers,
        embedding_scale=need(text, "hidden_size") ** 0.5,
        softcap=softcap_of(text),
        unknown_keys=(*outer, *unknown),
    )


def _attention(text: Mapping[str, Any], layer: int, layer_type: str, window: int) -> AttentionSpec:
    own = attention_of({**text, **_heads(text, layer, layer_type)}, layer_type)
    made_of_keys = flag(text, "attention_k_eq_v") and layer_type == FULL
    return replace(own, scale=1.0, window=window, qk_norm=True, values="keys" if made_of_keys else "normed")


def _heads(text: Mapping[str, Any], layer: int, layer_type: str) -> dict[str, Any]:
    """A layer's own numbers of heads: by layer in files of transformers, for all full layers in others."""
    if text.get("per_layer_config") is not None:
        given = {str(key): value for key, value in mapping(text, "per_layer_config").items()}
        own = dict(mapping(given, str(layer), "config.json (per_layer_config)"))
        if odd := sorted(own.keys() - {"head_dim", "num_key_value_heads"}):
            raise UserError(
                f"config.json has {odd[0]} in per_layer_config, and only head_dim and num_key_value_heads are read "
                "there: use another checkpoint."
            )
        return own
    if layer_type != FULL:
        return {}
    own = {"head_dim": text.get("global_head_dim") or GLOBAL_HEAD_DIM}
    if flag(text, "attention_k_eq_v") and text.get("num_global_key_value_heads"):
        own["num_key_value_heads"] = text["num_global_key_value_heads"]
    return own


def _mlp(text: Mapping[str, Any]) -> DenseSpec | ExpertsSpec:
    dense = need(text, "intermediate_size")
    if not flag(text, "enable_moe_block"):
        return DenseSpec(dense, GELU_TANH)
    count, top_k = experts_of(text, "num_experts", "top_k_experts")
    return ExpertsSpec(count, top_k, need(text, "moe_intermediate_size"), shared_size=dense, activation=GELU_TANH)


def build(config: ModelConfig, load: Loader, ops: Ops, context: int) -> Decoder:
    from sparkdraft.models.common.sandwich import build_sandwich

    return build_sandwich(config, load, ops, context, _sublayer, scaled=True)


def _sublayer(spec: LayerSpec, config: ModelConfig, load: Loader, name: str, ops: Ops) -> Sublayer:
    import torch

    from sparkdraft.kernels.ops import Norm
    from sparkdraft.models.common.blocks import GatedMLP, load_norm
    from sparkdraft.models.common.experts import Experts, load_expert_matrices
    from sparkdraft.models.common.sandwich import DenseAndExperts, load_dense

    if isinstance(spec.mlp, DenseSpec):
        return load_dense(spec, config, load, name, ops)
    dense = DenseSpec(spec.mlp.shared_size, spec.mlp.activation)
    experts = replace(spec.mlp, shared_size=0)
    hidden, count = config.hidden_size, experts.num_experts
    router = load.float_linear(f"{name}.router.proj", count, hidden)
    gain = load.vector(f"{name}.router.scale", hidden, torch.float32) * hidden**-0.5
    scale = load.vector(f"{name}.router.per_expert_scale", count, torch.float32)
    return DenseAndExperts(
        GatedMLP(dense, config, load, f"{name}.mlp", ops),
        Experts(experts, router, *load_expert_matrices(experts, hidden, load, f"{name}.experts"), ops, scale),
        router_norm=Norm(gain, config.rms_eps),
        experts_norm=load_norm(config, load, f"{name}.pre_feedforward_layernorm_2"),
        mlp_after=load_norm(config, load, f"{name}.post_feedforward_layernorm_1"),
        experts_after=load_norm(config, load, f"{name}.post_feedforward_layernorm_2"),
    )
