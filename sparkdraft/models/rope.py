"""Rotary position tables: cosines and sines of every position, for plain RoPE and its published stretchings.

The table is made once at load, in float32, as long as the context that will be served, so no kernel computes angles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparkdraft.models.config import ModelConfig


def rope_table(config: ModelConfig, length: int, freq_factors: Tensor | None = None) -> Tensor:
    """float32 [length, head_dim]: cosines in the first half, sines in the second."""
    dim = config.head_dim
    frequency = config.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    frequency, magnitude = _stretch(frequency, config)
    if freq_factors is not None:  # GGUF ships llama3's stretching as a tensor of divisors
        frequency = frequency / freq_factors.double()
    angle = torch.arange(length, dtype=torch.float64).unsqueeze(1) * frequency
    return (torch.cat((angle.cos(), angle.sin()), dim=1) * magnitude).float()


def _stretch(frequency: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    scaling = config.rope_scaling
    if scaling is None:
        return frequency, 1.0
    kind = scaling["rope_type"]
    if kind == "linear":
        return frequency / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(frequency, config, scaling), 1.0
    assert kind == "yarn", f"rope scaling {kind!r}: the config was read without a check of it"
    return _yarn(frequency, config, scaling)


def _llama3(frequency: Tensor, config: ModelConfig, scaling: Mapping[str, Any]) -> Tensor:
    """Slow rotations are stretched, fast ones left, and those between the two wavelengths blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling.get("original_max_position_embeddings") or config.max_position
    turns = original * frequency / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * share + frequency / scaling["factor"] * (1 - share)


def _yarn(frequency: Tensor, config: ModelConfig, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings") or config.max_position
    dim, base = config.head_dim, config.rope_theta

    def index_of(turns: float) -> float:  # the frequency index that makes this many turns over the original context
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(index_of(scaling.get("beta_fast") or 32)), 0)
    high = min(math.ceil(index_of(scaling.get("beta_slow") or 1)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return frequency * (1 - ramp) + frequency / factor * ramp, float(magnitude)
