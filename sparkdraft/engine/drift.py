"""Whether steps take longer than they did: the time of recent decode steps over what such steps took before.

Steps are told apart by their number of requests, rows and context. What a kind of step takes is learnt from the fastest
of them and is never raised, so that a machine that has become slow does not pass for a usual one. (The costs in
spec/step_costs.py follow the machine within some fifty steps, because depths are chosen by what steps cost now.)
Numbers only.
"""

from __future__ import annotations

Kind = tuple[int, int, int]

LEARNT = 16  # steps of a kind before its later ones are compared
FALL = 0.25  # how far a faster step lowers what its kind takes
WEIGHT = 1 / 64  # of one step in the recent mean
LATE = 8.0  # a step that is later than this counts as this late: a kernel was compiled, or the process was stopped


class StepDrift:
    def __init__(self) -> None:
        self._usual: dict[Kind, float] = {}
        self._steps: dict[Kind, int] = {}
        self._recent, self._num_recent = 1.0, 0
        self.num_compared = 0  # steps so far: a reader sees by it whether the ratio is new

    @property
    def ratio(self) -> float | None:
        """None before there are steps to compare."""
        return self._recent if self._num_recent * WEIGHT >= 1 else None

    def learn(self, num_seqs: int, num_rows: int, context: int, seconds: float) -> None:
        """One step in which requests only decoded. context: tokens of all requests together, which is what the step
        reads of the cache. 0 seconds: its time is not known."""
        if not seconds:
            return
        kind = _about(num_seqs), _about(num_rows), _about(context >> 8)
        steps, usual = self._steps.get(kind, 0), self._usual.get(kind, seconds)
        self._steps[kind] = steps + 1
        self._usual[kind] = usual + FALL * min(seconds - usual, 0.0)
        if steps >= LEARNT:
            self.num_compared += 1
            self._num_recent += 1
            self._recent += (min(seconds / usual, LATE) - self._recent) * max(WEIGHT, 1 / self._num_recent)

    def forget_recent(self) -> None:
        self._recent, self._num_recent = 1.0, 0


def _about(number: int) -> int:
    """The number's first four binary digits: small numbers as they are, and eight classes up to each further double."""
    shift = max(number.bit_length() - 4, 0)
    return number >> shift << shift
