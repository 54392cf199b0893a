"""Runs what only a GPU can run: its tests, `check-speed` and the figures of docs/numbers, one after the other.

Each step is a command of its own, with a time limit and a file for what it prints; a step that fails or runs out of
time is named at the end and stops none of those behind it. What a folder holds already is not run again, so a run that
was cut off goes on where it was.

    python tools/gpu_figures.py --out figures                       all of it, about an hour on an H200
    python tools/gpu_figures.py --out figures --only tests          names that begin so
    python tools/gpu_figures.py --out figures --seconds 540         begins no step that could end later
    python tools/gpu_figures.py --list                              names, limits and commands
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

OFFLINE = "bench offline --prompt-len 256 --output-len 128"
FORMS = {"bf16": ""} | {form: f"--shape-weights {form} " for form in ("int4", "nvfp4", "fp8")}
DRAFTED = "--drafter-shape {} --synthetic-acceptance {}"


@dataclass(frozen=True)
class Step:
    name: str
    limit: int  # seconds
    command: str  # of sparkdraft, or of Python where it begins with "-m" or "tools/"

    def arguments(self) -> list[str]:
        words = self.command.split()
        own = words[0] == "-m" or words[0].startswith("tools/")
        return [sys.executable, *([] if own else ["-m", "sparkdraft.cli.main"]), *words]


def _pytest(*folders: str, processes: int) -> str:
    return f"-m pytest -m gpu -n {processes} --dist load -rfE {' '.join('tests/' + folder for folder in folders)}"


def _shapes() -> list[Step]:
    """Whole models with random weights, at the numbers of streams for which figures are kept."""
    plain = {"qwen3-30b-a3b": "1,16", "gpt-oss-20b": "1,64", "gemma4-31b": "1", "qwen3.5-27b": "1,16"}
    steps = [
        Step(f"offline-{name}", 120, f"{OFFLINE} --shape {name} --concurrency {streams}")
        for name, streams in plain.items()
    ]
    steps += [
        Step(f"weights-{form}", 90, f"{OFFLINE} --shape qwen3-8b {flag}--concurrency 1,16")
        for form, flag in FORMS.items()
    ]
    drafted = {
        "qwen3.5-27b": ("qwen3.5-27b-dflash", "6.5", "1,16"),
        "gemma4-31b": ("gemma4-31b-dflash", "4", "1"),
    }
    steps += [
        Step(
            f"drafted-{name}", 120,
            f"{OFFLINE} --shape {name} {DRAFTED.format(drafter, length)} --concurrency {streams}",
        )
        for name, (drafter, length, streams) in drafted.items()
    ]  # fmt: skip
    steps += [
        Step(
            f"drafted-8b-{form}", 90,
            f"{OFFLINE} --shape qwen3-8b {FORMS[form]}{DRAFTED.format('dflash-5x', '6.5')} --concurrency 1",
        )
        for form in ("bf16", "int4")
    ]  # fmt: skip
    steps += [  # what an 8-bit drafter brings per step
        Step(
            f"drafter-fp8-{name}", 90,
            f"{OFFLINE} --shape {name} {DRAFTED.format(drafter, '6.5')} --drafter-weights fp8 --concurrency 1",
        )
        for name, drafter in {"qwen3-8b": "dflash-5x", "qwen3.5-27b": "qwen3.5-27b-dflash"}.items()
    ]  # fmt: skip
    experts = f"{OFFLINE} --shape qwen3-30b-a3b --shape-weights int4 --concurrency 1,16"
    steps.append(Step("weights-experts-int4", 90, experts))
    full = "bench offline --prompt-len 576 --output-len 16 --concurrency 16"  # its prompts fill a step, and its memory
    steps += [Step(f"memory-{name}", 90, f"{full} --shape {name}") for name in ("qwen3-8b", *plain)]
    steps.append(Step("memory-int4", 90, f"{full} --shape qwen3-8b --shape-weights int4"))
    prompt = f"{OFFLINE} --shape qwen3.5-27b --concurrency 1"
    return [*steps, Step("prompt-qwen3.5-27b", 120, prompt.replace("--prompt-len 256", "--prompt-len 32000"))]


def _requests() -> list[Step]:
    """What people send: sampled, penalised, arriving, over HTTP."""
    shape, wrong = "--shape qwen3-8b", "--drafter-shape dflash-5x"
    sampled = "--temperature 0.6 --top-p 0.95 --top-k 20"
    kinds = {"greedy": "", "sampled": f" {sampled}", "penalised": f" {sampled} --presence-penalty 1.5"}
    alone = f"{OFFLINE} {shape} --concurrency 1,16,64"
    steps = [Step(f"requests-{name}", 100, f"{alone} --spec off{flags}") for name, flags in kinds.items()]
    steps += [
        Step(f"requests-{name}-wrong", 120, f"{alone} {wrong} --spec auto{flags}") for name, flags in kinds.items()
    ]
    synthetic = f"bench offline {shape} {DRAFTED.format('dflash-5x', '6.5')} --prompt-len 256 --output-len 256"
    steps.append(Step("requests-synthetic", 240, f"{synthetic} --spec auto --concurrency 1,4,8,16,32"))
    steps.append(Step("requests-memory", 120, f"{synthetic} {sampled} --concurrency 64"))
    steps += [
        Step(f"requests-steps-{spec}-{n}", 90, f"tools/step_times.py --streams {n} --spec {spec}")
        for n in (16, 64)
        for spec in ("off", "auto")
    ]
    http = "tools/http_share.py"
    return [*steps, Step("requests-http", 560, http), Step("requests-http-wrong", 560, f"{http} {wrong}")]


STEPS = [
    Step("tests-kernels", 420, _pytest("kernels", processes=14)),
    Step("tests-engine", 300, _pytest("engine", "cache", "drafters", "speculation", "models", "operate", processes=8)),
    Step("check-speed", 420, "bench check-speed --device cuda"),
    *_requests(),
    *_shapes(),
    Step("mtp", 120, "tools/cuda_mtp.py --limit 90"),
    Step(
        "depth-mtp", 150,
        f"bench depth --shape qwen3.5-27b {DRAFTED.format('mtp', '4.9')} --concurrency 1,4 --output-len 192",
    ),
    Step("assistant", 120, "tools/cuda_assistant.py --no-times"),
    Step(
        "depth-assistant", 150,
        f"bench depth --shape gemma4-26b-a4b {DRAFTED.format('gemma4-26b-a4b-assistant', '5.3')} "
        "--depths 0,1,2,3,4,5,7 --concurrency 1,4 --output-len 384",
    ),
    Step(  # at a mean length that was published for it
        "depth-dflash", 150,
        f"bench depth --shape gemma4-26b-a4b {DRAFTED.format('gemma4-26b-a4b-dflash', '5.9')} "
        "--depths 0,3,7,15 --concurrency 1,4 --output-len 384",
    ),
    *(Step(f"doctor-{each}", 150, "doctor --device cuda") for each in ("first", "again")),  # the first compiles kernels
    *(Step(f"check-{kv}", 60, f"check --device cuda --kv {kv}") for kv in ("exact", "fp8", "turboquant")),
    Step("tune", 240, "tune --device cuda --minutes 3 --json"),
    *(Step(f"load-{form}", 120, f"tools/load_time.py --format {form}") for form in ("int4", "fp8")),
]  # fmt: skip


def with_tests() -> dict[str, str]:
    """Tools import the tests that lie beside them."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (".", os.environ.get("PYTHONPATH"))))}


