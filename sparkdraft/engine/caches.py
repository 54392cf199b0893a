"""Builds the caches that a plan describes: each layer's part, and the cache groups that requests hold beside blocks.

Layers over the whole context keep the K/V of every position in the plan's format (cache/formats). Layers with a sliding
window keep pages, recurrent layers a state per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparkdraft.cache.formats import Build, KVCache, kv_format
from sparkdraft.cache.formats.dense import DenseKV, in_windows
from sparkdraft.cache.groups import CacheGroup
from sparkdraft.cache.layered import LayeredKV
from sparkdraft.cache.pages import PagePool, RecentRows
from sparkdraft.cache.states import RecurrentStates, StateSizes, StateSlots, recurrent_layers
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
    learned: Any = None,  # what the format's `learn` returned
) -> tuple[KVCache, list[CacheGroup]]:
    windows, kind = {window.window: window for window in plan.windows}, kv_format(plan.kv)
    full = [spec for spec in model.cached_attention if spec.window not in windows]
    numbers = [i for i, layer in enumerate(model.layers) if layer.mixer in full]
    sizes = (plan.num_blocks, plan.block_size, plan.coded, plan.reads_back, MOST_AHEAD)
    cache, groups = kind.build(Build(full, numbers, *sizes, dtype, device, ops, same_bits_up_to, learned))
    if len(full) == model.num_layers:
        return cache, groups
    room = StepRoom(plan.max_step_tokens, plan.max_seqs, -(-plan.max_model_len // plan.block_size))
    slid, kept = {}, in_windows(kind).dtype(dtype)
    for size, window in windows.items():
        own = [spec for spec in model.cached_attention if spec.window == size]
        counts = (window.pages, plan.num_blocks, plan.block_size, room)
        slid[size] = WindowGroup(own, *counts, kept, device, ops, same_bits_up_to)
        pages = PagePool(window.pages)
        groups.append(RecentRows(pages, plan.block_size, 0, size + plan.reads_back, MOST_AHEAD, slid[size].send))
    states = None
    if recurrent := plan.states:
        assert same_bits_up_to <= recurrent.most_rows, "drafts deeper than the plan knows could not be taken back"
        kept_states = (recurrent.slots, recurrent.pages, recurrent.most_rows)
        states = recurrent_states(model, StateSizes(*kept_states, plan.num_blocks, plan.block_size), dtype, device, ops)
        groups.append(StateSlots(*kept_states[:2], plan.block_size, recurrent.most_rows, states))
    return LayeredKV([layer.mixer for layer in model.layers], cache, slid, states, ops), groups


def held_units(plan: Plan) -> list[tuple[int, int]]:
    """(units, bytes of one) of each cache group that `target_cache` makes, in its order: the format's pages, pages of
    each window, states of requests."""
    units = []
    if plan.coded and plan.coded.pages:
        units.append((plan.coded.pages, plan.coded.page_bytes))
    units += [(window.pages, window.page_bytes) for window in plan.windows]
    return units + ([(plan.states.slots, plan.states.slot_bytes)] if plan.states else [])


def scratch_cache(
    model: ModelConfig, num_rows: int, plan: Plan, dtype: torch.dtype, device: torch.device, ops: Ops
) -> KVCache:
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
