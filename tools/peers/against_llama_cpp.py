"""Decode speed of Sparkdraft, plain and drafted, and of llama.cpp on the same file, threads and prompt, in one run.

    pip install llama-cpp-python          # compiles llama.cpp; not a dependency of the project
    python tools/peers/against_llama_cpp.py [--threads 2] [--tokens 128] [--rounds 3]

Rounds alternate between them, so that a busy machine is unfair to all; the best round of each counts. Greedy, one
stream; time runs from the first token to the last. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from sparkdraft import LLM, SamplingParams
from sparkdraft.weights import hub

PROMPT = "Write a Python function `is_subsequence(s, t)` that returns True if s is a subsequence of t."


def ours(threads: int, spec: str) -> Callable[[int], float]:
    llm = LLM("smollm2", threads=threads, spec=spec)
    ids = llm.chat_ids([{"role": "user", "content": PROMPT}])

    def run(tokens: int) -> float:
        times, count = [], []
        for piece in llm.stream(ids, SamplingParams(max_tokens=tokens, ignore_eos=True)):
            times.append(time.perf_counter())
            count.append(len(piece.ids))
        return sum(count[1:]) / (times[-1] - times[0])

    return run


def llama_cpp(path: Path, threads: int) -> Callable[[int], float]:
    from llama_cpp import Llama

    model = Llama(str(path), n_threads=threads, n_threads_batch=threads, n_ctx=2048, verbose=False)
    text = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    ids = model.tokenize(text.encode(), add_bos=False, special=True)

    def run(tokens: int) -> float:
        model.reset()
        times = []
        for _ in model.generate(ids, temp=0.0):
            times.append(time.perf_counter())
            if len(times) == tokens:
                return (len(times) - 1) / (times[-1] - times[0])
        raise RuntimeError("llama.cpp stopped early")

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    path = hub.fetch("smollm2")
    engines = {
        "plain": ours(args.threads, "off"),
        "drafted": ours(args.threads, "auto"),
        "llama.cpp": llama_cpp(path, args.threads),
    }
    best = dict.fromkeys(engines, 0.0)
    for number in range(args.rounds):
        for name, run in engines.items():
            speed = run(args.tokens)
            best[name] = max(best[name], speed)
            print(f"round {number + 1}: {name:<10} {speed:6.1f} tok/s", flush=True)
    ratios = {name: round(best[name] / best["llama.cpp"], 3) for name in ("plain", "drafted")}
    print(f"plain is {ratios['plain']:.2f} and drafted {ratios['drafted']:.2f} times llama.cpp")
    speeds = {name: round(speed, 1) for name, speed in best.items()}
    print(json.dumps({"bench": "llama_cpp", "threads": args.threads, "tok_s": speeds, "ratios": ratios}))


if __name__ == "__main__":
    main()
