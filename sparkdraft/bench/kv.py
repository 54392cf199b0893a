"""Measures what a KV format costs and brings: memory, distance from the exact cache, decode speed.

Held-out texts of several kinds (heldout/, written for this project) are each read by the engine as one context, prompt
rows only: a row reads earlier rows by its position, as in decoding. Whole distributions are compared row by row. Of the
exact cache the last residuals are kept, a few megabytes per text, and the head computes their logits again beside each
format's own; the logits themselves would take hundreds of megabytes. cli/bench_kv.py loads models and prints.
"""

from __future__ import annotations

import gc
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkdraft.bench.offline import WARM_STEPS, Bench, Counted, Load, Report
from sparkdraft.core import SamplingParams, TokenLogprob, UserError, Work
from sparkdraft.engine.engine import Engine
from sparkdraft.llm import LLM
from sparkdraft.models.config import ModelConfig
from sparkdraft.plan.resolve import Plan
from sparkdraft.plan.sizes import kv_bytes_per_token
from sparkdraft.text.tokenizer import Tokenizer
from sparkdraft.weights.loader import Progress

HELDOUT = Path(__file__).with_name("heldout")
KINDS = ("prose", "code", "dialogue")  # kinds of texts, which are the names of their files
EXACT = "exact"
NOTATION = (
    "exact, fp8 or k<key bits>v<value bits>, 2 to 5 of each, such as k4v3; then -full, which codes all rows, "
    "and -uncentred, which leaves mean keys in: k4v3-full-uncentred"
)
CODED = re.compile(r"k([2-5])v([2-5])(-full)?(-uncentred)?")

# gets the prompt rows' last residuals [rows, hidden] and their logits [rows, vocab]
See = Callable[[Tensor, Tensor], None]


# ---- formats


@dataclass(frozen=True, slots=True)
class Format:
    name: str  # in the notation above
    options: dict[str, Any]  # fields of EngineConfig

    @property
    def is_centred(self) -> bool:
        return bool(self.options["tq_centre"])


def parse_formats(text: str) -> list[Format]:
    """Parse a comma-separated list. The exact cache comes first, asked for or not: all others are compared with it."""
    names = dict.fromkeys([EXACT, *(part.strip() for part in text.split(","))])
    return [_parse_format(name) for name in names]


def _parse_format(name: str) -> Format:
    if name in (EXACT, "fp8"):
        return Format(name, {"kv": name, "tq_centre": True})
    found = CODED.fullmatch(name)
    if not found:
        raise UserError(f"--formats names '{name}'; a format is {NOTATION}")
    key_bits, value_bits, full, uncentred = found.groups()
    bits = {"tq_key_bits": int(key_bits), "tq_value_bits": int(value_bits)}
    mode = {"tq_mode": "full_tq" if full else "hybrid", "tq_centre": not uncentred}
    return Format(name, {"kv": "turboquant"} | bits | mode)


# ---- memory


@dataclass(frozen=True, slots=True)
class Memory:
    bytes_per_token: int
    bits_per_value: float
    tokens_per_gib: int  # of cache, without uncoded pages, which do not grow with it
    tokens_that_fit: int  # in what a plan may use, less weights, scratch and uncoded pages
    of_exact: float  # ratio to the exact cache's tokens


def memories(plans: Mapping[str, Plan], model: ModelConfig, fraction: float) -> dict[str, Memory]:
    """Memory by name of format. fraction: share of the free memory that may be used; the exact plan's free memory is
    used for all.

    The limits that a plan puts on its cache do not apply: they would hide what a smaller format brings.
    """
    exact, values = plans[EXACT].memory, kv_bytes_per_token(model.attention, itemsize=1)
    room = int(exact.free * fraction) - exact.weights - exact.scratch
    sizes = {name: plan.memory.kv // (plan.num_blocks * plan.block_size) for name, plan in plans.items()}
    fit = {name: max(room - plan.memory.pages, 0) // sizes[name] for name, plan in plans.items()}
    return {
        name: Memory(size, 8 * size / values, (1 << 30) // size, fit[name], fit[name] / max(fit[EXACT], 1))
        for name, size in sizes.items()
    }


# ---- distance from the exact cache


@dataclass(frozen=True, slots=True)
class Reading:
    """How one cache read one text, by position."""

    logprobs: Tensor  # float64 [rows], of the ids that follow
    kl: Tensor  # float64 [rows], nats

    @property
    def perplexity(self) -> float:
        return math.exp(-self.logprobs.mean())

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    def rise(self, exact: Reading) -> float:
        """The rise of the perplexity over the exact cache's, as a share."""
        return mean_rise([(self, exact)])


def mean_rise(pairs: Iterable[tuple[Reading, Reading]]) -> float:
    """The geometric mean of the perplexity ratios of (a reading, the exact cache's), less 1."""
    return math.expm1(statistics.fmean(float(exact.logprobs.mean() - own.logprobs.mean()) for own, exact in pairs))


def rise_by_position(
    readings: Mapping[str, Reading], exact: Mapping[str, Reading], width: int
) -> list[tuple[float, float]]:
    """(position, mean rise over the texts up to there), every 'width' positions and at the end."""
    lost = [exact[kind].logprobs - reading.logprobs for kind, reading in readings.items()]
    longest = max(map(len, lost))
    ends = [*range(width, longest, width), longest]
    return [(end, math.expm1(statistics.fmean(float(each[:end].mean()) for each in lost))) for end in ends]


def kl_by_position(readings: Iterable[Reading], width: int) -> list[tuple[float, float]]:
    """(middle of each stretch of 'width' positions, mean over the texts that reach it)."""
    kls = [reading.kl for reading in readings]
    stretches = range(0, max(map(len, kls)), width)
    return [
        (start + width / 2, float(torch.cat([kl[start : start + width] for kl in kls]).mean())) for start in stretches
    ]


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """The KL divergence of 'other' from 'exact' in nats, per row of logits [rows, vocab]."""
    log_p, log_q = exact.log_softmax(-1), other.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)  # negative values are rounding


def read_texts(tokenizer: Tokenizer, tokens: int) -> dict[str, list[int]]:
    """Kind -> the first 'tokens' ids of its text, or all of them."""
    texts = {kind: (HELDOUT / f"{kind}.txt").read_text(encoding="utf-8") for kind in KINDS}
    return {kind: tokenizer.encode(text, add_special=False)[:tokens] for kind, text in texts.items()}


class Comparison:
    """Reads texts through one cache after the other. The first is the exact one, with which the others are compared."""

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self.texts = texts
        self._exact: dict[str, Tensor] = {}  # [rows, hidden] per text

    def read(self, llm: LLM, progress: Progress) -> dict[str, Reading]:
        """Readings by kind of text."""
        done, total = 0, sum(len(ids) - 1 for ids in self.texts.values())

        def count(rows: int) -> None:
            nonlocal done
            done += rows
            progress(done, total)

        return {kind: self._read(llm, kind, ids, count) for kind, ids in self.texts.items()}

    def _read(self, llm: LLM, kind: str, ids: list[int], count: Callable[[int], None]) -> Reading:
        exact, logits_of, rows = self._exact.get(kind), llm.engine.runner.model.logits, 0
        residuals: list[Tensor] = []
        kl: list[Tensor] = []

        def see(residual: Tensor, logits: Tensor) -> None:
            nonlocal rows
            if exact is None:
                residuals.append(residual.clone())
                kl.append(torch.zeros(len(logits), dtype=torch.float64))
            else:
                kl.append(divergence(logits_of(exact[rows : rows + len(logits)]), logits).double().cpu())
            rows += len(logits)
            count(len(logits))

        with prompt_rows_shown(llm.engine, see):
            completion = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))[0].completions[0]
        if exact is None:
            self._exact[kind] = torch.cat(residuals)
        scores = [token.logprob for token in completion.prompt_logprobs or [] if token is not None]
        assert len(scores) == rows == len(ids) - 1, f"{len(scores)} scores of {rows} rows seen, {len(ids)} ids"
        return Reading(torch.tensor(scores, dtype=torch.float64), torch.cat(kl))


