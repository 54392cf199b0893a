"""Llama and what shares its shape (SmolLM2 among them): grouped heads, RoPE, gated MLP, one norm before each.

Everything is in models/blocks.py; this file is the order in which a checkpoint's tensors are asked for.
"""

from __future__ import annotations

from types import ModuleType

from sparkdraft.models.blocks import Attention, Decoder, DecoderLayer, load_norm
from sparkdraft.models.config import ModelConfig
from sparkdraft.models.rope import rope_table
from sparkdraft.weights.loader import Loader


def build(config: ModelConfig, load: Loader, ops: ModuleType, context: int, qk_norm: bool = False) -> Decoder:
    embedding = load.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
    layers = []
    for i in range(config.num_layers):
        name = f"model.layers.{i}"
        attention = Attention(config, load, f"{name}.self_attn", ops, qk_norm)
        layers.append(DecoderLayer(config, load, name, attention, ops))
    norm = load_norm(config, load, "model.norm")
    if config.tie_embeddings:
        head = load.tied_head(embedding)
    else:
        head = load.linear({"lm_head": config.vocab_size}, config.hidden_size)
    factors = load.optional_vector("rope_freqs", config.head_dim // 2)
    rope = rope_table(config, context, factors).to(load.device)
    load.finish()
    return Decoder(config, layers, embedding, head, norm, rope, ops)
