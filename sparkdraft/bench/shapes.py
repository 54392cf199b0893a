"""Named shapes of models and of drafters with random weights: speed depends on dimensions, not on what was learned.

Whatever is measured on these says that the weights are random. Random weights write nonsense, so nothing here speaks
of quality, and a random drafter's drafts are accepted only where bench/synthetic.py says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.engine.build import build_engine
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.machine import detect, plan_here
from sparkdraft.models.config import ModelConfig, uniform_config
from sparkdraft.models.layers import AttentionSpec, DenseSpec, LayerSpec
from sparkdraft.spec.dflash_config import DFlashConfig, check_fits
from sparkdraft.spec.registry import DFlashKind, DraftSource
from sparkdraft.train.recipe import spread_taps
from sparkdraft.weights.loader import Progress

Sizes = dict[str, tuple[int, ...]]

_qwen3, _llama = partial(uniform_config, "qwen3", qk_norm=True), partial(uniform_config, "llama")

SHAPES = {
    "tiny": _qwen3(8, 64, 128, 4, 2, 32, 512, 4096, 1e-6, 1e6, None, True, qk_norm=True),  # does it run at all?
    "smollm2-135m": _llama(30, 576, 1536, 9, 3, 64, 49152, 8192, 1e-5, 1e5, None, True),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e-6, 1e6, None, True, qk_norm=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, 8, 128, 151936, 40960, 1e-6, 1e6, None, True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e-6, 1e6, None, False, qk_norm=True),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8, 128, 128256, 131072, 1e-5, 5e5, None, False),
}


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """DFlash layers with the dimensions of the target's own; embedding and head are the target's."""

    num_layers: int
    block_size: int = 16
    num_taps: int = 5


DRAFTER_SHAPES = {"dflash-5x": DrafterShape(5), "dflash-3x": DrafterShape(3)}


def shape(name: str) -> ModelConfig:
    if name not in SHAPES:
        raise UserError(f"shape '{name}' is not known; known are {', '.join(SHAPES)}")
    return SHAPES[name]


def drafter_shape(name: str, target: ModelConfig) -> DFlashConfig:
    """The drafter of this name that fits the target."""
    if name not in DRAFTER_SHAPES:
        raise UserError(f"drafter shape '{name}' is not known; known are {', '.join(DRAFTER_SHAPES)}")
    own = DRAFTER_SHAPES[name]
    attention, mlp = target.uniform()
    layer = LayerSpec(replace(attention, qk_norm=True, causal=False), mlp)
    draft = DFlashConfig(
        model=replace(target, model_type="qwen3", layers=(layer,) * own.num_layers, tie_embeddings=True),
        taps=spread_taps(target.num_layers, own.num_taps),
        block_size=own.block_size,
        mask_token_id=target.vocab_size - 1,
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
    )
    check_fits(draft, target)
    return draft


def random_engine(config: EngineConfig, draft: DFlashConfig | None = None, progress: Progress | None = None) -> Engine:
    """An engine of the shape that config.model names, with random weights, and a drafter of a shape if one is given."""
    model, device = shape(config.model), detect(config).device
    source = DraftSource(DFlashKind(), draft, RandomCheckpoint(draft, device)) if draft else None
    plan = plan_here(config, model, source.caps if source else None)
    return build_engine(plan, config, model, RandomCheckpoint(model, device), SilentTokenizer(), source, progress)


class RandomCheckpoint:
    """Answers like a checkpoint, with tensors drawn on the device as they are asked for."""

    path = Path("random weights")

    def __init__(self, model: ModelConfig | DFlashConfig, device: str) -> None:
        self._shapes = tensor_shapes(model) if isinstance(model, ModelConfig) else drafter_tensor_shapes(model)
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


def tensor_shapes(model: ModelConfig) -> Sizes:
    sizes: Sizes = {
        "model.embed_tokens.weight": (model.vocab_size, model.hidden_size),
        "model.norm.weight": (model.hidden_size,),
    }
    if not model.tie_embeddings:
        sizes["lm_head.weight"] = (model.vocab_size, model.hidden_size)
    return sizes | _layer_shapes(model, "model.")


def drafter_tensor_shapes(draft: DFlashConfig) -> Sizes:
    hidden = draft.model.hidden_size
    sizes: Sizes = {
        "fc.weight": (hidden, len(draft.taps) * draft.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    return sizes | _layer_shapes(draft.model, "")


def _layer_shapes(model: ModelConfig, prefix: str) -> Sizes:
    sizes: Sizes = {}
    hidden = model.hidden_size
    for i, layer in enumerate(model.layers):
        attention, mlp = layer.mixer, layer.mlp
        assert isinstance(attention, AttentionSpec) and isinstance(mlp, DenseSpec), layer
        own: Sizes = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (attention.query_width, hidden),
            "self_attn.k_proj": (attention.kv_width, hidden),
            "self_attn.v_proj": (attention.kv_width, hidden),
            "self_attn.o_proj": (hidden, attention.query_width),
            "mlp.gate_proj": (mlp.intermediate_size, hidden),
            "mlp.up_proj": (mlp.intermediate_size, hidden),
            "mlp.down_proj": (hidden, mlp.intermediate_size),
        }
        if attention.qk_norm:
            own |= {f"self_attn.{part}_norm": (attention.head_dim,) for part in "qk"}
        sizes |= {f"{prefix}layers.{i}.{name}.weight": size for name, size in own.items()}
    return sizes


class SilentTokenizer:
    """For engines whose text nobody reads."""

    eos_ids: frozenset[int] = frozenset()

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        return b""

    first_bytes = token_bytes

    def is_special(self, token: int) -> bool:
        return False
