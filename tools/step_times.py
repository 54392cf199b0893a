"""Where the time of the embedded model's steps goes, over real requests that come and go. For each kind of step it
prints how often it ran, the milliseconds from the read before to its own, those that the host spent on it in each part,
and the tokens that it wrote. On a GPU the host's parts overlap with the device, and 'read' waits for it.

    python tools/step_times.py [--streams 64] [--spec auto] [--device cuda] [--temperature 0.6] [--trace steps.json]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from sparkdraft.config import NO_PROFILE
from sparkdraft.core import Batch, SamplingParams, StepOutput
from sparkdraft.engine.steps import StepRead
from sparkdraft.llm import LLM
from sparkdraft.operate.bench.check_speed.sides import whole_requests

BEFORE, AFTER = ("depths", "schedule", "launch"), ("read", "commit")


class Watch:
    """Times the parts of an engine's steps. A part inside another is taken out of it."""

    def __init__(self, llm: LLM) -> None:
        engine = llm.engine
        self._now = defaultdict[str, float](float)  # seconds by part, in this call of Engine.step
        self._sums = defaultdict[str, dict[str, float]](lambda: defaultdict(float))  # by kind of step
        self._inner, self._last = [0.0], time.perf_counter()
        self._unread = deque[str]()  # the kinds of steps that were launched
        self._launched = self._read = ""  # in this call
        places = (engine.drafting, "depths"), (engine, "_schedule"), (engine.steps, "launch"), (engine.steps, "read")
        for part, (owner, name) in zip((*BEFORE, *AFTER), (*places, (engine, "_commit")), strict=True):
            setattr(owner, name, self._timed(part, getattr(owner, name)))
        launch, read, step, abandon = engine.steps.launch, engine.steps.read, engine.step, engine.steps.abandon

        def launched(batch: Batch) -> None:
            kind = ["prompts"] if batch.num_prompt_rows else []
            if any(work.decodes for work in batch.work):
                kind.append("drafted" if any(work.most_drafts for work in batch.work) else "plain")
            self._launched = " ".join(kind)
            self._unread.append(self._launched)
            launch(batch)

        def was_read() -> StepRead:
            self._read = self._unread.popleft()
            return read()

        def forgotten() -> None:
            self._unread.clear()
            abandon()

        def stepped() -> list[StepOutput]:
            self._now.clear()
            self._launched = self._read = ""
            outputs = step()
            now = time.perf_counter()
            if self._launched:
                self._add(self._launched, BEFORE)
            if self._read:
                self._now |= {"steps": 1, "between": now - self._last, "tokens": sum(len(o.ids) for o in outputs)}
                self._add(self._read, (*AFTER, "steps", "between", "tokens"))
            self._last = now
            return outputs

        for owner, name, call in (
            (engine.steps, "launch", launched),
            (engine.steps, "read", was_read),
            (engine.steps, "abandon", forgotten),
            (engine, "step", stepped),
        ):
            setattr(owner, name, call)

    def _add(self, kind: str, names: tuple[str, ...]) -> None:
        for name in names:
            self._sums[kind][name] += self._now[name]

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            self._inner.append(0.0)
            try:
                return call(*args)
            finally:
                took = time.perf_counter() - begin
                self._now[part] += took - self._inner.pop()
                self._inner[-1] += took

        return timed

    def table(self) -> str:
        parts = (*BEFORE, *AFTER)
        lines = [f"{'kind of step':16} steps  share  between  {'  '.join(f'{part:>8}' for part in parts)}  tokens"]
        total = sum(sums["between"] for sums in self._sums.values())
        for kind, sums in sorted(self._sums.items(), key=lambda item: -item[1]["between"]):
            count = max(sums["steps"], 1)
            means = "  ".join(f"{1e3 * sums[part] / count:8.3f}" for part in parts)
            share, between = sums["between"] / total, 1e3 * sums["between"] / count
            lines.append(
                f"{kind:16} {sums['steps']:5.0f} {share:6.1%} {between:8.3f}  {means}  {sums['tokens'] / count:6.1f}"
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
