"""Named model shapes with random weights: speed depends on dimensions, not on what was learned.

Whatever is measured on these says that the weights are random. Random weights write nonsense, so nothing here speaks
of quality.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.models.config import ModelConfig

SHAPES = {
    "smollm2-135m": ModelConfig("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e-5, 1e5, None, True),
    "qwen3-0.6b": ModelConfig("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e-6, 1e6, None, True),
    "qwen3-4b": ModelConfig("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 40960, 1e-6, 1e6, None, True),
    "qwen3-8b": ModelConfig("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e-6, 1e6, None, False),
    "llama-3.1-8b": ModelConfig("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 1e-5, 5e5, None, False),
}


def shape(name: str) -> ModelConfig:
    if name not in SHAPES:
        raise UserError(f"shape '{name}' is not known; known are {', '.join(SHAPES)}")
    return SHAPES[name]


class RandomCheckpoint:
    """Answers like a checkpoint, with tensors drawn on the device as they are asked for."""

    path = Path("random weights")

    def __init__(self, model: ModelConfig, device: str) -> None:
        self._shapes = tensor_shapes(model)
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def names(self) -> list[str]:
        return list(self._shapes)

    def read(self, name: str) -> Tensor:
        size = self._shapes[name]
        if len(size) == 1:
            return torch.ones(size, device=self._device)
        dtype = torch.float32 if self._device == "cpu" else torch.bfloat16
        return torch.randn(size, generator=self._generator, device=self._device, dtype=dtype).mul_(0.02)


def tensor_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inter = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (model.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not model.tie_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    for i in range(model.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inter, hidden),
            "mlp.up_proj": (inter, hidden),
            "mlp.down_proj": (hidden, inter),
        }
        if model.model_type == "qwen3":
            layer |= {"self_attn.q_norm": (model.head_dim,), "self_attn.k_norm": (model.head_dim,)}
        shapes |= {f"model.layers.{i}.{name}.weight": size for name, size in layer.items()}
    return shapes


class SilentTokenizer:
    """For engines whose text nobody reads."""

    eos_ids: frozenset[int] = frozenset()

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        return b""

    first_bytes = token_bytes

    def is_special(self, token: int) -> bool:
        return False
