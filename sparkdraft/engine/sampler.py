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

    def report(self, row: int, chosen: int) -> list[TokenLogprob] | None:
        if row not in self.logprobs:
            return None
        return [token_logprob(self.logprobs[row][0], chosen, self.logprobs[row][1])]


class Sampler:
    def __init__(self, vocab_size: int, eos_ids: frozenset[int], device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.device = device
        self._tallies: dict[Request, Tallies] = {}

    @torch.inference_mode()
    def __call__(self, logits: Tensor, requests: list[Request]) -> Sampled:
        """Sample the next id of each request from its row of 'logits' (float32 [rows, vocab], edited in place)."""
        logprobs = self._raw_logprobs(logits, requests)
        for row, request in enumerate(requests):
            self._edit(logits, row, request)
        ids = logits.max(-1).indices  # three times as fast as argmax on a CPU
        if any(r.params.temperature > 0 for r in requests):
            greedy = self._column([r.params.temperature == 0 for r in requests])
            ids = torch.where(greedy, ids, self._draw(logits, requests))
        return Sampled(ids, logprobs)

    def forget(self, request: Request) -> None:
        self._tallies.pop(request, None)

    # ---- what a request's own parameters do to its row

    def _edit(self, logits: Tensor, row: int, request: Request) -> None:
        params = request.params
        if params.has_penalties:
            self._penalise(logits[row], request)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=self.device)
            logits[row, ids] += torch.tensor(list(params.logit_bias.values()), device=self.device)
        if len(request.output_ids) < params.min_tokens:
            ends = torch.tensor([*self.eos_ids, *params.stop_ids], dtype=torch.long, device=self.device)
            logits[row, ends] = float("-inf")

    def _penalise(self, row: Tensor, request: Request) -> None:
        params, tallies = request.params, self._tally(request)
        seen = tallies.prompt | (tallies.output > 0)
        factor = params.repetition_penalty
        row.copy_(torch.where(seen, torch.where(row > 0, row / factor, row * factor), row))
        row -= params.frequency_penalty * tallies.output + params.presence_penalty * (tallies.output > 0)

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

    def _draw(self, logits: Tensor, requests: list[Request]) -> Tensor:  # int64 [rows]
        temperature = self._column([max(r.params.temperature, 1e-5) for r in requests]).unsqueeze(1)
        probs = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
        params = [r.params for r in requests]
        if any(p.min_p for p in params):
            probs = keep(probs, self._column([p.min_p for p in params]) * probs.amax(-1))
        if any(p.top_k for p in params):
            probs = keep(probs, top_k_floor(probs, [p.top_k for p in params]))
        if any(p.top_p < 1 for p in params):
            probs = keep(probs, nucleus_floor(probs, self._column([p.top_p for p in params])))
        seeds = self._column([r.seed for r in requests])
        positions = self._column([r.num_tokens for r in requests])
        return invert(probs, uniform(seeds, positions))

    def _raw_logprobs(self, logits: Tensor, requests: list[Request]) -> dict[int, tuple[Tensor, int]]:
        wanted = [i for i, r in enumerate(requests) if r.params.logprobs is not None]
        return {i: (logits[i].log_softmax(-1), requests[i].params.logprobs or 0) for i in wanted}


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
