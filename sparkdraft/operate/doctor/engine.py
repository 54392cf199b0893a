"""Runs a model on this machine and reports how: what the engine says of itself is compared with what ran.

The model is loaded as every command loads it. Then the doctor's own requests run, and their replays and launches are
counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor

from sparkdraft.config import EngineConfig
from sparkdraft.core import Batch, Fact, Fallback, SamplingParams, UserError
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.facts import facts
from sparkdraft.engine.load import load
from sparkdraft.operate.doctor.finding import Finding, Status
from sparkdraft.operate.forecast.rates import wait
from sparkdraft.operate.instrument import replaced
from sparkdraft.speculation.stats import SpecStats
from sparkdraft.util.progress import Meter

PART = "engine"
# Commands that measure tiles, by the name of the fact. Files of tiles are tuned/sm_*.json in the cache folder.
TUNE = {
    "matrix tiles": "sparkdraft tune, with this --model",
    "expert tiles": "sparkdraft tune, with this --model",
    "recurrent tiles": "python tools/cuda_delta_rule.py --tune --out CACHE/tuned/sm_XX.json",
    "attention tiles": "python tools/cuda_kernels.py --tune, which shows times and leaves the choice to you",
}
GRAPHS_OFF = "graphs is off"


def examine_engine(config: EngineConfig, bandwidth: float, meter: Meter) -> list[Finding]:
    """bandwidth: measured bytes per second; 0: not measured."""
    try:
        engine = _load(config, meter)
        meter.stage("running a request")
        counted = run_counted(engine)
    except UserError as error:
        return [Finding(PART, "model", f"it cannot run here: {error}", Status.BROKEN)]
    except Exception as error:  # whatever it is, a person must see it as a finding and not as a traceback
        first = (str(error).strip() or "no message").splitlines()[0]
        advice = "this is a fault of the installation or of the engine: send this report (--json) with an issue"
        value = f"it fails with {type(error).__name__}: {first}"
        return [Finding(PART, "model", value, Status.BROKEN, advice)]
    return [*_plan(engine), *judge_facts(facts(engine), counted.proofs(engine)), _speed(engine, counted, bandwidth)]


def _load(config: EngineConfig, meter: Meter) -> Engine:
    def report(done: int, total: int) -> None:
        if done < total:
            meter.stage("loading the model", done, total)
        else:
            meter.stage("warming up")

    return load(config, report).engine


# ---- findings


def _plan(engine: Engine) -> list[Finding]:
    plan, proposer = engine.plan, engine.drafting.proposer
    value = f"{plan.device}, {plan.weights} weights, {plan.kernels} kernels, {plan.threads} threads"
    room = f"{plan.max_model_len:,} tokens of context, {plan.max_seqs} requests at once, K/V {plan.kv}"
    drafter = f"{proposer.drafter.caps.name}, up to {engine.drafting.max_depth} drafts" if proposer else "none"
    return [
        Finding(PART, "runs on", value),
        Finding(PART, "room", room),
        Finding(PART, "drafter", drafter),
        *(_fallback(each) for each in engine.fallbacks),
    ]


def _fallback(each: Fallback) -> Finding:
    return Finding(PART, each.name, each.reason, Status.NOTE if each.is_choice else Status.CHANGE)


def judge_facts(found: list[Fact], proofs: dict[str, str]) -> list[Finding]:
    """proofs: what ran and shows it, by the name of the fact."""
    return [_judge_fact(fact, proofs.get(fact.name, "")) for fact in found]


def _judge_fact(fact: Fact, proof: str) -> Finding:
    value = f"{fact.value} ({fact.reason})" if fact.reason else fact.value
    status, advice = Status.FINE, ""
    kind = fact.name.removeprefix("drafter's ")
    if kind in TUNE and fact.reason:
        status, advice = Status.CHANGE, f"measure them on this GPU: {TUNE[kind]}"
    elif fact.reason == GRAPHS_OFF:
        status, advice = Status.CHANGE, "leave --no-graphs out: every step is launched operator by operator"
    elif fact.reason:
        status = Status.NOTE
    return Finding(PART, fact.name, value, status, advice, proof)


def _speed(engine: Engine, counted: Counted, bandwidth: float) -> Finding:
    """Compare a plain step of one request with the time to read its weights."""
    seconds = median(counted.seconds[3:])
    value = f"a token without drafts takes {seconds * 1e3:.1f} ms"
    if bandwidth:
        size = engine.runner.model.nbytes(1)
        value += (
            f"; reading its {size / 1e6:.0f} MB of weights at the measured bandwidth takes {size / bandwidth * 1e3:.1f}"
        )
    return Finding(PART, "speed", value, proof=f"{len(counted.seconds)} steps ran")


# ---- the doctor's own requests

PROMPT = 40  # tokens of the prompt
STEPS = 12  # that are counted


@dataclass(slots=True)
class Counted:
    """Counts of the doctor's requests."""

    replays: int = 0  # of graphs: the target's steps and the drafter's passes
    replayed: int = 0  # steps that had one or more
    ahead: int = 0  # steps that were launched before the last was read
    steps: int = 0
    kernels: int = 0  # of the largest compiled step that was replayed; 0: a CUDA graph does not tell
    seconds: list[float] = field(default_factory=list)  # of plain steps
    drafting: SpecStats = field(default_factory=SpecStats)  # of the request with drafts

    def proofs(self, engine: Engine) -> dict[str, str]:
        """The proof of each fact, by the fact's name."""
        size = f", the largest of {self.kernels} kernels" if self.kernels else ""
        replayed = f"{self.replayed} of {self.steps} steps replayed a graph{size}"
        found = {"decode steps": replayed if self.replayed else ""}
        found["overlapped steps"] = f"{self.ahead} of {self.steps} steps were launched ahead" if self.ahead else ""
        if engine.drafting.proposer:
            made, taken = self.drafting.num_draft_tokens, self.drafting.num_accepted_draft_tokens
            found["blocks of drafts"] = f"{made} drafts after a random text, {taken} accepted"
        return found


