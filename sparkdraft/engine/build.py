"""Builds an engine from a plan: the model with its weights, the drafter, the caches, the runner and the sampler.

The plan has refused everything that cannot run before the first weight is read here (engine/machine.py,
plan/resolve.py); engine/load.py opens the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from sparkdraft import kernels
from sparkdraft.cache.formats import Build, KVCache, kv_format
from sparkdraft.cache.formats.dense import DenseKV, in_windows
from sparkdraft.cache.groups import CacheGroup
from sparkdraft.cache.layered import LayeredKV
from sparkdraft.cache.pages import PagePool, RecentRows
from sparkdraft.cache.states import RecurrentStates, StateSizes, StateSlots, recurrent_layers
from sparkdraft.cache.windows import StepRoom, WindowGroup
from sparkdraft.config import ENGINE_FIELDS, EngineConfig
from sparkdraft.core import Fallback, UserError
from sparkdraft.drafters import find
from sparkdraft.drafters.base import Drafter, ReadsTarget
from sparkdraft.drafters.find import Choice, DraftSource
from sparkdraft.drafters.pairs import check_pair
from sparkdraft.drafters.vocabulary import IdCounts
from sparkdraft.engine.device_steps import DeviceSteps
from sparkdraft.engine.drafting import Drafting
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.host_steps import HostSteps
from sparkdraft.engine.proposer import Proposer
from sparkdraft.engine.runner import Runner
from sparkdraft.engine.sampler import Sampler
from sparkdraft.kernels.ops import FOLD, Ops
from sparkdraft.models.common.blocks import Decoder, Step
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.models.registry import architecture
from sparkdraft.plan.resolve import MOST_AHEAD, Plan
from sparkdraft.text.tokenizer import Vocabulary
from sparkdraft.weights.checkpoint import Checkpoint
from sparkdraft.weights.loader import Loader, Progress, WeightSource
from sparkdraft.weights.quantised_cache import open_cache

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def find_drafter(config: EngineConfig, target: ModelConfig, checkpoint: Checkpoint) -> Choice[DraftSource]:
    """The drafter that a config means, or None; one that was named and does not fit is refused. checkpoint: the
    target's."""
    found = _find(config, target, checkpoint)
    if found.drafter:
        return found._replace(drafter=found.drafter.asked(config.drafter_weights, config.draft_vocab, target))
    for name in ("drafter_weights", "draft_vocab"):
        if config.spec != "off" and getattr(config, name) != ENGINE_FIELDS[name].default:
            said = f"{name} is {getattr(config, name)}"
            raise UserError(f"{said}, and there is no drafter: name one with drafter, or leave {name} out")
    return found


def _find(config: EngineConfig, target: ModelConfig, checkpoint: Checkpoint) -> Choice[DraftSource]:
    if config.spec == "off" or config.drafter == "none":
        return Choice(None, [])
    if config.drafter == "auto":
        return find.choose(config.model, target, checkpoint)
    if held := find.in_target(config.drafter):
        return Choice(find.find_in_target(held, checkpoint, target), [])
    check_pair(config.drafter, target)
    return Choice(find.find_drafter(config.drafter, target), [])


def build_engine(
    plan: Plan,
    config: EngineConfig,
    model_config: ModelConfig,
    source: WeightSource,
    tokenizer: Vocabulary,
    drafter: DraftSource | None = None,
    progress: Progress | None = None,
    calibration: Sequence[int] = (),
    chosen: Sequence[Fallback] = (),
    model: Decoder | None = None,
) -> Engine:
    """calibration: ids for KV formats that learn from a text. chosen: fallbacks about the drafter and the settings.
    model: the weights, if an engine of the same context has loaded them before."""
    counts = IdCounts(config.count_ids, model_config.vocab_size) if config.count_ids else None
    # The native kernels have their own threads, and torch's, which spin after each operator, would take the cores.
    torch.set_num_threads(1 if plan.kernels == "native" else plan.threads)
    device, dtype, ops = torch.device(plan.device), TORCH_DTYPES[plan.dtype], kernels.load(plan.kernels)
    if plan.kernels == "native":
        from sparkdraft.kernels import native

        native.set_threads(plan.threads)
    with torch.inference_mode():
        cache = open_cache(source.path, config.weights, plan.device) if config.weights_cache else None
        with cache or nullcontext():
            forms: dict[str, Any] = {"weights": config.weights, "all_floats": plan.decoded}
            loader = Loader(source, device, dtype, ops, progress, cache=cache, **forms)
            positions = max(plan.max_model_len, len(calibration))
            model = model or architecture(model_config.model_type).build(model_config, loader, ops, positions)
        assert model.context >= positions, f"{model.context} positions for a context of {positions}"
        proposer, fallbacks = None, [*chosen, *loader.fallbacks, *_unknown_ends(tokenizer, model_config.vocab_size)]
        if drafter:
            made, said = _build_drafter(drafter, config, plan, model)
            proposer, fallbacks = Proposer(made, plan, device, ops), [*fallbacks, *said]
        ngram, reads = config.ngram and config.spec != "off", model_sizes(model_config).read
        drafting = Drafting(plan.max_model_len, proposer, ngram, config.num_draft, reads, config.depths, config.cut)
        learned, kind = None, kv_format(plan.kv)
        if calibration and kind.learns(config):
            scratch, run = scratch_cache(model_config, len(calibration), plan, dtype, device, ops), model.forward
            sizes = plan.block_size, model_config.max_position
            learned = kind.learn(lambda *step: run(Step(*step)), calibration, scratch, *sizes, device)
        kv, groups = target_cache(model_config, plan, dtype, device, ops, 1 + drafting.max_depth, learned)
        if proposer and isinstance(proposer.drafter, ReadsTarget):
            proposer.drafter.read_from(kv)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # give back the memory that only loading needed
    runner = Runner(model, kv, plan, device, drafter.caps.aux_layers if drafter else ())
    sampler = Sampler(model_config.vocab_size, tokenizer.eos_ids, device, ops, plan.max_seqs)
    steps = DeviceSteps(runner, sampler, drafting) if plan.device == "cuda" else HostSteps(runner, sampler, drafting)
    return Engine(plan, runner, sampler, tokenizer, drafting, steps, groups, fallbacks, counts)


