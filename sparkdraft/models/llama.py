"""Llama and what shares its shape (SmolLM2 among them): grouped heads, RoPE, gated MLP, one norm before each.

`build` serves every architecture with this order of norms. It imports the blocks, so reading a config needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkdraft.kernels.ops import Ops
from sparkdraft.models.common.config import ModelConfig, dense_config, refuse_windows
from sparkdraft.models.common.keys import check_keys, only_values
from sparkdraft.models.common.layers import ExpertsSpec, RecurrentSpec

if TYPE_CHECKING:
    from sparkdraft.models.common.blocks import Decoder
    from sparkdraft.models.common.experts import LoadExperts
    from sparkdraft.weights.loader import Loader

MODEL_TYPES = ("llama",)


def read(config: Mapping[str, Any]) -> ModelConfig:
    model = dense_config(config, check_keys(config, only_values("qk_norm use_qk_norm", False)))
    refuse_windows(config, slides_by_default=True)
    return model


def build(
    config: ModelConfig,
    load: Loader,
    ops: Ops,
    context: int,
    experts: LoadExperts | None = None,  # how those of a layer are found, where it is not as Qwen names them
    has_others: bool = False,  # the file may hold more than the text model
) -> Decoder:
    import torch

    from sparkdraft.models.common.blocks import Attention, Decoder, DecoderLayer, GatedMLP, load_head, load_norm
    from sparkdraft.models.common.delta_net import DeltaNet
    from sparkdraft.models.common.experts import load_experts
    from sparkdraft.models.common.keys import leave_others, text_prefix
    from sparkdraft.models.common.rope import RopeTables

    prefix = text_prefix(load) if has_others else "model."
    half = config.attention[0].head_dim // 2
    factors = load.vector("rope_freqs", half, torch.float32) if load.has("rope_freqs") else None
    ropes = RopeTables(context, load.device, factors)
    embedding = load.embedding(f"{prefix}embed_tokens", config.vocab_size, config.hidden_size)
    layers = []
    for i, spec in enumerate(config.layers):
        name = f"{prefix}layers.{i}"
        mlp = (experts or load_experts) if isinstance(spec.mlp, ExpertsSpec) else GatedMLP
        layers.append(
            DecoderLayer(
                load_norm(config, load, f"{name}.input_layernorm"),
                DeltaNet(spec.mixer, config, load, f"{name}.linear_attn", ops)
                if isinstance(spec.mixer, RecurrentSpec)
                else Attention(spec.mixer, config, load, f"{name}.self_attn", ops, ropes),
                load_norm(config, load, f"{name}.post_attention_layernorm"),
                mlp(spec.mlp, config, load, f"{name}.mlp", ops),
            )
        )
    norm = load_norm(config, load, f"{prefix}norm")
    head = load_head(config, load, embedding)
    if has_others:
        leave_others(load)
    load.finish()
    return Decoder(config, layers, embedding, head, norm, context, ops, load.dtype)
