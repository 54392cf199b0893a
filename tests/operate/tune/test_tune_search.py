"""What the search takes up and keeps, with speeds and a clock that are handed in."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.operate.tune.search import (
    BURST,
    LOADS,
    LONG,
    ONE,
    Budget,
    Knob,
    Options,
    Outcome,
    Run,
    Search,
    depth_lists,
    knobs,
)
from tests.fakes import fake_plan

ROWS = Knob("max_step_tokens", 512, (1024, 256), (LONG, BURST))
SEQS = Knob("max_seqs", 16, (32,), (BURST,))
Speed = Callable[[Options, str], float]


class Machine:
    """Its runs take a second each, and deviate by a share 'noise' of their speed."""

    def __init__(self, speed: Speed, noise: float = 0.001, seed: int = 0) -> None:
        self.speed, self.noise, self.clock, self.runs = speed, noise, 0.0, list[tuple[dict[str, object], str]]()
        self.random = random.Random(seed)

    def measure(self, options: Options, load: str) -> Run:
        self.clock += 1.0
        self.runs.append((dict(options), load))
        return Run(self.speed(options, load) * self.random.gauss(1, self.noise), 1.0)

    def tune(self, *todo: Knob, seconds: float = 300.0, old: Options | None = None) -> Outcome:
        budget = Budget(seconds, lambda: self.clock)
        return Search(self.measure, LOADS, budget, lambda text: None, lambda text: None).run(todo, old or {})


def faster(name: str, value: object, gain: float, loads: tuple[str, ...] = LOADS) -> Speed:
    return lambda options, load: 100 * (1 + gain * (options.get(name) == value and load in loads))


def test_a_gain_beyond_the_noise_is_kept() -> None:
    outcome = Machine(faster("max_step_tokens", 256, 0.1)).tune(ROWS, SEQS)
    assert outcome.is_kept and outcome.new == {"max_step_tokens": 256} and outcome.old == {}
    assert outcome.verdict and outcome.verdict.ratio == pytest.approx(1.1, abs=0.01)
    assert outcome.conclusion().startswith("faster by") and outcome.conclusion().endswith("the new settings are kept")


def test_gains_of_several_knobs_are_joined_and_the_old_profile_stays() -> None:
    def speed(options: Options, load: str) -> float:
        return 100 + 10 * (options.get("max_step_tokens") == 1024) + 10 * (options.get("max_seqs") == 32)

    outcome = Machine(speed).tune(ROWS, SEQS, old={"threads": 2})
    assert outcome.is_kept and outcome.new == {"threads": 2, "max_step_tokens": 1024, "max_seqs": 32}


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_taken_for_a_gain(seed: int) -> None:
    outcome = Machine(lambda options, load: 100.0, noise=0.05, seed=seed).tune(ROWS, SEQS)
    assert not outcome.is_kept and "the old settings are kept" in outcome.conclusion()


def test_a_gain_that_is_gone_when_it_is_measured_again_is_not_kept() -> None:
    machine = Machine(lambda options, load: 100.0)

    def fades(options: Options, load: str) -> float:
        return 130.0 if options.get("max_step_tokens") == 256 and machine.clock < 30 else 100.0

    machine.speed = fades
    outcome = machine.tune(ROWS)
    assert outcome.new == {"max_step_tokens": 256} and outcome.verdict and not outcome.is_kept
    assert "no gain beyond the noise, so the old settings are kept" in outcome.conclusion()


def test_a_gain_that_slows_another_load_down_is_not_kept() -> None:
    def speed(options: Options, load: str) -> float:
        tuned = options.get("max_step_tokens") == 256
        return 100 * (1 + tuned * {LONG: 0.5, BURST: 0.5, ONE: -0.1}.get(load, 0.0))

    outcome = Machine(speed).tune(ROWS)
    assert outcome.verdict and outcome.verdict.ratio > 1.1 and not outcome.is_kept
    assert "slower on one stream" in outcome.conclusion()


def test_old_and_new_are_measured_alternately_at_the_end() -> None:
    machine = Machine(faster("max_step_tokens", 256, 0.1))
    outcome = machine.tune(ROWS)
    last = [options for options, load in machine.runs if load == ONE][1:]  # the first run is of the old settings
    new = outcome.new
    assert len(last) >= 8 and last[:8] == [{}, new, new, {}] * 2


def test_what_cannot_run_is_said_and_passed_over() -> None:
    def speed(options: Options, load: str) -> float:
        if options.get("max_step_tokens") == 1024:
            raise UserError("it does not fit")
        return faster("max_step_tokens", 256, 0.1)(options, load)

    outcome = Machine(speed).tune(ROWS)
    assert outcome.tried[0] == ("max_step_tokens 1024", "cannot run: it does not fit") and outcome.new == {
        "max_step_tokens": 256
    }


def test_it_ends_in_time_and_says_what_was_not_tried() -> None:
    machine = Machine(faster("max_step_tokens", 1024, 0.1))
    outcome = machine.tune(ROWS, SEQS, seconds=70)
    assert machine.clock <= 70 and outcome.is_kept
    assert [name for name, _ in outcome.tried] == ["max_step_tokens 1024", "max_step_tokens 256", "max_seqs 32"]
    machine = Machine(faster("max_seqs", 32, 0.1))
    outcome = machine.tune(*[ROWS] * 5, SEQS, seconds=80)
    assert machine.clock <= 80 and "max_seqs 32" in outcome.skipped and not outcome.is_kept
    with pytest.raises(UserError, match=r"takes 32 s here, and 36 s are left: give --minutes 2 or more"):
        Machine(lambda options, load: 1.0).tune(ROWS, seconds=40)


def test_knobs_are_asked_for_only_when_there_is_time_to_try_them() -> None:
    """The tiles of a GPU's kernels are searched by whoever asks for the first knob: half of a small budget."""
    asked = list[float]()
    machine = Machine(faster("max_step_tokens", 256, 0.1))

    def todo(budget: Budget) -> Iterator[Knob]:
        asked.append(budget.spent)
        yield ROWS

    for seconds, expected in ((40.0, []), (300.0, [4.0])):
        machine.clock = 0.0
        budget = Budget(seconds, lambda: machine.clock)
        search = Search(machine.measure, LOADS, budget, lambda text: None, lambda text: None)
        with pytest.raises(UserError) if not expected else nullcontext():
            assert search.run(todo(budget), {}).is_kept
        assert asked == expected


