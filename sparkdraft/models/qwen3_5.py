"""Qwen3.5 and Qwen3.6, dense and with experts: Qwen3-Next's layers, mostly in a file with a vision tower.

Positions of pictures have three parts (M-RoPE); in a text all three are equal, and the rotation is the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkdraft.models import qwen3_next
from sparkdraft.models.common.config import ModelConfig, decoder_config, need
from sparkdraft.models.common.keys import check_keys, text_config
from sparkdraft.models.common.layers import DenseSpec, ExpertsSpec, LayerSpec

MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")

build = qwen3_next.build
MROPE = ("mrope_section", "mrope_interleaved")


def read(config: Mapping[str, Any]) -> ModelConfig:
    text, outer = text_config(config)
    has_experts = "_moe" in text["model_type"]
    unknown = check_keys(text, qwen3_next.ONLY, qwen3_next.READ + (qwen3_next.EXPERTS_READ if has_experts else ""))
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(text.get(name), Mapping):
            text[name] = {key: value for key, value in text[name].items() if key not in MROPE}
    mlp: DenseSpec | ExpertsSpec
    mlp = qwen3_next.experts_with_shared(text) if has_experts else DenseSpec(need(text, "intermediate_size"))
    layers = [LayerSpec(mixer, mlp) for mixer in qwen3_next.mixers_of(text)]
    return decoder_config(text, layers, norm_plus_one=True, unknown_keys=(*outer, *unknown))
