"""Sampling in plain torch: what requests change about their logits, which id each row takes, and how sure that is.

top_k, top_p and min_p each give a smallest probability that survives: one comparison applies all three. The noise of a
draw depends on (seed, position, id) alone (kernels/noise.py).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparkdraft.kernels.noise import gumbel
from sparkdraft.kernels.ops import IN_PROMPT, Draws, LogitEdits


def edit_logits(logits: Tensor, edits: LogitEdits) -> None:
    tables = edits.tables
    slots, ahead, positions = (part.tolist() for part in (edits.slots, edits.ahead, edits.positions))
    for row, (x, slot) in enumerate(zip(logits, slots, strict=True)):
        if slot < 0:
            continue
        repetition, presence, frequency = tables.penalties[slot].tolist()
        if (repetition, presence, frequency) != (1, 0, 0):
            drafts = edits.ids[row + 1 - ahead[row] : row + 1].long()
            counts = tables.counts[slot].index_add(0, drafts, torch.ones_like(drafts, dtype=torch.int32))
            output = counts % IN_PROMPT
            x.copy_(torch.where(counts > 0, torch.where(x > 0, x / repetition, x * repetition), x))
            x -= frequency * output + presence * (output > 0)
        some = tables.biased[slot] >= 0
        ids, excluded = tables.biased[slot][some].long(), positions[row] < tables.until[slot][some]
        x[ids] = torch.where(excluded, float("-inf"), x[ids] + tables.bias[slot][some])


def forbid_bits(logits: Tensor, masks: Tensor, which: Tensor) -> None:
    bits = masks[which.clamp(min=0).long()].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=masks.device) & 1
    forbidden = (bits == 0).flatten(1)[:, : logits.shape[1]] & (which >= 0).unsqueeze(1)
    logits.masked_fill_(forbidden, float("-inf"))


def count_ids(counts: Tensor, edit_slots: Tensor, samples: Tensor, accepted: Tensor | None = None) -> None:
    columns = torch.arange(samples.shape[1], device=samples.device)
    last = torch.zeros_like(edit_slots) if accepted is None else accepted
    seq, column = ((columns <= last.unsqueeze(1)) & (edit_slots >= 0).unsqueeze(1)).nonzero(as_tuple=True)
    index = edit_slots[seq].long() * counts.shape[1] + samples[seq, column]
    counts.view(-1).index_add_(0, index, torch.ones_like(index, dtype=torch.int32))


def sample(logits: Tensor, draws: Draws | None, ids: Tensor | None = None) -> Tensor:
    largest = argmax(logits)
    return largest if draws is None else largest.where(takes_largest(draws), scores(logits, draws, ids).argmax(-1))


def sample_sure(logits: Tensor, draws: Draws | None, ids: Tensor | None, widest: float) -> tuple[Tensor, Tensor]:
    top, columns = logits.max(-1)
    near = logits.masked_fill(logits < top.unsqueeze(1) - widest, float("-inf"))
    gaps = top - near.scatter(1, columns.unsqueeze(1), float("-inf")).logsumexp(-1)
    if draws is not None:
        greedy, best = takes_largest(draws), scores(logits, draws, ids).topk(2)
        columns = columns.where(greedy, best.indices[:, 0])
        gaps = gaps.where(greedy, best.values[:, 0] - best.values[:, 1])
    return columns, gaps.clamp(max=widest)


def argmax(logits: Tensor) -> Tensor:
    """int64 [rows]. Uses numpy on a CPU, which takes a tenth of torch's time."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)


def takes_largest(draws: Draws) -> Tensor:  # bool [rows]
    return (draws.slots < 0) | (draws.floats[0, draws.slots.clamp(min=0).long()] == 0)


def scores(logits: Tensor, draws: Draws, ids: Tensor | None = None) -> Tensor:
    """Logits over temperature plus noise, -inf for what the filters exclude. [rows, columns]"""
    seeds = draws.integers[1, draws.slots.clamp(min=0).long()]
    columns = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
    return allowed(logits, draws) + gumbel(seeds.unsqueeze(1), draws.positions.long().unsqueeze(1), columns)


def allowed(logits: Tensor, draws: Draws) -> Tensor:
    """Logits divided by each row's temperature, -inf where min_p, top_k or top_p exclude an id. [rows, columns]"""
    slots = draws.slots.clamp(min=0).long()
    (temperature, min_p, top_p), top_k = draws.floats[:, slots], draws.integers[0, slots]
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.clamp(min=1e-5).unsqueeze(1)
    probs = scaled.softmax(-1)
    floor = (min_p * probs.amax(-1)).maximum(top_k_floor(probs, top_k))
    floor = floor.maximum(top_p_floor(keep(probs, floor), top_p))
    return scaled.masked_fill(probs < floor.unsqueeze(1), float("-inf"))


def keep(probs: Tensor, floor: Tensor) -> Tensor:
    """Set to zero what is below each row's floor. Ties with the last survivor survive; nothing is renormalised."""
    return probs.where(probs >= floor.unsqueeze(1), 0.0)


def top_k_floor(probs: Tensor, top_k: Tensor) -> Tensor:
    """The k-th largest probability of each row, 0 where k is 0 (off). [rows]"""
    most = min(int(top_k.max()), probs.shape[-1])
    if most <= 0:
        return torch.zeros_like(probs[:, 0])
    best = torch.topk(probs, most).values  # largest first
    last = top_k.clamp(max=most) - 1
    return torch.where(last >= 0, best.gather(1, last.clamp(min=0).unsqueeze(1)).squeeze(1), 0.0)


def top_p_floor(probs: Tensor, top_p: Tensor) -> Tensor:
    """The largest probability t for which the ids with at least t hold a share top_p of each row's mass; 0 where top_p
    is 1 (off): there the sum's rounding would leave out the least likely ids. [rows]

    Ids below a share (1 - top_p) / columns of the mass hold less than 1 - top_p together, so the others hold enough.
    """
    floors = np.zeros(len(probs), dtype=np.float32)
    for index, (row, share) in enumerate(zip(probs.cpu().numpy(), top_p.tolist(), strict=True)):
        if share >= 1:
            continue
        mass = row.sum(dtype=np.float64)
        likely = np.sort(row[row >= (1 - share) * mass / len(row)])[::-1]
        last = np.searchsorted(np.cumsum(likely, dtype=np.float64), share * mass)
        floors[index] = likely[min(last, len(likely) - 1)]
    return torch.from_numpy(floors).to(probs.device)
