"""Mistral: Llama's shape; where a file has a sliding window, all layers have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkdraft.models import llama
from sparkdraft.models.common.config import (
    FULL,
    SLIDING,
    ModelConfig,
    dense_config,
    layer_count,
    types_of,
    window_of,
    windows_of,
)
from sparkdraft.models.common.keys import check_keys, only_values

MODEL_TYPES = ("mistral",)
WINDOW = 4096  # where the key is left out; null means that there is none

build = llama.build  # windows are in the layers' specs


def read(config: Mapping[str, Any]) -> ModelConfig:
    unknown = check_keys(config, only_values("qk_norm use_qk_norm attention_bias mlp_bias", False))
    window = window_of({"sliding_window": WINDOW, **config})
    types = types_of(config, [SLIDING if window else FULL] * layer_count(config))
    return dense_config(config, unknown, windows_of(types, window))
