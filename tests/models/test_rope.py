"""Rotary tables and what a config.json says of them, against transformers' own frequencies and rotation.

Every test compares angles far along the context, and each of the mistakes that others made is tried and must show:
a YaRN range that is rounded, frequencies over the rotated lanes where they are over the head, a table of those pairs
alone.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.kernels import reference
from sparkdraft.kernels.ops import RopeArgs
from sparkdraft.models.common.config import rope_spec
from sparkdraft.models.common.layers import RopeSpec
from sparkdraft.models.common.rope import RopeTables, rope_table

LENGTH = 3000
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
PARTIAL = {"partial_rotary_factor": 0.25}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {  # head_dim, rope_parameters
    "default": (128, {"rope_type": "default", "rope_theta": 1e6}),
    "linear": (64, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "llama3": (64, {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}),
    "yarn": (64, {"rope_type": "yarn", "rope_theta": 150000.0, **YARN}),
    "yarn, not truncated": (64, {"rope_type": "yarn", "rope_theta": 150000.0, "truncate": False, **YARN}),
    "proportional": (512, {"rope_type": "proportional", "rope_theta": 1e6, **PARTIAL}),
    "proportional, all": (64, {"rope_type": "proportional", "rope_theta": 1e6}),
    "partial": (256, {"rope_type": "default", "rope_theta": 1e7, **PARTIAL}),
    "partial linear": (256, {"rope_type": "linear", "rope_theta": 1e7, "factor": 2.0, **PARTIAL}),
    "partial yarn": (256, {"rope_type": "yarn", "rope_theta": 1e7, "truncate": False, **YARN, **PARTIAL}),
    "partial llama3": (128, {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3, "partial_rotary_factor": 0.5}),
}


def config_of(head_dim: int, rope: dict[str, Any]) -> dict[str, Any]:
    return {"max_position_embeddings": 131072, "head_dim": head_dim, "rope_parameters": rope}


def read(head_dim: int, rope: dict[str, Any], layer_type: str = "") -> RopeSpec:
    reads = "partial_rotary_factor"
    return rope_spec(config_of(head_dim, rope), head_dim, layer_type, reads)


def transformers_table(head_dim: int, rope: dict[str, Any]) -> Tensor:
    """Cosines and sines as its rotary modules make them: Qwen3-Next's is the one that rotates a part."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim}
    config = transformers.Qwen3NextConfig(
        **sizes, max_position_embeddings=131072, rope_parameters={"partial_rotary_factor": 1.0} | rope
    )
    default = Qwen3NextRotaryEmbedding.compute_default_rope_parameters
    frequency, magnitude = ROPE_INIT_FUNCTIONS.get(rope["rope_type"], default)(config)
    angle = torch.arange(LENGTH).double().unsqueeze(1) * frequency.double()
    return torch.cat((angle.cos(), angle.sin()), 1) * magnitude


def differ(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_transformers(kind: str) -> None:
    table, expected = rope_table(read(*KINDS[kind]), LENGTH), transformers_table(*KINDS[kind])
    assert table.shape == expected.shape and table.dtype == torch.float32
    assert differ(table, expected) < LENGTH * 3e-7  # transformers makes frequencies in float32


def test_a_yarn_range_that_is_rounded_is_another() -> None:
    exact, rounded = (rope_table(read(*KINDS[k]), LENGTH) for k in ("yarn, not truncated", "yarn"))
    assert differ(exact, rounded) > 0.1
    spec = read(*KINDS["yarn, not truncated"])
    assert spec.scaling is not None and spec.scaling["truncate"] is False
    low, high = (32 * math.log(4096 / (turns * 2 * math.pi)) / math.log(150000.0) for turns in (32, 1))
    assert (round(low, 4), round(high, 4)) == (8.0928, 17.398)
    for pair in (8, 9, 12, 17, 18):  # by hand: of pair i the share (i - low) / (high - low) is slowed down 32 times
        slowed = min(max((pair - low) / (high - low), 0), 1)
        frequency = 150000.0 ** -(pair / 32) * (1 - slowed + slowed / 32)
        wanted = math.cos(1000 * frequency) * (0.1 * math.log(32) + 1)
        assert abs(float(exact[1000, pair]) - wanted) < 1e-6


def rotated(x: Tensor, table: Tensor) -> Tensor:  # [rows, dim], row i at position i
    positions = torch.arange(len(x), dtype=torch.int32)
    y = x.clone()
    reference.qk_norm_rope(y, RopeArgs(positions, table, 1, 0, None, None, 1e-6))
    return y


def turn_pair(x: Tensor, a: int, b: int, angle: Tensor) -> None:
    left, right = x[:, a].clone(), x[:, b].clone()
    x[:, a], x[:, b] = left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()


def test_proportional_pairs_are_far_apart_and_slow() -> None:
    """By hand, a lane at a time; the frequencies of the rotated lanes, or a table of these pairs alone, are wrong."""
    spec = read(*KINDS["proportional"])
    table = rope_table(spec, 40)
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(0))
    expected = x.double()
    for pair in range(64):
        angle = torch.arange(40).double() * 1e6 ** (-2 * pair / 512)
        turn_pair(expected, pair, pair + 256, angle)
    assert table.shape == (40, 512) and differ(rotated(x, table), expected) < 1e-5
    over_rotated = rope_table(RopeSpec(512, 1e6, rotary_dim=128), 40)  # 64 pairs, spread over 128 lanes
    few = torch.cat((table[:, :64], table[:, 256:320]), 1)  # the right angles in the wrong lanes
    cos, sin = over_rotated.chunk(2, 1)
    fast = torch.cat((F.pad(cos, (0, 192), value=1.0), F.pad(sin, (0, 192))), 1)  # the right lanes, turned too fast
    for mistake in (over_rotated, few, fast):
        assert differ(rotated(x, mistake), expected) > 0.1


