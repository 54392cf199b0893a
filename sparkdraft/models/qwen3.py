"""Qwen3, dense: Llama's shape with an RMS norm on each head of q and k before they are rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkdraft.models import llama
from sparkdraft.models.common.config import ModelConfig, dense_config, layer_count, qwen_windows
from sparkdraft.models.common.keys import check_keys, only_values

MODEL_TYPES = ("qwen3",)

build = llama.build  # norms and windows are in the layers' specs


def read(config: Mapping[str, Any]) -> ModelConfig:
    unknown = check_keys(config, only_values("qk_norm use_qk_norm", True))
    return dense_config(config, unknown, qwen_windows(config, layer_count(config)), qk_norm=True)
