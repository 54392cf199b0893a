"""Published models and drafters described by hand, for predictions of their speed: those that no shape is named for."""

from __future__ import annotations

import json
from dataclasses import replace

from sparkdraft.drafters.dflash import DFlashConfig
from sparkdraft.drafters.find import ASSETS
from sparkdraft.models.common.config import ModelConfig, uniform_config
from sparkdraft.models.common.layers import DenseSpec, ExpertsSpec, LayerSpec, RecurrentSpec
from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.operate.bench.shapes import TARGET_FILES, drafter_shape, shape
from sparkdraft.operate.forecast.roofline import DraftPass
from tests.operate.forecast.described import attention


def hybrid(
    model_type: str, hidden: int, vocab: int, heads: int, kv_heads: int, value_heads: int, mlp: DenseSpec | ExpertsSpec,
    groups: int,
) -> ModelConfig:  # fmt: skip
    """Three gated delta rules, then one attention with an output gate, which has half as many weights again as its
    queries and output: heads are counted 1.5 times here."""
    recurrent = LayerSpec(RecurrentSpec(16, value_heads, 128, 128, 4), mlp)
    full = LayerSpec(attention(heads * 3 // 2, kv_heads, 256), mlp)
    return ModelConfig(model_type, hidden, vocab, 262144, ((recurrent,) * 3 + (full,)) * groups)


def gemma3(groups: int) -> ModelConfig:
    mlp = DenseSpec(10240)
    layers = (*(LayerSpec(attention(8, 4, 256, 1024), mlp),) * 5, LayerSpec(attention(8, 4, 256), mlp)) * groups
    return ModelConfig("gemma3", 2560, 262208, 131072, layers[:34], tie_embeddings=True)


def dense(layers: int, hidden: int, inter: int, heads: int, kv_heads: int, vocab: int) -> ModelConfig:
    return uniform_config("llama", layers, hidden, inter, heads, kv_heads, 128, vocab, 131072)


MODELS: dict[str, ModelConfig] = {
    **{name: shape(name) for name in (*TARGET_FILES, "qwen3-8b", "llama-3.1-8b", "smollm2-135m")},
    "qwen3.5-27b": hybrid("qwen3_5", 5120, 248320, 24, 4, 48, DenseSpec(17408), 16),
    "qwen3.5-35b-a3b": hybrid("qwen3_5_moe", 2048, 248320, 16, 2, 32, ExpertsSpec(256, 8, 512, 512), 10),
    "qwen3-coder-next": hybrid("qwen3_next", 2048, 151936, 16, 2, 32, ExpertsSpec(512, 10, 512, 512), 12),
    "qwen2.5-coder-7b": dense(28, 3584, 18944, 28, 4, 152064),
    "qwen3-32b": dense(64, 5120, 25600, 64, 8, 151936),
    "llama-3.3-70b": dense(80, 8192, 28672, 64, 8, 128256),
    "gemma-3-4b": gemma3(6),
}


def dflash(
    target: str, layers: int, inter: int, heads: int, kv_heads: int, dim: int, aux: int, vocab: int = 0,
    windowed: int = 0,
) -> DraftPass:  # fmt: skip
    """vocab: rows of a head of its own. windowed: layers with a window of 2048."""
    model = MODELS[target]
    own = uniform_config("qwen3", layers, model.hidden_size, inter, heads, kv_heads, dim, model.vocab_size, 131072)
    specs = [replace(s, window=2048 if i < windowed else 0, causal=False) for i, s in enumerate(own.attention)]
    own = replace(own, layers=tuple(replace(layer, mixer=s) for layer, s in zip(own.layers, specs, strict=True)))
    draft = DFlashConfig(own, tuple(range(aux)), 16, 1, vocab or model.vocab_size, model.hidden_size)
    return DraftPass.of(draft.caps(), model_sizes(model).head, own_head=bool(vocab))


def shaped(name: str, target: str) -> DraftPass:
    caps = drafter_shape(name, MODELS[target]).caps()
    return DraftPass.of(caps, model_sizes(MODELS[target]).head, caps.own_head)


def packaged(folder: str, target: str) -> DraftPass:
    draft = DFlashConfig.read(json.loads((ASSETS / folder / "config.json").read_text(encoding="utf-8")))
    own = draft.draft_vocab_size < MODELS[target].vocab_size
    return DraftPass.of(draft.caps(), model_sizes(MODELS[target]).head, own, 4, "quantised")


DRAFTERS: dict[str, DraftPass] = {
    "RedHatAI/gemma-4-31B-it-speculator.dflash": dflash("gemma4-31b", 5, 10752, 64, 8, 128, 5, vocab=32000),
    "z-lab/Qwen3.5-27B-DFlash": dflash("qwen3.5-27b", 5, 17408, 32, 8, 128, 5),
    "z-lab/Qwen3.6-27B-DFlash": dflash("qwen3.5-27b", 5, 17408, 32, 8, 128, 5, windowed=4),
    "z-lab/Qwen3.5-35B-A3B-DFlash": dflash("qwen3.5-35b-a3b", 8, 6144, 32, 4, 128, 5),
    "z-lab/Qwen3-Coder-Next-DFlash": dflash("qwen3-coder-next", 8, 6144, 32, 4, 128, 5),
    "z-lab/gemma-4-26B-A4B-it-DFlash": shaped("gemma4-26b-a4b-dflash", "gemma4-26b-a4b"),
    "google/gemma-4-26B-A4B-it-assistant": shaped("gemma4-26b-a4b-assistant", "gemma4-26b-a4b"),
    "DSpark, 7 drafts": DraftPass(1_360_000_000, 248320 * 5120, (), 5),
    "smollm2-dflash": packaged("smollm2-dflash", "smollm2-135m"),
    "dflash-5x": shaped("dflash-5x", "qwen3-8b"),
    "gemma4-31b-dflash": shaped("gemma4-31b-dflash", "gemma4-31b"),
}
