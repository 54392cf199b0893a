"""Forecasts: memory is the plan's to the byte, what is said to fit fits, and speeds agree with each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.operate.bench.shapes import drafter_shape, shape
from sparkdraft.operate.forecast.forecast import CLASSES, Forecast, Question, chance_of
from sparkdraft.operate.forecast.machine import find_machine
from sparkdraft.plan.resolve import resolve
from sparkdraft.plan.weight_formats import WeightFormats
from sparkdraft.speculation.costs import expected_tokens
from tests.operate.forecast.published import MODELS

QWEN = shape("qwen3-8b")


def question(model: str = "qwen3-8b", machine: str = "gb10", kv: str = "exact", drafter: str = "", weights: str = "",
             **more: object) -> Question:  # fmt: skip
    dims = MODELS.get(model) or shape(model)
    return Question(
        dims,
        find_machine(machine),
        EngineConfig(kv=kv),
        WeightFormats.parse(weights) if weights else None,
        drafter_shape(drafter, dims) if drafter else None,
        **more,  # type: ignore[arg-type]
    )


CASES = [
    question(),
    question(drafter="dflash-5x"),
    question(kv="turboquant", drafter="dflash-5x"),
    question(kv="fp8", machine="h200"),
    question("gpt-oss-20b", drafter="gpt-oss-20b-dflash", weights="bfloat16,experts=mxfp4"),
    question("gemma4-31b", drafter="gemma4-31b-dflash", weights="nvfp4"),
    question("gemma4-31b", machine="rtx-5090", weights="nvfp4"),
    question("smollm2-135m", machine="cpu"),
]


@pytest.mark.parametrize("asked", CASES)
def test_memory_is_what_serve_would_plan(asked: Question) -> None:
    forecast = Forecast(asked)
    caps = asked.drafter.caps() if asked.drafter else None
    args = (asked.config, asked.model, asked.machine.hardware, None, caps)  # as engine/machine.py asks
    assert forecast.plan == (resolve(*args, forecast.held) if asked.formats else resolve(*args))
    assert sum(forecast.memory.values()) == forecast.plan.memory.total
    assert forecast.plan.memory.total <= forecast.usable == forecast.plan.memory.free - forecast.head_room


@pytest.mark.parametrize("asked", CASES)
def test_what_is_said_to_fit_is_the_most_that_fits(asked: Question) -> None:
    """The plan takes a cache of that size, and refuses one that is a block larger."""
    forecast = Forecast(asked)
    config = replace(asked.config, kv_tokens=forecast.max_tokens, max_seqs=forecast.plan.max_seqs)
    args = (asked.model, asked.machine.hardware, None, forecast.caps, forecast.held)
    if forecast.plan.windows or forecast.plan.coded:  # pages that go with the number of blocks
        assert resolve(config, *args).num_blocks * 16 <= forecast.max_tokens
        return
    assert resolve(config, *args).memory.total <= forecast.usable
    with pytest.raises(UserError, match="or fewer"):
        resolve(replace(config, kv_tokens=forecast.max_tokens + 16), *args)


def test_a_drafter_takes_weights_and_room_for_its_own_keys() -> None:
    with_drafter, without = Forecast(question(drafter="dflash-5x")), Forecast(question())
    assert with_drafter.max_tokens < without.max_tokens
    assert with_drafter.memory["drafter's weights"] == 2 * with_drafter.caps.num_weights  # type: ignore[union-attr]
    share = with_drafter.memory["drafter's K/V"] / with_drafter.memory["K/V of the target"]
    assert share == pytest.approx(5 / 36), "five layers beside 36 of the same heads"
    assert "drafter's K/V" not in without.memory


def test_fewer_bytes_of_a_drafter_are_planned_and_are_faster() -> None:
    plain = question(drafter="dflash-5x")
    small = replace(plain, config=EngineConfig(drafter_weights="fp8"))
    few = replace(small, drafter=small.drafter.among(32768))  # type: ignore[arg-type]
    found = [Forecast(each) for each in (plain, small, few)]
    held = [each.memory["drafter's weights"] for each in found]
    assert held[1] == pytest.approx(held[0] / 2, rel=0.001), "and a scale per row"
    assert held[2] - held[1] == pytest.approx(32768 * QWEN.hidden_size, rel=0.001), "rows of the head, by themselves"
    steps = [each.seconds(15).total for each in found]
    assert steps[0] > 1.04 * steps[1] > 1.08 * steps[2]
    assert [each.seconds(0).total for each in found] == [found[0].seconds(0).total] * 3


def test_a_drafters_own_embedding_is_planned_where_its_file_is_at_hand() -> None:
    plain = question(drafter="dflash-5x")
    own = replace(plain, names=("embed_tokens.weight",))
    table = 2 * QWEN.vocab_size * QWEN.hidden_size
    held = [Forecast(each).memory["drafter's weights"] for each in (own, plain)]
    assert held[0] - held[1] == table
    assert Forecast(own).seconds(7) == Forecast(plain).seconds(7), "rows of it are looked up"


@pytest.mark.parametrize("asked", CASES)
def test_ranges_hold_what_is_expected(asked: Question) -> None:
    forecast = Forecast(asked)
    for low, expected, high in [
        (each.low, each.expected, each.high)
        for each in (forecast.plain, *(d.speed for d in forecast.by_class.values()))
    ]:
        assert 0 < low < expected < high
    assert bool(forecast.by_class) == bool(asked.drafter)


def test_drafting_pays_from_the_break_even_on() -> None:
    forecast = Forecast(question("gpt-oss-20b", drafter="gpt-oss-20b-dflash", streams=4))
    for depth in forecast.depths:
        need = forecast.break_even(depth)
        assert forecast.speed(depth, need).expected == pytest.approx(forecast.plain.expected)
    chance = forecast.least_chance
    assert chance is not None and forecast.drafted(chance).depth > 0 and forecast.drafted(chance - 0.02).depth == 0


def test_better_drafts_go_deeper_and_never_slower() -> None:
    forecast = Forecast(question("gpt-oss-20b", drafter="gpt-oss-20b-dflash"))
    found = [forecast.drafted(chance / 20) for chance in range(20)]
    assert [each.depth for each in found] == sorted(each.depth for each in found)
    assert [each.speed for each in found] == sorted(each.speed for each in found)
    assert found[0].depth == 0 and found[0].speed == forecast.plain and found[-1].depth == 7
    assert list(forecast.by_class) == list(CLASSES)


def test_a_fixed_depth_is_the_only_one() -> None:
    asked = question(drafter="dflash-5x")
    for spec, depths in (("off", []), ("5", [5]), ("auto", [1, 3, 7, 15])):
        forecast = Forecast(replace(asked, config=EngineConfig(spec=spec)))
        assert forecast.depths == depths and bool(forecast.by_class) == bool(depths)


def test_chances_and_lengths_are_the_same_thing() -> None:
    for tokens, depth in ((6.5, 15), (1.5, 1), (3.0, 7)):
        assert expected_tokens([chance_of(tokens, depth)] * depth)[-1] == pytest.approx(tokens)


def test_longer_contexts_and_more_streams() -> None:
    by_context = [Forecast(question(context=c)).plain.expected for c in (1000, 8000, 32000)]
    assert by_context == sorted(by_context, reverse=True)
    by_streams = [Forecast(question(context=1000, streams=n)).plain.expected for n in (1, 4, 16, 64)]
    assert by_streams == sorted(by_streams) and by_streams[1] < 4 * by_streams[0]


def test_experts_and_crowds_are_less_certain() -> None:
    def bar(asked: Question) -> float:
        speed = Forecast(asked).plain
        return (speed.high - speed.low) / speed.expected

    dense, crowd = (question(machine="h200", streams=n) for n in (1, 16))
    experts = question("qwen3-30b-a3b", machine="h200")
    assert bar(dense) < bar(crowd) and bar(dense) < bar(experts)


def test_recurrent_states_are_a_part_of_a_step_and_bound_the_streams() -> None:
    """A model of recurrent layers keeps little K/V, so tokens alone would allow for more streams than have states."""
    forecast = Forecast(question("qwen3-coder-next", weights="nvfp4", context=1024))
    assert forecast.seconds().states > 0
    assert forecast.max_tokens // 1024 > forecast.max_streams == forecast.plan.max_seqs


def test_what_does_not_fit_is_refused_with_the_sums() -> None:
    """The largest part first, and that is the weights, of recurrent models too."""
    for name in ("gemma4-31b", "qwen3.5-27b"):
        with pytest.raises(
            UserError, match=r"does not fit: .* it takes [56]\d\.\d without K/V \(weights 5\d\.\d, a step"
        ):
            Forecast(question(name, machine="rtx-5090"))


def test_speeds_are_those_of_the_streams_that_run_at_once() -> None:
    many, most = Forecast(question(machine="h200", streams=1000)), Forecast(question(machine="h200", streams=177))
    assert many.running() == 177 == most.running() and not many.holds_all and most.holds_all
    assert many.plain == most.plain and many.seconds() == most.seconds()
    assert Forecast(question(machine="h200", streams=1000, context=32768)).running() < 177, "of a longer context fewer"


def test_more_recurrent_streams_than_fit_are_planned_as_far_as_they_do() -> None:
    """Each keeps a state, so a plan for all of them would be refused."""
    forecast = Forecast(question("qwen3.5-27b", machine="h200", streams=1000))
    assert 64 < forecast.running() == forecast.max_streams == forecast.plan.max_seqs < 1000
    with pytest.raises(UserError, match="ask for max_seqs"):
        Forecast(replace(forecast.question, config=EngineConfig(max_seqs=1000)))


def test_a_stated_acceptance_narrows_the_range() -> None:
    asked = question(drafter="dflash-5x")
    found = Forecast(asked).by_class["prose"]
    stated = Forecast(replace(asked, chances={"prose": found.chance})).by_class["prose"]
    assert stated.speed.expected == found.speed.expected
    assert found.speed.low < stated.speed.low and stated.speed.high < found.speed.high
