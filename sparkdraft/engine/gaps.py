"""Picks drafts and says how sure each is: how far the score of the id that is taken stands above the others.

For greedy rows it is the logit of the largest probability: its logit less the logarithm of the sum of the others'
exponentials, of those that come within WIDEST of it. For rows that draw it is the gap between the two best scores,
which are logits over temperature with the target's dice. The ids are those of `sampler.pick`, and the gap is found in
the same logits, without another pass over the head. For the host's steps on a CPU; recorded steps on a GPU pick without
gaps.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from sparkdraft.engine.sampler import Draws, allowed, ids_of
from sparkdraft.kernels.dice import gumbel

WIDEST = 8.0  # a gap this wide or wider is reported as this: the draft is as sure as can be


class Sure(NamedTuple):
    ids: Tensor  # int64 [rows]
    gaps: Tensor  # float32 [rows]


def pick_sure(ops: ModuleType, logits: Tensor, draws: Draws | None, ids: Tensor | None = None) -> Sure:
    """As `sampler.pick`, with the gaps."""
    if hasattr(ops, "sample_sure"):
        parameters = (None, None) if draws is None else (draws.floats, draws.integers)
        columns, gaps = ops.sample_sure(logits, *parameters, ids, WIDEST)
        return Sure(ids_of(columns, ids), gaps)
    columns, gaps = largest(logits)
    if draws is not None:
        drawn, drawn_gaps = draw(logits, draws, ids)
        is_greedy = draws.floats.view(3, -1)[0] == 0
        columns, gaps = columns.where(is_greedy, drawn), gaps.where(is_greedy, drawn_gaps)
    return Sure(ids_of(columns, ids), gaps.clamp(max=WIDEST))


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The definition for greedy rows, in torch."""
    top, columns = logits.max(-1)
    near = logits.masked_fill(logits < top.unsqueeze(1) - WIDEST, float("-inf"))
    others = near.scatter(1, columns.unsqueeze(1), float("-inf")).logsumexp(-1)
    return columns, top - others


def draw(logits: Tensor, draws: Draws, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The definition for rows that draw, in torch: the two best of the scores."""
    _, seeds, positions = draws.integers.view(3, -1).unsqueeze(2)
    columns = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
    best = (allowed(logits, draws) + gumbel(seeds, positions, columns)).topk(2)
    return best.indices[:, 0], best.values[:, 0] - best.values[:, 1]
