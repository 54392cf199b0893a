"""Published models described by hand, layer by layer: what their architectures' files must read out of config.json."""

from __future__ import annotations

from sparkdraft.kernels.activation import GELU_TANH, Activation
from sparkdraft.models.config import ModelConfig
from sparkdraft.models.layers import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, RopeSpec


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


DESCRIBED: dict[str, ModelConfig] = {
    "qwen3-30b-a3b": qwen3_30b_a3b(),
    "gpt-oss-20b": gpt_oss(24, 32),
    "gpt-oss-120b": gpt_oss(36, 128),
    "gemma4-31b": gemma4(5376, 32, 16, 4, DenseSpec(21504, GELU_TANH), 10),
    "gemma4-26b-a4b": gemma4(2816, 16, 8, 2, ExpertsSpec(128, 8, 704, shared_size=2112, activation=GELU_TANH), 5),
}
