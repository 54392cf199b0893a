"""How many prompt rows a step may take while other requests wait for their next token.

A long prompt run in large chunks makes every stream beside it stand still for the time of a chunk. So the time of a
step is kept under a target: it is what the decode rows cost plus a time per prompt row. Both are measured. What decode
rows cost is known from steps without prompts, by the number of requests that decode; where it is not known the prompt
waits for one step, and where it was measured many steps ago, for two. Where decode rows alone take a large part of the
target, steps may be longer: a prompt must not take much longer than it takes alone. Numbers only: the scheduler asks,
the engine tells.
"""

from __future__ import annotations

FIRST_SHARE = 32  # before anything is measured, a chunk is one 32nd of the rows that a step may have
LEAST_ROWS = 16  # smaller chunks cost hardly less
AIM = 0.92  # share of the target that is aimed at: steps differ by a tenth
MOST_OTHERS = 0.2  # share of a step's time that decode rows may take while a prompt waits
GROWTH = 2  # a chunk is at most twice the largest so far: a much larger chunk has another time per row
MEMORY = 0.5  # what a measurement leaves of the belief before it
LATE = 1.5  # a step that took more than 1.5 times the expected time counts as 1.5 times
FRESH = 32  # steps with prompts after which the cost of decode rows is measured again


class PromptPace:
    def __init__(self, target: float, max_rows: int) -> None:
        """target: seconds per step while other requests decode. max_rows: rows that a step can have."""
        self.target, self.max_rows = target, max_rows
        self._largest = max_rows // FIRST_SHARE // GROWTH  # chunk so far
        self._decode_seconds: dict[int, float] = {}  # of a step without prompts, by size of the batch
        self._age: dict[int, int] = {}  # steps with prompts since then
        self._again: dict[int, float] = {}  # the first of two new measurements, while the old one is out of date
        self._row_seconds = 0.0  # per prompt row, beside those; 0 before the first measurement

    def most_rows(self, num_decoding: int) -> int:
        """Prompt rows of a step in which this many requests decode; 0 where their own cost must be measured first."""
        decode = self._decode_seconds.get(_size(num_decoding))
        if decode is None or self._age[_size(num_decoding)] >= FRESH:
            return 0
        most = GROWTH * self._largest
        if self._row_seconds:
            step = max(AIM * self.target, decode / MOST_OTHERS)
            most = min(most, int((step - decode) / self._row_seconds))
        return min(max(most, LEAST_ROWS), self.max_rows)

    def learn(self, num_decoding: int, prompt_rows: int, seconds: float) -> None:
        """What a step took in which this many requests decoded beside these prompt rows; 0 seconds: not known."""
        size = _size(num_decoding)
        if not seconds:
            return
        if not prompt_rows:
            self._learn_decode(size, seconds)
            return
        self._age[size] = self._age.get(size, 0) + 1
        if prompt_rows >= LEAST_ROWS:  # fewer tell little of a row's time
            beside = max(seconds - self._decode_seconds.get(size, 0.0), 0.1 * seconds)
            self._row_seconds = _mixed(self._row_seconds, beside / prompt_rows)
            self._largest = max(self._largest, prompt_rows)

    def _learn_decode(self, size: int, seconds: float) -> None:
        if size not in self._decode_seconds:
            self._decode_seconds[size], self._age[size] = seconds, 0
        elif self._age[size] < FRESH:
            self._decode_seconds[size], self._age[size] = _mixed(self._decode_seconds[size], seconds), 0
        elif (first := self._again.pop(size, 0.0)) == 0:
            self._again[size] = seconds
        else:  # the faster of two: one late step would make all steps longer until the next measurement
            self._decode_seconds[size], self._age[size] = min(first, seconds), 0


def _size(num_decoding: int) -> int:
    """Batches of 1, 2, 3 to 4, 5 to 8 ... requests cost about the same."""
    return (num_decoding - 1).bit_length()


def _mixed(before: float, now: float) -> float:
    """A decayed mean. A step can be late by accident (a kernel was compiled), but not early."""
    if not before or now < before / 2:
        return now
    return MEMORY * before + (1 - MEMORY) * min(now, LATE * before)
