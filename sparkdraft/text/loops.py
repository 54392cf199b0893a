"""Where a text begins to repeat itself for good: small models often end in a loop, and loops are easy to draft.

A loop is exact (every id equals the one a period before), lasts to the end of the text and has been seen once before it
is called one. What is done with the rest of such a text, cut or kept, is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence


def loop_start(ids: Sequence[int], longest: int = 128, tail: int = 48) -> int:
    """The first id that only repeats; len(ids) where the text does not end in a loop.

        0 .......... one full cycle | start ................ len(ids)      ids[i] == ids[i - period] from start on

    For some period up to 'longest' the repetition must be at least 'tail' ids and one period long; of several periods
    that fit (any multiple of one does) the smallest start counts.
    """
    best = len(ids)
    for period in range(1, longest + 1):
        start = len(ids)
        while start > period and ids[start - 1] == ids[start - 1 - period]:
            start -= 1
        if len(ids) - start >= max(tail, period):
            best = min(best, start)
    return best
