"""How an engine runs on this machine, in words, so that users need not guess it from the speed.

A fallback is less than what was wanted, and every command prints it. A fact is how things are, and is shown on request:
`generate --verbose` and `--json`, `LLM.facts()`, /v1/status. Facts are read from the parts as they run, not from the
plan.
"""

from __future__ import annotations

import torch

from sparkdraft.core import Fact
from sparkdraft.engine.engine import Engine
from sparkdraft.plan.memory import RECORDINGS
from sparkdraft.weights.linear import Linear


def facts(engine: Engine) -> list[Fact]:
    model, plan = engine.runner.model, engine.plan
    found = [_recordings(engine), _overlap(engine), _bits(engine), *_cut(engine)]
    if plan.device == "cuda":
        found += model.ops.facts(
            [m.tiles for m in model.matrices if isinstance(m, Linear) and m.tiles], torch.device(plan.device)
        )
    return found


def _recordings(engine: Engine) -> Fact:
    name, plan = "decode steps", engine.plan
    if engine.runner.graphs:
        return Fact(name, f"replayed from recordings, at most {RECORDINGS[plan.kernels].most} of each kind")
    reason = "graphs is off"
    if plan.coded and plan.device == "cpu":
        reason = "torch runs a CPU's turboquant cache, and its operators are not recorded"
    elif plan.kernels == "reference":
        reason = "the reference kernels cannot be recorded"
    elif plan.graphs:
        reason = "the model has an operator that cannot be recorded"
    return Fact(name, "launched one operator at a time", reason)


def _overlap(engine: Engine) -> Fact:
    name = "overlapped steps"
    if engine.overlap:
        return Fact(name, "on: the next decode step is launched before the last one is read")
    on_cpu = engine.plan.device == "cpu"
    return Fact(
        name, "off", "the CPU that would prepare the next step computes this one" if on_cpu else "graphs is off"
    )


def _bits(engine: Engine) -> Fact:
    name, plan = "drafts and bits", engine.plan
    if engine.decodes_exactly:
        most = " of up to 16 rows" if plan.device == "cuda" else ""
        return Fact(name, f"a row has the same bits alone and in a step{most} with drafts")
    return Fact(name, "a row may differ in its last bit beside its drafts", "float32 products are torch's own")


def _cut(engine: Engine) -> list[Fact]:
    name = "blocks of drafts"
    if not engine.drafting.proposer:
        return []
    if engine.plan.device == "cpu":
        return [Fact(name, "cut where their own confidence no longer pays, unless the depth is fixed")]
    return [Fact(name, "verified whole", "a step on a GPU is recorded with a fixed number of rows")]
