"""Gemma 3's text models: norms around each sublayer, five layers with a window to one without, a rotation for each.

Files hold the gains of norms less 1. The pictures of the larger ones are not read (models/common/keys.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdraft.kernels.ops import GELU_TANH, Ops
from sparkdraft.models.common.config import (
    FULL,
    SLIDING,
    ModelConfig,
    attention_of,
    decoder_config,
    need,
    sliding_layers,
    softcap_of,
)
from sparkdraft.models.common.keys import check_keys, only_values, text_config
from sparkdraft.models.common.layers import DenseSpec, LayerSpec
from sparkdraft.util.fields import mapping, real, whole

if TYPE_CHECKING:
    from sparkdraft.models.common.blocks import Decoder
    from sparkdraft.weights.loader import Loader

MODEL_TYPES = ("gemma3", "gemma3_text")
READ = "query_pre_attn_scalar final_logit_softcapping rope_local_base_freq sliding_window_pattern"

DEFAULTS = {  # of transformers, which published files leave out
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}


def read(config: Mapping[str, Any]) -> ModelConfig:
    text, outer = text_config(config)
    text = DEFAULTS | text
    only = only_values("hidden_act hidden_activation", "gelu_pytorch_tanh") | only_values("mlp_bias", False)
    unknown = check_keys(text, only, READ)
    pattern = whole(text, "sliding_window_pattern") or whole(text, "_sliding_window_pattern") or 6
    text["rope_parameters"], text["rope_scaling"] = _ropes(text), None
    mlp = DenseSpec(need(text, "intermediate_size"), GELU_TANH)
    scale = need(text, "query_pre_attn_scalar") ** -0.5
    layers = [
        LayerSpec(replace(attention_of(text, each), window=window, qk_norm=True, scale=scale), mlp)
        for each, window in sliding_layers(text, pattern)
    ]
    return decoder_config(
        text,
        layers,
        norm_plus_one=True,
        embedding_scale=need(text, "hidden_size") ** 0.5,
        softcap=softcap_of(text),
        unknown_keys=(*outer, *unknown),
    )


def _ropes(text: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE by type of layer, as new files have it. Old ones have a theta for each, and stretch full layers only."""
    given, thetas = mapping(text, "rope_parameters"), _thetas(text)
    if FULL in given or SLIDING in given:
        return {each: {"rope_theta": theta, **mapping(given, each)} for each, theta in thetas.items()}
    stretched = {**given, **mapping(text, "rope_scaling")}
    return {FULL: {"rope_theta": thetas[FULL], **stretched}, SLIDING: {"rope_theta": thetas[SLIDING]}}


def _thetas(text: Mapping[str, Any]) -> dict[str, float]:
    return {FULL: real(text, "rope_theta") or 1e6, SLIDING: real(text, "rope_local_base_freq") or 1e4}


def build(config: ModelConfig, load: Loader, ops: Ops, context: int) -> Decoder:
    from sparkdraft.models.common.sandwich import build_sandwich, load_dense

    return build_sandwich(config, load, ops, context, load_dense, scaled=False)
