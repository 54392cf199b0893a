"""Our choice of depth over steps that are not our engine's: easy text is drafted deeply, hard text plainly."""

from __future__ import annotations

import random

import pytest

from sparkdraft.bridges.vllm.plugin.depth_steps import DepthSteps, usual_depths


def run(chance: float, steps: int = 300, num: int = 1, most: int = 15, row: float = 0.05) -> tuple[list[int], float]:
    """Depths of the steps of 'num' requests whose drafts are accepted by chance, and the tokens a second. A draft costs
    'row' of a plain step."""
    dice, depths, now, tokens = random.Random(1), DepthSteps(most), 0.0, num
    seen: list[int] = []
    wanted = {f"r{i}": 0 for i in range(num)}
    for step in range(steps):
        wanted = depths.choose(dict.fromkeys(wanted, 100 + step))
        deepest = max(wanted.values())
        now += 1.0 + row * sum(wanted.values())
        for name, depth in wanted.items():
            accepted = next((i for i in range(depth) if dice.random() > chance), depth)
            depths.verified(name, depth, accepted)
            tokens += 1 + accepted
        depths.ended(now, [*wanted.values()], num, 100 + step, is_pure=True)
        seen.append(deepest)
    depths.finished(wanted)
    return seen, tokens / now


def test_the_depths_are_those_of_our_engine() -> None:
    assert usual_depths(15) == [0, 1, 3, 7, 15] and usual_depths(1) == [0, 1] and usual_depths(4) == [0, 1, 3, 4]


@pytest.mark.parametrize("num", [1, 3])
def test_easy_text_is_drafted_and_hard_text_is_not(num: int) -> None:
    easy, fast = run(0.95, num=num)
    hard, slow = run(0.02, num=num, row=0.3)
    assert sorted(easy)[len(easy) // 2] >= 7 and fast > 2.5 * num
    assert sum(depth > 0 for depth in hard) < len(hard) / 5 and slow > 0.93 * num, "parking costs next to nothing"


def test_only_given_depths_are_chosen_and_odd_reports_do_no_harm() -> None:
    depths = DepthSteps(7, [7, 7, 2])
    for step in range(200):
        chosen = depths.choose({"a": 50 + step})
        assert chosen["a"] in (0, 2, 7)
        depths.verified("a", chosen["a"], chosen["a"])
        depths.verified("never chosen", 3, 1)
        depths.ended(step + 1.0, [chosen["a"]], 1, 50 + step, is_pure=step % 7 != 0)
    depths.idle()
    depths.ended(1000.0, [], 1, 10, is_pure=True)  # the pause before it is no step
    depths.ended(1000.0, [], 1, 10, is_pure=True)
    depths.ended(1000.5, [], 0, 0, is_pure=True)
    depths.finished(["a", "a", "unknown"])
    assert depths.choose({}) == {}
