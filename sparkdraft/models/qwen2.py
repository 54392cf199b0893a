"""Qwen2 and 2.5, dense: Llama's shape with a bias on the projections to queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparkdraft.models import llama
from sparkdraft.models.common.config import ModelConfig, dense_config, layer_count, qwen_windows
from sparkdraft.models.common.keys import check_keys, only_values
from sparkdraft.models.common.layers import AttentionSpec

MODEL_TYPES = ("qwen2",)

build = llama.build  # biases and windows are in the layers' specs


def read(config: Mapping[str, Any]) -> ModelConfig:
    unknown = check_keys(config, only_values("qk_norm use_qk_norm attention_bias mlp_bias use_mrope", False))
    model = dense_config(config, qk_norm=False, windows=qwen_windows(config, layer_count(config)))
    layers = []
    for layer in model.layers:
        assert isinstance(layer.mixer, AttentionSpec)
        layers.append(replace(layer, mixer=replace(layer.mixer, bias=True)))  # whatever attention_bias says
    return replace(model, layers=tuple(layers), unknown_keys=unknown)
