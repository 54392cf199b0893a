"""How an engine runs on this machine, in words: shown by `generate --verbose`, `LLM.facts()` and /v1/status.

A fallback is less than what was wanted, and every command prints it; a fact is how things are. Facts are read from the
parts as they run, not from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sparkdraft.core import Fact
from sparkdraft.drafters.base import Drafter
from sparkdraft.engine.engine import Engine
from sparkdraft.kernels.ops import ExpertShapes, KernelShapes, all_tiles
from sparkdraft.models.common.blocks import Decoder
from sparkdraft.models.common.layers import ExpertsSpec, RecurrentSpec
from sparkdraft.plan.memory import GRAPHS
from sparkdraft.plan.resolve import ITEMSIZE, Plan
from sparkdraft.weights.linear import ExpertLinear, Linear

CUT = "blocks of drafts"  # the name of a fact


def facts(engine: Engine) -> list[Fact]:
    model, plan = engine.runner.model, engine.plan
    found = [_graphs(engine), _overlap(engine), _bits(engine), *_drafting(engine)]
    if plan.device == "cuda":
        from sparkdraft.kernels.cuda.runtime.facts import facts as gpu_facts

        found += gpu_facts(asked(model, plan), torch.device(plan.device))
        if proposer := engine.drafting.proposer:
            own = asked_by_drafter(proposer.drafter, plan)
            found += [replace(f, name=f"drafter's {f.name}") for f in gpu_facts(own, torch.device(plan.device))[:-1]]
    return found


def asked(model: Decoder, plan: Plan) -> KernelShapes:
    """Return what the target asks of its kernels."""
    experts, recurrent, windows = [], set(), {window.window for window in plan.windows}
    for spec, layer in zip(model.config.layers, model.layers, strict=True):
        if isinstance(spec.mlp, ExpertsSpec):
            gate_up, down = (m for m in layer.matrices if isinstance(m, ExpertLinear))
            experts.append(ExpertShapes(gate_up, down, spec.mlp.top_k))
        if isinstance(spec.mixer, RecurrentSpec):
            recurrent.add((spec.mixer.num_value_heads, spec.mixer.key_dim, spec.mixer.value_dim))
    is_coded = plan.coded is not None and plan.coded.is_read
    coded = frozenset(s.head_dim for s in model.config.attention if is_coded and s.window not in windows)
    exact = frozenset(s.head_dim for s in model.config.attention if not (is_coded and s.window not in windows))
    matrices = all_tiles(m for m in model.matrices if isinstance(m, Linear))
    return KernelShapes(
        matrices, experts, exact, coded, frozenset(recurrent), ITEMSIZE[plan.dtype], plan.max_step_tokens
    )


def asked_by_drafter(drafter: Drafter, plan: Plan) -> KernelShapes:
    """Its keys and values are exact, whatever the target's are."""
    dims, none = frozenset(spec.head_dim for spec in drafter.caps.kv), frozenset[int]()
    return KernelShapes(
        all_tiles(drafter.matrices), (), dims, none, frozenset(), ITEMSIZE[plan.dtype], plan.max_step_tokens
    )


def _graphs(engine: Engine) -> Fact:
    name, plan = "decode steps", engine.plan
    if engine.steps.graphs:
        limits = GRAPHS[plan.kernels]
        most = f"{limits.most} of each kind" + (f", in {limits.room >> 20} MiB" if limits.room else "")
        return Fact(name, f"replayed from graphs, at most {most}")
    reason = "graphs is off"
    if plan.kernels == "reference":
        reason = "the reference kernels cannot be captured"
    elif plan.graphs:
        reason = "the model has an operator that cannot be captured"
    return Fact(name, "launched one operator at a time", reason)


def _overlap(engine: Engine) -> Fact:
    name = "overlapped steps"
    if engine.steps.ahead:
        return Fact(name, "on: the next decode step is launched before the last one is read")
    return Fact(name, "off", "the CPU that would prepare the next step computes this one")


def _bits(engine: Engine) -> Fact:
    name, plan = "drafts and bits", engine.plan
    if engine.decodes_exactly:
        most = " of up to 16 rows" if plan.device == "cuda" else ""
        return Fact(name, f"a row has the same bits alone and in a step{most} with drafts")
    return Fact(name, "a row may differ in its last bit beside its drafts", "float32 products are torch's own")


def _drafting(engine: Engine) -> list[Fact]:
    """Whether blocks are cut, what a pass of the drafter reads, and how often it runs where that is not once a step."""
    proposer, vocab = engine.drafting.proposer, engine.runner.model.config.vocab_size
    if not proposer:
        return []
    where = "by the host, before they are verified"
    if engine.steps.ahead:
        where = "on the device, where rows past the cut write nothing and reach no expert"
    found = [Fact(CUT, f"cut where their own confidence no longer pays, unless the depth is fixed: {where}")]
    if not engine.drafting.cuts:
        found = [Fact(CUT, "verified whole", engine.drafting.whole)]
    drafter, caps = proposer.drafter, proposer.drafter.caps
    ids = f"among {caps.num_ids:,} of {vocab:,} ids" if caps.num_ids else f"among all {vocab:,} ids"
    size = drafter.reads(1).propose / 1e6
    reads = f"{formats(drafter.matrices)}; a pass reads {size:.1f} MB and drafts {ids}"
    found.append(Fact("drafter's weights", reads))
    if proposer.chain:
        value, reason = f"{caps.name}, one per draft, up to {proposer.max_depth} per step", ""
        if engine.steps.ahead:
            value += "; all of a step in one graph, that of an overlapped step"
        elif engine.plan.graphs:
            value, reason = f"{value}; one graph, replayed for each", "ids are picked between passes"
        found.append(Fact("the drafter's passes", value, reason))
    return found


def formats(matrices: Sequence[Linear | ExpertLinear]) -> str:
    """How they are kept, in words."""
    return " and ".join(sorted({each for matrix in matrices for each in _formats(matrix)}))


def _formats(matrix: Linear | ExpertLinear) -> list[str]:
    if matrix.tiles:
        return [matrix.tiles.format]
    if isinstance(matrix, ExpertLinear):
        return _formats(matrix.expert(0))
    if matrix.parts:
        return [each for part in matrix.parts for each in _formats(part)]
    kept: Any = getattr(matrix, "matrix", None)  # of the native kernels
    return [f"{kept.bits}bit"] if kept is not None else [type(matrix).__name__]
