"""What the engine really runs for a model on this machine, shown by running it: every claim has a kernel that ran.

The model is loaded as every command loads it. Requests of the doctor's own then run (trials.py): what they replayed and
launched ahead is counted, and their kernels are watched layer by layer (watch.py).
"""

from __future__ import annotations

from statistics import median
from typing import Any

from sparkdraft.config import EngineConfig
from sparkdraft.core import Fact, Fallback, UserError
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.facts import facts, formats
from sparkdraft.engine.load import load
from sparkdraft.operate.doctor import layers as words
from sparkdraft.operate.doctor.finding import Finding, Status
from sparkdraft.operate.doctor.trials import Counted, run_counted, run_drafter_watched, run_watched
from sparkdraft.operate.doctor.watch import ENDS, Watch, listed
from sparkdraft.util.progress import Meter

PART, KERNELS = "engine", "kernels by layer"
# What measures tiles, by the name of the fact. Files of tiles are tuned/sm_*.json in the cache folder.
TUNE = {
    "matrix tiles": "sparkdraft tune, with this --model",
    "expert tiles": "sparkdraft tune, with this --model",
    "recurrent tiles": "python tools/cuda_delta_rule.py --tune --out CACHE/tuned/sm_XX.json",
    "attention tiles": "python tools/cuda_kernels.py --tune, which shows times and leaves the choice to you",
}
GRAPHS_OFF = "graphs is off"


def examine_engine(config: EngineConfig, bandwidth: float, meter: Meter) -> list[Finding]:
    """bandwidth: bytes per second that were measured; 0: not measured."""
    try:
        engine = _load(config, meter)
        meter.stage("running a request")
        counted = run_counted(engine)
        prompt, row = run_watched(engine)
        drafts = run_drafter_watched(engine)
    except UserError as error:
        return [Finding(PART, "model", f"it cannot run here: {error}", Status.BROKEN)]
    except Exception as error:  # whatever it is, a person must see it as a finding and not as a traceback
        first = (str(error).strip() or "no message").splitlines()[0]
        advice = "this is a fault of the installation or of the engine: send this report (--json) with an issue"
        value = f"it fails with {type(error).__name__}: {first}"
        return [Finding(PART, "model", value, Status.BROKEN, advice)]
    return [*_plan(engine), *judge_facts(facts(engine), counted.proofs(engine)), *_speed(engine, counted, bandwidth),
            *_kernels(engine, prompt, row), *_drafter(engine, drafts)]  # fmt: skip


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


def _speed(engine: Engine, counted: Counted, bandwidth: float) -> list[Finding]:
    """A plain step of one request against the time that its weights take to be read."""
    seconds = median(counted.seconds[3:])
    value = f"a token without drafts takes {seconds * 1e3:.1f} ms"
    if bandwidth:
        size = engine.runner.model.nbytes(1)
        value += (
            f"; reading its {size / 1e6:.0f} MB of weights at the measured bandwidth takes {size / bandwidth * 1e3:.1f}"
        )
    return [Finding(PART, "speed", value, proof=f"{len(counted.seconds)} steps ran")]


def _kernels(engine: Engine, prompt: Watch, row: Watch) -> list[Finding]:
    """Layers that are alike and ran alike are one finding."""
    model, groups = engine.runner.model, dict[Any, list[int]]()
    for number, (spec, layer) in enumerate(zip(model.config.layers, model.layers, strict=True)):
        what = f"{words.describe(spec, engine.plan)}; weights {formats(layer.matrices)}"
        groups.setdefault((what, row.of(number), prompt.of(number)), []).append(number)
    found = [_layer(f"layers {words.runs(at)}", *key) for key, at in groups.items()]
    ends = f"embedding, final norm, head of {model.config.vocab_size:,} ids; weights {formats([model.head])}"
    return [*found, _layer("ends", ends, row.of(ENDS), prompt.of(ENDS))]


def _drafter(engine: Engine, drafts: Watch | None) -> list[Finding]:
    proposer, groups = engine.drafting.proposer, dict[Any, list[int]]()
    if drafts is None or not proposer:
        return []
    layers: Any = getattr(proposer.drafter, "layers", ())
    for number, (spec, layer) in enumerate(zip(proposer.drafter.caps.kv, layers, strict=True)):
        what = f"{words.attention(spec, 'exact')}; weights {formats(layer.matrices)}"
        groups.setdefault((what, drafts.of(number)), []).append(number)
    return [
        _layer(f"drafter's layers {words.runs(at)}", what, ran, ran, "a block") for (what, ran), at in groups.items()
    ]


def _layer(name: str, what: str, row: Any, prompt: Any, rows: str = "one row") -> Finding:
    if not row:
        advice = "no kernel was seen: send this report with an issue"
        return Finding(KERNELS, name, what, Status.CHANGE, advice)
    proof = f"{rows} ran {listed(row)}"
    proof += "" if row == prompt else f"; a prompt ran {listed(prompt)}"
    return Finding(KERNELS, name, what, proof=proof)
