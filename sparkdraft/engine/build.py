"""Builds an engine from a config: open the checkpoint, make the plan, load the model, size the cache.

The one place that knows all parts; each part knows only its own. Everything that can be refused is refused before the
first weight is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from sparkdraft import kernels
from sparkdraft.cache.formats import KVFormat
from sparkdraft.cache.formats.capture import CaptureKV
from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.cache.formats.turboquant import TurboQuantKV
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.engine.blockdraft import BlockDraft
from sparkdraft.engine.centre import SKIPPED, key_centres
from sparkdraft.engine.devices import detect
from sparkdraft.engine.drafting import Drafting
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.flight import Flight
from sparkdraft.engine.runner import Runner
from sparkdraft.engine.sampler import Sampler
from sparkdraft.models.config import ModelConfig
from sparkdraft.models.registry import architecture
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.resolve import FLOAT_MATRIX, Fallback, Plan, resolve
from sparkdraft.spec.config import DraftConfig, check_fits
from sparkdraft.spec.dflash import build as build_dflash
from sparkdraft.spec.registry import default_drafter, open_drafter
from sparkdraft.text.tokenizer import Vocabulary
from sparkdraft.weights.loader import Loader, Progress, WeightSource

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A drafter that is to be loaded: what it is, and where its weights are."""

    config: DraftConfig
    source: WeightSource


def find_drafter(config: EngineConfig, target: ModelConfig) -> DraftSource | None:
    """The drafter a config means, if any; one that was named and does not fit is refused."""
    if config.spec == "off" or config.drafter == "none":
        return None
    name = default_drafter(config.model) if config.drafter == "auto" else config.drafter
    if name is None:
        return None
    checkpoint = open_drafter(name)
    draft = DraftConfig.read(checkpoint.config)
    check_fits(draft, target)
    return DraftSource(draft, checkpoint)


def make_plan(config: EngineConfig, model: ModelConfig, drafter: DraftSource | None = None) -> Plan:
    hardware = detect(config)
    problem = _native_problem(config, hardware)
    plan = resolve(config, model, hardware, problem, drafter.config if drafter else None)
    if plan.coded:
        _check_coded(plan.kernels, model.head_dim, plan.block_size)
    return plan


def _check_coded(name: str, head_dim: int, block_size: int) -> None:
    ops = kernels.load(name)
    try:
        assert ops.tq_attention, f"the {name} kernels have none"
    except ImportError as error:  # of a Triton whose Gluon is another
        raise UserError(f"kv turboquant needs the Gluon of Triton 3.6 ({error}); ask for kv fp8 or exact") from error
    if head_dim not in getattr(ops, "TQ_DIMS", (head_dim,)):
        dims = ", ".join(map(str, ops.TQ_DIMS))
        raise UserError(
            f"kv turboquant runs at head dims {dims} on the {name} kernels; this model's is {head_dim}: ask for kv fp8"
        )
    if block_size != getattr(ops, "TQ_BLOCK", block_size):
        size = ops.TQ_BLOCK
        raise UserError(
            f"block_size is {block_size}; kv turboquant on the {name} kernels has blocks of {size}: leave it"
        )


def build_engine(
    plan: Plan,
    config: EngineConfig,
    model_config: ModelConfig,
    source: WeightSource,
    tokenizer: Vocabulary,
    drafter: DraftSource | None = None,
    progress: Progress | None = None,
    calibration: Sequence[int] = (),
) -> Engine:
    """calibration: ids of any text, for caches that are coded; without enough of them nothing is centred."""
    build = architecture(model_config.model_type)
    # Beside the native kernels torch runs only small operators; its threads, spinning after each, would take the cores.
    torch.set_num_threads(1 if plan.kernels == "native" else plan.threads)
    device, dtype, ops = torch.device(plan.device), TORCH_DTYPES[plan.dtype], kernels.load(plan.kernels)
    if plan.kernels == "native":
        ops.set_threads(plan.threads)
    with torch.inference_mode():
        loader = Loader(source, device, dtype, ops, progress)
        model = build(model_config, loader, ops, plan.max_model_len)
        block = None
        if drafter:
            own = Loader(drafter.source, device, dtype, ops)
            own_kv = _kv(drafter.config.model, plan, dtype, device, ops)  # exact, whatever the target's is
            made = build_dflash(drafter.config, own, ops, model, plan.max_model_len, own_kv)
            block = BlockDraft(made, plan, device, ops)
        drafting = Drafting(plan.max_model_len, block, config.ngram and config.spec != "off", config.num_draft)
        centres = None
        if plan.coded and config.tq_centre and len(calibration) > SKIPPED:
            blocks = -(-len(calibration) // plan.block_size)
            scratch = _kv(model_config, replace(plan, num_blocks=blocks), dtype, device, ops)
            centres = key_centres(model, calibration, scratch, plan.block_size, device)
        kv = _target_kv(model_config, plan, dtype, device, ops, 1 + drafting.max_depth, centres)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading took for a while is not the engine's
    plan.fallbacks.extend(Fallback(FLOAT_MATRIX, note) for note in loader.notes)
    runner = Runner(model, kv, plan, device, drafter.config.taps if drafter else ())
    sampler = Sampler(model_config.vocab_size, tokenizer.eos_ids, device, ops)
    flight = Flight(runner, block, device, drafting.choices) if plan.graphs and plan.device == "cuda" else None
    return Engine(plan, runner, sampler, tokenizer, drafting, flight)


def _target_kv(
    model: ModelConfig,
    plan: Plan,
    dtype: torch.dtype,
    device: torch.device,
    ops: ModuleType,
    most_query: int,
    centres: Sequence[Tensor] | None,
) -> KVFormat:
    if coded := plan.coded:
        heads, blocks = (model.num_kv_heads, model.head_dim), (plan.num_blocks, plan.block_size)
        exact = (coded.first, coded.recent, coded.pages)
        bits = (coded.key_bits, coded.value_bits)
        codes = TurboQuantKV(*bits, *heads, *blocks, exact, centres, device, ops, most_query)
        return CaptureKV(_kv(model, plan, dtype, device, ops, most_query), codes) if coded.captured else codes
    kept = torch.float8_e4m3fn if plan.kv == "fp8" else dtype
    return _kv(model, plan, kept, device, ops, most_query)


def _kv(
    model: ModelConfig, plan: Plan, dtype: torch.dtype, device: torch.device, ops: ModuleType, most_query: int = 0
) -> DenseKV:
    heads = (model.num_layers, model.num_kv_heads, model.head_dim)
    return DenseKV(*heads, plan.num_blocks, plan.block_size, dtype, device, ops, most_query)


def _native_problem(config: EngineConfig, hardware: Hardware) -> str | None:
    """Why the C++ kernels can not be had; not asked (they would be compiled) where they are not wanted."""
    if hardware.device != "cpu" or config.dtype not in ("auto", "quantised"):
        return None
    reason: str | None = kernels.load("native").unavailable_reason()
    return reason
