"""Prompt lookup: drafts what followed when a request's text last ended the way it ends now.

Every run of 'min_match' ids is remembered by where it last ended. While the text goes on as it did after an earlier
run, that place is followed, so a long match is not left for a short one; where it departs, the newest run counts. An id
costs a look into a dictionary, and nothing until the first question: a request that never drafts only records its ids.
How deep to draft, and whether the copy pays, is left to the depth controller; whether it is right, to the target.

    ids      .... [e-L+1 .. e] e+1 ......... n-1          the last L ids, n-L .. n-1, occurred before and ended at e
    drafts                     e+1 ......... n-1 e+1 ..   copied on, and round again: a loop is drafted to any length
"""

from __future__ import annotations

from collections.abc import Sequence

NONE = -1


class NgramIndex:
    def __init__(self, min_match: int = 8) -> None:
        assert min_match >= 1, f"min_match {min_match}: the empty string matches everywhere"
        self.min_match = min_match
        self._ids: list[int] = []
        self._num_indexed = 0
        self._ends: dict[tuple[int, ...], int] = {}  # a run of min_match ids -> where it last ended
        self._match_end = NONE  # where what the text ends with ended before

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Record committed ids, in order: the prompt, then the output as it comes."""
        self._ids.extend(ids)

    @property
    def matches(self) -> bool:
        """Whether the last min_match ids of the text, or more, also stand somewhere before."""
        self._catch_up()
        return self._match_end != NONE

    def propose(self, most: int) -> list[int]:
        """What followed the match, 'most' ids of it; none without one."""
        if most <= 0 or not self.matches:
            return []
        start = self._match_end + 1
        drafts = self._ids[start : start + most]
        while len(drafts) < most:  # the copy reached the end of the text, from where it copies itself
            drafts += drafts[: most - len(drafts)]
        return drafts

    def _catch_up(self) -> None:
        ids, ends, size = self._ids, self._ends, self.min_match
        for position in range(max(self._num_indexed, size - 1), len(ids)):
            run = tuple(ids[position - size + 1 : position + 1])
            followed = self._match_end + 1
            goes_on = followed > 0 and ids[followed] == ids[position]
            self._match_end = followed if goes_on else ends.get(run, NONE)
            ends[run] = position
        self._num_indexed = len(ids)