def run_counted(engine: Engine) -> Counted:
    """Run a request without drafts, which is timed, and one with drafts."""
    counted = Counted()
    depths = (0, engine.drafting.max_depth) if engine.drafting.proposer else (0,)
    with _counting(engine, counted):
        for depth in depths:
            engine.reset_counts()
            params = SamplingParams((STEPS + 4) * (depth + 1), num_draft=depth, ignore_eos=True)
            name = engine.add(_ids(engine), params)
            for _ in range(STEPS):
                before, begin = counted.replays, time.perf_counter()
                engine.step()
                if not depth:
                    wait(engine.plan.device)
                    counted.seconds.append(time.perf_counter() - begin)
                counted.steps += 1
                counted.replayed += counted.replays > before
            counted.drafting = engine.drafting.so_far()
            _end(engine, name)
    return counted


@contextmanager
def _counting(engine: Engine, counted: Counted) -> Iterator[None]:
    """Count replays and launches by replacing the methods that make them."""
    graph, steps = engine.runner.model.ops.Graph, engine.steps
    stand_ins: list[tuple[Any, str, Any]] = []
    if graph:
        replay = graph.replay

        def counted_replay(self: Any) -> Tensor:
            counted.replays += 1
            counted.kernels = max(counted.kernels, len(getattr(self, "kernels", ())))
            out: Tensor = replay(self)
            return out

        stand_ins.append((graph, "replay", counted_replay))
    if steps.ahead:
        launch = steps.launch

        def counted_launch(batch: Batch) -> None:
            launch(batch)
            counted.ahead += 1

        stand_ins.append((steps, "launch", counted_launch))
    with replaced(*stand_ins):
        yield


def _end(engine: Engine, name: str) -> None:
    engine.abort(name)
    while engine.has_work:
        engine.step()


def _ids(engine: Engine) -> list[int]:
    """Return a prompt that no request has had, so that the prefix cache does not have it."""
    count, start = min(PROMPT, engine.plan.max_model_len // 2), time.perf_counter_ns()
    return [(start + 7919 * i) % engine.sampler.vocab_size for i in range(count)]
