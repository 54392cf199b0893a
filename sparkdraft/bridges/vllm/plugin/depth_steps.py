"""Chooses draft depths for another engine's steps, from what each step verified and when it ended.

It knows nothing of vLLM, so it can be tested without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sparkdraft.speculation.budget import Budget, depth_choices
from sparkdraft.speculation.survival import Kind

START = 0.7  # the acceptance that requests begin with


class DepthSteps:
    def __init__(self, most: int, depths: Sequence[int] = ()) -> None:
        """most: drafts per step that the drafter makes. depths: the choices, such as those with CUDA graphs (default:
        those of our own engine); 0 is always among them, so that drafting can pause."""
        self.most = most
        kind = Kind(START, drawn=False, by_model=True, finds_gaps=False)
        self._budget = Budget(most, [kind], sorted({0, *(depths or depth_choices(most))}))
        self._slots: dict[str, int] = {}
        self._verified: list[tuple[int, int, int]] = []  # slot, drafts, accepted: of requests of the last step
        self._last: float | None = None  # when the last step ended; None: idle since

    def choose(self, contexts: Mapping[str, int]) -> dict[str, int]:
        """Returns how many drafts each request should verify next. contexts: length in tokens of each request that will
        decode."""
        for name in contexts:
            if name not in self._slots:
                self._slots[name] = self._budget.open(0)
        self._record()
        slots = [self._slots[name] for name in contexts]
        return dict(zip(contexts, self._budget.choose(slots, max(contexts.values(), default=0)), strict=True))

    def verified(self, name: str, drafted: int, accepted: int) -> None:
        """Records a step of one request; without drafts, a plain step."""
        if name in self._slots:
            self._verified.append((self._slots[name], drafted, accepted))

    def ended(self, now: float, depths: Sequence[int], num: int, context: int, is_pure: bool) -> None:
        """Records the end of a step of `num` requests. depths: drafts verified, of the requests that had any.
        is_pure: no prompt was read, so the time is that of decoding."""
        last, self._last = self._last, now
        if last is None or not is_pure or not num or now <= last:
            return
        drafting = sum(depth > 0 for depth in depths)
        self._budget.measured(
            num + sum(depths), num, max(context, 1), now - last, None, drafting, max(depths, default=0)
        )

    def idle(self) -> None:
        """Ends the current interval: the next step's end does not measure a step."""
        self._last = None

    def finished(self, names: Iterable[str]) -> None:
        self._record()
        for name in names:
            if (slot := self._slots.pop(name, None)) is not None:
                self._budget.close(slot)

    def _record(self) -> None:
        """Tells the budget of the last step, of all its requests at once."""
        verified, self._verified = self._verified, []
        if verified:
            self._budget.record(*zip(*verified, strict=True))
