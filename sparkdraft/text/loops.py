"""Texts that end in a loop: small models often repeat themselves until they are stopped, and loops are easy to draft.

A text ends in a loop of some period if every id of its end equals the id one period before. A `LoopRule` says how long
periods may be and how many ids must repeat. `find_loops` is the definition; `ends_in_loop` answers yes or no for many
texts at once, on their device. The caller decides what to do with a loop: training cuts it, and the evaluation does not
count it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoopRule:
    max_period: int  # longer periods are not looked for
    min_repeated: int  # ids that must repeat, and never fewer than one period


class Loop(NamedTuple):
    start: int  # the first id that only repeats: ids[i] == ids[i - period] from here to the end
    period: int


def find_loops(ids: Sequence[int] | np.ndarray, rule: LoopRule) -> Iterator[Loop]:
    """Every loop that the text ends in, shortest period first; a multiple of a period is often one too.

    0 ........ one period | start ........ the end
    """
    ids = np.asarray(ids)
    for period in range(1, min(rule.max_period, len(ids) - rule.min_repeated) + 1):
        different = np.flatnonzero(ids[period:] != ids[:-period])
        start = period + (int(different[-1]) + 1 if len(different) else 0)
        if len(ids) - start >= max(rule.min_repeated, period):
            yield Loop(start, period)


def loop_start(ids: Sequence[int] | np.ndarray, rule: LoopRule) -> int:
    """The earliest start of a loop that the text ends in; len(ids) if there is none."""
    return min((loop.start for loop in find_loops(ids, rule)), default=len(ids))


def ends_in_loop(recent: Tensor, num_ids: Tensor, rule: LoopRule) -> Tensor:
    """Whether `find_loops` finds any, per text: bool [texts].

    recent  [texts, max_period + min_repeated]  the last ids of each text; anything may precede a shorter text
    num_ids [texts]                             the length of each text
    """
    period, repeated = rule.max_period, rule.min_repeated
    assert period <= repeated and recent.shape[1] == period + repeated, (rule, recent.shape)
    end = recent[:, None, period:]
    equal = (recent.unfold(1, repeated, 1)[:, :period] == end).all(-1)  # [texts, max_period], longest period first
    needed = torch.arange(period + repeated, repeated, -1, device=equal.device)  # the ids that each period looks at
    return (equal & (num_ids[:, None] >= needed)).any(1)