def run(step: Step, folder: Path) -> str:
    """What came of it, in a few words; its output lies in the folder, under another name until it has ended."""
    begin, going = time.monotonic(), folder / f"{step.name}.part"
    with going.open("w") as file:
        file.write(f"$ {step.command}\n")
        file.flush()
        process = subprocess.Popen(
            step.arguments(), stdout=file, stderr=subprocess.STDOUT, env=with_tests(), start_new_session=True
        )
        try:
            status = process.wait(step.limit)
        except subprocess.TimeoutExpired:
            return f"ended after its limit of {step.limit} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started, which may hold the GPU's memory
    if status:
        return f"failed with {status} after {time.monotonic() - begin:.0f} s, see {going}"
    going.rename(folder / f"{step.name}.txt")
    return f"{time.monotonic() - begin:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for what each step prints")
    parser.add_argument("--only", default="", help="beginnings of names, with commas between them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all steps together")
    parser.add_argument("--list", action="store_true", help="print the steps, run none")
    args = parser.parse_args()
    chosen = [step for step in STEPS if step.name.startswith(tuple(args.only.split(",")))]
    if args.list or not args.out:
        for step in chosen:
            print(f"{step.name:20} {step.limit:4} s  {step.command}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    begin, bad = time.monotonic(), []
    for step in chosen:
        done = args.out / f"{step.name}.txt"
        if done.exists():
            continue
        if time.monotonic() - begin + step.limit > args.seconds:
            outcome = f"not begun: its {step.limit} s do not fit into the {args.seconds:.0f}"
        else:
            outcome = run(step, args.out)
        if not done.exists():
            bad.append(step.name)
        print(f"{step.name:20} {outcome}", flush=True)
    print("all ran" if not bad else f"without a result: {', '.join(bad)}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
