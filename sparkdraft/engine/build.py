"""Builds an engine from a config: open the checkpoint, make the plan, load the model, size the cache.

The one place that knows all parts; each part knows only its own. Everything that can be refused is refused before the
first weight is read.
"""

from __future__ import annotations

import torch

from sparkdraft import kernels
from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.config import EngineConfig
from sparkdraft.engine.devices import detect
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.runner import Runner
from sparkdraft.engine.sampler import Sampler
from sparkdraft.models.config import ModelConfig
from sparkdraft.models.registry import architecture
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.resolve import Fallback, Plan, resolve
from sparkdraft.text.tokenizer import Vocabulary
from sparkdraft.weights.loader import Loader, Progress, WeightSource

TORCH_DTYPES = {"quantised": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}


def make_plan(config: EngineConfig, model: ModelConfig) -> Plan:
    hardware = detect(config)
    return resolve(config, model, hardware, _native_problem(config, hardware))


def build_engine(
    plan: Plan, model_config: ModelConfig, source: WeightSource, tokenizer: Vocabulary, progress: Progress | None = None
) -> Engine:
    build = architecture(model_config.model_type)
    # Beside the native kernels torch runs only small operators; its threads, spinning after each, would take the cores.
    torch.set_num_threads(1 if plan.kernels == "native" else plan.threads)
    device, dtype, ops = torch.device(plan.device), TORCH_DTYPES[plan.dtype], kernels.load(plan.kernels)
    pack = None
    if plan.dtype == "quantised":
        ops.set_threads(plan.threads)
        pack = ops.PackedLinear.pack
    loader = Loader(source, device, dtype, pack, progress)
    with torch.inference_mode():
        model = build(model_config, loader, ops, plan.max_model_len)
        heads = (model_config.num_layers, model_config.num_kv_heads, model_config.head_dim)
        kv = DenseKV(*heads, plan.num_blocks, plan.block_size, dtype, device, ops)
    plan.fallbacks.extend(Fallback("a float32 matrix among quantised ones", note) for note in loader.notes)
    runner = Runner(model, kv, plan, device)
    return Engine(plan, runner, Sampler(model_config.vocab_size, tokenizer.eos_ids, device), tokenizer)


def _native_problem(config: EngineConfig, hardware: Hardware) -> str | None:
    """Why the C++ kernels can not be had; not asked (they would be compiled) where they are not wanted."""
    if hardware.device != "cpu" or config.dtype not in ("auto", "quantised"):
        return None
    reason: str | None = kernels.load("native").unavailable_reason()
    return reason