def _unknown_ends(tokenizer: Vocabulary, vocab_size: int) -> list[Fallback]:
    unknown = sorted(token for token in tokenizer.eos_ids if not 0 <= token < vocab_size)
    reason = f"ids go from 0 to {vocab_size - 1}"
    return [Fallback(f"the end-of-text id {token} is ignored", reason) for token in unknown]


def _build_drafter(
    source: DraftSource, config: EngineConfig, plan: Plan, target: Decoder
) -> tuple[Drafter, list[Fallback]]:
    """The drafter, and what loading it settled for. Its weights are quantised only if the user asks for it; its K/V are
    exact."""
    device, dtype, ops = torch.device(plan.device), TORCH_DTYPES[plan.dtype], target.ops
    form, keeps = source.weights, config.weights_cache
    cache = open_cache(source.source.path, form, plan.device, "drafter") if keeps else None
    with cache or nullcontext():
        forms: dict[str, Any] = {"weights": form, "option": "drafter_weights", "all_floats": plan.decoded}
        load = Loader(source.source, device, dtype, ops, cache=cache, **forms)
        kv = DenseKV(source.caps.kv, plan.num_blocks, plan.block_size, dtype, device, ops)
        made = source.build(load, ops, target, kv, plan.max_model_len, plan.max_seqs)
    return made, [replace(each, name=f"in the drafter, {each.name}") for each in load.fallbacks]


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
    # Beside prompts, decoding slots are padded, and both are sequences of a step.
    rows, seqs = plan.max_step_tokens + plan.max_seqs, 2 * plan.max_seqs
    room = StepRoom(rows, seqs, -(-plan.max_model_len // plan.block_size))
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
        states = RecurrentStates(
            recurrent_layers(model), StateSizes(*kept_states, plan.num_blocks, plan.block_size), dtype, device, ops
        )
        groups.append(StateSlots(*kept_states[:2], plan.block_size, recurrent.most_rows, states))
    return LayeredKV([layer.mixer for layer in model.layers], cache, slid, states, ops), groups


def held_units(plan: Plan) -> list[tuple[int, int]]:
    """(units, bytes of one) of each cache group, in the order of `target_cache`."""
    units = []
    if plan.coded and plan.coded.pages:
        units.append((plan.coded.pages, plan.coded.page_bytes))
    units += [(window.pages, window.page_bytes) for window in plan.windows]
    return units + ([(plan.states.slots, plan.states.slot_bytes)] if plan.states else [])


def scratch_cache(
    model: ModelConfig, num_rows: int, plan: Plan, dtype: torch.dtype, device: torch.device, ops: Ops
) -> KVCache:
    """An exact cache of all layers for one sequence of so many tokens, which uses its blocks in order."""
    blocks = -(-num_rows // plan.block_size)
    full, states = DenseKV(model.cached_attention, blocks, plan.block_size, dtype, device, ops), None
    if plan.states:
        states = RecurrentStates(
            recurrent_layers(model), StateSizes(1, 0, FOLD, blocks, plan.block_size), dtype, device, ops
        )
        states.send([(block, 0) for block in range(blocks)])
    return LayeredKV([layer.mixer for layer in model.layers], full, {}, states, ops)
