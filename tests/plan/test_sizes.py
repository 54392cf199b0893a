"""The sums over layers against models that are counted tensor by tensor, and against published sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkdraft.bench.shapes import SHAPES, tensor_shapes
from sparkdraft.models.config import ModelConfig
from sparkdraft.models.layers import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, RecurrentSpec, RopeSpec
from sparkdraft.models.registry import read_config
from sparkdraft.plan.sizes import layer_sizes, model_sizes


def attention(heads: int, kv_heads: int, dim: int, window: int = 0, kv_from: int | None = None) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, dim, RopeSpec(dim), dim**-0.5, window, kv_from=kv_from)


def test_matrices_are_counted_as_a_checkpoint_holds_them() -> None:
    for model in SHAPES.values():
        matrices = [size for size in tensor_shapes(model).values() if len(size) == 2]
        assert model_sizes(model).held == sum(rows * width for rows, width in matrices)


def test_qwen3_30b_a3b_has_30_billion_weights_and_uses_3() -> None:
    layer = LayerSpec(attention(32, 4, 128), ExpertsSpec(128, 8, 768))
    sizes = model_sizes(ModelConfig("qwen3_moe", 2048, 151936, 40960, (layer,) * 48))
    assert round(sizes.held / 1e9, 2) == 30.53  # what a published folder holds, without its vectors
    assert 2.9e9 < sizes.active < 3.4e9


SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4 = {
    "model_type": "gemma4_text", "vocab_size": 262144, "max_position_embeddings": 262144, "head_dim": 256,
    "global_head_dim": 512, "attention_k_eq_v": True, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
}  # fmt: skip
PUBLISHED = [  # numbers of config.json, and the weights that transformers counts in the text model
    ({**GEMMA4, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
      "num_key_value_heads": 16, "num_global_key_value_heads": 4, "layer_types": ([SLIDING] * 5 + [FULL]) * 10}, 30.70),
    ({**GEMMA4, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
      "num_key_value_heads": 8, "num_global_key_value_heads": 2, "layer_types": ([SLIDING] * 5 + [FULL]) * 5,
      "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}, 25.23),
    ({"model_type": "gpt_oss", "vocab_size": 201088, "max_position_embeddings": 131072, "hidden_size": 2880,
      "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
      "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}, 20.91),
]  # fmt: skip


@pytest.mark.parametrize(("config", "billions"), PUBLISHED, ids=["gemma 4 31B", "gemma 4 26B-A4B", "gpt-oss-20b"])
def test_published_configs_have_their_published_sizes(config: dict[str, Any], billions: float) -> None:
    assert model_sizes(read_config(config)).held / 1e9 == pytest.approx(billions, rel=1e-3)  # vectors are left out


def test_a_layer_that_borrows_keys_adds_none() -> None:
    own, borrowed = (LayerSpec(attention(8, 2, 64, kv_from=i), DenseSpec(512)) for i in (None, 0))
    model = ModelConfig("toy", 256, 1000, 512, (own, borrowed))
    assert model_sizes(model).kv == 2 * 2 * 64 and len(model.cached_attention) == 1
    saved = layer_sizes(own, 256).held - layer_sizes(borrowed, 256).held
    assert saved == 2 * 256 * 2 * 64  # its k and v projections


def test_a_recurrent_layer_keeps_a_state_and_no_keys() -> None:
    """Qwen3.5-27B: 48 value heads of 128 x 128, and three rows of 10,240 channels before the convolution."""
    sizes = layer_sizes(LayerSpec(RecurrentSpec(16, 48, 128, 128, 4), DenseSpec(17408)), 5120)
    assert sizes.kv == sizes.queries == 0 and sizes.state == 48 * 128 * 128 + 3 * 10240


def test_operations_follow_what_is_active_and_what_is_seen() -> None:
    model = SHAPES["qwen3-8b"]
    sizes = model_sizes(model)
    assert sizes.operations(keys=0) == 2 * (sizes.active - 4096 * 151936)
    assert sizes.operations(keys=100) - sizes.operations(keys=0) == 4 * 36 * 32 * 128 * 100
    experts = replace(model.layers[0], mlp=ExpertsSpec(8, 2, 512, shared_size=256))
    one = layer_sizes(experts, 4096)
    assert one.held - one.active == 6 * 3 * 4096 * 512
