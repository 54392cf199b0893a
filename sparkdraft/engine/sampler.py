"""Turns logits into ids: every row with its own request's parameters, whatever else is in the batch.

A row is sampled by inverting the distribution at one uniform number that is a function of (seed, position) alone, so a
seeded request writes the same text in any batch, after a preemption, and with or without drafts. top_k, top_p and min_p
are each a smallest probability that survives: one comparison applies all three, without sorting the vocabulary.
Log-probabilities are the model's own, before any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdraft.core import Request, TokenLogprob

BISECTIONS = 24  # halvings of [0, 1] to find top_p's smallest probability: below float32's resolution of the sum


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits: a request, and the drafts that are taken for its next ids when this row is sampled."""

    request: Request
    ahead: Sequence[int] = ()

    @property
    def num_output(self) -> int:
        return len(self.request.output_ids) + len(self.ahead)

    @property
    def position(self) -> int:
        return self.request.num_tokens + len(self.ahead)


@dataclass(slots=True)
class Tallies:
    """What penalties look at, on the device; kept only for requests that have penalties."""

    prompt: Tensor  # bool [vocab]: ids that stand in the prompt
    output: Tensor  # int32 [vocab]: how often each id was committed
    num_output: int = 0  # output ids counted so far


@dataclass(slots=True)
class Sampled:
    ids: Tensor  # int64 [rows], on the device: reading it is the step's one wait
    logprobs: dict[int, tuple[Tensor, int]]  # row -> (log-probabilities [vocab], alternatives), where asked for

    def report(self, first: int, chosen: list[int]) -> list[TokenLogprob] | None:
        """Of consecutive rows of one request, from row 'first' on."""
        if first not in self.logprobs:
            return None
        rows = [self.logprobs[first + i] for i in range(len(chosen))]
        return [token_logprob(logprobs, token, top) for (logprobs, top), token in zip(rows, chosen, strict=True)]


class Sampler:
    def __init__(self, vocab_size: int, eos_ids: frozenset[int], device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.device = device
        self._tallies: dict[Request, Tallies] = {}
        self._biases: dict[Request, tuple[Tensor, Tensor]] = {}

    def __call__(self, logits: Tensor, rows: list[SampleRow]) -> Sampled:
        """Sample an id from each row of 'logits' (float32 [rows, vocab], edited in place)."""
        logprobs = self._raw_logprobs(logits, rows)
        for index, row in enumerate(rows):
            self._edit(logits, index, row)
        ids = argmax(logits)
        if any(r.request.params.temperature > 0 for r in rows):
            greedy = self._column([r.request.params.temperature == 0 for r in rows])
            ids = torch.where(greedy, ids, self._draw(logits, rows))
        return Sampled(ids, logprobs)

    def forget(self, request: Request) -> None:
        self._tallies.pop(request, None)
        self._biases.pop(request, None)

    # ---- what a request's own parameters do to its row

    def _edit(self, logits: Tensor, index: int, row: SampleRow) -> None:
        params = row.request.params
        if params.has_penalties:
            self._penalise(logits[index], row)
        if params.logit_bias:
            ids, values = self._bias(row.request)
            logits[index, ids] += values
        if row.num_output < params.min_tokens:
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
        """The request's counts, brought up to its committed output."""
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

    # ---- drawing

    def _column(self, values: Sequence[float | int | bool]) -> Tensor:  # [rows]
        return torch.tensor(values, device=self.device)

    def _draw(self, logits: Tensor, rows: list[SampleRow]) -> Tensor:  # int64 [rows]
        params = [r.request.params for r in rows]
        temperature = self._column([max(p.temperature, 1e-5) for p in params]).unsqueeze(1)
        probs = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
        if any(p.min_p for p in params):
            probs = keep(probs, self._column([p.min_p for p in params]) * probs.amax(-1))
        if any(p.top_k for p in params):
            probs = keep(probs, top_k_floor(probs, [p.top_k for p in params]))
        if any(p.top_p < 1 for p in params):
            probs = keep(probs, nucleus_floor(probs, self._column([p.top_p for p in params])))
        seeds = self._column([r.request.seed for r in rows])
        return invert(probs, uniform(seeds, self._column([r.position for r in rows])))

    def _raw_logprobs(self, logits: Tensor, rows: list[SampleRow]) -> dict[int, tuple[Tensor, int]]:
        wanted = {i: r.request.params.logprobs for i, r in enumerate(rows)}
        return {i: (logits[i].log_softmax(-1), top) for i, top in wanted.items() if top is not None}


def argmax(logits: Tensor) -> Tensor:
    """int64 [rows]. On a CPU by numpy, which takes a tenth of torch's time."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def token_logprob(logprobs: Tensor, chosen: int, top: int) -> TokenLogprob:
    """One position's report from its row of log-probabilities [vocab]."""
    best = torch.topk(logprobs, top)
    pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(chosen, float(logprobs[chosen]), pairs)


def keep(probs: Tensor, floor: Tensor) -> Tensor:
    """Zero what lies below each row's floor; ties with the last survivor survive. Not renormalised."""
    return probs.where(probs >= floor.unsqueeze(1), 0.0)


def top_k_floor(probs: Tensor, top_k: list[int]) -> Tensor:
    """The k-th largest probability of each row, 0 where k is 0 (off). [rows]"""
    vocab = probs.shape[-1]
    best = torch.topk(probs, min(max(top_k), vocab)).values  # best first
    last = torch.tensor([min(k, vocab) - 1 for k in top_k], device=probs.device)
    return torch.where(last >= 0, best.gather(1, last.clamp(min=0).unsqueeze(1)).squeeze(1), 0.0)


def nucleus_floor(probs: Tensor, top_p: Tensor) -> Tensor:
    """Largest probability t for which the ids with at least t hold a share top_p of each row's mass. [rows]"""
    goal = top_p * probs.sum(-1)
    low, high = torch.zeros_like(goal), probs.amax(-1)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        enough = probs.where(probs >= middle.unsqueeze(1), 0.0).sum(-1) >= goal
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    # 'low' holds enough mass, 'high' may not: the smallest probability not below 'low' is the floor itself.
    return probs.where(probs >= low.unsqueeze(1), float("inf")).amin(-1)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) for each (seed, position): a 64-bit mixer in int64 arithmetic, the same on any device."""
    x = seeds * -7046029254386353131 + positions * -4417276706812531889
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _shift_right(x, shift)) * factor
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 40).double() / 2**24


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # int64 shifts carry the sign in: mask it off


def invert(probs: Tensor, u: Tensor) -> Tensor:
    """The id at which the running sum of each row's probabilities passes u of its total. int64 [rows]"""
    running = probs.double().cumsum(-1)
    goal = (u * running[:, -1]).unsqueeze(1)
    return torch.searchsorted(running, goal, right=True).squeeze(1).clamp(max=probs.shape[-1] - 1)
