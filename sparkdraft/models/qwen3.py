"""Qwen3, dense: Llama's shape with an RMS norm on each head of q and k before they are rotated."""

from __future__ import annotations

from types import ModuleType

from sparkdraft.models import llama
from sparkdraft.models.blocks import Decoder
from sparkdraft.models.config import ModelConfig
from sparkdraft.weights.loader import Loader


def build(config: ModelConfig, load: Loader, ops: ModuleType, context: int) -> Decoder:
    return llama.build(config, load, ops, context, qk_norm=True)
