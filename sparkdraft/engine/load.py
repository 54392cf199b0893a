"""Turns a user's configuration into a model that is ready to run: checkpoint, drafter, plan, tokenizer, engine.

The Python API (llm.py) and the server's backend (engine/backend.py) both begin here. engine/build.py puts the engine
together.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdraft.cache.turboquant.centre import TEXT
from sparkdraft.config import EngineConfig
from sparkdraft.engine.build import build_engine, find_drafter
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.machine import plan_here
from sparkdraft.models.config import ModelConfig
from sparkdraft.models.registry import read_config
from sparkdraft.text.tokenizer import Tokenizer
from sparkdraft.weights.checkpoint import Checkpoint, open_checkpoint
from sparkdraft.weights.loader import Progress


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to run, and what its front ends need beside the engine."""

    checkpoint: Checkpoint
    model_config: ModelConfig
    tokenizer: Tokenizer
    engine: Engine


def load(config: EngineConfig, progress: Progress | None = None) -> Loaded:
    """progress: called with the number of tensors read so far and the number of all tensors."""
    checkpoint = open_checkpoint(config.model)
    model = read_config(checkpoint.config)
    drafter, chosen = find_drafter(config, model)
    plan = plan_here(config, model, drafter.caps if drafter else None, checkpoint.stored_bytes())
    tokenizer = Tokenizer.of(checkpoint)
    text = tokenizer.encode(TEXT.read_text(encoding="utf-8")) if plan.coded else []
    calibration = text[: plan.max_model_len]
    engine = build_engine(plan, config, model, checkpoint, tokenizer, drafter, progress, calibration, chosen)
    engine.warm_up()
    return Loaded(checkpoint, model, tokenizer, engine)
