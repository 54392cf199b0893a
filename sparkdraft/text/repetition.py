"""Finds out that a text repeats itself, so that the engine can end it: small models at temperature 0 often do until
they are stopped.

A text repeats itself if its last ids are one pattern, `min_count` times in a row and without a change, and at least
`min_tokens` of them only repeat the pattern before. It is looked at only at lengths that are multiples of `interval`:
these do not depend on how many ids a step commits, so drafted text ends where plain text does.
"""

from __future__ import annotations

from array import array

from sparkdraft.core import Repetition

GLANCE = 8  # ids that are looked for before all of them are compared
WIDTH = array("i").itemsize


def interval(rule: Repetition) -> int:
    """After how many ids the text is looked at again: one by one for short patterns, 16 for a rule of 200 tokens."""
    return max(1, _needed(rule, max(rule.min_pattern_size, 1)) // 12)


def repeats(ids: list[int], rule: Repetition) -> bool:
    """Whether ids end in a repetition. Ids are compared as bytes: earlier places of the last few, each of which is a
    pattern's length to try, are found in some microseconds."""
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
    """How many ids must repeat the id one pattern before."""
    return max(rule.min_tokens, (rule.min_count - 1) * size)


def _bytes(ids: list[int], count: int) -> bytes:
    return array("i", ids[-count:]).tobytes()


def _repeats(data: bytes, size: int, count: int) -> bool:
    return len(data) >= count + size and data[-count:] == data[-count - size : -size]
