"""How many prompt rows a step may take while other requests wait for their next token.

A long prompt run in large chunks makes every stream beside it stand still for the time of a chunk. So the time of a
step is kept under a target: it is what the decode rows cost, known from steps without prompts, plus a time per prompt
row, learnt from the steps that had some. Where decode rows alone take a large part of the target, steps may be longer:
a prompt must not take much longer than it takes alone. Numbers only: the scheduler asks, the engine tells.
"""

from __future__ import annotations

FIRST_SHARE = 32  # before anything is measured, a chunk is one 32nd of the rows that a step may have
LEAST_ROWS = 16  # smaller chunks cost hardly less
MOST_OTHERS = 0.2  # share of a step's time that decode rows may take while a prompt waits
GROWTH = 2  # a chunk is at most twice the largest so far: a time per row holds near the size it was measured at
DECODE_MEMORY = 0.9  # what a step without prompts leaves of the belief before it
PROMPT_MEMORY = 0.5  # the same of a step with prompts: its time per row grows with the context
LATE = 1.5  # a step later than this times the belief counts as this late


class PromptPace:
    def __init__(self, target: float, max_rows: int) -> None:
        """target: seconds per step while other requests decode. max_rows: rows that a step can have."""
        self.target, self.max_rows = target, max_rows
        self._largest = max_rows // FIRST_SHARE // GROWTH  # chunk so far
        self._decode_seconds = 0.0  # of a step without prompts
        self._row_seconds = 0.0  # per prompt row, beside those; 0 before the first measurement

    def most_rows(self) -> int:
        """Prompt rows of a step in which other requests decode."""
        most = GROWTH * self._largest
        if self._row_seconds:
            step = max(self.target, self._decode_seconds / MOST_OTHERS)
            most = min(most, int((step - self._decode_seconds) / self._row_seconds))
        return min(max(most, LEAST_ROWS), self.max_rows)

    def learn(self, prompt_rows: int, seconds: float) -> None:
        """What a step took in which requests decoded, beside this number of prompt rows; 0 seconds: not known."""
        if not seconds:
            return
        if not prompt_rows:
            self._decode_seconds = _mixed(self._decode_seconds, seconds, DECODE_MEMORY)
        elif prompt_rows >= LEAST_ROWS:  # fewer tell little of a row's time
            per_row = max(seconds - self._decode_seconds, 0.1 * seconds) / prompt_rows
            self._row_seconds = _mixed(self._row_seconds, per_row, PROMPT_MEMORY)
            self._largest = max(self._largest, prompt_rows)


def _mixed(before: float, now: float, memory: float) -> float:
    """A decayed mean. A step can be late by accident (a kernel was compiled), but not early."""
    if not before or now < before / 2:
        return now
    return memory * before + (1 - memory) * min(now, LATE * before)
