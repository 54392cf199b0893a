"""Repetition in token ids: small models at temperature 0 often repeat themselves until they are stopped.

`repeats` tells the engine to end such a text: its last ids are one pattern, `min_count` times in a row, and at least
`min_tokens` of them repeat the pattern before. It is checked at multiples of `interval` ids, however many a step
commits, so drafted text ends where plain text does.

`find_loops` finds where a finished text begins to loop, for training, which cuts the loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sparkdraft.core import Repetition

if TYPE_CHECKING:
    from torch import Tensor

GLANCE = 8  # ids to search for before all of them are compared
WIDTH = array("i").itemsize


def interval(rule: Repetition) -> int:
    """The number of ids between checks: 1 for short patterns, 16 for a rule of 200 tokens."""
    return max(1, _needed(rule, max(rule.min_pattern_size, 1)) // 12)


def repeats(ids: list[int], rule: Repetition) -> bool:
    """True if ids end in a repetition. Ids are searched as bytes for earlier places of the last few, each of which
    gives a pattern length to try."""
    shortest = max(rule.min_pattern_size, 1)
    if len(ids) < shortest + _needed(rule, shortest):
        return False
    glance = min(GLANCE, _needed(rule, shortest))
    recent, whole = _bytes(ids, rule.max_pattern_size + glance), b""
    last, end = recent[-glance * WIDTH :], len(recent) - shortest * WIDTH
    while (at := recent.rfind(last, 0, max(end, 0))) >= 0:
        size, misfit = divmod(len(recent) - len(last) - at, WIDTH)
        whole = whole or _bytes(ids, rule.max_pattern_size + _needed(rule, rule.max_pattern_size))
        if not misfit and _repeats(whole, size * WIDTH, _needed(rule, size) * WIDTH):
            return True
        end = at + len(last) - 1
    return False


def _needed(rule: Repetition, size: int) -> int:
    """The number of ids that must repeat the id one pattern before."""
    return max(rule.min_tokens, (rule.min_count - 1) * size)


def _bytes(ids: list[int], count: int) -> bytes:
    return array("i", ids[-count:]).tobytes()


def _repeats(data: bytes, size: int, count: int) -> bool:
    return len(data) >= count + size and data[-count:] == data[-count - size : -size]


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
    """True if `find_loops` finds any, per text: bool [texts].

    recent  [texts, max_period + min_repeated]  the last ids of each text; anything may precede a shorter text
    num_ids [texts]                             the length of each text
    """
    import torch

    period, repeated = rule.max_period, rule.min_repeated
    assert period <= repeated and recent.shape[1] == period + repeated, (rule, recent.shape)
    end = recent[:, None, period:]
    equal = (recent.unfold(1, repeated, 1)[:, :period] == end).all(-1)  # [texts, max_period], longest period first
    needed = torch.arange(period + repeated, repeated, -1, device=equal.device)  # the ids that each period looks at
    return (equal & (num_ids[:, None] >= needed)).any(1)
