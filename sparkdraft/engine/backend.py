"""The project's own engine as a backend of the server: implements `Backend` (sparkdraft/backend.py) with an Engine."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch

from sparkdraft.backend import BackendStatus, CodingError, ModelInfo, Report
from sparkdraft.cache.formats.centre import TEXT
from sparkdraft.config import EngineConfig
from sparkdraft.core import GrammarSpec, SamplingParams, StepOutput
from sparkdraft.defaults import usable_defaults
from sparkdraft.engine.caches import held_units
from sparkdraft.engine.coding_errors import MOST_CHARS, coding_errors
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.facts import facts
from sparkdraft.engine.load import Loaded, load
from sparkdraft.engine.machine import gpu_facts
from sparkdraft.engine.warm_up import warm_up
from sparkdraft.text.grammar import Grammar


def load_backend(options: dict[str, Any], report: Report) -> EngineBackend:
    """Load the model that the options name, warm it up and return it ready for requests."""
    config = EngineConfig.of(**options)

    def weights(done: int, total: int) -> None:
        report("weights", done, total)
        if done >= total:
            report("warm-up", 0, 0)

    loaded = load(config, weights)
    warm_up(loaded.engine, lambda done, total: report("warm-up", done, total))
    return EngineBackend(loaded, config.model)


class EngineBackend:
    def __init__(self, loaded: Loaded, model: str) -> None:
        """model: its name, as the user gave it."""
        self.engine = loaded.engine
        self._text = loaded.tokenizer.encode(TEXT.read_text(encoding="utf-8")[:MOST_CHARS])
        self.info = model_info(loaded, model)

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        return self.engine.grammars.compile(spec)

    def add(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams, grammar: Grammar | None = None
    ) -> None:
        self.engine.add(prompt_ids, params, request_id, grammar)

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    def step(self) -> list[StepOutput]:
        return self.engine.step()

    def fail_batch(self, error: Exception) -> list[str]:
        """Errors that libraries raise as their own types (Triton, cuBLAS) are found by Engine.fail_batch, which waits
        for the GPU."""
        if isinstance(error, torch.AcceleratorError):  # the GPU's context may be lost, and with it every tensor
            raise error
        return self.engine.fail_batch()

    def status(self) -> BackendStatus:
        engine = self.engine
        return BackendStatus(
            running=len(engine.scheduler.running),
            waiting=len(engine.scheduler.waiting),
            kv_blocks_free=engine.pool.num_free,
            kv_blocks_total=engine.pool.num_blocks - engine.pool.num_held,
            block_size=engine.plan.block_size,
            preemptions=engine.scheduler.num_preempted,
            drafting=engine.drafting.so_far().as_dict(),
            kv_errors=engine.kv_errors(),
            step_drift=engine.drift.ratio,
            steps_compared=engine.drift.num_compared if engine.drift.is_known else None,
            kv_usage=kv_usage(engine),
        )

    def reset_counts(self) -> None:
        self.engine.reset_counts()

    def switch(self, part: str, on: bool) -> None:
        self.engine.switch(part, on)

    def coding_errors(self) -> list[CodingError]:
        return coding_errors(self.engine, self._text)


def kv_usage(engine: Engine) -> float:
    """The share of the caches' bytes that requests hold: of blocks, and of what layers with windows, coded layers and
    recurrent ones keep beside them. What is only remembered for later prompts is free, and so are blocks
    that nobody may take for now."""
    plan, pool = engine.plan, engine.pool
    free = engine.scheduler.holdings.num_free
    parts = [(pool.num_blocks, plan.memory.kv // max(plan.num_blocks, 1), pool.num_free + pool.num_held)]
    parts += [(*unit, left) for unit, left in zip(held_units(plan), free, strict=True)]
    total = sum(count * size for count, size, _ in parts)
    return sum((count - left) * size for count, size, left in parts) / total if total else 0.0


def model_info(loaded: Loaded, model: str) -> ModelInfo:
    engine, checkpoint, config = loaded.engine, loaded.checkpoint, loaded.model_config
    plan, proposer = engine.plan, engine.drafting.proposer
    fallbacks = engine.fallbacks
    plan_facts = asdict(plan)
    del plan_facts["fallbacks"], plan_facts["memory"]
    plan_facts |= gpu_facts(plan.device)
    plan_facts |= {"kv_tokens": plan.num_blocks * plan.block_size, "max_draft": engine.drafting.max_depth}
    caps = proposer.drafter.caps if proposer else None
    return ModelInfo(
        model=model,
        model_type=config.model_type,
        max_model_len=plan.max_model_len,
        vocab_size=config.vocab_size,
        tokenizer=loaded.tokenizer.raw.to_str(),
        special=checkpoint.special,
        eos_ids=sorted(loaded.tokenizer.eos_ids),
        chat_template=checkpoint.chat_template,
        sampling=usable_defaults(checkpoint.generation)[0],
        plan=plan.describe(fallbacks),
        plan_facts=plan_facts,
        fallbacks=[fallback.as_dict() for fallback in fallbacks],
        drafter={"name": caps.name, "max_depth": caps.max_depth} if caps else None,
        created=int(time.time()),
        facts=[asdict(fact) for fact in facts(engine)],
    )
