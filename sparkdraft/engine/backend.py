"""The project's own engine as a backend of the server (sparkdraft/backend.py)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from sparkdraft.backend import BackendStatus, CodingError, ModelInfo, Report
from sparkdraft.cache.formats import CALIBRATION
from sparkdraft.config import EngineConfig, usable_defaults
from sparkdraft.core import GrammarSpec, SamplingParams, StepOutput, UserError
from sparkdraft.engine.build import held_units
from sparkdraft.engine.coding_errors import MOST_CHARS, coding_errors
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.facts import facts
from sparkdraft.engine.load import Loaded, Opened, load_opened, open_model
from sparkdraft.engine.machine import gpu_facts
from sparkdraft.plan.resolve import Plan
from sparkdraft.text.grammar import Grammar

WARM_UP_SECONDS = {"cpu": 6.0, "cuda": 30.0}
BATCHES = (2, 4, 8, 16)
SHALLOW = (1, 3)  # depths that pay in any batch; Engine.warm_up has tried all depths with one request
SHORT = 40  # tokens per prompt
STEPS = 4  # per trial: the prompt, a shape's first run, its capture, and one to measure it


def load_backend(options: dict[str, Any], report: Report) -> EngineBackend:
    """Loads the model that the options name and warms it up."""
    return prepare(open_model(EngineConfig.of(**options)), report)


def prepare(opened: Opened, report: Report) -> EngineBackend:
    """Loads a checkpoint that has been opened and warms it up."""

    def weights(done: int, total: int) -> None:
        report("weights", done, total)
        if done >= total:
            report("warm-up", 0, 0)

    loaded = load_opened(opened, weights)
    warm_up(loaded.engine, lambda done, total: report("warm-up", done, total))
    return EngineBackend(loaded, opened.config.model)


class EngineBackend:
    def __init__(self, loaded: Loaded, model: str) -> None:
        """model: its name, as the user gave it."""
        self.engine = loaded.engine
        self._text = loaded.tokenizer.encode(CALIBRATION.read_text(encoding="utf-8")[:MOST_CHARS])
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
        """Errors of libraries' own types (Triton, cuBLAS) are found by Engine.fail_batch, which waits for the GPU."""
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
    """The share of the caches' bytes that requests hold: of blocks, and of pages and states beside them. What is only
    remembered for later prompts counts as free, and so do blocks that nobody may take for now."""
    plan, pool = engine.plan, engine.pool
    free = engine.scheduler.groups.num_free
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


@dataclass(frozen=True, slots=True)
class Trial:
    """Requests of one shape that run together, to warm up."""

    num_prompt: int
    params: SamplingParams
    seqs: int = 1


def trials(plan: Plan, max_depth: int, has_experts: bool = False) -> list[Trial]:
    """The trials, ordered by how likely each is to be a user's first request."""
    most = STEPS * (1 + max_depth) + 1
    room = plan.max_model_len - most
    plain = SamplingParams(max_tokens=most, num_draft=0, ignore_eos=True)
    drafted = replace(plain, num_draft=max_depth or None)
    sampled = replace(drafted, temperature=1.0, top_p=0.9, top_k=40, min_p=0.01, seed=0)
    scored = replace(drafted, logprobs=5, presence_penalty=0.5, repetition_penalty=1.1, logit_bias={0: -1.0})
    held = replace(drafted, grammar=GrammarSpec("json_object"))
    found = [Trial(SHORT, params) for params in (plain, drafted, sampled, held, scored)]
    found.append(Trial(200, drafted))
    # Many rows of a batch read hardly more experts than some of them: how cheap the last ones are must be measured.
    deep = (max_depth,) if has_experts and plan.device == "cuda" and max_depth else ()
    depths = (*(depth for depth in SHALLOW if depth < max_depth), *deep)
    few = [plain, *(replace(plain, num_draft=depth) for depth in depths)]
    found += [Trial(SHORT, params, seqs) for seqs in BATCHES if seqs <= plan.max_seqs for params in few]
    found.append(Trial(plan.max_step_tokens + SHORT, plain))
    fit = [replace(trial, num_prompt=min(trial.num_prompt, room)) for trial in found]
    return [trial for trial in fit if trial.num_prompt > 0]


def warm_up(engine: Engine, report: Callable[[int, int], None]) -> None:
    """Runs requests of the shapes that a server will get, so that the first request is as fast as the tenth.

    The most usual shapes come first, and a slow machine stops when its time is up.
    """
    numbers = random.Random(0)
    todo = trials(engine.plan, engine.drafting.max_depth, engine.drafting.has_experts)
    deadline = time.monotonic() + WARM_UP_SECONDS[engine.plan.device]
    for done, trial in enumerate(todo):
        report(done, len(todo))
        if time.monotonic() > deadline:
            break
        _try(engine, trial, numbers)
    engine.reset_counts()


def _try(engine: Engine, trial: Trial, numbers: random.Random) -> None:
    """Runs the prompts and a few more steps. The text is random and is thrown away."""
    names = []
    for _ in range(trial.seqs):
        ids = [numbers.randrange(engine.sampler.vocab_size) for _ in range(trial.num_prompt)]
        try:
            names.append(engine.add(ids, trial.params))
        except UserError:
            assert trial.params.grammar is not None, trial
            return  # this tokenizer does not support grammars; a request that wants one is told so
    while engine.has_work and not engine.scheduler.only_decoding:
        engine.step()
    for _ in range(STEPS - 1):
        engine.step()
    for name in names:
        engine.abort(name)
    while engine.has_work:
        engine.step()
