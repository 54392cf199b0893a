"""Limits the prompt tokens of a step while other requests wait for their next token, or might come to wait.

The time of a step is kept under a target. It is estimated as the cost of the decode tokens, measured per batch size in
steps without prompts, plus a measured time per prompt token. Where that cost is unknown, the prompt waits for one step;
where it was measured many steps ago, for two. Where decode tokens alone take a large part of the target, steps may be
longer: a prompt must not take much longer than it takes alone.

Where nobody decodes, the next to come waits for the end of a step. On a CPU, where a step of the most tokens takes a
second and the split of a prompt changes no bit of it (with native kernels), such steps are limited too.
"""

from __future__ import annotations

FIRST_SHARE = 32  # before anything is measured, a chunk is one 32nd of the rows that a step may have
LEAST_ROWS = 16  # smaller chunks cost hardly less
AIM = 0.92  # aim at this share of the target: steps differ by a tenth
MOST_OTHERS = 0.2  # largest share of a step's time for decode rows while a prompt waits
GROWTH = 2  # a chunk is at most twice the largest so far: the time per row of a much larger chunk is different
MEMORY = 0.5  # weight of the earlier estimate when a new measurement comes
LATE = 1.5  # a step that took more than 1.5 times the expected time counts as 1.5 times
ALONE = 2.0  # targets that a step may take in which nobody decodes
WORTH = 5.0  # and steps of one decode token: shorter ones would read the weights too often
FRESH = 32  # steps with prompts after which the cost of decode rows is measured again


class PromptPace:
    def __init__(self, target: float, max_step_tokens: int, limits_alone: bool = False) -> None:
        """target: seconds per step while other requests decode. max_step_tokens: tokens per step at most.
        limits_alone: whether steps in which nobody decodes are limited."""
        self.target, self.max_step_tokens, self.limits_alone = target, max_step_tokens, limits_alone
        self._largest = max_step_tokens // FIRST_SHARE // GROWTH  # the largest chunk so far
        self._decode_seconds: dict[int, float] = {}  # time of a step without prompts, per size of the batch
        self._age: dict[int, int] = {}  # steps with prompts since that measurement
        self._again: dict[int, float] = {}  # the first of two new measurements, while the old one is out of date
        self._row_seconds = 0.0  # seconds per prompt row, on top of the decode rows; 0 before the first measurement
        self._row_alone = 0.0  # and where nobody decodes, on top of reading the weights

    def most_rows(self, num_decoding: int) -> int:
        """Prompt tokens of a step in which this many requests decode; 0 if the cost of decoding must be measured
        first."""
        if not num_decoding:
            return self._most_alone()
        decode = self._decode_seconds.get(_size(num_decoding))
        if decode is None or self._age[_size(num_decoding)] >= FRESH:
            return 0
        most = GROWTH * self._largest
        if self._row_seconds:
            step = max(AIM * self.target, decode / MOST_OTHERS)
            most = min(most, int((step - decode) / self._row_seconds))
        return min(max(most, LEAST_ROWS), self.max_step_tokens)

    def _most_alone(self) -> int:
        """A power of two, so that the same prompt is split the same way each time, nearly always."""
        if not self.limits_alone or not self._row_alone:
            return self.max_step_tokens
        weights = self._decode_seconds.get(_size(1), 0.0)
        most = int((max(ALONE * self.target, WORTH * weights) - weights) / self._row_alone)
        return min(max(1 << max(most, 1).bit_length() - 1, LEAST_ROWS), self.max_step_tokens)

    def learn(self, num_decoding: int, prompt_rows: int, seconds: float) -> None:
        """The time of a step in which this many requests decoded beside these prompt tokens; 0 seconds: not known."""
        size = _size(num_decoding)
        if not seconds:
            return
        if not num_decoding:
            if prompt_rows >= LEAST_ROWS:
                rows = max(seconds - self._decode_seconds.get(_size(1), 0.0), 0.1 * seconds)
                self._row_alone = _mixed(self._row_alone, rows / prompt_rows)
            return
        if not prompt_rows:
            self._learn_decode(size, seconds)
            return
        self._age[size] = self._age.get(size, 0) + 1
        if prompt_rows >= LEAST_ROWS:  # fewer rows say little about the time per row
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
    """The size class of a batch: 1, 2, 3 to 4, 5 to 8 ... requests."""
    return (num_decoding - 1).bit_length()


def _mixed(before: float, now: float) -> float:
    """A decayed mean. A step can be late by accident (a kernel was compiled), but not early."""
    if not before or now < before / 2:
        return now
    return MEMORY * before + (1 - MEMORY) * min(now, LATE * before)
