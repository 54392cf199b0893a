"""Turns logits into ids: each row with its own request's parameters, whatever else is in the batch.

Ids are drawn with noise that depends on (seed, position, id) alone (kernels/noise.py), so a seeded request writes the
same text in any batch, after a preemption, and with or without drafts. top_k, top_p and min_p each give a smallest
probability that survives: one comparison applies all three, and the whole vocabulary is never sorted. Log-probabilities
are the model's own, before any of this.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparkdraft.core import Request, SamplingParams, TokenLogprob
from sparkdraft.engine.accept import checked
from sparkdraft.kernels import reference
from sparkdraft.kernels.noise import draw, gumbel
from sparkdraft.kernels.ops import WIDEST, Ops
from sparkdraft.text.grammar import GrammarState, Mask

# Per byte of a mask: the upper bounds of its eight ids. Taking a minimum needs a quarter of the time of an indexed
# assignment.
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], 1, bitorder="little")
BOUNDS = np.where(BITS, np.float32(np.inf), np.float32(-np.inf))  # [256, 8]
TOP_K_SIZES, WHOLE_VOCABULARY = (0, 64, 1024), 1 << 62  # how many of the likeliest ids are examined for top_k
BISECTIONS = 24  # halvings of [0, 1] to find top_p's smallest probability: beyond float32's resolution of the sum


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


class Filters(NamedTuple):
    """The filters that are computed for a batch: none, or min_p and top_p, and also top_k if a row asks for it.

    Overlapped steps are recorded once per value, so there are few values, whatever numbers clients send. A row whose
    own filters are off is not changed by those of the others.
    """

    on: bool = False
    top_k: int = 0  # upper limit of the rows' k: one of TOP_K_SIZES, or WHOLE_VOCABULARY

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Filters:
        """The filters of the requests that draw; a greedy request's filters change nothing."""
        drawn = [p for p in params if p.temperature]
        largest = max((p.top_k for p in drawn), default=0)
        size = next((size for size in TOP_K_SIZES if largest <= size), WHOLE_VOCABULARY)
        return cls(any(p.top_k or p.min_p or p.top_p < 1 for p in drawn), size)


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters of the rows of a batch, on the device; None for a batch in which all rows are greedy."""

    floats: Tensor  # float32 [3 * rows]: temperature (0: greedy), min_p, top_p
    integers: Tensor  # int64 [3 * rows]: top_k (0: off), seed, position of the sampled id
    filters: Filters
    mixed: bool  # whether some rows may be greedy

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
        mixed = not all(p.temperature for p in params)
        # Tensors over the arrays' own memory: torch takes several times as long to read lists.
        tensors = [torch.frombuffer(floats, dtype=torch.float32), torch.frombuffer(integers, dtype=torch.int64)]
        if device.type != "cpu":
            tensors = [tensor.to(device) for tensor in tensors]
        return cls(tensors[0], tensors[1], Filters.of(params), mixed)


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
            return Sampled(checked(logits, argmax(logits)), {})
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
    if draws is None:
        columns = argmax(logits)
    elif ops.sampler:  # filters and draws in one call, and takes the largest of a greedy row
        columns = ops.sampler.sample(logits, draws.floats, draws.integers, ids)
    else:
        _, seeds, positions = draws.integers.view(3, -1)
        columns = draw(allowed(logits, draws), seeds, positions, ids)
        if draws.mixed:
            columns = argmax(logits).where(draws.floats.view(3, -1)[0] == 0, columns)
    return ids_of(columns, ids)


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


def argmax(logits: Tensor) -> Tensor:
    """int64 [rows]. Uses numpy on a CPU, which takes a tenth of torch's time."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


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
    """Pick as `pick` does, and find the gaps in the same logits, without another pass over the head.

    A greedy row's gap is the largest logit less the logsumexp of the others, as far as they come within WIDEST of it.
    For a row that draws it is the gap between the two best scores: logits over temperature plus the target's noise.
    """
    if ops.sampler:
        floats, integers = (None, None) if draws is None else (draws.floats, draws.integers)
        columns, gaps = ops.sampler.sample_sure(logits, floats, integers, ids, WIDEST)
        return Sure(ids_of(columns, ids), gaps)
    columns, gaps = ops.largest_gap(logits, WIDEST)
    if draws is not None:
        drawn, drawn_gaps = ops.best_gap(drawn_scores(logits, draws, ids), WIDEST)
        is_greedy = draws.floats.view(3, -1)[0] == 0
        columns, gaps = columns.where(is_greedy, drawn), gaps.where(is_greedy, drawn_gaps)
    return Sure(ids_of(columns, ids), gaps)


