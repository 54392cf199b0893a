"""Reads a long prompt while others decode: the gaps in their text, and how much longer the prompt takes.

It runs the engine without a server. A gap is the time between two steps that gave a stream something. The prefix cache
must be off, because each prompt must be read anew.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from sparkdraft.core import SamplingParams, UserError
from sparkdraft.engine.engine import Engine
from sparkdraft.llm import LLM
from sparkdraft.operate.bench.prompts import chat_prompts, read_prompts

SETTLE = 16  # tokens that each stream writes before its gaps count
BEFORE = 24  # steps without the long prompt, for comparison
QUESTION = "Which of these events came first?"


@dataclass(frozen=True, slots=True)
class Gaps:
    """Seconds between the outputs of each stream, over all streams."""

    seconds: list[float]

    def as_dict(self) -> dict[str, float]:
        return {"median_ms": 1e3 * self.median, "largest_ms": 1e3 * self.largest, "count": len(self.seconds)}

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def largest(self) -> float:
        return max(self.seconds)


@dataclass(frozen=True, slots=True)
class Beside:
    """The time to the prompt's first token, and the gaps of the streams before and meanwhile."""

    first: float  # seconds to the prompt's first token
    before: Gaps
    during: Gaps


class LongPrompt:
    def __init__(self, llm: LLM, streams: int = 8, prompt_len: int = 3800) -> None:
        """prompt_len: tokens of ordinary text in the prompt; the template and a question come on top."""
        assert not llm.plan.prefix_cache, "the prompt would be found, not read"
        self.engine = llm.engine
        if streams >= llm.plan.max_seqs:
            raise UserError(
                f"{streams} streams and the prompt do not run at once; {llm.plan.max_seqs} requests do: "
                "ask for fewer streams, or raise --max-seqs"
            )
        self.prompt = chat_prompts(llm, [QUESTION], prompt_len)[0]
        self.others = chat_prompts(llm, list(islice(cycle(read_prompts(0)["prose"]), streams)))

    def alone(self) -> float:
        """Return the seconds to the prompt's first token in an engine that does nothing else."""
        begin, name = time.perf_counter(), self._add_prompt()
        while not any(output.request_id == name for output in self.engine.step()):
            pass
        seconds = time.perf_counter() - begin
        self._end([name])
        return seconds

    def beside(self) -> Beside:
        """Measure the same while the streams decode."""
        room = self.engine.plan.max_model_len - max(map(len, self.others))
        params = SamplingParams(max_tokens=room, ignore_eos=True)
        watch = _Watch(self.engine, [self.engine.add(ids, params) for ids in self.others])
        while watch.fewest < SETTLE:
            watch.step()
        watch.gaps.clear()
        for _ in range(BEFORE):
            watch.step()
        before, watch.gaps = Gaps(watch.gaps), []
        begin, name = time.perf_counter(), self._add_prompt()
        while name not in watch.step():
            pass
        seconds = time.perf_counter() - begin
        self._end([name, *watch.last])
        return Beside(seconds, before, Gaps(watch.gaps))

    def _add_prompt(self) -> str:
        return self.engine.add(self.prompt, SamplingParams(max_tokens=8, ignore_eos=True))

    def _end(self, names: list[str]) -> None:
        for name in names:
            self.engine.abort(name)
        self.engine.step()  # returns their ends


class _Watch:
    """Steps an engine and records when each stream got something."""

    def __init__(self, engine: Engine, names: list[str]) -> None:
        self.engine = engine
        self.last = dict.fromkeys(names, 0.0)
        self.written = dict.fromkeys(names, 0)
        self.gaps: list[float] = []
        self._preempted = engine.scheduler.num_preempted

    @property
    def fewest(self) -> int:
        return min(self.written.values())

    def step(self) -> set[str]:
        """Return the requests that got something. Raises UserError if a stream ended or had to wait for memory."""
        outputs, now = self.engine.step(), time.perf_counter()
        ended = any(output.finish and output.request_id in self.last for output in outputs)
        if ended or self.engine.scheduler.num_preempted > self._preempted:
            plan = self.engine.plan
            raise UserError(
                f"not all streams ran on until the prompt was read: the context holds {plan.max_model_len} tokens and "
                f"the KV cache {plan.num_blocks * plan.block_size}; ask for fewer streams or a shorter prompt"
            )
        for output in outputs:
            name = output.request_id
            if name in self.last:
                if self.written[name]:
                    self.gaps.append(now - self.last[name])
                self.last[name] = now
                self.written[name] += len(output.ids)
        return {output.request_id for output in outputs}


def summary(alone: list[float], beside: list[Beside], target: float, prompt_tokens: int) -> dict[str, Any]:
    """Return medians over the runs, and the largest gap of all runs."""
    before = Gaps([gap for each in beside for gap in each.before.seconds])
    during = Gaps([gap for each in beside for gap in each.during.seconds])
    first_alone, first_beside = statistics.median(alone), statistics.median(each.first for each in beside)
    return {
        "prompt_tokens": prompt_tokens,
        "first_token_alone_s": first_alone,
        "first_token_beside_s": first_beside,
        "first_token_ratio": first_beside / first_alone,
        "gaps_before": before.as_dict(),
        "gaps_during": during.as_dict(),
        "step_target_ms": 1e3 * target,
        "largest_gap_of_target": during.largest / target,
        "median_gap_of_target": during.median / target,
    }
