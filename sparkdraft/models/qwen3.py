"""Qwen3, dense: Llama's shape with an RMS norm on each head of q and k before they are rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparkdraft.models import llama
from sparkdraft.models.config import ModelConfig, dense_config
from sparkdraft.models.keys import check_keys, only_values, refuse_windows

build = llama.build  # the norms are in the layers' specs


def read(config: Mapping[str, Any]) -> ModelConfig:
    """Raises UserError where the config asks for a computation that is not built."""
    model = dense_config(config, qk_norm=True)
    unknown = check_keys(config, only_values("qk_norm use_qk_norm", True))
    refuse_windows(config, slides_by_default=False)
    return replace(model, unknown_keys=unknown)