def drawn_scores(logits: Tensor, draws: Draws, ids: Tensor | None = None) -> Tensor:
    """Logits over temperature plus noise, -inf for what the filters exclude."""
    _, seeds, positions = draws.integers.view(3, -1).unsqueeze(2)
    columns = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
    return allowed(logits, draws) + gumbel(seeds, positions, columns)


def allowed(logits: Tensor, draws: Draws) -> Tensor:
    """Logits divided by each row's temperature, -inf where min_p, top_k or top_p exclude an id. [rows, vocab]"""
    temperature, min_p, top_p = draws.floats.view(3, -1)
    top_k, filters = draws.integers.view(3, -1)[0], draws.filters
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.clamp(min=1e-5).unsqueeze(1)
    if not filters.on:
        return scaled
    probs = scaled.softmax(-1)
    floor = min_p * probs.amax(-1)
    if filters.top_k:
        floor = floor.maximum(top_k_floor(probs, top_k, filters.top_k))
    floor = floor.maximum(nucleus_floor(keep(probs, floor), top_p))
    return scaled.masked_fill(probs < floor.unsqueeze(1), float("-inf"))


def keep(probs: Tensor, floor: Tensor) -> Tensor:
    """Set to zero what is below each row's floor. Ties with the last survivor survive; nothing is renormalised."""
    return probs.where(probs >= floor.unsqueeze(1), 0.0)


def top_k_floor(probs: Tensor, top_k: Tensor, most: int) -> Tensor:
    """The k-th largest probability of each row, 0 where k is 0 (off). 'most' is at least every k. [rows]"""
    best = torch.topk(probs, min(most, probs.shape[-1])).values  # largest first
    last = top_k.clamp(max=best.shape[1]) - 1
    return torch.where(last >= 0, best.gather(1, last.clamp(min=0).unsqueeze(1)).squeeze(1), 0.0)


def nucleus_floor(probs: Tensor, top_p: Tensor) -> Tensor:
    """The largest probability t for which the ids with at least t hold a share top_p of each row's mass. 0 where top_p
    is 1 (off): there the sum's rounding would leave out the least likely ids. [rows]"""
    return sorted_floor(probs, top_p) if probs.device.type == "cpu" else bisected_floor(probs, top_p)


def bisected_floor(probs: Tensor, top_p: Tensor) -> Tensor:
    """The floor of top_p by bisection: for a GPU, which sorts slowly and must not wait for the host."""
    goal = top_p * probs.sum(-1)
    low, high = torch.zeros_like(goal), probs.amax(-1)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        enough = probs.where(probs >= middle.unsqueeze(1), 0.0).sum(-1) >= goal
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    # 'low' holds enough mass, 'high' may not: the smallest probability that is at least 'low' is the floor.
    return probs.where(probs >= low.unsqueeze(1), float("inf")).amin(-1).where(top_p < 1, 0.0)


def sorted_floor(probs: Tensor, top_p: Tensor) -> Tensor:
    """The floor of top_p by sorting: for a CPU, which has few rows with few likely ids each.

    Ids below a share (1 - top_p) / vocab of the mass hold less than 1 - top_p together, so the others hold enough.
    """
    floors = np.zeros(len(probs), dtype=np.float32)
    for index, (row, share) in enumerate(zip(probs.numpy(), top_p.tolist(), strict=True)):
        if share >= 1:
            continue
        mass = row.sum(dtype=np.float64)
        likely = np.sort(row[row >= (1 - share) * mass / len(row)])[::-1]
        last = np.searchsorted(np.cumsum(likely, dtype=np.float64), share * mass)
        floors[index] = likely[min(last, len(likely) - 1)]
    return torch.from_numpy(floors)
