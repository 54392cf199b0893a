"""Compares what `sparkdraft plan` predicts for this machine with what `sparkdraft bench offline` measures on it, and
fits the engine's losses to that.

Shapes with random weights and, on a CPU, the embedded model, each load in a process of its own; the bandwidth is the
one that each command measures. It prints predicted over measured with the losses that a plan would take and with fitted
ones, and ends in a line of JSON. --write makes a machine file of them, for `sparkdraft plan --machine FILE` or for
sparkdraft/operate/forecast/machines.

    python tools/plan_check.py                             some six minutes on an H200, three on two cores
    python tools/plan_check.py --limit 300                 begins no load after so many seconds
    python tools/plan_check.py --write spark.json          also writes what was fitted
    python tools/plan_check.py --loads tiny                two loads of a tiny shape: whether the script itself works
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from sparkdraft.cli.plan import FORMATS_OF, SHAPES_OF
from sparkdraft.core import UserError
from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.operate.bench.shapes import drafter_shape, shape
from sparkdraft.operate.forecast.machine import FOLDER, Machine, like, this_machine
from sparkdraft.operate.forecast.roofline import DraftPass, Load, Losses, Rates, Target, step
from sparkdraft.plan.weight_formats import EIGHT_BITS, WeightFormats, kept_on_cpu

ROUNDS = 60
SECONDS = ("layer", "step", "draft", "experts_layer")  # the other losses are shares, at most 1
# Which losses a measured load tells something about. 'step' is left: it can not be told from 'layer'.
FITTED = (
    "floats",
    "coded",
    "layer",
    "experts",
    "experts_layer",
    "kv",
    "kv_fp8",
    "kv_coded",
    "rows",
    "rows_coded",
    "draft",
)


@dataclass(frozen=True)
class Case:
    shape: str
    streams: int
    prompt: int
    output: int = 64
    kv: str = "exact"
    drafter: str = ""
    length: float = 6.5  # ids per step that a drafter's are taken to bring

    @property
    def name(self) -> str:
        drafted = f", {self.drafter}" if self.drafter else ""
        return f"{self.shape}, {self.streams} x {self.prompt}, {self.kv}{drafted}"

    def command(self) -> list[str]:
        of = {"model": self.shape, "spec": "off"} if self.shape in SHAPES_OF else {"shape": self.shape}
        given = {**of, "concurrency": self.streams, "prompt-len": self.prompt, "output-len": self.output}
        if self.kv != "exact":
            given["kv"] = self.kv
        if self.drafter:
            given |= {"drafter-shape": self.drafter, "synthetic-acceptance": self.length}
        flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
        return [sys.executable, "-m", "sparkdraft.cli.main", "bench", "offline", *flags]


LOADS = {
    "gpu": [
        Case("qwen3-8b", 1, 256),
        Case("qwen3-8b", 16, 256),
        Case("qwen3-0.6b", 1, 256),
        Case("qwen3-8b", 4, 32000, 32),
        Case("qwen3-8b", 1, 256, 256, drafter="dflash-5x"),
        Case("qwen3-8b", 16, 256, 256, drafter="dflash-5x"),
        Case("qwen3-8b", 1, 32000, 104, drafter="dflash-5x"),
        Case("qwen3-8b", 4, 32000, 32, "turboquant"),
        Case("qwen3-8b", 1, 32000, 104, "turboquant", "dflash-5x"),
        Case("qwen3-8b", 4, 32000, 32, "fp8"),
        Case("qwen3-30b-a3b", 1, 256),
        Case("qwen3-30b-a3b", 16, 256),
        Case("gpt-oss-20b", 1, 256),
    ],
    "cpu": [
        *(Case("smollm2", streams, prompt) for prompt in (128, 2000) for streams in (1, 4)),
        Case("smollm2", 8, 128),
        *(Case("smollm2-135m", streams, 128) for streams in (1, 8)),
    ],
    "tiny": [Case("tiny", 1, 64, 16), Case("tiny", 2, 64, 16)],
}


@dataclass(frozen=True)
class Measured:
    case: Case
    tok_s: float
    length: float  # ids that a stream committed per step
    bandwidth: float  # bytes per second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", choices=LOADS, help="default: by the device")
    parser.add_argument("--limit", type=float, default=3600, metavar="SECONDS")
    parser.add_argument("--write", default="", metavar="FILE")
    args = parser.parse_args()
    machine = this_machine()
    print(f"{machine.title}: {machine.rates.bandwidth / 1e9:.0f} GB/s", flush=True)
    found = measure_all(LOADS[args.loads or ("cpu" if machine.hardware.device == "cpu" else "gpu")], args.limit)
    before = machine.losses().expected
    one_share = replace(before, formats={}) if machine.hardware.device == "cpu" else before  # of 4 and of 8 bits
    after = fit(machine, found, one_share)
    rows = [(each, ratio(machine, each, before), ratio(machine, each, after)) for each in found]
    print(f"predicted / measured: with losses {machine.losses().origin}; fitted to these loads")
    for each, old, new in rows:
        print(f"{old:8.2f}{new:8.2f}   {each.case.name}: {each.tok_s:.1f} tok/s")
    errors = [abs(old - 1) for _, old, _ in rows]
    print(f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    if args.write:
        write(machine, after, Path(args.write))
    figures = [{"load": each.case.name, "tok_s": each.tok_s, "predicted": round(old, 4)} for each, old, _ in rows]
    print(json.dumps({"machine": machine.title, "figures": figures, "fitted": asdict(after)}))


def measure_all(cases: Sequence[Case], limit: float) -> list[Measured]:
    begin, found = time.perf_counter(), []
    for case in cases:
        if time.perf_counter() - begin > limit:
            print(f"left out, {limit:.0f} s are over: {case.name}")
            continue
        done = subprocess.run(case.command(), capture_output=True, text=True, env={**os.environ})
        if done.returncode:
            print(f"failed: {case.name}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}", flush=True)
            continue
        summary = json.loads(done.stdout.strip().splitlines()[-1])
        (row,) = summary["rows"]
        found.append(Measured(case, row["decode_tok_s"], row["length"], summary["bandwidth_gb_s"] * 1e9))
        print(f"{time.perf_counter() - begin:6.0f} s  {case.name}: {row['decode_tok_s']:.1f} tok/s", flush=True)
    if not found:
        raise UserError("nothing could be measured")
    return found


def ratio(machine: Machine, each: Measured, losses: Losses) -> float:
    """Predicted over measured speed."""
    on_cpu = machine.hardware.device == "cpu"  # what was measured of its kernels does not hang on the bandwidth
    rates = Rates(machine.rates.bandwidth if on_cpu else each.bandwidth, machine.rates.arithmetic)
    seconds = step(rates, losses, *_work(each.case, on_cpu)).total
    return each.case.streams * each.length / seconds / each.tok_s


@cache
def _work(case: Case, on_cpu: bool) -> tuple[Target, Load, DraftPass | None]:
    """Random weights choose experts independently."""
    model, itemsize = shape(SHAPES_OF.get(case.shape, case.shape)), 4 if on_cpu else 2
    fmt = EIGHT_BITS if on_cpu else "bfloat16"
    formats = WeightFormats(fmt)
    if case.shape in FORMATS_OF and on_cpu:
        formats = kept_on_cpu(WeightFormats.parse(FORMATS_OF[case.shape]))
    drafter, depth = None, 0
    if case.drafter:
        draft = drafter_shape(case.drafter, model)
        depth = draft.block_size - 1
        drafter = DraftPass.of(draft.caps(), model_sizes(model).head, False, itemsize, fmt)
    target = Target.of(model, formats, case.kv, itemsize, spread=1.0)
    return target, Load(case.streams, case.prompt + case.output // 2, depth), drafter


def fit(machine: Machine, found: Sequence[Measured], losses: Losses) -> Losses:
    """Losses at which predictions are nearest, by steps along one of them at a time."""

    def cost(trial: Losses) -> float:
        return statistics.fmean(abs(math.log(ratio(machine, each, trial))) ** 1.5 for each in found)

    start = {name: getattr(losses, name) for name in FITTED}
    for name, usual in (("kv_fp8", losses.kv), ("kv_coded", losses.kv), ("rows_coded", losses.rows)):
        start[name] = start[name] or usual
    best = replace(losses, **start)
    least, sizes = cost(best), dict.fromkeys(FITTED, 0.2)
    for _ in range(ROUNDS):
        for name in FITTED:
            for factor in (1 + sizes[name], 1 / (1 + sizes[name])):
                value = getattr(best, name) * factor
                trial = replace(best, **{name: value if name in SECONDS else min(value, 1.0)})
                if (new := cost(trial)) < least * (1 - 1e-6):
                    best, least = trial, new
                    break
            else:
                sizes[name] *= 0.7
    return best


def write(machine: Machine, losses: Losses, path: Path) -> None:
    """The file that the machine is like, with what was measured here."""
    data = json.loads((FOLDER / f"{like(machine.hardware).name}.json").read_text(encoding="utf-8"))
    data |= {"title": machine.title, "bandwidth_gb_s": round(machine.rates.bandwidth / 1e9, 1)}
    data["tflop_s"] = {fmt: round(rate / 1e12, 3) for fmt, rate in machine.rates.arithmetic.items()}
    data["memory_gib"] = round(machine.hardware.free_bytes / 2**30, 1)
    fitted = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in asdict(losses).items()}
    error = {"dense": 0.10, "experts": 0.15}
    data["engines"] = {"sparkdraft": {"from": "fitted by tools/plan_check.py", "losses": fitted, "error": error}}
    data["sources"] = [f"bandwidth and arithmetic: measured on {time.strftime('%Y-%m-%d')} by tools/plan_check.py"]
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
