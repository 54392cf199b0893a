"""A chat of ten turns, each answer written plainly and with drafts: does drafting stay ahead as the context grows?

    python tools/chat_turns.py                      the embedded model and its drafter, about three minutes on two cores
    python tools/chat_turns.py --drafter FOLDER     another drafter

Greedy, so both ways write the same text; they take turns in going first. Seconds count from an answer's first token to
its last. "CPU" is the same ratio in seconds of processor time, which other programs on the machine disturb less. Ends
in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time

from sparkdraft import LLM, SamplingParams
from sparkdraft.core import AUTO
from sparkdraft.operate.bench.prompts import read_prompts

Timed = tuple[list[int], float, float]  # ids, seconds, seconds of processor time


def answer(llm: LLM, ids: list[int], num_draft: int, max_tokens: int) -> Timed:
    written: list[int] = []
    begin, cpu = 0.0, 0.0
    for piece in llm.stream(ids, SamplingParams(max_tokens, num_draft=num_draft)):
        if not written:
            begin, cpu = time.perf_counter(), time.process_time()
        written += piece.ids
    return written, time.perf_counter() - begin, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", default="auto", help="a folder (default: the embedded one)")
    parser.add_argument("--turns", type=int, default=10, help="default 10")
    parser.add_argument("--max-tokens", type=int, default=384, help="of an answer (default 384)")
    args = parser.parse_args()
    llm = LLM("smollm2", device="cpu", drafter=args.drafter, max_seqs=1)
    classes = list(read_prompts(0).values())
    asked = [classes[i % len(classes)][i // len(classes)] for i in range(args.turns)]
    messages: list[dict[str, str]] = []
    totals, turns = [0.0] * 4, []
    print("turn  context  tokens  plain tok/s  drafted tok/s  ratio    CPU")
    for turn, prompt in enumerate(asked):
        messages.append({"role": "user", "content": prompt})
        ids, found = llm.chat_ids(messages), dict[int, Timed]()
        for num_draft in ((0, AUTO), (AUTO, 0))[turn % 2]:
            found[num_draft] = answer(llm, ids, num_draft, args.max_tokens)
        (plain, seconds, cpu), (drafted, auto_seconds, auto_cpu) = found[0], found[AUTO]
        assert plain == drafted, "drafts changed the text"
        count = len(plain) - 1
        times = [seconds, auto_seconds, cpu, auto_cpu]
        totals = [a + b for a, b in zip(totals, times, strict=True)]
        ratio, cpu_ratio = seconds / max(auto_seconds, 1e-9), cpu / max(auto_cpu, 1e-9)
        speeds = f"{count / max(seconds, 1e-9):11.1f}  {count / max(auto_seconds, 1e-9):13.1f}"
        print(f"{turn + 1:4}  {len(ids):7}  {count:6}  {speeds}  {ratio:5.2f}  {cpu_ratio:5.2f}", flush=True)
        turns.append({"context": len(ids), "tokens": count, "ratio": round(ratio, 3), "cpu_ratio": round(cpu_ratio, 3)})
        messages.append({"role": "assistant", "content": llm.tokenizer.decode(plain)})
    whole = {"ratio": round(totals[0] / totals[1], 3), "cpu_ratio": round(totals[2] / totals[3], 3)}
    print(json.dumps({"bench": "chat_turns", "drafter": args.drafter, **whole, "turns": turns}))


if __name__ == "__main__":
    main()