@contextmanager
def prompt_rows_shown(engine: Engine, see: See) -> Iterator[None]:
    """Within it, 'see' gets the prompt rows that the engine scores, in order, as it scores them."""
    runner, model = engine.runner, engine.runner.model
    score, logits = runner.prompt_logprobs, model.logits

    def shown(residual: Tensor) -> Tensor:
        found = logits(residual)
        see(residual, found)
        return found

    def scored(work: Work, first_row: int, top: int) -> list[TokenLogprob]:
        setattr(model, "logits", shown)  # noqa: B010  only while prompts are scored: sampled rows have logits too
        try:
            return score(work, first_row, top)
        finally:
            del model.logits  # back to the class's own method

    setattr(runner, "prompt_logprobs", scored)  # noqa: B010
    try:
        yield
    finally:
        del runner.prompt_logprobs


# ---- speed


@dataclass(frozen=True, slots=True)
class Speed:
    streams: int
    context: int
    decode_tok_s: float  # all streams together
    step_ms: float  # median
    floor_ms: float  # bytes that a step reads, including the format's own K/V, over measured bandwidth
    share: float  # floor over measured
    prefill_tok_s: float

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


class DecodeBench(Bench):
    """Measures decode speed alone: only the two passes of bench offline that this needs."""

    def decode(self, load: Load, report: Report) -> Speed:
        warm = min(load.output_len, WARM_STEPS)
        progress = Counted(report, warm + load.output_len)
        report(0, progress.total)
        self._run(load, warm, progress)
        measured = self._run(load, load.output_len)
        step, floor = statistics.median(measured.steps), sum(self.floor_bytes(load).values()) / self.ceilings.bandwidth
        tokens, prompts = measured.tokens / len(measured.steps), load.streams * load.prompt_len
        speeds = (tokens / step, step * 1e3, floor * 1e3, floor / step, prompts / measured.prefill)
        return Speed(load.streams, load.prompt_len, *speeds)


# ---- together


@dataclass(slots=True)
class Found:
    """Everything measured about one format."""

    memory: Memory
    readings: dict[str, Reading] = field(default_factory=dict)  # by kind of text; empty for random weights
    speeds: list[Speed] = field(default_factory=list)

    def rise(self, exact: Found) -> float:
        return mean_rise((own, exact.readings[kind]) for kind, own in self.readings.items())

    @property
    def kl(self) -> float:
        """The mean over the texts, which all count the same."""
        return statistics.fmean(reading.mean_kl for reading in self.readings.values())

    def as_dict(self, exact: Found) -> dict[str, Any]:
        texts = {
            kind: {
                "tokens": len(own.logprobs),
                "perplexity": round(own.perplexity, 4),
                "rise": round(own.rise(exact.readings[kind]), 6),
                "kl": round(own.mean_kl, 8),
            }
            for kind, own in self.readings.items()
        }
        together = {"rise": round(self.rise(exact), 6), "kl": round(self.kl, 8)} if texts else None
        memory = {name: round(value, 4) for name, value in asdict(self.memory).items()}
        return memory | {"texts": texts, "all": together, "speed": [s.as_dict() for s in self.speeds]}


def release(device: str) -> None:
    """Free the memory of an engine that is no longer used, so that the next one plans with all free memory."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
