"""What HTTP costs a published shape with random weights: the same closed loop of requests over HTTP and in the engine's
process, greedy, sampled and penalised, with lengths drawn from ranges.

    python tools/http_share.py [--shape qwen3-8b] [--drafter-shape dflash-5x] [--device cuda] [--streams 1,16,64]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from sparkdraft.operate.bench.check_speed.served import COMMAND, serving

SAMPLED = ("--temperature", "0.6", "--top-p", "0.95", "--top-k", "20")
SAMPLINGS = {"greedy": (), "sampled": SAMPLED, "penalised": (*SAMPLED, "--presence-penalty", "1.5")}
PROMPT, OUTPUT = "64:512", "100:300"  # tokens


def rows(command: list[str]) -> list[dict[str, Any]]:
    said = subprocess.run([*COMMAND, "bench", *command], stdout=subprocess.PIPE, check=True).stdout
    return list(json.loads(said.splitlines()[-1])["rows"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--drafter-shape", default="", help="it is always wrong, because its weights are random too")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", default="1,16,64")
    parser.add_argument("--requests", type=int, default=0, help="per number of streams (default: 8 per stream)")
    parser.add_argument("--prompt-len", default=PROMPT)
    parser.add_argument("--output-len", default=OUTPUT)
    args = parser.parse_args()
    loop = ["--concurrency", args.streams, "--prompt-len", args.prompt_len, "--output-len", args.output_len]
    loop += ["--requests", str(args.requests)]
    engine = ["--shape", args.shape, "--device", args.device, "--max-seqs", str(max(map(int, args.streams.split(","))))]
    engine += ["--drafter-shape", args.drafter_shape, "--spec", "auto"] if args.drafter_shape else ["--spec", "off"]
    print("requests    streams  tok/s over HTTP  in process  share  first token ms p50 / p99 over HTTP", flush=True)
    served = {}
    with serving(*engine) as url:
        for name, flags in SAMPLINGS.items():
            served[name] = rows(["serve", "--url", url, *loop, *flags])
    for name, flags in SAMPLINGS.items():
        for over, inside in zip(served[name], rows(["offline", *engine, *loop, *flags]), strict=True):
            first = over["ttft_ms"]
            print(
                f"{name:10} {over['streams']:8} {over['tok_s']:16.1f} {inside['tok_s']:11.1f}"
                f"  {over['tok_s'] / inside['tok_s']:5.1%}  {first['p50']:.0f} / {first['p99']:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
