"""Prompt lookup: drafts what followed the last time a request's text ended the way it ends now.

An online suffix automaton of the text: a state stands for the strings that end at the same places, so the link of the
newest state is the longest suffix that occurred before, and each state remembers the last place where it ended. An id
costs constant time on average, and nothing until the first question: a request that never drafts only records its ids.
How deep to draft, and whether the copy pays, is left to the depth controller; whether it is right, to the target.

    ids      .... [e-L+1 .. e] e+1 ......... n-1          the last L ids, n-L .. n-1, occurred before and ended at e
    drafts                     e+1 ......... n-1 e+1 ..   copied on, and round again: a loop is drafted to any length
"""

from __future__ import annotations

from collections.abc import Sequence

NONE = -1
ROOT = 0  # the state of the empty string
MOST_CLIMBS = 64


class NgramIndex:
    def __init__(self, min_match: int = 8) -> None:
        assert min_match >= 1, f"min_match {min_match}: the empty string matches everywhere"
        self.min_match = min_match
        self._ids: list[int] = []
        self._num_indexed = 0
        self._match_end = NONE  # of the last indexed id: where its longest earlier match ended
        # One entry a state, at most two states an id. Nearly every state has one way on, so that one lies in flat
        # lists and only states that branch have a dictionary: about 250 bytes an id in all.
        self._length = [0]  # of the longest string of the state
        self._link = [NONE]  # the state of the longest suffix that also ends elsewhere
        self._latest = [NONE]  # where it last ended
        self._next_id = [NONE]
        self._next_state = [NONE]
        self._branches: dict[int, dict[int, int]] = {}  # state -> the ways on that are not in the lists
        self._last = ROOT

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Record committed ids, in order: the prompt, then the output as it comes."""
        self._ids.extend(ids)

    @property
    def match_length(self) -> int:
        """Length of the longest suffix of the text that also ends somewhere before its end."""
        self._catch_up()
        return self._length[self._link[self._last]] if self._last != ROOT else 0

    def propose(self, most: int) -> list[int]:
        """What followed the longest match where it last occurred, 'most' ids of it; none if the match is too short."""
        if most <= 0 or self.match_length < self.min_match:
            return []
        start = self._match_end + 1
        drafts = self._ids[start : start + most]
        while len(drafts) < most:  # the copy reached the end of the text, from where it copies itself
            drafts += drafts[: most - len(drafts)]
        return drafts

    # ---- the automaton

    def _catch_up(self) -> None:
        for position in range(self._num_indexed, len(self._ids)):
            self._append(self._ids[position], position)
        self._num_indexed = len(self._ids)

    def _append(self, token: int, position: int) -> None:
        length, link, follow = self._length, self._link, self._follow
        new = self._add_state(position + 1, position)
        state, to = self._last, NONE
        while state != NONE and (to := follow(state, token)) == NONE:
            self._connect(state, token, new)
            state = link[state]
        if state == NONE:
            to = ROOT  # the first time this id is seen
        elif length[to] != length[state] + 1:
            to = self._split(state, token, to)
        link[new] = to
        self._last = new
        self._match_end = self._latest[to]
        self._refresh(to, position)

    def _follow(self, state: int, token: int) -> int:
        if self._next_id[state] == token:
            return self._next_state[state]
        branches = self._branches.get(state)
        return NONE if branches is None else branches.get(token, NONE)

    def _connect(self, state: int, token: int, to: int) -> None:
        if self._next_id[state] in (token, NONE):
            self._next_id[state] = token
            self._next_state[state] = to
        else:
            self._branches.setdefault(state, {})[token] = to

    def _split(self, state: int, token: int, old: int) -> int:
        """The shorter strings of 'old' now end where its longer ones do not: give them a state of their own."""
        clone = self._add_state(self._length[state] + 1, self._latest[old])
        self._next_id[clone] = self._next_id[old]
        self._next_state[clone] = self._next_state[old]
        if old in self._branches:
            self._branches[clone] = self._branches[old].copy()
        self._link[clone] = self._link[old]
        self._link[old] = clone
        while state != NONE and self._follow(state, token) == old:
            self._connect(state, token, clone)
            state = self._link[state]
        return clone

    def _add_state(self, length: int, latest: int) -> int:
        self._length.append(length)
        self._link.append(NONE)
        self._latest.append(latest)
        self._next_id.append(NONE)
        self._next_state.append(NONE)
        return len(self._length) - 1

    def _refresh(self, state: int, position: int) -> None:
        """All the suffixes that occurred before have now ended here.

        They are few in ordinary text, but as many as there are ids in a loop. The bound keeps the cost of an id
        constant; past it a match is still the longest, but may be copied from an occurrence that is not the last.
        """
        length, link, latest, shortest = self._length, self._link, self._latest, self.min_match
        for _ in range(MOST_CLIMBS):
            if length[state] < shortest:  # never proposed from
                return
            latest[state] = position
            state = link[state]
