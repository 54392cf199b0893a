"""Phi-3 and Phi-4: Llama's shape in files that hold q, k and v as one matrix, and gate and up as another.

Rotary embedding may be partial. Files that stretch their positions (longrope) are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkdraft.models import llama
from sparkdraft.models.common.config import ModelConfig, dense_config, layer_count, window_of
from sparkdraft.models.common.keys import check_keys, only_values, refused, rope_of

MODEL_TYPES = ("phi3",)

build = llama.build  # blocks find a fused matrix by its name


def read(config: Mapping[str, Any]) -> ModelConfig:
    only = only_values("qk_norm use_qk_norm attention_bias mlp_bias", False)
    unknown = check_keys(config, only, "partial_rotary_factor original_max_position_embeddings")
    kind = rope_of(config, reads="partial_rotary_factor")["rope_type"]
    if kind != "default":  # early files say "su" or "yarn", and mean longrope
        raise refused("rope_scaling of the kind", kind, ("default",))
    config = {"rms_norm_eps": 1e-5, **config}
    return dense_config(config, unknown, [window_of(config)] * layer_count(config), partial=True)
