"""Published models described by hand, layer by layer: what their architectures' files must read out of config.json."""

from __future__ import annotations

from dataclasses import replace

from sparkdraft.kernels.ops import GELU_TANH, Activation
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, RecurrentSpec, RopeSpec


def attention(
    heads: int, kv_heads: int, dim: int, window: int = 0, kv_from: int | None = None, values: str = "given"
) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, dim, RopeSpec(dim), dim**-0.5, window, kv_from=kv_from, values=values)


def qwen3_30b_a3b() -> ModelConfig:
    layer = LayerSpec(attention(32, 4, 128), ExpertsSpec(128, 8, 768))
    return ModelConfig("qwen3_moe", 2048, 151936, 40960, (layer,) * 48)


def gpt_oss(layers: int, experts: int) -> ModelConfig:
    mlp = ExpertsSpec(experts, 4, 2880, activation=Activation("clamped_swiglu", 7.0), bias=True)
    pair = tuple(LayerSpec(attention(64, 8, 64, window), mlp) for window in (128, 0))
    return ModelConfig("gpt_oss", 2880, 201088, 131072, pair * (layers // 2))


def gemma4(
    hidden: int, heads: int, kv_heads: int, global_kv_heads: int, mlp: DenseSpec | ExpertsSpec, groups: int
) -> ModelConfig:
    """Five layers of a window, then one over everything, whose values are made of its keys."""
    slides = LayerSpec(attention(heads, kv_heads, 256, 1024, values="normed"), mlp)
    full = LayerSpec(attention(heads, global_kv_heads, 512, values="keys"), mlp)
    layers = (*(slides,) * 5, full) * groups
    return ModelConfig("gemma4", hidden, 262144, 262144, layers, tie_embeddings=True)


def hybrid(
    kind: str, hidden: int, heads: int, kv_heads: int, value_heads: int, mlp: DenseSpec | ExpertsSpec, groups: int,
    vocab: int = 248320,
) -> ModelConfig:  # fmt: skip
    """Three recurrent layers, then one of gated attention."""
    full = LayerSpec(replace(attention(heads, kv_heads, 256), gated=True), mlp)
    recurrent = LayerSpec(RecurrentSpec(16, value_heads, 128, 128, conv_width=4), mlp)
    return ModelConfig(kind, hidden, vocab, 262144, (*(recurrent,) * 3, full) * groups)


QWEN35_EXPERTS = ExpertsSpec(256, 8, 512, shared_size=512, shared_gate=True)
NEXT_EXPERTS = ExpertsSpec(512, 10, 512, shared_size=512, shared_gate=True)
DESCRIBED: dict[str, ModelConfig] = {
    "qwen3.5-27b": hybrid("qwen3_5", 5120, 24, 4, 48, DenseSpec(17408), 16),
    "qwen3.5-35b-a3b": hybrid("qwen3_5_moe", 2048, 16, 2, 32, QWEN35_EXPERTS, 10),
    "qwen3-coder-next": hybrid("qwen3_next", 2048, 16, 2, 32, NEXT_EXPERTS, 12, 151936),
    "qwen3-coder-next-24": hybrid("qwen3_next", 2048, 16, 2, 32, NEXT_EXPERTS, 6, 151936),
    "qwen3-30b-a3b": qwen3_30b_a3b(),
    "gpt-oss-20b": gpt_oss(24, 32),
    "gpt-oss-120b": gpt_oss(36, 128),
    "gemma4-31b": gemma4(5376, 32, 16, 4, DenseSpec(21504, GELU_TANH), 10),
    "gemma4-26b-a4b": gemma4(2816, 16, 8, 2, ExpertsSpec(128, 8, 704, shared_size=2112, activation=GELU_TANH), 5),
}