def test_one_slow_run_does_not_end_the_search() -> None:
    machine = Machine(faster("max_seqs", 32, 0.1))
    measure = machine.measure

    def spiked(options: Options, load: str) -> Run:
        run = measure(options, load)
        return run._replace(seconds=60.0) if len(machine.runs) == 12 else run

    machine.measure = spiked  # type: ignore[method-assign]
    outcome = machine.tune(ROWS, SEQS)
    assert machine.runs[11][1] == BURST and not outcome.skipped and outcome.is_kept


def test_the_knobs_of_a_machine() -> None:
    plan = fake_plan(max_step_tokens=512, max_seqs=16, threads=4)
    found = {k.name: k.values for k in knobs(EngineConfig(), plan, [0, 1, 3, 7], 4, [])}
    assert found["threads"] == (3, 2) and found["max_seqs"] == (32, 8, 64) and "kv" not in found
    assert found["max_step_tokens"] == (1024, 256, 2048, 128) and found["spec_depths"][0] == "0,1,2,3,5,7"
    named = {k.name for k in knobs(EngineConfig.of(max_step_tokens=0, spec="3"), plan, [0, 1, 3, 7], 1, [])}
    assert named == {"max_seqs", "threads"}, "what the user has named is not tuned"
    assert all(EngineConfig(spec_depths=text).depths for text in depth_lists(1) + depth_lists(15) + depth_lists(40))
