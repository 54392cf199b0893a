"""Rotary position tables: cosines and sines of every position, for plain RoPE and its published ways of stretching it.

A table is made once at load, in float32, as long as the context that will be served. Layers with equal specs share one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparkdraft.models.common.layers import RopeSpec

SLICE = 4096  # positions whose angles are held in float64 at once


class RopeTables:
    """The tables of one model, on its device, each made when a layer asks for it first."""

    def __init__(self, length: int, device: torch.device, freq_factors: Tensor | None = None) -> None:
        """freq_factors: divisors of the frequencies, which GGUF files ship in place of llama3's stretching."""
        self._length, self._device, self._factors = length, device, freq_factors
        self._made: list[tuple[RopeSpec, Tensor]] = []

    def of(self, spec: RopeSpec) -> Tensor:
        for known, table in self._made:
            if known == spec:
                return table
        table = rope_table(spec, self._length, self._factors).to(self._device)
        self._made.append((spec, table))
        return table


def rope_table(spec: RopeSpec, length: int, freq_factors: Tensor | None = None) -> Tensor:
    """float32 [length, spec.width]: cosines in the first half, sines in the second."""
    dim = spec.width
    frequency = spec.theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    frequency, magnitude = _stretch(frequency, spec)
    if freq_factors is not None:
        frequency = frequency / freq_factors.cpu().double()
    table = torch.empty((length, dim), dtype=torch.float32)
    for first in range(0, length, SLICE):
        angle = torch.arange(first, min(first + SLICE, length), dtype=torch.float64).unsqueeze(1) * frequency
        table[first : first + SLICE] = torch.cat((angle.cos(), angle.sin()), dim=1) * magnitude
    return table


def _stretch(frequency: Tensor, spec: RopeSpec) -> tuple[Tensor, float]:
    scaling = spec.scaling
    if scaling is None:
        return frequency, 1.0
    kind = scaling["rope_type"]
    if kind == "linear":
        return frequency / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(frequency, spec, scaling), 1.0
    if kind == "proportional":
        return _proportional(frequency, spec, scaling), 1.0
    assert kind == "yarn", f"rope scaling {kind!r}: the config was read without a check of it"
    return _yarn(frequency, spec, scaling)


def _proportional(frequency: Tensor, spec: RopeSpec, scaling: Mapping[str, Any]) -> Tensor:
    """Only the first share of a head's pairs is rotated, as fast as if all were."""
    turning = int(scaling.get("partial_rotary_factor", 1.0) * spec.head_dim // 2)
    still = torch.zeros(len(frequency) - turning, dtype=frequency.dtype)
    return torch.cat((frequency[:turning] / scaling.get("factor", 1.0), still))


def _llama3(frequency: Tensor, spec: RopeSpec, scaling: Mapping[str, Any]) -> Tensor:
    """Slow rotations are stretched, fast ones left, and those between the two wavelengths blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling.get("original_max_position_embeddings") or spec.trained_context
    turns = original * frequency / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * share + frequency / scaling["factor"] * (1 - share)


def _yarn(frequency: Tensor, spec: RopeSpec, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings") or spec.trained_context
    dim, base = spec.width, spec.theta

    def index_of(turns: float) -> float:  # the frequency index that makes this many turns over the original context
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = index_of(scaling.get("beta_fast") or 32), index_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
        magnitude *= scaling.get("attn_factor") or 1.0  # llama.cpp's and vLLM's name, of what multiplies the usual
    return frequency * (1 - ramp) + frequency / factor * ramp, float(magnitude)
