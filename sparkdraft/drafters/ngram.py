"""Prompt lookup: drafts the ids that followed the last time a request's text ended as it ends now.

Every run of 'min_match' ids is remembered by where it last ended. While the text continues as it did after an earlier
run, that match is kept, so a long match is not given up for a shorter one; where the text departs, the newest run is
used.

    ids      .... [e-L+1 .. e] e+1 ......... n-1          the last L ids, n-L .. n-1, occurred before and ended at e
    drafts                     e+1 ......... n-1 e+1 ..   copied on, and round again: a loop is drafted to any length

The runs are in a hash table with chains: `_newest` holds the end of the newest run of each bucket, `_older` holds for
each run the end of the next older run of its bucket. It takes 16 to 24 bytes per id. Adding one id costs microseconds.
A long prompt is indexed by numpy, PROMPT_IDS per call, and nothing matches until all of it is indexed. When the text is
twice as long as when the table was made, the table is made again: 12 ms at 65,000 ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NGRAM_DEPTH = 15  # drafts per step where only the request's own text drafts
NONE = -1
PROMPT_IDS = 4096  # ids of a prompt that one call indexes at most
FOLLOWED_IDS = 256  # ids at a prompt's end that are added one at a time, so that matches in them are followed
ROOM = 2  # buckets per id at least in a new table, which serves until the text is twice as long
MOST_LINKS = 32  # links of a chain that are followed; only texts made for it have longer chains
FACTOR = 0x9E3779B97F4A7C15  # of the rolling hash: odd, with bits spread over the word
WORD = (1 << 64) - 1


class NgramIndex:
    def __init__(self, min_match: int = 8) -> None:
        assert min_match >= 1, f"min_match {min_match}: the empty string matches everywhere"
        self.min_match = min_match
        self._ids = array("i")  # ids in the table
        self._waiting: list[int] = []  # ids that are recorded and not indexed yet
        self._newest = array("i")  # per bucket
        self._older = array("i")  # per position
        self._hash = 0  # of the last run
        self._match_end = NONE  # where the run that the text ends with ended before
        self._power = pow(FACTOR, min_match + 1, 1 << 64)  # the factor of the id that leaves a run

    def __len__(self) -> int:
        return len(self._ids) + len(self._waiting)

    @property
    def nbytes(self) -> int:
        return sum(a.itemsize * len(a) for a in (self._ids, self._newest, self._older))

    def extend(self, ids: Sequence[int]) -> None:
        """Record committed ids, in order: the prompt, then the output as it comes."""
        self._waiting.extend(ids)

    @property
    def matches(self) -> bool:
        """True if the last min_match ids of the text, or more, also occur somewhere before."""
        if self._waiting:
            self._catch_up()
        return self._match_end != NONE

    def propose(self, most: int) -> list[int]:
        """The 'most' ids that followed the match; none without a match."""
        if most <= 0 or not self.matches:
            return []
        start = self._match_end + 1
        drafts = self._ids[start : start + most].tolist()
        while len(drafts) < most:  # the copy has reached the end of the text and continues with its own ids
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
        """Add one id: extend the match or look for another, and remember the run that ends here."""
        ids, position, older = self._ids, len(self._ids), NONE
        ids.append(token)
        before = position - self.min_match  # the position that leaves the run
        self._hash = ((self._hash + token) * FACTOR - (ids[before] * self._power if before >= 0 else 0)) & WORD
        if before >= -1:
            bucket = self._hash >> self._shift
            older, self._newest[bucket] = self._newest[bucket], position
            followed = self._match_end + 1
            goes_on = followed > 0 and ids[followed] == token
            self._match_end = followed if goes_on else self._find(position, older)
        self._older.append(older)

    def _find(self, position: int, end: int) -> int:
        """The earlier end of the run that ends at this position. end: of the newest run in its bucket."""
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
        """Index a part of a long prompt, up to its last ids."""
        count = min(PROMPT_IDS, len(self._waiting) - FOLLOWED_IDS)
        self._ids.extend(self._waiting[:count])
        del self._waiting[:count]
        self._index()
        self._match_end = NONE

    def _make_table(self) -> None:
        """Make a table for all recorded ids, with one bucket per id or more."""
        bits = (ROOM * max(len(self), 1024)).bit_length()
        self._newest = _nones(1 << bits)
        self._older = array("i")
        self._shift = 64 - bits
        self._index()

    def _index(self) -> None:
        """Add the runs that are not in the table yet. Afterwards the table holds the newest run of each bucket, and
        each run is chained to the one before it."""
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
        same = buckets[1:] == buckets[:-1]  # whether a bucket is that of the entry before
        first, last = np.append(True, ~same), np.append(~same, True)
        older[ends[first]] = newest[buckets[first]]
        older[ends[1:][same]] = ends[:-1][same]
        newest[buckets[last]] = ends[last]

    def _hashes(self, start: int) -> NDArray[np.uint64]:
        """Hashes of the runs that end at 'start' and later: the sum of id * FACTOR ** (1 + distance from the end)."""
        ids = np.frombuffer(self._ids, np.int32)[start - self.min_match + 1 :].astype(np.uint64)
        count = len(self._ids) - start
        hashes = np.zeros(count, np.uint64)
        for first in range(self.min_match):
            hashes = (hashes + ids[first : first + count]) * np.uint64(FACTOR)
        return hashes


def _nones(count: int) -> array[int]:
    return array("i", b"\xff" * (4 * count))  # the bytes of NONE
