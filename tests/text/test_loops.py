"""Where a text begins to repeat itself: by hand, against the rule written out, and on the evaluation responses.

The finder for many texts on a device is held to the one for a single text.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparkdraft.operate.bench.accept import LOOP
from sparkdraft.text.repetition import LoopRule, ends_in_loop, find_loops, loop_start

RESPONSES = Path(__file__).parent.parent.parent / "tools" / "responses.npz"


@pytest.mark.parametrize(
    ("ids", "start"),
    [
        ([], 0),
        ([1, 2, 3], 3),
        ([5] * 49, 1),  # 48 ids that each equal the one before
        ([5] * 48, 48),  # one too few
        ([9, 8, *[1, 2, 3] * 17], 5),  # a cycle, then 16 times again
        ([9, 8, *[1, 2, 3] * 16], 50),
        ([9, *range(100), *range(100)], 101),  # as long as its period is enough
        ([9, *range(100), *range(99)], 200),
        ([*range(129), *range(129)], 258),  # longer cycles are not looked for
        ([*[1, 2] * 40, 3], 81),  # it ended
    ],
)
def test_by_hand(ids: list[int], start: int) -> None:
    assert loop_start(ids, LOOP) == start


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(0, 12))
def test_the_rule(before: list[int], cycle: list[int], times: int) -> None:
    ids, longest, tail = before + cycle * times, 4, 6

    def repeats(start: int, period: int) -> bool:
        long_enough = len(ids) - start >= max(tail, period)
        return long_enough and start >= period and all(ids[i] == ids[i - period] for i in range(start, len(ids)))

    starts = [s for s in range(len(ids)) for period in range(1, longest + 1) if repeats(s, period)]
    assert loop_start(ids, LoopRule(max_period=longest, min_repeated=tail)) == min(starts, default=len(ids))


@given(st.lists(st.lists(st.integers(0, 1), max_size=24), min_size=1, max_size=5), st.integers(0, 2))
def test_many_texts_at_once(texts: list[list[int]], before: int) -> None:
    """Whatever precedes a short text in its row, here even ids that continue it, makes no loop."""
    rule = LoopRule(max_period=4, min_repeated=6)
    width = rule.max_period + rule.min_repeated
    recent = torch.tensor([([before] * width + text)[-width:] for text in texts])
    found = ends_in_loop(recent, torch.tensor([len(text) for text in texts]), rule)
    assert found.tolist() == [any(find_loops(text, rule)) for text in texts]


def test_the_evaluation_responses() -> None:
    data = np.load(RESPONSES)
    ends, loops = np.cumsum(data["len"]), [0] * 7
    for end, length, prompt, kind in zip(ends, data["len"], data["plen"], data["cls"], strict=True):
        response = data["tok"][end - length + int(prompt) : end].tolist()
        loops[kind] += loop_start(response, LOOP) < len(response)
    assert loops == [3, 2, 12, 3, 11, 17, 0]
