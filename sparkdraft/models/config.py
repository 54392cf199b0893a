"""A model's dimensions: its ends (vocabulary, hidden size) and one spec per layer (models/layers.py).

Each architecture's file reads its own config.json into this record (models/registry.py finds the file); GGUF metadata
is translated to such a config first. `dense_config` and `uniform_config` describe models whose layers are all alike:
Llama's kind, and DFlash drafters. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.models.keys import rope_of
from sparkdraft.models.layers import AttentionSpec, DenseSpec, LayerSpec, RopeSpec

FINAL = -1  # among numbers of blocks whose result is tapped: what the final norm makes of the last one's


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str
    hidden_size: int
    vocab_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    rms_eps: float = 1e-6
    tie_embeddings: bool = False
    norm_plus_one: bool = False  # files hold the gains of RMS norms less 1
    embedding_scale: float = 1.0  # of the rows that the first layer reads
    softcap: float = 0.0  # logits are bent to stay within it, by a tanh; 0: as they are
    unknown_keys: tuple[str, ...] = ()  # of config.json: ignored, and shown to the user

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """Of the layers that have attention, in order."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec))

    @property
    def cached_attention(self) -> tuple[AttentionSpec, ...]:
        """Of the layers that keep keys and values of their own."""
        return tuple(spec for spec in self.attention if spec.kv_from is None)

    def uniform(self) -> tuple[AttentionSpec, DenseSpec]:
        """The attention and MLP of a model whose layers are all alike; others have no such pair."""
        first = self.layers[0]
        if any(layer != first for layer in self.layers):
            raise UserError(f"the layers of this {self.model_type} model differ; this needs a model of equal layers")
        assert isinstance(first.mixer, AttentionSpec) and isinstance(first.mlp, DenseSpec), first
        return first.mixer, first.mlp


def dense_config(config: Mapping[str, Any], qk_norm: bool) -> ModelConfig:
    """A config.json of Llama's kind. Which of its other keys may be ignored is for the caller to check."""
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        head_dim = config.get("head_dim") or hidden // heads
        rope = rope_spec(config, head_dim)
        return uniform_config(
            model_type=config["model_type"],
            num_layers=config["num_hidden_layers"],
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            vocab_size=config["vocab_size"],
            max_position=config["max_position_embeddings"],
            rms_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=qk_norm,
        )
    except KeyError as missing:
        raise UserError(f"config.json has no {missing}: it does not describe a decoder this engine knows") from None


def rope_spec(config: Mapping[str, Any], head_dim: int, layer_type: str = "", reads: str = "") -> RopeSpec:
    """The rope of a config.json; layer_type and reads as in `rope_of`.

    An architecture that rotates a part of each head reads "partial_rotary_factor", which may be beside the dict too.
    """
    rope = rope_of(config, layer_type, reads)
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    scaling = rope if rope["rope_type"] != "default" else None
    part = 0
    if "partial_rotary_factor" in reads.split() and rope["rope_type"] != "proportional":
        factor = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        part = int(head_dim * factor)
        if not 0 < part <= head_dim or part % 2:
            raise UserError(
                f"config.json has partial_rotary_factor {factor}, which rotates {part} of {head_dim} lanes; "
                "they must be pairs of lanes of a head: use another checkpoint."
            )
    return RopeSpec(head_dim, theta, scaling, config["max_position_embeddings"], part if part < head_dim else 0)


def uniform_config(
    model_type: str,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    max_position: int,
    rms_eps: float = 1e-6,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    tie_embeddings: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    """A model whose layers are all alike, from plain numbers."""
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=RopeSpec(head_dim, rope_theta, rope_scaling, max_position),
        scale=head_dim**-0.5,
        qk_norm=qk_norm,
        bias=attention_bias,
        output_bias=attention_bias,
    )
    layer = LayerSpec(attention, DenseSpec(intermediate_size, bias=mlp_bias))
    return ModelConfig(
        model_type, hidden_size, vocab_size, max_position, (layer,) * num_layers, rms_eps, tie_embeddings
    )