def test_a_partial_table_turns_the_first_lanes_and_no_others() -> None:
    spec = read(*KINDS["partial"])
    table, x = rope_table(spec, 40), torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    assert (spec.rotary_dim, spec.width, table.shape[1]) == (64, 64, 64)
    got, expected = rotated(x, table), x.double()
    for pair in range(32):
        angle = torch.arange(40).double() * 1e7 ** (-2 * pair / 64)
        turn_pair(expected, pair, pair + 32, angle)
    assert differ(got, expected) < 1e-5 and torch.equal(got[:, 64:], x[:, 64:])
    over_head = rope_table(RopeSpec(256, 1e7), 40)
    mistake = torch.cat((over_head[:, :32], over_head[:, 128:160]), 1)  # frequencies over the head's 256 lanes
    assert differ(rotated(x, mistake), expected) > 0.1


# ---- config.json ----------------------------------------------------------------------------------------------------

GEMMA = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


def test_each_type_of_layer_has_its_own() -> None:
    slides, full = read(256, GEMMA, "sliding_attention"), read(512, GEMMA, "full_attention")
    assert (slides.theta, slides.scaling, slides.width) == (1e4, None, 256)
    assert (full.theta, full.width) == (1e6, 512)
    assert torch.equal(rope_table(full, 9), rope_table(read(*KINDS["proportional"]), 9))
    tables = RopeTables(50, torch.device("cpu"))
    assert tables.of(slides) is tables.of(read(256, GEMMA, "sliding_attention"))
    assert tables.of(slides).shape != tables.of(full).shape


def test_a_gemma_config_of_transformers_is_read_alike() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    text = transformers.Gemma4TextConfig(
        head_dim=32, global_head_dim=64, num_attention_heads=4, hidden_size=64, num_hidden_layers=2,
        rope_parameters=GEMMA, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    frequency, _ = ROPE_INIT_FUNCTIONS["proportional"](text, layer_type="full_attention")
    spec = rope_spec(text.to_dict(), 64, "full_attention")
    angle = torch.arange(LENGTH).double().unsqueeze(1) * frequency.double()
    assert differ(rope_table(spec, LENGTH), torch.cat((angle.cos(), angle.sin()), 1)) < LENGTH * 3e-7


def test_a_flat_dict_is_for_all_types() -> None:
    for layer_type in ("", "sliding_attention", "full_attention"):
        spec = rope_spec(config_of(64, KINDS["yarn, not truncated"][1]), 64, layer_type)
        assert spec == read(*KINDS["yarn, not truncated"])


def test_old_files_keep_the_part_beside_the_dict() -> None:
    config = {"max_position_embeddings": 99, "rope_theta": 1e7, "rope_scaling": None, "partial_rotary_factor": 0.25}
    assert rope_spec(config, 256, reads="partial_rotary_factor") == RopeSpec(256, 1e7, None, 99, 64)
    assert rope_spec(config | {"partial_rotary_factor": 1}, 256, reads="partial_rotary_factor").rotary_dim == 0


@pytest.mark.parametrize(
    ("head_dim", "rope", "layer_type", "words"),
    [
        (
            64,
            {"sliding_attention": GEMMA["sliding_attention"]},
            "full_attention",
            "without those of 'full_attention' layers",
        ),
        (64, GEMMA, "", "rope_parameters with sliding_attention"),
        (64, {"rope_type": "longrope"}, "", "of the kind 'longrope'"),
        (64, {"rope_type": "default", "partial_rotary_factor": 1.5}, "", "partial_rotary_factor 1.5, .* at most 1"),
        (20, {"rope_type": "default", "partial_rotary_factor": 0.25}, "", "rotates 5 of 20 lanes"),
        (64, {"rope_type": "default", "mrope_section": [3, 3, 2]}, "", "mrope_section"),
    ],
)
def test_what_is_not_built_is_refused(head_dim: int, rope: dict[str, Any], layer_type: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read(head_dim, rope, layer_type)


def test_only_who_reads_a_key_gets_past_it() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    with pytest.raises(UserError, match=r"partial_rotary_factor 0\.25"):
        rope_spec(config_of(256, rope), 256)
    spec = rope_spec(config_of(256, rope), 256, reads="partial_rotary_factor mrope_section")
    assert spec.width == 64


def test_a_file_may_say_what_multiplies_the_usual_magnitude() -> None:
    """As DeepSeek-R1-0528-Qwen3-8B does, so that none is left."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    plain, scaled = (rope_table(read(128, yarn | more), 40) for more in ({}, {"attn_factor": 0.8782488562869419}))
    assert float(plain[0, 0]) == pytest.approx(0.1 * math.log(4) + 1) and float(scaled[0, 0]) == pytest.approx(1)


def test_divisors_of_a_gguf_are_used_as_they_are() -> None:
    """Whatever the activations' type, and on whatever device they were put."""
    spec, factors = read(64, {"rope_type": "default", "rope_theta": 5e5}), torch.linspace(1, 8, 32)
    exact = rope_table(spec, LENGTH, factors)
    frequency = 5e5 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64) / factors.double()
    assert torch.allclose(exact[-1, :32].double(), ((LENGTH - 1) * frequency).cos(), atol=1e-6)
    assert not torch.allclose(rope_table(spec, LENGTH, factors.bfloat16()), exact, atol=1e-2)
