"""Compares the memory that a plan counts for the embedded model on a CPU with what its process takes in the end.

Prompts without a word in common fill the KV cache, then texts of 1 to 16 streams make recordings. What the process
holds alone (its unique set) is compared with what it held before the model was loaded, when all had been imported. It
ends in a line of JSON.

    python tools/plan_memory.py                         four minutes on two cores
    python tools/plan_memory.py --spec auto             the engine chooses how many drafts
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch

import sparkdraft.engine.build
import sparkdraft.kernels.native  # noqa: F401
from sparkdraft import LLM, SamplingParams

CONTEXT, STREAMS = 4096, (1, 2, 3, 5, 8, 11, 16)


def held() -> int:
    """Bytes that are this process's alone."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(size) << 10 for size in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kv-tokens", type=int, default=65536)
    parser.add_argument("--spec", default="15", help="drafts per step (default 15: the most memory)")
    args = parser.parse_args()
    tokens = args.kv_tokens
    before = held()
    llm = LLM("smollm2", device="cpu", kv_tokens=tokens, max_model_len=CONTEXT, spec=args.spec)
    plan, rng = llm.engine.plan.memory, torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 40000, (tokens // CONTEXT, CONTEXT - 18), generator=rng).tolist()
    llm.generate(ids, SamplingParams(16, ignore_eos=True))
    for streams in STREAMS:
        asked = [each[:40] for each in (ids * max(STREAMS))[:streams]]
        llm.generate(asked, SamplingParams(48, ignore_eos=True))
    taken = held() - before
    print(f"planned {plan.total / 2**20:.0f} MiB, taken {taken / 2**20:.0f} MiB ({taken / plan.total:.1%})")
    print(json.dumps({"bench": "plan_memory", "kv_tokens": tokens, "planned": plan.total, "taken": taken}))


if __name__ == "__main__":
    main()
