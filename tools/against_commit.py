"""Compares the speed of this checkout with another one's, in turn on the same machine, so that a change of structure
shows whether it cost anything.

    git worktree add /tmp/before v0.1.0
    python tools/against_commit.py /tmp/before                    the embedded model on a CPU, two minutes
    python tools/against_commit.py /tmp/before --device cuda      shapes with random weights, five minutes on an H200
    python tools/against_commit.py /tmp/before --only int4        loads whose names begin so

Each load is one `bench offline` of either checkout, --rounds times; the faster run of each counts. It prints tokens per
second of both and their ratio, and ends in a line of JSON; status 1 if a ratio is below --least.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
DRAFTED = "--drafter-shape {} --synthetic-acceptance 6.5"
LOADS = {
    "cpu": {
        "plain": "--concurrency 1,4",
        "drafted": "--spec 7 --concurrency 1,4",
    },
    "cuda": {
        "8b": "--shape qwen3-8b --concurrency 1,16",
        "8b-drafted": f"--shape qwen3-8b {DRAFTED.format('dflash-5x')} --concurrency 1,16",
        "int4": "--shape qwen3-8b --shape-weights int4 --concurrency 1,16",
        "experts": "--shape qwen3-30b-a3b --concurrency 1,16",
        "gpt-oss": "--shape gpt-oss-20b --concurrency 1,16",
        "hybrid": "--shape qwen3.5-27b --concurrency 1,16",
        "turboquant": "--shape qwen3-8b --kv turboquant --concurrency 1,16",
    },
}


def measured(root: Path, load: str, device: str) -> dict[str, float]:
    """Decoded tokens per second by streams."""
    lengths = "--prompt-len 256 --output-len 128"
    command = [*f"-m sparkdraft.cli.main bench offline --device {device} {lengths} {load}".split()]
    ran = subprocess.run(
        [sys.executable, *command], cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    if ran.returncode:
        raise SystemExit(f"{root}: {load}: {ran.stderr[-500:]}")
    rows = json.loads(ran.stdout.splitlines()[-1])["rows"]
    return {f"{row['streams']} streams": row["decode_tok_s"] for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the folder of the other checkout")
    parser.add_argument("--device", choices=LOADS, default="cpu")
    parser.add_argument("--only", default="", help="beginnings of names, with commas between them")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--least", type=float, default=0.98, help="the lowest ratio that is accepted (default 0.98)")
    args = parser.parse_args()
    roots = {"this": HERE, "other": args.other.resolve()}
    ratios = {}
    print(f"{'load':28}{'other':>10}{'this':>10}{'ratio':>8}")
    for name, load in LOADS[args.device].items():
        if not name.startswith(tuple(args.only.split(","))):
            continue
        best: dict[str, dict[str, float]] = {which: {} for which in roots}
        for turn in range(args.rounds):
            for which in sorted(roots, reverse=bool(turn % 2)):
                for key, speed in measured(roots[which], load, args.device).items():
                    best[which][key] = max(speed, best[which].get(key, 0.0))
        for key, speed in best["this"].items():
            ratios[f"{name}, {key}"] = ratio = speed / best["other"][key]
            print(f"{f'{name}, {key}':28}{best['other'][key]:10.1f}{speed:10.1f}{ratio:8.3f}", flush=True)
    print(json.dumps({"device": args.device, "ratios": {key: round(ratio, 4) for key, ratio in ratios.items()}}))
    return int(min(ratios.values()) < args.least)


if __name__ == "__main__":
    sys.exit(main())
