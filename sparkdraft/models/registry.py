"""Which file knows which architecture, by the `model_type` of config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from sparkdraft.core import UserError
from sparkdraft.kernels.ops import Ops
from sparkdraft.models import (
    gemma3,
    gemma4,
    gpt_oss,
    llama,
    mistral,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.util.fields import text

if TYPE_CHECKING:
    from sparkdraft.models.common.blocks import Decoder
    from sparkdraft.weights.loader import Loader


class Architecture(Protocol):
    """One file of this folder."""

    def read(self, config: Mapping[str, Any]) -> ModelConfig:
        """What a config.json describes. Raises UserError where it asks for a computation that is not built."""

    def build(self, config: ModelConfig, load: Loader, ops: Ops, context: int) -> Decoder:
        """The model, with weights. context: positions that it will be run at, at most."""


ARCHITECTURES: dict[str, Architecture] = {
    "llama": llama,
    "mistral": mistral,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
    "gemma3": gemma3,
    "gemma3_text": gemma3,
    "gemma4": gemma4,
    "gemma4_text": gemma4,
    "gpt_oss": gpt_oss,
}


def architecture(model_type: str) -> Architecture:
    if model_type not in ARCHITECTURES:
        raise UserError(f"architecture '{model_type}' is not supported; supported are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[model_type]


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """What a config.json describes, read by its own architecture's file. Raises UserError."""
    if not (model_type := text(config, "model_type")):
        raise UserError("config.json has no 'model_type': it does not describe a decoder this engine knows")
    return architecture(model_type).read(config)
