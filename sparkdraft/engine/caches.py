"""Makes the caches that a plan describes: each layer's part, and the holdings that requests have beside their blocks.

Layers over the whole context keep the K/V of every position: exact, in 8 bits, or coded. Layers with a sliding window
keep pages, recurrent layers a state per request. Formats and holdings are in cache/; plan/ decides which layer gets
which.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkdraft.cache.formats import KVFormat
from sparkdraft.cache.formats.capture import CaptureKV
from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.cache.formats.turboquant import TurboQuantKV
from sparkdraft.cache.holdings import Holding
from sparkdraft.cache.layered import LayeredKV
from sparkdraft.cache.pages import PagePool
from sparkdraft.cache.plan_states import recurrent_layers
from sparkdraft.cache.recent_rows import RecentRows
from sparkdraft.cache.state_slots import StateSlots
from sparkdraft.cache.states import RecurrentStates, StateSizes
from sparkdraft.cache.windows import StepRoom, WindowGroup
from sparkdraft.kernels.ops import FOLD, Ops
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import AttentionSpec
from sparkdraft.plan.resolve import MOST_AHEAD, Plan


def dense_cache(
    layers: Sequence[AttentionSpec], plan: Plan, dtype: torch.dtype, device: torch.device, ops: Ops
) -> DenseKV:
    """A cache that treats all layers alike, whatever their windows: for drafters."""
    return DenseKV(layers, plan.num_blocks, plan.block_size, dtype, device, ops)


def target_cache(
    model: ModelConfig,
    plan: Plan,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    same_bits_up_to: int,
    centres: Sequence[Tensor] | None,  # per layer, for a coded cache
) -> tuple[KVFormat, list[Holding]]:
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
    if len(full) == model.num_layers:
        return cache, holdings
    room = StepRoom(plan.max_rows, plan.max_seqs, -(-plan.max_model_len // plan.block_size))
    groups = {}
    for size, window in windows.items():
        own = [spec for spec in model.cached_attention if spec.window == size]
        sizes = (window.pages, plan.num_blocks, plan.block_size, room)
        groups[size] = WindowGroup(own, *sizes, kept, device, ops, same_bits_up_to)
        pages = PagePool(window.pages)
        holdings.append(RecentRows(pages, plan.block_size, 0, size + plan.reads_back, MOST_AHEAD, groups[size].send))
    states = None
    if recurrent := plan.states:
        assert same_bits_up_to <= recurrent.most_rows, "drafts deeper than the plan knows could not be taken back"
        counts = (recurrent.slots, recurrent.pages, recurrent.most_rows)
        states = recurrent_states(model, StateSizes(*counts, plan.num_blocks, plan.block_size), dtype, device, ops)
        holdings.append(StateSlots(*counts[:2], plan.block_size, recurrent.most_rows, states))
    return LayeredKV([layer.mixer for layer in model.layers], cache, groups, states, ops), holdings


def held_units(plan: Plan) -> list[tuple[int, int]]:
    """(units, bytes of one) of each holding that `target_cache` makes, in its order: pages of uncoded rows, pages of
    each window, states of requests."""
    units = []
    if plan.coded and plan.coded.is_hybrid and not plan.coded.captured:
        units.append((plan.coded.pages, plan.coded.page_bytes))
    units += [(window.pages, window.page_bytes) for window in plan.windows]
    return units + ([(plan.states.slots, plan.states.slot_bytes)] if plan.states else [])


def scratch_cache(
    model: ModelConfig, num_rows: int, plan: Plan, dtype: torch.dtype, device: torch.device, ops: Ops
) -> KVFormat:
    """An exact cache of all layers for one sequence of so many rows, which uses its blocks in order."""
    blocks = -(-num_rows // plan.block_size)
    full, states = DenseKV(model.cached_attention, blocks, plan.block_size, dtype, device, ops), None
    if plan.states:
        states = recurrent_states(model, StateSizes(1, 0, FOLD, blocks, plan.block_size), dtype, device, ops)
        states.send([(block, 0) for block in range(blocks)])
    return LayeredKV([layer.mixer for layer in model.layers], full, {}, states, ops)


def recurrent_states(
    model: ModelConfig, sizes: StateSizes, dtype: torch.dtype, device: torch.device, ops: Ops
) -> RecurrentStates:
    return RecurrentStates(recurrent_layers(model), sizes, dtype, device, ops)


def _coded(
    layers: Sequence[AttentionSpec],
    plan: Plan,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
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
    return codes, [
        RecentRows(pages, plan.block_size, coded.first, coded.recent + plan.reads_back, MOST_AHEAD, codes.send)
    ]
