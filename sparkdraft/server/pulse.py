"""Whether the engine process still runs, as the API sees it.

The API pings the engine process every BEAT seconds. A thread of that process answers, so a long step (a first
compilation, a huge prompt) does not look like a stopped process: a stopped process sends nothing at all. Each answer
also says which turn the engine's loop is in, so a step that never ends is noticed too, after a much longer limit.

Time is counted in pings that the API sent, not read from a clock: while the API itself stands still (a paused
container, a machine that sleeps), nothing is held against the engine.
"""

from __future__ import annotations

BEAT = 0.5  # seconds between two pings
SILENT = 2.0  # seconds without a byte from the engine after which it counts as unresponsive
RETRY = 5  # seconds after which a client may try again meanwhile


class Pulse:
    def __init__(self) -> None:
        self.silent_for = 0.0  # seconds since the engine process last sent something
        self.step_for = 0.0  # seconds that the turn of the engine's loop has lasted; 0 while it waits for work
        self._turn, self._idle = 0, True

    @property
    def is_silent(self) -> bool:
        return self.silent_for > SILENT

    def pinged(self) -> None:
        """Another BEAT has passed."""
        self.silent_for += BEAT
        self.step_for += 0.0 if self._idle else BEAT

    def heard(self) -> None:
        """Something came from the engine process."""
        self.silent_for = 0.0

    def answered(self, turn: int, idle: bool) -> None:
        if idle or turn != self._turn:
            self.step_for = 0.0
        self._turn, self._idle = turn, idle

    def hung(self, hang: float, step: float) -> str:
        """Why the engine counts as hung, or "". hang, step: the longest silence and the longest step; 0: no limit."""
        if hang and self.silent_for >= hang:
            return f"the engine process gave no sign of life for {self.silent_for:.0f} s and was killed"
        if step and self.step_for >= step and not self.is_silent:
            return f"a step of the engine lasted {self.step_for:.0f} s, so its process was killed"
        return ""
