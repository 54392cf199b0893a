"""A toy architecture whose layers all differ: the file that docs/adding-a-model.md walks through, and its oracle.

layer 0    attention over everything, 4 heads of 32 (2 K/V heads)      dense MLP
layer 1    a window of 24, 4 heads of 16 (4 K/V heads)                 4 experts, 2 per row
layer 2    the same window, over the keys and values of layer 1        dense MLP
layer 3    attention over everything, as layer 0                       4 experts, 2 per row
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparkdraft.models.blocks import Attention, Decoder, DecoderLayer, GatedMLP, load_head, load_norm
from sparkdraft.models.config import ModelConfig
from sparkdraft.models.experts import load_experts
from sparkdraft.models.layers import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, RopeSpec
from sparkdraft.models.rope import RopeTables
from sparkdraft.weights.loader import Loader
from tests.models.tiny import byte_tokenizer

CONFIG: dict[str, Any] = {
    "model_type": "toy",
    "hidden_size": 64,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "intermediate_size": 96,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "sliding_window": 24,
    "layer_types": ["full", "sliding", "shared", "full"],
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}

# ---- the architecture: what a file of sparkdraft/models holds


def read(config: Mapping[str, Any]) -> ModelConfig:
    dense = DenseSpec(config["intermediate_size"])
    experts = ExpertsSpec(config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"])
    full = AttentionSpec(4, 2, 32, RopeSpec(32, theta=1e5), scale=32**-0.5)
    slides = AttentionSpec(4, 4, 16, RopeSpec(16), scale=0.3, window=config["sliding_window"], qk_norm=True)
    layers = []
    for i, kind in enumerate(config["layer_types"]):
        if kind == "shared":
            borrowed = AttentionSpec(4, 4, 16, RopeSpec(16), 0.3, slides.window, qk_norm=True, kv_from=i - 1)
            layers.append(LayerSpec(borrowed, dense))
        else:
            layers.append(LayerSpec(full if kind == "full" else slides, experts if i % 2 else dense))
    ends = (config["hidden_size"], config["vocab_size"], config["max_position_embeddings"])
    return ModelConfig("toy", *ends, tuple(layers), tie_embeddings=config["tie_word_embeddings"])


def build(config: ModelConfig, load: Loader, ops: ModuleType, context: int) -> Decoder:
    ropes = RopeTables(context, load.device)
    embedding = load.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
    layers = []
    for i, spec in enumerate(config.layers):
        name = f"model.layers.{i}"
        mlp = load_experts if isinstance(spec.mlp, ExpertsSpec) else GatedMLP
        layers.append(
            DecoderLayer(
                load_norm(config, load, f"{name}.input_layernorm"),
                Attention(spec.mixer, config, load, f"{name}.self_attn", ops, ropes),
                load_norm(config, load, f"{name}.post_attention_layernorm"),
                mlp(spec.mlp, config, load, f"{name}.mlp", ops),
            )
        )
    norm, head = load_norm(config, load, "model.norm"), load_head(config, load, embedding)
    load.finish()
    return Decoder(config, layers, embedding, head, norm, context, ops, load.dtype)


# ---- a checkpoint of it


def write_toy(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(size, generator=generator) * (0.3 if len(size) == 1 else 1.5 * size[-1] ** -0.5)
        + (1.0 if len(size) == 1 else 0.0)
        for name, size in _shapes().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    model, hidden = read(CONFIG), CONFIG["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (CONFIG["vocab_size"], hidden),
        "lm_head.weight": (CONFIG["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for i, layer in enumerate(model.layers):
        attention, mlp, name = layer.mixer, layer.mlp, f"model.layers.{i}."
        assert isinstance(attention, AttentionSpec)
        own = {"q": attention.query_width}
        if attention.kv_from is None:
            own |= {"k": attention.kv_width, "v": attention.kv_width}
        shapes |= {f"{name}self_attn.{part}_proj.weight": (rows, hidden) for part, rows in own.items()}
        shapes[f"{name}self_attn.o_proj.weight"] = (hidden, attention.query_width)
        if attention.qk_norm:
            shapes |= {f"{name}self_attn.{part}_norm.weight": (attention.head_dim,) for part in "qk" if part in own}
        shapes |= {f"{name}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        places, inter = [f"{name}mlp"], mlp.intermediate_size
        if isinstance(mlp, ExpertsSpec):
            shapes[f"{name}mlp.gate.weight"] = (mlp.num_experts, hidden)
            places = [f"{name}mlp.experts.{e}" for e in range(mlp.num_experts)]
        for place in places:
            shapes |= {f"{place}.{part}_proj.weight": (inter, hidden) for part in ("gate", "up")}
            shapes[f"{place}.down_proj.weight"] = (hidden, inter)
    return shapes


# ---- the oracle: the whole sequence at once, in plain torch, without a cache and without the package's blocks


@torch.inference_mode()
def toy_logits(folder: Path, ids: list[int]) -> Tensor:  # [rows, vocab]
    w, model = load_file(folder / "model.safetensors"), read(CONFIG)
    x, kept = w["model.embed_tokens.weight"][ids], dict[int, tuple[Tensor, Tensor]]()
    position = torch.arange(len(ids))
    distance = position.unsqueeze(1) - position
    for i, layer in enumerate(model.layers):
        spec, name = layer.mixer, f"model.layers.{i}."
        assert isinstance(spec, AttentionSpec)
        h = _norm(x, w[f"{name}input_layernorm.weight"])
        q = _heads(h, w, f"{name}self_attn.q", spec)
        if spec.kv_from is None:
            v = (h @ w[f"{name}self_attn.v_proj.weight"].t()).view(len(ids), -1, spec.head_dim)
            kept[i] = _heads(h, w, f"{name}self_attn.k", spec), v
        k, v = (t.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1) for t in kept[spec.kv_from or i])
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        seen = (distance >= 0) & (distance < (spec.window or len(ids)))
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
        x = x + mixed.flatten(1) @ w[f"{name}self_attn.o_proj.weight"].t()
        h = _norm(x, w[f"{name}post_attention_layernorm.weight"])
        x = x + _mlp(h, w, f"{name}mlp", layer.mlp)
    return _norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].t()


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain


def _heads(h: Tensor, w: dict[str, Tensor], name: str, spec: AttentionSpec) -> Tensor:
    x = (h @ w[f"{name}_proj.weight"].t()).view(len(h), -1, spec.head_dim)
    if spec.qk_norm:
        x = _norm(x, w[f"{name}_norm.weight"])
    half = spec.head_dim // 2
    angle = torch.arange(len(h)).unsqueeze(1) * spec.rope.theta ** -(torch.arange(half) / half)
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _mlp(h: Tensor, w: dict[str, Tensor], name: str, spec: DenseSpec | ExpertsSpec) -> Tensor:
    def gated(place: str, rows: Tensor) -> Tensor:
        gate, up = (rows @ w[f"{place}.{part}_proj.weight"].t() for part in ("gate", "up"))
        return (F.silu(gate) * up) @ w[f"{place}.down_proj.weight"].t()

    if isinstance(spec, DenseSpec):
        return gated(name, h)
    chances, chosen = (h @ w[f"{name}.gate.weight"].t()).softmax(-1).topk(spec.top_k)
    out = torch.zeros_like(h)
    for row, (shares, experts) in enumerate(zip(chances, chosen, strict=True)):
        for share, expert in zip(shares / shares.sum(), experts.tolist(), strict=True):
            out[row] += share * gated(f"{name}.experts.{expert}", h[row])
    return out
