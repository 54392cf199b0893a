"""A model's dimensions, read from a Hugging Face config.json (GGUF metadata is translated to one first).

One frozen record serves every architecture here; what an architecture does not have stays at its default. Which keys
may be ignored and which are refused is in keys.py. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.models.keys import check_keys, rope_of

FINAL = -1  # among numbers of blocks whose result is tapped: what the final norm makes of the last one's


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    unknown_keys: tuple[str, ...] = ()  # of config.json: ignored, and shown to the user

    @property
    def num_parameters(self) -> int:
        """Weights of the decoder layers and the head, without norms: what one token's pass multiplies by."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_layers * layer + self.hidden_size * self.vocab_size

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> ModelConfig:
        """A model that is to be run. Raises UserError where its config asks for a computation that is not built."""
        dimensions = ModelConfig.dimensions(config)
        return replace(dimensions, unknown_keys=check_keys(config))

    @staticmethod
    def dimensions(config: Mapping[str, Any]) -> ModelConfig:
        """The same without a look at other keys: drafters have tables of their own (spec/dflash_config.py)."""
        try:
            heads, rope = config["num_attention_heads"], rope_of(config)
            return ModelConfig(
                model_type=config["model_type"],
                num_layers=config["num_hidden_layers"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_heads=heads,
                num_kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                vocab_size=config["vocab_size"],
                max_position=config["max_position_embeddings"],
                rms_eps=config.get("rms_norm_eps", 1e-6),
                rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
                rope_scaling=rope if rope["rope_type"] != "default" else None,
                tie_embeddings=bool(config.get("tie_word_embeddings", False)),
                attention_bias=bool(config.get("attention_bias", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
            )
        except KeyError as missing:
            raise UserError(f"config.json has no {missing}: it does not describe a decoder this engine knows") from None
