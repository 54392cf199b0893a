"""Drafters of the embedded model side by side: each built-in prompt is written with every one of them in turn.

    python tools/compare_drafters.py auto ./another-drafter --per-class 12 --output-len 128

A machine's speed drifts by more than drafters differ, so runs one after the other do not tell them apart; here the
drift is the same for all. One stream, greedy, depth as the engine chooses; "auto" is the drafter in the package. Each
one's share of plain decoding is beside its speed. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json

from sparkdraft import LLM, SamplingParams
from sparkdraft.operate.bench.accept import ALL, Pace, add_to, chat_prompts, pace, read_prompts

WARM = ["Why is the sky blue?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafters", nargs="+", help="folders, or auto")
    parser.add_argument("--per-class", type=int, default=12, help="prompts of each class, 0: all (default 12)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens a prompt (default 128)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    args = parser.parse_args()
    llms = {name: LLM("smollm2", drafter=name, device=args.device) for name in args.drafters}
    params, classes = SamplingParams(args.output_len), read_prompts(args.per_class)
    first = next(iter(llms.values()))
    for llm in llms.values():
        pace(llm, params, chat_prompts(llm, WARM), lambda more: None)
    found = {name: {kind: Pace() for kind in (*classes, ALL)} for name in llms}
    for kind, texts in classes.items():
        for ids in chat_prompts(first, texts):
            for name, llm in llms.items():
                one = pace(llm, params, [ids], lambda more: None)
                for total in (found[name][kind], found[name][ALL]):
                    add_to(total, one)
        print(f"{kind:<9}" + "".join(f"  {shown(found[name][kind])}" for name in llms), flush=True)
    print(f"{ALL:<9}" + "".join(f"  {shown(found[name][ALL])}" for name in llms))
    rows = {name: {kind: each.as_dict() for kind, each in kinds.items()} for name, kinds in found.items()}
    print(json.dumps({"bench": "compare_drafters", "device": first.plan.device, "drafters": rows}))


def shown(each: Pace) -> str:
    facts = each.as_dict()
    return f"{facts['auto_tok_s']:8.1f} tok/s {facts['ratio']:5.2f} of plain"


if __name__ == "__main__":
    main()
