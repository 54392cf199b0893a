"""The seconds of a step: each part by itself, against sums that are made by hand here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkdraft.models.common.sizes import kv_bytes_per_token, model_sizes
from sparkdraft.operate.bench.shapes import drafter_shape, shape
from sparkdraft.operate.forecast.roofline import DraftPass, Load, Losses, Rates, Target, overlap, step
from sparkdraft.plan.weight_formats import WeightFormats
from tests.operate.forecast.published import DRAFTERS, MODELS

FLOATS = WeightFormats("bfloat16")
NONE = Losses(floats=1.0, coded=1.0, experts=1.0, kv=1.0, layer=0.0, step=0.0)
READS = Rates(1e12, {"bfloat16": 1e30})  # so much arithmetic that reading alone takes time
DENSE, MOE, GEMMA = (shape(name) for name in ("qwen3-8b", "qwen3-30b-a3b", "gemma4-31b"))


def test_without_losses_a_step_reads_its_bytes_once() -> None:
    for model in (DENSE, MOE):
        found = step(READS, NONE, Target.of(model, FLOATS, spread=1.0), Load(4, 1000))
        sizes = model_sizes(model)
        assert found.weights == pytest.approx(2 * sizes.read(4) / 1e12)
        assert found.kv == pytest.approx(4 * 1000 * kv_bytes_per_token(model.attention, 2) / 1e12)
        assert (found.states, found.drafter, found.fixed) == (0, 0, 0)
        assert found.total == pytest.approx(found.weights + found.kv)


def test_rows_that_agree_reach_fewer_experts() -> None:
    alone, agreeing = (step(READS, NONE, Target.of(MOE, FLOATS, spread=s), Load(16, 1)).weights for s in (1.0, 0.6))
    one = step(READS, NONE, Target.of(MOE, FLOATS, spread=0.6), Load(1, 1)).weights
    assert one < agreeing < alone
    assert one == pytest.approx(2 * model_sizes(MOE).read(1) / 1e12), "one row has nobody to agree with"


def test_formats_shrink_what_is_read() -> None:
    times = [step(READS, NONE, Target.of(DENSE, WeightFormats.parse(f)), Load()).weights for f in ("bfloat16", "nvfp4")]
    sizes = model_sizes(DENSE)
    assert times[1] == pytest.approx((sizes.active_in_layers * 0.5625 + sizes.head * 2) / 1e12)
    assert times[0] == pytest.approx(sizes.active * 2 / 1e12)


def test_a_window_bounds_what_is_read_and_is_not_coded() -> None:
    short, long = (step(READS, NONE, Target.of(GEMMA, FLOATS), Load(1, c)).kv for c in (1024, 8192))
    full = [spec for spec in GEMMA.attention if not spec.window]
    assert long - short == pytest.approx((8192 - 1024) * kv_bytes_per_token(full, 2) / 1e12)
    slides = replace(GEMMA, layers=tuple(each for each in GEMMA.layers if each.mixer.window))  # type: ignore[union-attr]
    exact, coded = (
        step(READS, NONE, Target.of(slides, FLOATS, kv), Load(1, 8192)).kv for kv in ("exact", "turboquant")
    )
    assert exact == coded > 0


def test_codes_are_a_quarter_of_exact_keys_and_values() -> None:
    exact, fp8, coded = (
        step(READS, NONE, Target.of(DENSE, FLOATS, kv), Load(1, 32000)).kv for kv in ("exact", "fp8", "turboquant")
    )
    assert fp8 == pytest.approx(exact / 2) and coded == pytest.approx(exact * 116 / 512)


def test_states_are_written_once_or_for_every_row() -> None:
    model = MODELS["qwen3.5-27b"]
    target = Target.of(model, FLOATS)
    drafter = DRAFTERS["z-lab/Qwen3.5-27B-DFlash"]
    once, each = (step(READS, replace(NONE, snapshots=s), target, Load(2, 100, 15), drafter) for s in (False, True))
    assert target.state == 48 * (48 * 128 * 128 + 3 * 10240)
    assert once.states == pytest.approx(2 * 2 * target.state * 4 / 1e12)
    assert each.states == pytest.approx(2 * 17 * target.state * 4 / 1e12)


def test_arithmetic_takes_over_with_rows() -> None:
    rates = Rates(4.4e12, {"bfloat16": 700e12})
    target = Target.of(DENSE, FLOATS)
    few, many = (step(rates, NONE, target, Load(streams, 1)).weights for streams in (1, 4096))
    assert few == pytest.approx(2 * model_sizes(DENSE).active / 4.4e12, rel=0.01)
    assert many == pytest.approx(2 * 4096 * model_sizes(DENSE).active / 700e12, rel=0.1)
    assert overlap(3, 0) == pytest.approx(3) and 4 < overlap(3, 4) < 7


def test_coded_weights_are_multiplied_in_bfloat16_unless_an_engine_does_otherwise() -> None:
    rates = Rates(1e30, {"bfloat16": 1e12, "nvfp4": 4e12})
    target = Target.of(DENSE, WeightFormats("nvfp4"))
    usual, own = (step(rates, replace(NONE, own_arithmetic=o), target, Load(64, 1)).weights for o in (False, True))
    assert usual == pytest.approx(4 * own)


def test_a_block_is_one_pass_and_a_chain_one_per_draft() -> None:
    target = Target.of(DENSE, FLOATS)
    block = DraftPass.of(drafter_shape("dflash-5x", DENSE).caps(), model_sizes(DENSE).head)
    chain = block._replace(chain=True)
    times = {
        (drafter.chain, depth): step(READS, NONE, target, Load(1, 0, depth), drafter).drafter
        for drafter in (block, chain)
        for depth in (1, 7)
    }
    assert times[False, 1] == times[False, 7] == pytest.approx(2 * (block.weights + block.head) / 1e12)
    assert times[True, 7] == pytest.approx(7 * times[True, 1])
    assert step(READS, NONE, target, Load(1, 0, 0), block).drafter == 0, "nothing is drafted"


def test_a_quantised_drafter_reads_less_and_the_targets_head_as_it_is() -> None:
    caps, head, target = drafter_shape("dflash-5x", DENSE).caps(), model_sizes(DENSE).head, Target.of(DENSE, FLOATS)
    coded = DraftPass.of(caps, head, coded_fmt="fp8")
    assert coded.coded == caps.num_weights == coded.weights and coded.head == head
    found = step(READS, NONE, target, Load(1, 0, 7), coded).drafter
    assert found == pytest.approx((caps.num_weights + 2 * head) / 1e12)


def test_losses_lengthen_what_they_are_of() -> None:
    target, load = Target.of(MOE, WeightFormats.parse("nvfp4"), "turboquant"), Load(2, 4000, 7)
    drafter = DRAFTERS["z-lab/Qwen3.5-35B-A3B-DFlash"]
    before = step(READS, NONE, target, load, drafter)
    changed = {
        "floats": (0.5, "weights"),
        "coded": (0.5, "weights"),
        "experts": (0.5, "weights"),
        "kv": (0.5, "kv"),
        "kv_coded": (0.5, "kv"),
        "rows": (0.5, "kv"),
        "rows_coded": (0.5, "kv"),
        "layer": (1e-3, "fixed"),
        "experts_layer": (1e-3, "fixed"),
        "step": (1e-3, "fixed"),
        "draft": (1e-3, "drafter"),
    }
    for name, (value, part) in changed.items():
        after = step(READS, replace(NONE, **{name: value}), target, load, drafter)
        assert getattr(after, part) > getattr(before, part) * 1.01, name
    assert step(READS, replace(NONE, rows=0.1), target, Load(2, 4000)).kv == pytest.approx(before.kv), (
        "one row per stream"
    )
