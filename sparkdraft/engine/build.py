"""Builds an engine from a plan: the model with its weights, the drafter, the KV cache, the runner and the sampler.

This is the one place that knows all parts; each part knows only its own. The plan has refused everything that cannot
run before the first weight is read here (engine/machine.py, plan/resolve.py); engine/load.py opens the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from sparkdraft import kernels
from sparkdraft.cache.formats import kv_format
from sparkdraft.config import ENGINE_FIELDS, EngineConfig
from sparkdraft.core import Fallback, UserError
from sparkdraft.drafters import find
from sparkdraft.drafters.base import Drafter, ReadsTarget
from sparkdraft.drafters.find import Choice, DraftSource
from sparkdraft.drafters.pairs import check_pair
from sparkdraft.drafters.vocabulary import IdCounts
from sparkdraft.engine.caches import dense_cache, scratch_cache, target_cache
from sparkdraft.engine.drafting import Drafting
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.overlap import OverlappedSteps
from sparkdraft.engine.proposer import Proposer
from sparkdraft.engine.runner import Runner
from sparkdraft.engine.sampler import Sampler
from sparkdraft.models.common.blocks import Decoder, Step
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.models.registry import architecture
from sparkdraft.plan.resolve import Plan
from sparkdraft.text.tokenizer import Vocabulary
from sparkdraft.weights.checkpoint import Checkpoint
from sparkdraft.weights.loader import Loader, Progress, WeightSource
from sparkdraft.weights.quantised_cache import open_cache

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def find_drafter(config: EngineConfig, target: ModelConfig, checkpoint: Checkpoint) -> Choice[DraftSource]:
    """The drafter that a config means, or None. A drafter that was named and does not fit is refused. checkpoint: the
    target's, which may hold one."""
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
    """calibration: ids of any text, for KV formats that learn from one. chosen: what is to be said about
    the choice of the drafter and of the settings. model: the weights, if an engine of the same context has loaded them
    before."""
    # The native kernels have their own threads. Torch runs only small operators beside them, and its threads, which
    # spin after each operator, would take the cores.
    counts = IdCounts(config.count_ids, model_config.vocab_size) if config.count_ids else None
    torch.set_num_threads(1 if plan.kernels == "native" else plan.threads)
    device, dtype, ops = torch.device(plan.device), TORCH_DTYPES[plan.dtype], kernels.load(plan.kernels)
    if plan.kernels == "native":
        from sparkdraft.kernels import native

        native.set_threads(plan.threads)
    with torch.inference_mode():
        cache = open_cache(source.path, config.weights, plan.device) if config.weights_cache else None
        with cache or nullcontext():
            loader = Loader(source, device, dtype, ops, progress, weights=config.weights, cache=cache)
            model = model or architecture(model_config.model_type).build(model_config, loader, ops, plan.max_model_len)
        assert model.context >= plan.max_model_len, f"{model.context} positions for a context of {plan.max_model_len}"
        proposer, fallbacks = None, [*chosen, *loader.fallbacks, *_unknown_ends(tokenizer, model_config.vocab_size)]
        if drafter:
            made, said = _build_drafter(drafter, config, plan, model)
            proposer, fallbacks = Proposer(made, plan, device, ops), [*fallbacks, *said]
        ngram, reads = config.ngram and config.spec != "off", model_sizes(model_config).read
        drafting = Drafting(plan.max_model_len, proposer, ngram, config.num_draft, reads, config.depths, config.cut)
        learned, kind = None, kv_format(plan.kv)
        if calibration and kind.learns(config):
            scratch, run = scratch_cache(model_config, len(calibration), plan, dtype, device, ops), model.forward
            learned = kind.learn(lambda *step: run(Step(*step)), calibration, scratch, plan.block_size, device)
        kv, groups = target_cache(model_config, plan, dtype, device, ops, 1 + drafting.max_depth, learned)
        if proposer and isinstance(proposer.drafter, ReadsTarget):
            proposer.drafter.read_from(kv)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # give back the memory that only loading needed
    runner = Runner(model, kv, plan, device, drafter.caps.aux_layers if drafter else ())
    sampler = Sampler(model_config.vocab_size, tokenizer.eos_ids, device, ops, plan.max_seqs)
    overlap = None
    if plan.graphs and plan.device == "cuda":
        overlap = OverlappedSteps(runner, proposer, device, drafting.choices, drafting.cuts, sampler.edits)
    return Engine(plan, runner, sampler, tokenizer, drafting, overlap, groups, fallbacks, counts)


def _unknown_ends(tokenizer: Vocabulary, vocab_size: int) -> list[Fallback]:
    unknown = sorted(token for token in tokenizer.eos_ids if not 0 <= token < vocab_size)
    reason = f"ids go from 0 to {vocab_size - 1}"
    return [Fallback(f"the end-of-text id {token} is ignored", reason) for token in unknown]


def _build_drafter(
    source: DraftSource, config: EngineConfig, plan: Plan, target: Decoder
) -> tuple[Drafter, list[Fallback]]:
    """The drafter, and what loading it settled for. Its weights are quantised only if the user asks for it, whatever
    the target's are; its K/V are exact."""
    device, dtype, ops = torch.device(plan.device), TORCH_DTYPES[plan.dtype], target.ops
    form, keeps = source.weights, config.weights_cache
    cache = open_cache(source.source.path, form, plan.device, "drafter") if keeps else None
    with cache or nullcontext():
        load = Loader(source.source, device, dtype, ops, weights=form, cache=cache, option="drafter_weights")
        kv = dense_cache(source.caps.kv, plan, dtype, device, ops)
        made = source.build(load, ops, target, kv, plan.max_model_len, plan.max_seqs)
    return made, [replace(each, name=f"in the drafter, {each.name}") for each in load.fallbacks]
