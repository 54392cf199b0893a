"""Runs requests of the shapes that a server will get, before the server reports that it is ready.

Loading has compiled the kernels and measured a single request (Engine.warm_up). Here prompts of several lengths,
batches, sampling, a grammar, and drafts with each of them run once, so that the first user's request is as fast as the
tenth. The most usual shapes come first, and a slow machine stops when its time is up.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from sparkdraft.core import GrammarSpec, SamplingParams, UserError
from sparkdraft.engine.engine import Engine
from sparkdraft.plan.resolve import Plan

BUDGET = {"cpu": 6.0, "cuda": 30.0}  # seconds
BATCHES = (2, 4, 8, 16)
SHALLOW = (1, 3)  # depths that pay in any batch; Engine.warm_up has tried all depths with one request
SHORT = 40  # tokens per prompt
STEPS = 4  # per trial: the prompt, a shape's first run, its recording, and one to measure it


@dataclass(frozen=True, slots=True)
class Trial:
    """Requests that run together."""

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
    found.append(Trial(plan.max_rows + SHORT, plain))
    fit = [replace(trial, num_prompt=min(trial.num_prompt, room)) for trial in found]
    return [trial for trial in fit if trial.num_prompt > 0]


def warm_up(engine: Engine, report: Callable[[int, int], None]) -> None:
    numbers = random.Random(0)
    todo = trials(engine.plan, engine.drafting.max_depth, engine.drafting.has_experts)
    deadline = time.monotonic() + BUDGET[engine.plan.device]
    for done, trial in enumerate(todo):
        report(done, len(todo))
        if time.monotonic() > deadline:
            break
        run(engine, trial, numbers)
    engine.reset_counts()


def run(engine: Engine, trial: Trial, numbers: random.Random) -> None:
    """Run the prompts and a few more steps. The text is random and is thrown away."""
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
