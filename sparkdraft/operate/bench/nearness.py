"""How well an engine predicts held-out texts, and how far its predictions are from those of another that is the base.

Texts of several kinds (heldout/, written for this project) are each read by the engine as one context, prompt rows
only: a row reads earlier rows by its position, as in decoding. Whole distributions are compared row by row. Of the base
the last residuals are kept, a few megabytes per text, and the head computes their logits again beside those of each
other engine; the logits themselves would take hundreds of megabytes. So all engines must have the head of the base.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkdraft.core import SamplingParams, TokenLogprob, Work
from sparkdraft.engine.engine import Engine
from sparkdraft.llm import LLM
from sparkdraft.operate.bench.decode import Speed
from sparkdraft.text.tokenizer import Tokenizer
from sparkdraft.weights.loader import Progress

HELDOUT = Path(__file__).with_name("heldout")
KINDS = ("prose", "code", "dialogue")  # kinds of texts, which are the names of their files

# gets the prompt rows' last residuals [rows, hidden] and their logits [rows, vocab]
See = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class Reading:
    """How one engine read one text, by position."""

    logprobs: Tensor  # float64 [rows], of the ids that follow
    kl: Tensor  # float64 [rows], nats

    @property
    def perplexity(self) -> float:
        return math.exp(-self.logprobs.mean())

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    def rise(self, base: Reading) -> float:
        """The rise of the perplexity over the base's, as a share."""
        return mean_rise([(self, base)])


def mean_rise(pairs: Iterable[tuple[Reading, Reading]]) -> float:
    """The geometric mean of the perplexity ratios of (a reading, the base's), less 1."""
    return math.expm1(statistics.fmean(float(base.logprobs.mean() - own.logprobs.mean()) for own, base in pairs))


def rise_by_position(
    readings: Mapping[str, Reading], base: Mapping[str, Reading], width: int
) -> list[tuple[float, float]]:
    """(position, mean rise over the texts up to there), every 'width' positions and at the end."""
    lost = [base[kind].logprobs - reading.logprobs for kind, reading in readings.items()]
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


def divergence(base: Tensor, other: Tensor) -> Tensor:
    """The KL divergence of 'other' from 'base' in nats, per row of logits [rows, vocab]."""
    log_p, log_q = base.log_softmax(-1), other.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)  # negative values are rounding


def read_texts(tokenizer: Tokenizer, tokens: int) -> dict[str, list[int]]:
    """Kind -> the first 'tokens' ids of its text, or all of them."""
    texts = {kind: (HELDOUT / f"{kind}.txt").read_text(encoding="utf-8") for kind in KINDS}
    return {kind: tokenizer.encode(text, add_special=False)[:tokens] for kind, text in texts.items()}


class Comparison:
    """Reads texts through one engine after the other. The first is the base, with which the others are compared."""

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self.texts = texts
        self._base: dict[str, Tensor] = {}  # [rows, hidden] per text

    def read(self, llm: LLM, progress: Progress) -> dict[str, Reading]:
        """Readings by kind of text."""
        done, total = 0, sum(len(ids) - 1 for ids in self.texts.values())

        def count(rows: int) -> None:
            nonlocal done
            done += rows
            progress(done, total)

        return {kind: self._read(llm, kind, ids, count) for kind, ids in self.texts.items()}

    def _read(self, llm: LLM, kind: str, ids: list[int], count: Callable[[int], None]) -> Reading:
        base, logits_of, rows = self._base.get(kind), llm.engine.runner.model.logits, 0
        residuals: list[Tensor] = []
        kl: list[Tensor] = []

        def see(residual: Tensor, logits: Tensor) -> None:
            nonlocal rows
            if base is None:
                residuals.append(residual.clone())
                kl.append(torch.zeros(len(logits), dtype=torch.float64))
            else:
                kl.append(divergence(logits_of(base[rows : rows + len(logits)]), logits).double().cpu())
            rows += len(logits)
            count(len(logits))

        with prompt_rows_shown(llm.engine, see):
            completion = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))[0].completions[0]
        if base is None:
            self._base[kind] = torch.cat(residuals)
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


@dataclass(slots=True)
class Measured:
    """How an engine read the texts, and how fast it decodes."""

    readings: dict[str, Reading] = field(default_factory=dict, kw_only=True)  # by kind of text; random weights: none
    speeds: list[Speed] = field(default_factory=list, kw_only=True)

    def rise(self, base: Measured) -> float:
        return mean_rise((own, base.readings[kind]) for kind, own in self.readings.items())

    @property
    def kl(self) -> float:
        """The mean over the texts, which all count the same."""
        return statistics.fmean(reading.mean_kl for reading in self.readings.values())

    def as_dict(self, base: Measured) -> dict[str, Any]:
        texts = {
            kind: {
                "tokens": len(own.logprobs),
                "perplexity": round(own.perplexity, 4),
                "rise": round(own.rise(base.readings[kind]), 6),
                "kl": round(own.mean_kl, 8),
            }
            for kind, own in self.readings.items()
        }
        together = {"rise": round(self.rise(base), 6), "kl": round(self.kl, 8)} if texts else None
        return {"texts": texts, "all": together, "speed": [s.as_dict() for s in self.speeds]}
