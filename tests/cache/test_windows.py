"""Pages of sliding windows: as many as requests need, no more than blocks, and fewer where memory is short."""

from __future__ import annotations

import pytest

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import AttentionSpec, DenseSpec, LayerSpec, RopeSpec
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.resolve import MOST_AHEAD, resolve
from tests.operate.forecast.described import DESCRIBED

WINDOW = 1024


def layer(window: int, kv_from: int | None = None, kv_heads: int = 2) -> LayerSpec:
    spec = AttentionSpec(8, kv_heads, 64, RopeSpec(64), 0.125, window, kv_from=kv_from)
    return LayerSpec(spec, DenseSpec(1024))


def model(*layers: LayerSpec) -> ModelConfig:
    return ModelConfig("toy", 512, 32000, 32768, layers)


def gpu(mib: int) -> Hardware:
    return Hardware("cuda", "a GPU", 8, mib << 20, (9, 0))


MOSTLY_SLIDING = model(*[layer(WINDOW)] * 5, layer(0))


@pytest.mark.parametrize("mib", [380, 500, 1000, 20000])
def test_pages_leave_room_for_blocks(mib: int) -> None:
    plan = resolve(EngineConfig(max_step_tokens=512, max_seqs=16), MOSTLY_SLIDING, gpu(mib))
    (window,) = plan.windows
    assert -(-(WINDOW + MOST_AHEAD) // 16) <= window.pages <= plan.max_seqs * 32768 // 16
    assert plan.num_blocks * 16 >= 1024 and plan.memory.total <= 0.85 * (mib << 20)


def test_gemma_31b_holds_0_8_gib_of_windows_per_stream() -> None:
    """50 sliding layers of 16 x 256 and 10 full ones of 4 x 512; kept whole, 32K tokens of the former take 25 GiB."""
    slides, full = layer(WINDOW), layer(0)
    slides = LayerSpec(AttentionSpec(32, 16, 256, RopeSpec(256), 1.0, WINDOW), slides.mlp)
    full = LayerSpec(AttentionSpec(32, 4, 512, RopeSpec(512), 1.0), full.mlp)
    gemma = model(*([slides] * 5 + [full]) * 10)
    one, four = (resolve(EngineConfig(max_seqs=n), gemma, gpu(110 << 10)).windows[0] for n in (1, 4))
    per_stream = (four.pages - one.pages) / 3 * 0.8 * one.page_bytes / 2**30  # without what is spare
    assert per_stream == pytest.approx(0.84, abs=0.03)


def test_no_more_pages_than_blocks() -> None:
    plan = resolve(EngineConfig(kv_tokens=512, max_seqs=16), MOSTLY_SLIDING, gpu(20000))
    assert plan.windows[0].pages == plan.num_blocks == 32


def test_a_model_whose_layers_all_slide() -> None:
    plan = resolve(EngineConfig(max_seqs=4), model(*[layer(WINDOW)] * 4), gpu(4000))
    assert plan.max_model_len == 32768 and plan.memory.kv <= plan.num_blocks
    with pytest.raises(UserError, match="no layers whose K/V grow"):
        resolve(EngineConfig(kv="turboquant"), model(*[layer(WINDOW)] * 4), gpu(4000))


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert not resolve(EngineConfig(max_model_len=1024), MOSTLY_SLIDING, gpu(4000)).windows


def test_codes_are_not_borrowed() -> None:
    with pytest.raises(UserError, match="read another layer's K/V"):
        resolve(EngineConfig(kv="turboquant"), model(layer(0), layer(0, kv_from=0)), gpu(4000))
    slid = model(layer(0, kv_heads=4), layer(WINDOW), layer(WINDOW, kv_from=1))
    assert resolve(EngineConfig(kv="turboquant"), slid, gpu(4000)).coded  # a window's keys are not coded


def test_a_context_that_is_asked_for_comes_before_pages() -> None:
    """Pages for 64 requests would take what the context needs: fewer run at once, and the plan says how many."""
    gemma = DESCRIBED["gemma4-31b"]
    plan = resolve(EngineConfig(max_model_len=65536), gemma, gpu(79 << 10))
    assert plan.max_model_len == 65536 and plan.max_seqs == 1
    assert [f.name for f in plan.fallbacks] == ["at most 1 request at once instead of 64"]
    plan = resolve(EngineConfig(), gemma, gpu(110 << 10))
    assert plan.max_model_len == 262144 and plan.max_seqs == 11
    with pytest.raises(UserError, match=r"the KV cache holds \d+ tokens: .* GiB of pages leave .* lower max"):
        resolve(EngineConfig(max_model_len=131072), gemma, gpu(79 << 10))
    with pytest.raises(UserError, match=r"kv_tokens is 131072.* GiB of pages leave"):
        resolve(EngineConfig(kv_tokens=131072), gemma, gpu(79 << 10))


def test_only_formats_that_run_are_advised() -> None:
    """Codes of heads of 512 have no kernels on a GPU; 8 bits have none on a CPU."""
    gemma = DESCRIBED["gemma4-31b"]
    on_gpu = resolve(EngineConfig(), gemma, gpu(79 << 10)).fallbacks[-1].reason
    on_cpu = resolve(EngineConfig(), gemma, Hardware("cpu", "a CPU", 8, 64 << 30)).fallbacks[-1].reason
    assert on_gpu.endswith("; kv fp8 holds more") and on_cpu.endswith("; kv turboquant holds more")


@pytest.mark.parametrize("gib", [32, 64])
def test_pages_are_part_of_a_cpus_quarter(gib: int) -> None:
    plan = resolve(EngineConfig(), model(*[layer(4096, kv_heads=32)] * 32), Hardware("cpu", "a CPU", 8, gib << 30))
    assert 0.5 < (plan.memory.kv + plan.memory.pages) / (0.25 * (gib << 30)) <= 1
