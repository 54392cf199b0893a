"""Our choice of depth over another engine's steps: it is told what a step verified and when it ended, and says how many
drafts each request should verify next. Knows nothing of vLLM, so that it is tested without it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sparkdraft.speculation.depth import DepthController
from sparkdraft.speculation.depth_state import DepthState


def usual_depths(most: int) -> list[int]:
    """0, 1, 3, 7 and so on up to the most: the depths among which this package's own engine chooses."""
    depths, depth = [0], 1
    while depth < most:
        depths.append(depth)
        depth = 2 * depth + 1
    return [*depths, most]


class DepthSteps:
    def __init__(self, most: int, depths: Sequence[int] = ()) -> None:
        """most: drafts per step that the drafter makes. depths: those to choose from, such as those that are recorded
        as graphs; none: usual_depths. 0 is always among them, or drafting could not be left out."""
        self.most = most
        self._controller = DepthController(most, depths=sorted({0, *(depths or usual_depths(most))}))
        self._states: dict[str, DepthState] = {}
        self._last: float | None = None  # when the last step ended; None: nothing ran since

    def choose(self, contexts: Mapping[str, int]) -> dict[str, int]:
        """By request, how many drafts it shall verify in its next step. contexts: tokens of each request that will
        decode."""
        ids = list(contexts)
        for name in ids:
            if name not in self._states:
                self._states[name] = self._controller.open()
        states = [self._states[name] for name in ids]
        return dict(zip(ids, self._controller.choose(states, [contexts[name] for name in ids]), strict=True))

    def verified(self, name: str, drafted: int, accepted: int) -> None:
        """One request's part of a step; without drafts, a plain step."""
        state = self._states.get(name)
        if state is not None:
            self._controller.record(state, drafted, accepted)

    def ended(self, now: float, depths: Sequence[int], num: int, context: int, is_pure: bool) -> None:
        """A step of 'num' requests has ended, some of which verified so many drafts. is_pure: it read no prompt, so its
        time is that of decoding."""
        last, self._last = self._last, now
        if last is None or not is_pure or not num or now <= last:
            return
        if depths:
            self._controller.verifies(depths, num)  # the choice of a later step may have been made since
        self._controller.measured(max(depths, default=0), num, max(context, 1), now - last)

    def idle(self) -> None:
        """Nothing runs: the next step's end is not the end of an interval."""
        self._last = None

    def finished(self, names: Iterable[str]) -> None:
        for name in names:
            if (state := self._states.pop(name, None)) is not None:
                self._controller.close(state)
