"""Which file builds which architecture, by the `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from sparkdraft.core import UserError
from sparkdraft.models import llama, qwen3
from sparkdraft.models.blocks import Decoder
from sparkdraft.models.config import ModelConfig
from sparkdraft.weights.loader import Loader

Build = Callable[[ModelConfig, Loader, ModuleType, int], Decoder]

ARCHITECTURES: dict[str, Build] = {"llama": llama.build, "qwen3": qwen3.build}


def architecture(model_type: str) -> Build:
    if model_type not in ARCHITECTURES:
        raise UserError(f"architecture '{model_type}' is not supported; supported are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[model_type]
