"""Qwen2 and 2.5, dense: Llama's shape with a bias on the projections to queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkdraft.models import llama
from sparkdraft.models.common.config import ModelConfig, dense_config, layer_count, qwen_windows
from sparkdraft.models.common.keys import check_keys, only_values

MODEL_TYPES = ("qwen2",)

build = llama.build  # biases and windows are in the layers' specs


def read(config: Mapping[str, Any]) -> ModelConfig:
    unknown = check_keys(config, only_values("qk_norm use_qk_norm attention_bias mlp_bias use_mrope", False))
    return dense_config(config, unknown, qwen_windows(config, layer_count(config)), bias=True)
