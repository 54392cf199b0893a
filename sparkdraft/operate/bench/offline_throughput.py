"""Tokens per second of whole requests: the tokens written over all the time they took, prompts included.

A fixed number of requests runs at once; when one ends the next begins, until all have ended. A server is loaded in this
way, and `vllm bench throughput` counts so too: compare this figure with a server's. offline.py measures the cost of a
step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from sparkdraft.core import SamplingParams
from sparkdraft.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Throughput:
    requests: int
    tokens: int  # tokens written
    seconds: float
    first: list[float]  # seconds from each request's beginning to its first token

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


def throughput(engine: Engine, requests: Iterable[tuple[list[int], SamplingParams]], streams: int) -> Throughput:
    """Run these requests, 'streams' at once, in an engine that does nothing else. The iterable is read as they
    begin."""
    coming, running, tokens = iter(requests), set[str](), 0
    began, first = dict[str, float](), dict[str, float]()
    begin = time.perf_counter()
    while True:
        for prompt, params in islice(coming, streams - len(running)):
            name = engine.add(prompt, params)
            running.add(name)
            began[name] = time.perf_counter()
        if not running:
            seconds = [first[name] - began[name] for name in began]
            return Throughput(len(began), tokens, time.perf_counter() - begin, seconds)
        for output in engine.step():
            tokens += len(output.ids)
            first.setdefault(output.request_id, time.perf_counter())
            if output.finish:
                running.discard(output.request_id)
