"""Llama and what shares its shape (SmolLM2 among them): grouped heads, RoPE, gated MLP, one norm before each.

The blocks are in models/common/blocks.py. This file says what a config.json of the kind means, and in which order a
checkpoint's tensors are asked for. Blocks are imported when a model is built: reading a config needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdraft.kernels.ops import Ops
from sparkdraft.models.common.config import ModelConfig, dense_config, refuse_windows
from sparkdraft.models.common.keys import check_keys, only_values
from sparkdraft.models.common.layers import ExpertsSpec

if TYPE_CHECKING:
    from sparkdraft.models.common.blocks import Decoder
    from sparkdraft.models.common.experts import LoadExperts
    from sparkdraft.weights.loader import Loader

MODEL_TYPES = ("llama",)


def read(config: Mapping[str, Any]) -> ModelConfig:
    """Raises UserError where the config asks for a computation that is not built."""
    model = dense_config(config, qk_norm=False)
    unknown = check_keys(config, only_values("qk_norm use_qk_norm", False))
    refuse_windows(config, slides_by_default=True)
    return replace(model, unknown_keys=unknown)


def build(config: ModelConfig, load: Loader, ops: Ops, context: int, experts: LoadExperts | None = None) -> Decoder:
    """experts: how those of a layer are found, where it is not as Qwen names them."""
    import torch

    from sparkdraft.models.common.blocks import Attention, Decoder, DecoderLayer, GatedMLP, load_head, load_norm
    from sparkdraft.models.common.experts import load_experts
    from sparkdraft.models.common.rope import RopeTables

    factors = load.optional_vector("rope_freqs", config.attention[0].head_dim // 2, torch.float32)
    ropes = RopeTables(context, load.device, factors)
    embedding = load.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
    layers = []
    for i, spec in enumerate(config.layers):
        name = f"model.layers.{i}"
        mlp = (experts or load_experts) if isinstance(spec.mlp, ExpertsSpec) else GatedMLP
        layers.append(
            DecoderLayer(
                load_norm(config, load, f"{name}.input_layernorm"),
                Attention(spec.mixer, config, load, f"{name}.self_attn", ops, ropes),
                load_norm(config, load, f"{name}.post_attention_layernorm"),
                mlp(spec.mlp, config, load, f"{name}.mlp", ops),
            )
        )
    norm = load_norm(config, load, "model.norm")
    head = load_head(config, load, embedding)
    load.finish()
    return Decoder(config, layers, embedding, head, norm, context, ops, load.dtype)
