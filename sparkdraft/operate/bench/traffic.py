"""Requests as they arrive at a server: lengths drawn from ranges, arrivals drawn from a Poisson process, and what came
of them.

The same requests can be sent to a server (streaming.py) and to an engine in this process (in_process.py), so the ratio
of the two is what HTTP costs. Prompts are ids that are new in every run, so no prefix cache knows them. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from sparkdraft.core import UserError

IDS = (1_000, 30_000)  # ids of prompts: nearly all vocabularies have them, and few have control tokens among them
QUANTILES = (50, 90, 99)
LIMITS = ("ttft", "tpot", "e2el")  # vLLM's names: to the first token, per token after it, to the end
PER_STREAM, FEWEST = 8, 16  # requests, unless their number is given
MOST_WARM = 128  # requests of a warm-up
Answered = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A range of tokens, both ends included."""

    low: int
    high: int

    @classmethod
    def read(cls, flag: str, text: str, least: int = 1) -> Lengths:
        low, _, high = text.partition(":")
        high = high if ":" in text else low
        if not (low.isdecimal() and high.isdecimal() and least <= int(low) <= int(high)):
            raise UserError(f"{flag} is '{text}'; give a number from {least}, or a range such as 64:512")
        return cls(int(low), int(high))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class Planned:
    at: float  # seconds from the beginning until it arrives; 0 in a closed loop
    prompt: list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class Traffic:
    prompt_len: Lengths
    output_len: Lengths
    requests: int = 0  # 0: PER_STREAM per stream, and no fewer than FEWEST
    rate: float = math.inf  # requests a second, on average; inf: the next begins when one ends
    seed: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)  # what a request says, by SamplingParams' names
    limits: dict[str, float] = field(default_factory=dict)  # milliseconds by LIMITS

    def count(self, streams: int) -> int:
        return self.requests or max(FEWEST, PER_STREAM * streams)

    def plan(self, streams: int, vocab_size: int = IDS[1], warm: bool = False) -> list[Planned]:
        """Draw the requests. The same seed gives the same lengths and arrivals, and a longer plan begins like a shorter
        one. warm: others of the same kind, all there at once, two per stream."""
        lengths, arrivals = (np.random.default_rng([self.seed, warm, part]) for part in range(2))
        ids = np.random.default_rng()
        low, high = IDS if vocab_size >= IDS[1] else (0, vocab_size)
        planned, at = [], 0.0
        for _ in range(min(2 * streams, MOST_WARM) if warm else self.count(streams)):
            prompt_len = int(lengths.integers(self.prompt_len.low, self.prompt_len.high, endpoint=True))
            output_len = int(lengths.integers(self.output_len.low, self.output_len.high, endpoint=True))
            planned.append(Planned(at, ids.integers(low, high, prompt_len).tolist(), output_len))
            at += 0.0 if warm or math.isinf(self.rate) else float(arrivals.exponential(1 / self.rate))
        return planned

    def as_dict(self) -> dict[str, Any]:
        rate = None if math.isinf(self.rate) else self.rate
        lengths = {"prompt_len": str(self.prompt_len), "output_len": str(self.output_len)}
        return asdict(self) | lengths | {"rate": rate}


def read_limits(texts: Sequence[str]) -> dict[str, float]:
    """Read `ttft:150 tpot:20`, in milliseconds."""
    found = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = math.nan
        if name not in LIMITS or not found[name] > 0:
            raise UserError(
                f"--goodput has '{text}'; give milliseconds for any of {', '.join(LIMITS)}: ttft:150 tpot:20"
            )
    return found


# ---- what came of them


@dataclass(slots=True)
class Record:
    """A request as its client saw it, in seconds of one clock."""

    began: float  # when it was sent, or added to the engine
    pieces: list[float] = field(default_factory=list)  # when each piece of text arrived
    ended: float = 0.0
    tokens: int = 0
    error: str = ""

    @property
    def first(self) -> float:
        return self.pieces[0] - self.began

    @property
    def per_token(self) -> float:
        """Seconds per token after the first."""
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.pieces)]

    def meets(self, limits: dict[str, float]) -> bool:
        """Whether a request that did not fail was within the limits."""
        took = {"ttft": self.first, "tpot": self.per_token, "e2el": self.ended - self.began}
        return all(1e3 * took[name] <= limit for name, limit in limits.items())


def figures(records: Sequence[Record], seconds: float, streams: int, limits: dict[str, float]) -> dict[str, Any]:
    """One row of the table. A failed request counts as an error and in nothing else."""
    good = [record for record in records if not record.error]
    errors = [record.error for record in records if record.error]
    tokens = sum(record.tokens for record in good)
    met = sum(record.meets(limits) for record in good)
    return {
        "streams": streams,
        "requests": len(records),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "tokens": tokens,
        "seconds": seconds,
        "tok_s": tokens / seconds,
        "requests_s": len(good) / seconds,
        "ttft_ms": percentiles([record.first for record in good]),
        "itl_ms": percentiles([gap for record in good for gap in record.gaps]),
        "tpot_ms": percentiles([record.per_token for record in good if record.tokens > 1]),
        "e2el_ms": percentiles([record.ended - record.began for record in good]),
        "goodput_s": met / seconds if limits else None,
        "good_share": met / len(records) if limits else None,
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """In milliseconds; None if there is nothing."""
    if not seconds:
        return None
    return {f"p{q}": 1e3 * float(value) for q, value in zip(QUANTILES, np.percentile(seconds, QUANTILES), strict=True)}


# ---- the table


HEADS = ("streams", "requests", "tok/s", "first token ms p50 / p90 / p99", "between ms p50 / p90 / p99")


def markdown(title: str, traffic: Traffic, rows: Sequence[dict[str, Any]]) -> str:
    goodput = ["within limits a second", "share"] if traffic.limits else []
    heads = [*HEADS, *goodput, "errors"]
    lines = [f"{title}. {describe(traffic)}", "", _line(heads), _line(["---:"] * len(heads))]
    return "\n".join([*lines, *(_line(_cells(row)) for row in rows)])


def describe(traffic: Traffic) -> str:
    arrive = "the next request begins when one ends"
    if not math.isinf(traffic.rate):
        arrive = f"requests arrive at {traffic.rate:g} a second (Poisson)"
    limits = ", ".join(f"{name} {limit:g} ms" for name, limit in traffic.limits.items())
    within = f"; limits: {limits}" if limits else ""
    lengths = f"Prompts of {traffic.prompt_len} random ids, answers of {traffic.output_len} tokens"
    return f"{lengths}; {arrive}; {how_sampled(traffic.sampling)}; seed {traffic.seed}{within}."


def how_sampled(sampling: dict[str, Any]) -> str:
    greedy = [] if sampling.get("temperature") else ["greedy"]
    return ", ".join([*greedy, *(f"{name} {value:g}" for name, value in sampling.items())])


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [str(row["streams"]), str(row["requests"]), f"{row['tok_s']:.1f}", _three(row["ttft_ms"], 0)]
    cells.append(_three(row["itl_ms"], 1))
    if row["goodput_s"] is not None:
        cells += [f"{row['goodput_s']:.2f}", f"{row['good_share']:.0%}"]
    return [*cells, str(row["errors"])]


def _three(values: dict[str, float] | None, digits: int) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values.values()) if values else "-"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
