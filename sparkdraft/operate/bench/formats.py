"""Compares formats of weights and of the KV cache: how well they predict held-out texts, and their size.

One engine after the other reads each text as one context, and next-token distributions are compared (KL divergence).
Of the first engine, the base, only the last hidden states are kept, a few MB per text: its logits are computed again
beside those of each other engine, so all engines must have the base's head.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparkdraft.cache.formats import EXACT, kv_formats, listed
from sparkdraft.core import SamplingParams, TokenLogprob, UserError, Work
from sparkdraft.engine.engine import Engine
from sparkdraft.llm import LLM
from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.models.registry import read_config
from sparkdraft.operate.instrument import replaced
from sparkdraft.text.tokenizer import Tokenizer
from sparkdraft.weights.checkpoint import Checkpoint
from sparkdraft.weights.loader import Progress
from sparkdraft.weights.plane_layout import StoredBytes
from sparkdraft.weights.quant.quantise import QUANTISERS
from sparkdraft.weights.quant.stored import QuantisedExperts, Stored, as_float

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer


TEXTS = Path(__file__).with_name("heldout")
KINDS = ("prose", "code", "dialogue")  # kinds of texts, which are the names of their files

# gets the prompt rows' last residuals [rows, hidden] and their logits [rows, vocab]
See = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class Reading:
    """Log-probabilities and KL divergences of one text in one engine, by position."""

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
        return math.expm1(float(base.logprobs.mean() - self.logprobs.mean()))


Readings = Mapping[str, Reading]  # by kind of text


def rise_of_all(readings: Readings, base: Readings) -> float:
    """The geometric mean of the texts' perplexity ratios, less 1."""
    return math.expm1(statistics.fmean(math.log1p(own.rise(base[kind])) for kind, own in readings.items()))


def kl_of_all(readings: Readings) -> float:
    """The mean over the texts, each with the same weight."""
    return statistics.fmean(reading.mean_kl for reading in readings.values())


def divergence(base: Tensor, other: Tensor) -> Tensor:
    """The KL divergence of 'other' from 'base' in nats, per row of logits [rows, vocab]."""
    log_p, log_q = base.log_softmax(-1), other.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)  # negative values are rounding


def read_texts(tokenizer: Tokenizer, tokens: int) -> dict[str, list[int]]:
    """Return the first 'tokens' ids of each kind of text."""
    texts = {kind: (TEXTS / f"{kind}.txt").read_text(encoding="utf-8") for kind in KINDS}
    return {kind: tokenizer.encode(text, add_special=False)[:tokens] for kind, text in texts.items()}


class Comparison:
    """Reads texts through one engine after the other and compares all with the first."""

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self.texts = texts
        self._base: dict[str, Tensor] = {}  # [rows, hidden] per text

    def read(self, llm: LLM, progress: Progress) -> dict[str, Reading]:
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
    """Passes the prompt tokens that the engine scores to 'see', in order."""
    runner, model = engine.runner, engine.runner.model
    score, logits = runner.prompt_logprobs, model.logits

    def shown(residual: Tensor) -> Tensor:
        found = logits(residual)
        see(residual, found)
        return found

    def scored(work: Work, first_row: int, top: int) -> list[TokenLogprob]:
        with replaced((model, "logits", shown)):  # only while prompts are scored: sampled tokens have logits too
            return score(work, first_row, top)

    with replaced((runner, "prompt_logprobs", scored)):
        yield


def reading_fields(own: Readings, base: Readings) -> dict[str, Any]:
    """Return what the JSON of a comparison says of one format's texts."""
    texts = {
        kind: {
            "tokens": len(reading.logprobs),
            "perplexity": round(reading.perplexity, 4),
            "rise": round(reading.rise(base[kind]), 6),
            "kl": round(reading.mean_kl, 8),
        }
        for kind, reading in own.items()
    }
    return {"texts": texts, "all": {"rise": round(rise_of_all(own, base), 6), "kl": round(kl_of_all(own), 8)}}


# ---- formats of the KV cache

NOTATION = listed([each.notation for each in kv_formats()])


@dataclass(frozen=True, slots=True)
class Format:
    name: str  # in the notation above
    options: dict[str, Any]  # fields of EngineConfig


def parse_kv_formats(text: str) -> list[Format]:
    """Parse a comma-separated list of KV formats. The exact cache always comes first, as the base of the comparison."""
    names = dict.fromkeys([EXACT, *(part.strip() for part in text.split(","))])
    return [_parse_format(name) for name in names]


def _parse_format(name: str) -> Format:
    for each in kv_formats():
        if (options := each.parse(name)) is not None:
            return Format(name, options)
    raise UserError(f"--formats names '{name}'; a format is {NOTATION}")


# ---- formats of weights
#
# The base is the checkpoint with every matrix as floats. Each format is those floats, quantised at load
# (weights/quant/quantise.py), so a quantised checkpoint, such as the embedded one, can be measured too.

FLOATS = "floats"


def parse_weight_formats(text: str) -> list[str]:
    """Parse a comma-separated list of weight formats. Floats always come first, as the base of the comparison."""
    names = list(dict.fromkeys([FLOATS, *(part.strip() for part in text.split(","))]))
    for name in names:
        if name != FLOATS and name not in QUANTISERS:
            raise UserError(f"--formats names '{name}'; a format is {', '.join((FLOATS, *QUANTISERS))}")
    return names


class FloatCheckpoint:
    """Reads the quantised matrices of a checkpoint as float32. Experts that a file stores together stay quantised:
    their floats would have another order."""

    def __init__(self, stored: Checkpoint) -> None:
        self._stored = stored
        self.path: Path = stored.path
        self.config, self.generation = stored.config, stored.generation
        self.chat_template, self.special = stored.chat_template, stored.special

    def names(self) -> list[str]:
        return self._stored.names()

    def read(self, name: str) -> Stored:
        part = self._stored.read(name)
        is_integers = isinstance(part, Tensor) and not part.is_floating_point()  # such as ids
        return part if is_integers or isinstance(part, QuantisedExperts) else as_float(part)

    def stored_bytes(self, unread: tuple[str, ...] = ()) -> StoredBytes:
        return StoredBytes(0, model_sizes(read_config(self.config)).held)

    def tokenizer_json(self) -> RawTokenizer:
        return self._stored.tokenizer_json()


def format_bytes(name: str, width: int, float_bytes: int) -> float:
    """Bytes per weight of a format, scales included. width: weights of a row."""
    if name == FLOATS:
        return float(float_bytes)
    coded = QUANTISERS[name][0](torch.ones(1, width))
    parts = (coded.codes, coded.scale, coded.offset, coded.row_scale)
    return sum(part.nbytes for part in parts if part is not None) / width
