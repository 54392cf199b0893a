"""Makes the caches that a plan describes: each layer's part, and the holdings that requests have beside their blocks.

Layers over the whole context keep the K/V of every position: exact, in 8 bits, or coded. Layers with a sliding window
keep pages. Formats and holdings are in cache/; plan/ decides which layer gets which.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from sparkdraft.cache.formats import KVFormat
from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.cache.holdings import Holding
from sparkdraft.cache.pages import PagePool
from sparkdraft.cache.recent_rows import RecentRows
from sparkdraft.cache.turboquant.capture import CaptureKV
from sparkdraft.cache.turboquant.format import TurboQuantKV
from sparkdraft.cache.windows import StepRoom, WindowedKV, WindowGroup
from sparkdraft.models.config import ModelConfig
from sparkdraft.models.layers import AttentionSpec
from sparkdraft.plan.resolve import MOST_AHEAD, Plan


def dense_cache(
    layers: Sequence[AttentionSpec], plan: Plan, dtype: torch.dtype, device: torch.device, ops: ModuleType
) -> DenseKV:
    """A cache that treats all layers alike, whatever their windows: for drafters, and for a model that is run once."""
    return DenseKV(layers, plan.num_blocks, plan.block_size, dtype, device, ops)


def target_cache(
    model: ModelConfig,
    plan: Plan,
    dtype: torch.dtype,
    device: torch.device,
    ops: ModuleType,
    same_bits_up_to: int,
    centres: Sequence[Tensor] | None,  # per layer, for a coded cache
) -> tuple[KVFormat, list[Holding]]:
    assert len(model.attention) == model.num_layers, "a layer without attention needs a cache that does not exist yet"
    windows = {window.window: window for window in plan.windows}
    kept = torch.float8_e4m3fn if plan.kv == "fp8" else dtype
    full = [spec for spec in model.cached_attention if spec.window not in windows]
    numbers = [i for i, layer in enumerate(model.layers) if layer.mixer in full]
    if plan.coded:
        if centres:  # centres has all layers with attention; some of these layers are not coded
            pairs = zip(model.attention, centres, strict=True)
            centres = [c for spec, c in pairs if spec.kv_from is None and spec.window not in windows]
        cache, holdings = _coded(full, plan, dtype, device, ops, same_bits_up_to, centres, numbers)
    else:
        cache, holdings = DenseKV(full, plan.num_blocks, plan.block_size, kept, device, ops, same_bits_up_to), []
    if len(full) == len(model.attention):
        return cache, holdings
    room = StepRoom(plan.max_rows, plan.max_seqs, -(-plan.max_model_len // plan.block_size))
    groups = {}
    for size, window in windows.items():
        own = [spec for spec in model.cached_attention if spec.window == size]
        sizes = (window.pages, plan.num_blocks, plan.block_size, room)
        groups[size] = WindowGroup(own, *sizes, kept, device, ops, same_bits_up_to)
        pages = PagePool(window.pages)
        holdings.append(RecentRows(pages, plan.block_size, 0, size, MOST_AHEAD, groups[size].send))
    return WindowedKV(model.attention, cache, groups, ops), holdings


def _coded(
    layers: Sequence[AttentionSpec],
    plan: Plan,
    dtype: torch.dtype,
    device: torch.device,
    ops: ModuleType,
    same_bits_up_to: int,
    centres: Sequence[Tensor] | None,
    numbers: Sequence[int],  # of these layers in the model
) -> tuple[KVFormat, list[Holding]]:
    coded, blocks = plan.coded, (plan.num_blocks, plan.block_size)
    assert coded
    uncoded, bits = (coded.first, coded.recent, coded.pages), (coded.key_bits, coded.value_bits)
    codes = TurboQuantKV(*bits, layers, *blocks, uncoded, centres, device, ops, same_bits_up_to)
    if coded.captured:
        return CaptureKV(DenseKV(layers, *blocks, dtype, device, ops, same_bits_up_to), codes, numbers, device), []
    if not coded.is_hybrid:
        return codes, []
    pages = PagePool(coded.pages)
    return codes, [RecentRows(pages, plan.block_size, coded.first, coded.recent, MOST_AHEAD, codes.send)]
