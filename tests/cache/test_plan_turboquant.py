"""A coded cache's plan: bits, pages and bytes, and that what is saved is really there to be used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.models.common.config import uniform_config
from sparkdraft.operate.bench.random_model import SHAPES
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.resolve import Plan, resolve

H200 = Hardware("cuda", "H200", 16, 110 << 30, (9, 0))
MODEL = SHAPES["qwen3-8b"]


def plan(**options: Any) -> Plan:
    return resolve(EngineConfig(max_seqs=64, **options), MODEL, H200)


def test_four_times_the_tokens_with_the_uncoded_rows_counted_in() -> None:
    exact, hybrid, coded = plan(), plan(kv="turboquant"), plan(kv="turboquant", tq_mode="full_tq")
    tokens = [p.num_blocks * p.block_size for p in (exact, hybrid, coded)]
    assert coded.coded and coded.memory.pages == 0
    assert tokens[2] / tokens[0] == pytest.approx(512 / 116, rel=1e-3)
    assert hybrid.coded and hybrid.coded.is_hybrid
    assert hybrid.memory.pages == hybrid.coded.pages * (36 * 2 * 8 * 128 * 16 * 2)
    assert 4.2 < tokens[1] / tokens[0] < tokens[2] / tokens[0]
    assert hybrid.memory.total <= 0.85 * H200.free_bytes
    assert "K4/V3" in hybrid.describe() and "pages" in hybrid.describe()


def test_the_first_layers_really_get_a_bit_more() -> None:
    made = plan(kv="turboquant", tq_initial_layers=4).coded
    assert made and made.key_bits == (5,) * 4 + (4,) * 32
    assert made.bytes_per_token(MODEL.attention) == 8 * (36 * 116 + 4 * 16)
    assert "4 layers K5" in made.describe()


def test_a_captured_cache_is_an_exact_one_and_codes_beside_it() -> None:
    exact, captured = plan(), plan(kv="turboquant", tq_mode="capture_only")
    assert captured.coded and captured.coded.captured and not captured.coded.is_hybrid
    assert captured.memory.pages == 0 and captured.memory.kv == captured.num_blocks * 16 * 36 * 8 * (512 + 116)
    assert captured.num_blocks / exact.num_blocks == pytest.approx(512 / 628, rel=0.02)
    assert exact.memory.scratch < captured.memory.scratch, "what is measured with is counted in"
    assert captured.memory.total <= 0.85 * H200.free_bytes
    assert "exact, TurboQuant K4/V3 captured beside it" in captured.describe()


def test_off_is_exact() -> None:
    made = plan(kv="turboquant", tq_mode="off")
    assert made.coded is None and made.num_blocks == plan().num_blocks
    assert made.kv == "exact" and "turboquant" not in made.describe()
    laptop = Hardware("cpu", "a laptop", 8, 60 << 30)
    assert resolve(EngineConfig(kv="turboquant", tq_mode="off"), MODEL, laptop).weights == "quantised"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tq_key_bits": 6}, "tq_key_bits is 6; TurboQuant takes 2 to 5"),
        ({"tq_value_bits": 1}, "tq_value_bits is 1; TurboQuant takes 2 to 5"),
        ({"tq_mode": "some"}, "tq_mode is 'some'; it must be one of off, hybrid, full_tq, capture_only"),
        ({"tq_ring_capacity": 0}, "tq_ring_capacity is 0"),
        ({"tq_initial_layers": 99}, "36 layers have a KV cache"),
        ({"tq_initial_layers": 1, "tq_key_bits": 5}, "5 is the most"),
        ({"kv": "int3"}, "kv is 'int3'"),
    ],
)
def test_what_can_not_be_is_said_in_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan(**{"kv": "turboquant"} | options)


@pytest.mark.parametrize("mode", ["hybrid", "full_tq", "capture_only"])
def test_models_and_kernels_that_can_not_be_coded(mode: str) -> None:
    config = EngineConfig(kv="turboquant", tq_mode=mode)
    with pytest.raises(UserError, match="no layers whose K/V grow"):
        resolve(config, replace(MODEL, layers=()), H200)
    with pytest.raises(UserError, match="head dimension 72 cannot be rotated"):
        resolve(config, uniform_config("qwen3", 36, 4096, 12288, 32, 8, 72, 151936, 40960), H200)
    on_a_cpu = resolve(config, MODEL, Hardware("cpu", "a laptop", 8, 60 << 30))
    assert on_a_cpu.kernels == "native" and on_a_cpu.coded and on_a_cpu.graphs and not on_a_cpu.fallbacks


def test_shapes_that_a_gpus_kernels_cannot_run() -> None:
    config = EngineConfig(kv="turboquant")
    laptop = Hardware("cpu", "a laptop", 8, 60 << 30)
    for model, own, words in (
        *(
            (
                uniform_config("qwen3", 36, 4096, 12288, 32, 8, dim, 151936, 40960),
                config,
                f"head dims 64, 128, 256 on the cuda kernels; this model's is {dim}: ask for kv fp8",
            )
            for dim in (96, 512)
        ),
        (MODEL, replace(config, block_size=32), "block_size is 32; kv turboquant on the cuda kernels has blocks of 16"),
    ):
        with pytest.raises(UserError, match=words):
            resolve(own, model, H200)
        assert resolve(own, model, laptop).coded, "a CPU runs any shape"
