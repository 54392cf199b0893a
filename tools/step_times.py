"""Where the time of the embedded model's steps goes, over real requests that come and go: for each kind of step how
often it ran, the milliseconds from one step's read to the next, those that the host spent in each part, and the tokens
written. On a GPU the host's parts overlap with the device, except for 'read', which waits for it.

    python tools/step_times.py [--streams 64] [--spec auto] [--device cuda] [--temperature 0.6] [--trace steps.json]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from sparkdraft.config import NO_PROFILE
from sparkdraft.core import Batch, SamplingParams
from sparkdraft.llm import LLM
from sparkdraft.operate.bench.check_speed.sides import whole_requests

PARTS = ("depths", "schedule", "launch", "read", "commit")


class Watch:
    """Times the parts of an engine's steps. Parts inside others are taken out of them."""

    def __init__(self, llm: LLM) -> None:
        engine = llm.engine
        self.now: dict[str, float] = defaultdict(float)
        self.kinds: dict[str, list[dict[str, float]]] = defaultdict(list)
        self._kind, self._inner, self._last = "", [0.0], 0.0
        places = (engine.drafting, "depths"), (engine, "_schedule"), (engine.steps, "launch"), (engine.steps, "read")
        for part, (owner, name) in zip(PARTS, (*places, (engine, "_commit")), strict=True):
            setattr(owner, name, self._timed(part, getattr(owner, name)))
        launch, step = engine.steps.launch, engine.step

        def named(batch: Batch) -> None:
            drafts, prompts = sum(work.most_drafts > 0 for work in batch.work), batch.num_prompt_rows > 0
            decoding = sum(work.decodes for work in batch.work)
            self._kind = " ".join(
                (["prompts"] if prompts else []) + (["drafted"] if drafts else ["plain"]) * bool(decoding)
            )
            launch(batch)

        def counted() -> Any:
            self.now.clear()
            outputs = step()
            now = time.perf_counter()
            self.now |= {"between": now - self._last if self._last else 0.0, "tokens": sum(len(o.ids) for o in outputs)}
            self._last = now
            self.kinds[self._kind or "none"].append(dict(self.now))
            return outputs

        engine.steps.launch, engine.step = named, counted  # type: ignore[method-assign]

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            self._inner.append(0.0)
            try:
                return call(*args)
            finally:
                took = time.perf_counter() - begin
                self.now[part] += took - self._inner.pop()
                self._inner[-1] += took

        return timed

    def table(self) -> str:
        lines = [f"{'kind of step':18} steps  share  between  {'  '.join(f'{part:>8}' for part in PARTS)}  tokens"]
        total = sum(step["between"] for steps in self.kinds.values() for step in steps)
        for kind, steps in sorted(self.kinds.items(), key=lambda item: -len(item[1])):
            means = {name: sum(s.get(name, 0.0) for s in steps) / len(steps) for name in ("between", *PARTS, "tokens")}
            parts = "  ".join(f"{1e3 * means[part]:8.3f}" for part in PARTS)
            share = means["between"] * len(steps) / total
            lines.append(
                f"{kind:18} {len(steps):5} {share:6.1%} {1e3 * means['between']:8.3f}  {parts}  {means['tokens']:6.1f}"
            )
        return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--spec", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--requests", type=int, default=0, help="default: 4 per stream")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--trace", default="", metavar="FILE", help="write a trace of the run for chrome://tracing")
    args = parser.parse_args()
    llm = LLM(
        "smollm2", device=args.device, spec=args.spec, max_seqs=args.streams, prefix_cache=False, profile=NO_PROFILE
    )
    params = SamplingParams(args.output_len, temperature=args.temperature, top_p=0.95, top_k=20)
    requests = args.requests or 4 * args.streams
    whole_requests(llm, args.streams, requests, params)  # captures what comes up
    watch = Watch(llm)
    with torch.profiler.profile() if args.trace else nullcontext() as profile:
        speed = whole_requests(llm, args.streams, requests, params)["tok_s"]
    if args.trace:
        profile.export_chrome_trace(args.trace)
    print(f"{args.streams} streams, --spec {args.spec}, temperature {args.temperature:g}: {speed:.1f} tok/s\n")
    print(watch.table() + "\n\nmilliseconds, means")


if __name__ == "__main__":
    main()
