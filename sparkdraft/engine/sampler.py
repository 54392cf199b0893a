"""Turns logits into ids: each row with its own request's parameters, whatever else is in the batch.

Ids are drawn with noise that depends on (seed, position, id) alone (kernels/noise.py), so a seeded request writes the
same text in any batch, after a preemption, and with or without drafts. One operator filters and draws.
Log-probabilities are the model's own, before any of this.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparkdraft.core import Request, TokenLogprob
from sparkdraft.engine.accept import checked
from sparkdraft.kernels import reference
from sparkdraft.kernels.ops import WIDEST, Ops
from sparkdraft.text.grammar import GrammarState, Mask

# Per byte of a mask: the upper bounds of its eight ids. Taking a minimum needs a quarter of the time of an indexed
# assignment.
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], 1, bitorder="little")
BOUNDS = np.where(BITS, np.float32(np.inf), np.float32(-np.inf))  # [256, 8]


class SampleRow(NamedTuple):
    """One row of logits: a request, and the drafts that precede the id sampled in this row."""

    request: Request
    ahead: Sequence[int] = ()
    grammar: GrammarState | None = None  # its state after the committed text, without the drafts

    @property
    def num_output(self) -> int:
        return len(self.request.output_ids) + len(self.ahead)

    @property
    def position(self) -> int:
        return self.request.num_tokens + len(self.ahead)


@dataclass(slots=True)
class Tallies:
    """What penalties need, on the device; kept only for requests with penalties."""

    prompt: Tensor  # bool [vocab]: ids that occur in the prompt
    output: Tensor  # int32 [vocab]: how often each id was committed
    num_output: int = 0  # output ids counted so far


@dataclass(slots=True)
class Sampled:
    ids: Tensor  # int64 [rows], on the device; reading it is the only wait of the step. accept.NONE: no finite logit
    # row -> (log-probabilities [vocab], number of alternatives), where requested
    logprobs: dict[int, tuple[Tensor, int]]

    def report(self, first: int, chosen: list[int]) -> list[TokenLogprob] | None:
        """Log-probabilities of consecutive rows of one request, from row 'first' on."""
        if first not in self.logprobs:
            return None
        rows = torch.stack([self.logprobs[first + i][0] for i in range(len(chosen))])
        return token_logprobs(rows, chosen, self.logprobs[first][1])


class Draws(NamedTuple):
    """Sampling parameters of the rows of a batch, on the device; None for a batch in which all rows are greedy."""

    floats: Tensor  # float32 [3 * rows]: temperature (0: greedy), min_p, top_p
    integers: Tensor  # int64 [3 * rows]: top_k (0: off), seed, position of the sampled id

    @classmethod
    def of(
        cls, requests: Sequence[Request], positions: Sequence[int], device: torch.device, each: int = 1
    ) -> Draws | None:
        """Parameters of 'each' rows per request, which sample ids from its position on; None if no request draws."""
        params = [request.params for request in requests]
        if not any(p.temperature for p in params):
            return None
        numbers, rows = range(each), [p for p in params for _ in range(each)] if each > 1 else params
        floats = array("f", [*(p.temperature for p in rows), *(p.min_p for p in rows), *(p.top_p for p in rows)])
        integers = array("q", [p.top_k for p in rows])
        integers.extend(request.seed for request in requests for _ in numbers)
        integers.extend(position + k for position in positions for k in numbers)
        # Tensors over the arrays' own memory: torch takes several times as long to read lists.
        tensors = [torch.frombuffer(floats, dtype=torch.float32), torch.frombuffer(integers, dtype=torch.int64)]
        if device.type != "cpu":
            tensors = [tensor.to(device) for tensor in tensors]
        return cls(*tensors)


class Sampler:
    def __init__(self, vocab_size: int, eos_ids: frozenset[int], device: torch.device, ops: Ops = reference) -> None:
        self.vocab_size = vocab_size
        self.ops = ops
        self.eos_ids = frozenset(token for token in eos_ids if 0 <= token < vocab_size)
        self.device = device
        self._tallies: dict[Request, Tallies] = {}
        self._biases: dict[Request, tuple[Tensor, Tensor]] = {}

    def __call__(self, logits: Tensor, rows: list[SampleRow]) -> Sampled:
        """Sample an id from each row of 'logits' (float32 [rows, vocab], which is edited in place)."""
        if takes_likeliest(rows):
            return Sampled(checked(logits, pick(self.ops, logits, None)), {})
        logprobs = self._raw_logprobs(logits, rows)
        for index, row in enumerate(rows):
            self._edit(logits, index, row)
        if any(r.grammar for r in rows):
            self._constrain(logits, rows)
        draws = Draws.of([r.request for r in rows], [r.position for r in rows], logits.device)
        return Sampled(checked(logits, pick(self.ops, logits, draws)), logprobs)

    def forget(self, request: Request) -> None:
        self._tallies.pop(request, None)
        self._biases.pop(request, None)

    # ---- penalties and biases

    def _edit(self, logits: Tensor, index: int, row: SampleRow) -> None:
        params = row.request.params
        if params.has_penalties:
            self._penalise(logits[index], row)
        if params.logit_bias:
            ids, values = self._bias(row.request)
            logits[index, ids] += values
        if row.num_output < params.min_tokens and not row.grammar:
            ends = torch.tensor([*self.eos_ids, *params.stop_ids], dtype=torch.long, device=self.device)
            logits[index, ends] = float("-inf")

    def _penalise(self, logits: Tensor, row: SampleRow) -> None:
        params, tallies = row.request.params, self._tally(row.request)
        output = tallies.output
        if row.ahead:
            output = output.index_add(0, self._column(row.ahead), torch.ones_like(self._column(row.ahead)).int())
        seen = tallies.prompt | (output > 0)
        factor = params.repetition_penalty
        logits.copy_(torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits))
        logits -= params.frequency_penalty * output + params.presence_penalty * (output > 0)

    def _bias(self, request: Request) -> tuple[Tensor, Tensor]:
        """The request's biases on the device, sent there once."""
        if request not in self._biases:
            bias = request.params.logit_bias
            self._biases[request] = self._column(list(bias)), self._column(list(bias.values()))
        return self._biases[request]

    def _tally(self, request: Request) -> Tallies:
        """The request's counts, updated with its committed output."""
        tallies = self._tallies.get(request)
        if tallies is None:
            prompt = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
            prompt[torch.tensor(request.prompt_ids, device=self.device)] = True
            output = torch.zeros(self.vocab_size, dtype=torch.int32, device=self.device)
            tallies = self._tallies[request] = Tallies(prompt, output)
        fresh = request.output_ids[tallies.num_output :]
        if fresh:
            index = torch.tensor(fresh, device=self.device)
            tallies.output.index_add_(0, index, torch.ones_like(index, dtype=torch.int32))
            tallies.num_output = len(request.output_ids)
        return tallies

    # ---- grammars

    def _constrain(self, logits: Tensor, rows: list[SampleRow]) -> None:
        """Mask each row by what the grammar allows after its drafts. Rows behind a draft that breaks the grammar stay
        as they are.

        Such a draft is masked in its own row, so it is never accepted, and the rows behind it are never used.
        """
        masks: dict[int, Mask] = {}
        for first, row in enumerate(rows):
            if row.grammar and not row.ahead:  # the first row of its request; the rows of a request are consecutive
                last = next((i for i in range(first + 1, len(rows)) if not rows[i].ahead), len(rows)) - 1
                for index, mask in enumerate(row.grammar.masks(rows[last].ahead), first):
                    masks[index] = self._keep_open(mask, rows[index])
        forbid(logits, list(masks), np.stack([*masks.values()]))

    def _keep_open(self, mask: Mask, row: SampleRow) -> Mask:
        """Remove the end of the text from a mask where the text must go on (min_tokens, ignore_eos), unless nothing
        else is allowed."""
        params = row.request.params
        short = row.num_output < params.min_tokens
        if not short and not params.ignore_eos:
            return mask
        open_mask = mask.copy()
        for token in {*self.eos_ids, *(params.stop_ids if short else ())}:
            open_mask[token // 8] &= 255 ^ (1 << token % 8)
        return open_mask if open_mask.any() else mask

    # ---- the parts

    def _column(self, values: Sequence[float | int | bool]) -> Tensor:  # [rows]
        return torch.tensor(values, device=self.device)

    def _raw_logprobs(self, logits: Tensor, rows: list[SampleRow]) -> dict[int, tuple[Tensor, int]]:
        wanted = {i: r.request.params.logprobs for i, r in enumerate(rows)}
        return {i: (logits[i].log_softmax(-1), top) for i, top in wanted.items() if top is not None}


def pick(ops: Ops, logits: Tensor, draws: Draws | None, ids: Tensor | None = None) -> Tensor:
    """int64 [rows]: the id that each row of 'logits' [rows, columns] takes, which is its likeliest or the one it draws.

    Samples and drafts are picked by this one function, on the host and in overlapped steps. draws: None if all rows are
    greedy. ids: int64 [columns], the id of each column; None if a column's number is its id.
    """
    floats, integers = draws or (None, None)
    return ids_of(ops.sample(logits, floats, integers, ids), ids)


def ids_of(columns: Tensor, ids: Tensor | None) -> Tensor:
    """The ids of columns; with ids None a column's number is its id. Uses numpy on a CPU, at a fraction of torch's
    time."""
    if ids is None:
        return columns
    return torch.from_numpy(ids.numpy()[columns.numpy()]) if ids.device.type == "cpu" else ids[columns]


def takes_likeliest(rows: Sequence[SampleRow]) -> bool:
    """Whether every row takes its likeliest id and needs nothing else, as in most steps."""
    known: Request | None = None
    for row in rows:
        if row.request is not known:  # the rows of a request are consecutive
            known, params = row.request, row.request.params
            if params.temperature or params.logprobs is not None or params.min_tokens or params.logit_bias:
                return False
            if row.grammar or params.has_penalties:
                return False
    return True


def forbid(logits: Tensor, rows: list[int], masks: Mask) -> None:
    """Set -inf in these rows for every id whose bit is 0. masks: uint8 [rows, bytes], the lowest bit is the first
    id."""
    vocab = logits.shape[1]
    if logits.device.type == "cpu":
        table = logits.numpy()
        for row, mask in zip(rows, masks, strict=True):
            np.minimum(table[row], BOUNDS.take(mask, 0).ravel()[:vocab], out=table[row])
        return
    bounds, index = torch.from_numpy(BOUNDS).to(logits.device), torch.tensor(rows, device=logits.device)
    most = bounds[torch.from_numpy(masks).to(logits.device).int()].flatten(1)  # [rows, ids]
    logits[index] = logits[index].minimum(most[:, :vocab])


def token_logprobs(logprobs: Tensor, chosen: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probability reports from rows of log-probabilities [rows, vocab]. All rows share one top-k and one transfer,
    as float64, which represents ids and float32 exactly."""
    best = torch.topk(logprobs, top)
    own = logprobs.gather(1, torch.tensor(chosen, device=logprobs.device).unsqueeze(1))
    table = torch.cat([own.double(), best.values.double(), best.indices.double()], 1).tolist()
    return [
        TokenLogprob(token, row[0], [(int(i), value) for i, value in zip(row[1 + top :], row[1:], strict=False)])
        for token, row in zip(chosen, table, strict=True)
    ]


class Sure(NamedTuple):
    """Picked drafts and how sure each is: the gap between its score and the others'."""

    ids: Tensor  # int64 [rows]
    gaps: Tensor  # float32 [rows]


def pick_sure(ops: Ops, logits: Tensor, draws: Draws | None, ids: Tensor | None = None) -> Sure:
    """Pick as `pick` does, and find the gaps in the same logits, without another pass over the head."""
    floats, integers = draws or (None, None)
    columns, gaps = ops.sample_sure(logits, floats, integers, ids, WIDEST)
    return Sure(ids_of(columns, ids), gaps)
