"""Finds out that a text repeats itself, so that the engine can end it: small models at temperature 0 often do until
they are stopped.

A text repeats itself if its last ids are one pattern, `min_count` times in a row and without a change, and at least
`min_tokens` of them only repeat the pattern before. It is looked at only at lengths that are multiples of `interval`:
these do not depend on how many ids a step commits, so drafted text ends where plain text does.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparkdraft.core import Repetition

GLANCE = 8  # ids that are compared before all of them are


def interval(rule: Repetition) -> int:
    """After how many ids the text is looked at again: one by one for short patterns, 16 for a rule of 200 tokens."""
    return max(1, _needed(rule, max(rule.min_pattern_size, 1)) // 12)


def repeats(ids: Sequence[int], rule: Repetition) -> bool:
    """Whether a list of ids ends in a repetition."""
    shortest = max(rule.min_pattern_size, 1)
    if len(ids) < shortest + _needed(rule, shortest):
        return False
    earlier = ids[-1 - rule.max_pattern_size : -1][::-1]  # the id one pattern of p ids before the last is at p - 1
    size = shortest - 1
    while True:
        try:
            size = earlier.index(ids[-1], size) + 1
        except ValueError:
            return False
        needed = _needed(rule, size)
        if _ends_in(ids, size, min(GLANCE, needed)) and _ends_in(ids, size, needed):
            return True


def _needed(rule: Repetition, size: int) -> int:
    """How many ids must repeat the id one pattern before."""
    return max(rule.min_tokens, (rule.min_count - 1) * size)


def _ends_in(ids: Sequence[int], size: int, count: int) -> bool:
    return len(ids) >= count + size and ids[-count:] == ids[-count - size : -size]
