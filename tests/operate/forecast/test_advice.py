"""What is recommended when: the tables that people publish for one model, as a function of the load."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sparkdraft.cache.formats import kv_names
from sparkdraft.config import EngineConfig
from sparkdraft.operate.bench.shapes import drafter_shape, shape
from sparkdraft.operate.forecast.advice import (
    Alternative,
    compare,
    recommend,
    tried,
    with_kv,
    without_drafter,
)
from sparkdraft.operate.forecast.forecast import NOTHING, Forecast, Question
from sparkdraft.operate.forecast.machine import find_machine
from sparkdraft.plan.weight_formats import WeightFormats
from tests.operate.forecast.test_forecast import question


@pytest.mark.parametrize(
    ("streams", "context", "kv", "why"),
    [
        (1, 2048, "exact", "have room for"),  # one person who chats
        (4, 2048, "exact", "have room for"),  # a few, with short contexts
        (16, 4096, "turboquant", "times as fast"),  # more of them: their K/V take a third of a step
        (128, 16384, "turboquant", "exact K/V hold 37 of 128 streams"),  # a fleet of agents
        (16, 40960, "turboquant", "exact K/V hold 15 of 16 streams"),  # more than fits
        (8, 32768, "turboquant", "times as fast"),  # long contexts: K/V are most of a step
    ],
)
def test_which_cache_for_which_load(streams: int, context: int, kv: str, why: str) -> None:
    advice = recommend(Forecast(question(streams=streams, context=context)))
    assert advice.kv == kv and why in advice.reasons[0], advice
    assert f"--kv {kv}" in advice.sentence() and advice.sentence().endswith(".")


def test_drafts_are_advised_where_they_pay() -> None:
    dense = recommend(Forecast(question(drafter="dflash-5x")))
    assert dense.drafts and "2.0 to 4.3 times" in dense.reasons[1], "a dense model gains on every text"
    experts = question("gpt-oss-120b", drafter="gpt-oss-120b-dflash", weights="bfloat16,experts=mxfp4", streams=4,
                       context=32768)  # fmt: skip
    mixed = recommend(Forecast(experts))
    assert mixed.drafts and "on code" in mixed.reasons[1] and "paused by itself on prose" in mixed.reasons[1]
    hopeless = question("gpt-oss-120b", drafter="gpt-oss-120b-dflash", weights="bfloat16,experts=mxfp4", streams=4,
                        chances={"poems": 0.4})  # fmt: skip
    never = recommend(Forecast(hopeless))
    assert not never.drafts and "--spec off" in never.sentence()
    assert recommend(Forecast(question())).drafts, "the request's own text may repeat itself"


def tight(streams: int = 1) -> Question:
    """A pair that leaves next to nothing of the memory of an RTX 5090 whose desktop takes 2.3 GiB."""
    model, machine = shape("qwen3.5-27b"), find_machine("rtx-5090")
    machine = replace(machine, hardware=replace(machine.hardware, free_bytes=int(29.1 * 2**30)))
    drafter = drafter_shape("qwen3.5-27b-dflash", model)
    return Question(model, machine, EngineConfig(), WeightFormats.parse("nvfp4"), drafter, streams)


def test_a_drafter_that_leaves_no_room_for_a_stream_is_left_out() -> None:
    asked = tight()
    forecast = Forecast(asked)
    assert forecast.running() == 0 and forecast.plain == NOTHING == forecast.by_class["code"].speed
    advice = recommend(forecast)
    assert advice.runs and not advice.drafts and "--drafter none" in advice.flags
    assert re.search(r"beside the drafter \d+ tokens.*; without it [\d,]+ fit, room for \d+", advice.reasons[0])
    assert "drafts" not in advice.sentence(), "what it left out is no remedy"
    short = recommend(Forecast(replace(asked, context=512)))
    assert short.drafts and short.drafter, "a stream that fits beside it is drafted"


def test_many_plain_streams_may_be_worth_more_than_few_drafted_ones() -> None:
    crowd = tight(100)
    advice = recommend(Forecast(crowd))
    best = Forecast(with_kv(without_drafter(crowd), advice.kv))
    assert not advice.drafter and best.plain.expected > max(
        found.middle.speed.expected for kv in kv_names() if (found := tried(with_kv(crowd, kv))[0]) and found.middle
    )


def test_where_nothing_runs_nothing_is_recommended() -> None:
    advice = recommend(Forecast(question("gemma4-31b", machine="rtx-5090", weights="nvfp4", context=262144)))
    assert not advice.runs and advice.sentence().startswith("This cannot be served: no stream of 262,144 tokens fits")
    assert re.search(r"at most [\d,]+ do, with --kv fp8; ask for a shorter --context", advice.sentence())


def test_more_streams_than_serve_runs_by_itself_need_a_flag() -> None:
    assert "--max-seqs 100" in recommend(Forecast(question(machine="h200", streams=100))).flags
    assert "--max-seqs" not in recommend(Forecast(question(machine="h200", streams=64))).flags


def test_the_largest_part_of_a_step_names_the_remedy() -> None:
    short = recommend(Forecast(question())).reasons[2]
    assert short.startswith("weights are 9") and "smaller weights" in short
    assert "smaller weights" not in recommend(Forecast(question(weights="nvfp4"))).reasons[2]
    long = recommend(Forecast(question("gemma4-31b", weights="nvfp4", streams=32, context=262144))).reasons[2]
    assert long.startswith("K/V are")
    small = recommend(Forecast(question("tiny", machine="h200"))).reasons[2]
    assert small.startswith("fixed costs are")


def test_a_model_whose_codes_no_kernel_reads_gets_fp8_where_exact_is_too_large() -> None:
    advice = recommend(Forecast(question("gemma4-31b", machine="rtx-5090", weights="nvfp4", streams=4)))
    assert advice.kv == "fp8" and re.match(r"exact K/V hold \d of 4 streams", advice.reasons[0])


def test_alternatives_are_ranked() -> None:
    asked = question("gemma4-31b", machine="rtx-5090", weights="nvfp4", streams=4)
    found = compare(asked, "nvfp4")
    assert [(each.weights, each.kv) for each in found[:2]] == [("nvfp4", "fp8"), ("nvfp4", "exact")]
    assert found[0].holds_all and not found[1].holds_all
    refused = [each for each in found if each.forecast is None]
    assert refused == found[2:] and all(each.refusal for each in refused)
    assert len(found) == 6 == len({(each.weights, each.kv, each.drafter) for each in found})


def test_alternatives_with_a_drafter_are_tried_without_it() -> None:
    found = compare(question(drafter="dflash-5x"), "bfloat16")
    assert len(found) == 18 and found[0].drafter and found[0].weights == "nvfp4"
    rates = [each.tok_s for each in found]
    assert rates == sorted(rates, reverse=True)

    def one(weights: str, kv: str, drafter: bool) -> Alternative:
        return next(each for each in found if (each.weights, each.kv, each.drafter) == (weights, kv, drafter))

    assert one("fp8", "exact", False).tok_s < one("fp8", "turboquant", False).tok_s < one("fp8", "exact", True).tok_s
