"""Prompt lookup: drafts what followed when a request's text last ended the way it ends now.

Every run of 'min_match' ids is remembered by where it last ended. While the text goes on as it did after an earlier
run, that place is followed, so a long match is not left for a short one; where it departs, the newest run counts. How
deep to draft, and whether the copy pays, is left to the depth controller; whether it is right, to the target.

    ids      .... [e-L+1 .. e] e+1 ......... n-1          the last L ids, n-L .. n-1, occurred before and ended at e
    drafts                     e+1 ......... n-1 e+1 ..   copied on, and round again: a loop is drafted to any length

The runs are in a hash table with chains: `_newest` holds where the newest run of each bucket ended, `_older` for each
run where the next older one of its bucket ended. It takes 16 to 24 bytes per id. One new id costs microseconds; a long
prompt is put into the table by numpy, PROMPT_IDS per question, and nothing matches until all of it is there. A table
that has become too small, because the text is twice as long as when it was made, is made anew: 12 ms at 65,000 ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NONE = -1
PROMPT_IDS = 4096  # ids of a prompt that one question indexes at most
FOLLOWED_IDS = 256  # ids at a prompt's end in which matches are followed, one id at a time
ROOM = 2  # buckets per id at least when the table is made: it serves until the text is twice as long
MOST_LINKS = 32  # of a chain that are looked at: longer ones are only met by texts made for it
FACTOR = 0x9E3779B97F4A7C15  # of the rolling hash: odd, with bits all over
WORD = (1 << 64) - 1


class NgramIndex:
    def __init__(self, min_match: int = 8) -> None:
        assert min_match >= 1, f"min_match {min_match}: the empty string matches everywhere"
        self.min_match = min_match
        self._ids = array("i")  # those that are indexed
        self._waiting: list[int] = []  # those that are recorded and not indexed yet
        self._newest = array("i")  # by bucket
        self._older = array("i")  # by position
        self._hash = 0  # of the last run
        self._match_end = NONE  # where what the text ends with ended before
        self._power = pow(FACTOR, min_match + 1, 1 << 64)  # of the id that leaves a run

    def __len__(self) -> int:
        return len(self._ids) + len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Ids that the next questions have still to index."""
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        return sum(a.itemsize * len(a) for a in (self._ids, self._newest, self._older))

    def extend(self, ids: Sequence[int]) -> None:
        """Record committed ids, in order: the prompt, then the output as it comes."""
        self._waiting.extend(ids)

    @property
    def matches(self) -> bool:
        """Whether the last min_match ids of the text, or more, also stand somewhere before."""
        if self._waiting:
            self._catch_up()
        return self._match_end != NONE

    def propose(self, most: int) -> list[int]:
        """What followed the match, 'most' ids of it; none without one."""
        if most <= 0 or not self.matches:
            return []
        start = self._match_end + 1
        drafts = self._ids[start : start + most].tolist()
        while len(drafts) < most:  # the copy reached the end of the text, from where it copies itself
            drafts += drafts[: most - len(drafts)]
        return drafts

    def _catch_up(self) -> None:
        if len(self._newest) < len(self):
            self._make_table()
        if len(self._waiting) >= FOLLOWED_IDS + self.min_match:  # at least one whole run can be indexed
            self._take_prompt()
        if len(self._waiting) < FOLLOWED_IDS + self.min_match:
            for token in self._waiting:
                self._follow(token)
            self._waiting = []

    def _follow(self, token: int) -> None:
        """One more id: go on with the match if it does, else look for another, and remember the run that ends here."""
        ids, position, older = self._ids, len(self._ids), NONE
        ids.append(token)
        before = position - self.min_match  # the position that the run leaves behind
        self._hash = ((self._hash + token) * FACTOR - (ids[before] * self._power if before >= 0 else 0)) & WORD
        if before >= -1:
            bucket = self._hash >> self._shift
            older, self._newest[bucket] = self._newest[bucket], position
            followed = self._match_end + 1
            goes_on = followed > 0 and ids[followed] == token
            self._match_end = followed if goes_on else self._find(position, older)
        self._older.append(older)

    def _find(self, position: int, end: int) -> int:
        """Where the run that ends at this position ended before. end: of the newest run in its bucket."""
        if end != NONE:
            run = self._run(position)
            for _ in range(MOST_LINKS):
                if end == NONE or self._run(end) == run:
                    return end
                end = self._older[end]
        return NONE

    def _run(self, end: int) -> array[int]:
        return self._ids[end - self.min_match + 1 : end + 1]

    # ---- many ids at once

    def _take_prompt(self) -> None:
        """Some of a long prompt, up to its last ids."""
        count = min(PROMPT_IDS, len(self._waiting) - FOLLOWED_IDS)
        self._ids.extend(self._waiting[:count])
        del self._waiting[:count]
        self._index()
        self._match_end = NONE

    def _make_table(self) -> None:
        """With a bucket per id or more, for all that is recorded."""
        bits = (ROOM * max(len(self), 1024)).bit_length()
        self._newest = _nones(1 << bits)
        self._older = array("i")
        self._shift = 64 - bits
        self._index()

    def _index(self) -> None:
        """Put the runs into the table that end where it does not reach yet. It holds the newest of each bucket then,
        and each is chained to the one before it, in the table or among these."""
        start, stop = len(self._older), len(self._ids)
        self._older.extend(_nones(stop - start))
        start = max(start, self.min_match - 1)
        if start >= stop:
            return
        hashes = self._hashes(start)
        self._hash = int(hashes[-1])
        newest, older = (np.frombuffer(a, np.int32) for a in (self._newest, self._older))
        pairs = np.sort((hashes >> np.uint64(self._shift)) << np.uint64(32) | np.arange(start, stop, dtype=np.uint64))
        buckets, ends = (pairs >> np.uint64(32)).astype(np.int64), (pairs & np.uint64(0xFFFFFFFF)).astype(np.int32)
        same = buckets[1:] == buckets[:-1]  # as the one before
        first, last = np.append(True, ~same), np.append(~same, True)
        older[ends[first]] = newest[buckets[first]]
        older[ends[1:][same]] = ends[:-1][same]
        newest[buckets[last]] = ends[last]

    def _hashes(self, start: int) -> NDArray[np.uint64]:
        """Of the runs that end at 'start' and later: the sum of id * FACTOR ** (1 + how far it is from the end)."""
        ids = np.frombuffer(self._ids, np.int32)[start - self.min_match + 1 :].astype(np.uint64)
        count = len(self._ids) - start
        hashes = np.zeros(count, np.uint64)
        for first in range(self.min_match):
            hashes = (hashes + ids[first : first + count]) * np.uint64(FACTOR)
        return hashes


def _nones(count: int) -> array[int]:
    return array("i", b"\xff" * (4 * count))  # the bytes of NONE
