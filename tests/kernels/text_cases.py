"""Texts that repeat themselves, and what is to be drafted of them: brute force, in plain Python."""

from __future__ import annotations

from hypothesis import strategies as st

from sparkdraft.kernels.ops import MOST_MATCH

# A beginning, then a phrase that is written again and again, cut anywhere: loops, matches at the very start, none.
LOOPS = st.builds(
    lambda before, phrase, times, cut: (before + phrase * times)[: len(before) + len(phrase) * times - cut],
    st.lists(st.integers(0, 4), max_size=6),
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.integers(1, 9),
    st.integers(0, 5),
)
TEXTS = st.one_of(st.lists(st.integers(0, 1), max_size=70), st.lists(st.integers(0, 9), max_size=70), LOOPS)


def best_match(text: list[int], min_match: int, depth: int) -> tuple[int, list[int]]:
    """The length of the match and the drafts; (0, []): none."""
    best = (0, 0)
    for end in range(len(text) - 1):
        run = 0
        while run < min(end + 1, MOST_MATCH) and text[end - run] == text[-1 - run]:
            run += 1
        best = max(best, (run, end))
    run, end = best
    if run < min_match:
        return 0, []
    drafts: list[int] = []
    for k in range(depth):
        place = end + 1 + k
        drafts.append(text[place] if place < len(text) else drafts[place - len(text)])
    return run, drafts
