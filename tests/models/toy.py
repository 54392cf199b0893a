"""A toy architecture whose layers all differ: the file that docs/adding-a-model.md walks through, and its oracle.

layer 0    attention over everything, 4 heads of 32 (2 K/V heads), biases    dense MLP of GELU, with biases
layer 1    a window of 24, 4 heads of 16 (4 K/V heads)                       4 experts, 2 per row
layer 2    the same window, over the keys and values of layer 1              dense MLP; both results are normed
layer 3    attention over everything, as layer 0                             4 experts, 2 per row

The embedding is scaled, and the logits are capped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparkdraft.kernels.ops import GELU_TANH, Norm, Normed, Ops
from sparkdraft.models.common.blocks import (
    Attention,
    Decoder,
    DecoderLayer,
    GatedMLP,
    Layer,
    Step,
    load_head,
    load_norm,
)
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.experts import load_experts
from sparkdraft.models.common.layers import AttentionSpec, DenseSpec, ExpertsSpec, LayerKV, LayerSpec, RopeSpec
from sparkdraft.models.common.rope import RopeTables
from sparkdraft.weights.linear import Linear
from sparkdraft.weights.loader import Loader
from tests.models.tiny import byte_tokenizer

MODEL_TYPES = ("toy",)
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
    "embedding_scale": 1.5,
    "final_logit_softcapping": 8.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}

# ---- the architecture: what a file of sparkdraft/models holds


def read(config: Mapping[str, Any]) -> ModelConfig:
    dense = DenseSpec(config["intermediate_size"])
    experts = ExpertsSpec(config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"])
    biased = DenseSpec(config["intermediate_size"], GELU_TANH, bias=True)
    full = AttentionSpec(4, 2, 32, RopeSpec(32, theta=1e5), scale=32**-0.5, bias=True, output_bias=True)
    slides = AttentionSpec(4, 4, 16, RopeSpec(16), scale=0.3, window=config["sliding_window"], qk_norm=True)
    layers = []
    for i, kind in enumerate(config["layer_types"]):
        if kind == "shared":
            borrowed = AttentionSpec(4, 4, 16, RopeSpec(16), 0.3, slides.window, qk_norm=True, kv_from=i - 1)
            layers.append(LayerSpec(borrowed, dense))
        else:
            layers.append(LayerSpec(full if kind == "full" else slides, experts if i % 2 else biased))
    ends = (config["hidden_size"], config["vocab_size"], config["max_position_embeddings"])
    scale, cap, tied = (config[key] for key in ("embedding_scale", "final_logit_softcapping", "tie_word_embeddings"))
    return ModelConfig("toy", *ends, tuple(layers), tie_embeddings=tied, embedding_scale=scale, softcap=cap)


def build(config: ModelConfig, load: Loader, ops: Ops, context: int) -> Decoder:
    ropes = RopeTables(context, load.device)
    embedding = load.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
    layers: list[Layer] = []
    for i, spec in enumerate(config.layers):
        name = f"model.layers.{i}"
        mlp = load_experts if isinstance(spec.mlp, ExpertsSpec) else GatedMLP
        layer = DecoderLayer(
            load_norm(config, load, f"{name}.input_layernorm"),
            Attention(spec.mixer, config, load, f"{name}.self_attn", ops, ropes),
            load_norm(config, load, f"{name}.post_attention_layernorm"),
            mlp(spec.mlp, config, load, f"{name}.mlp", ops),
        )
        after = [load_norm(config, load, f"{name}.{part}") for part in AFTER if load.has(f"{name}.{part}.weight")]
        layers.append(NormedAfter(layer, *after, ops) if after else layer)
    norm, head = load_norm(config, load, "model.norm"), load_head(config, load, embedding)
    load.finish()
    return Decoder(config, layers, embedding, head, norm, context, ops, load.dtype)


AFTER, SCALE = ("after_attention_layernorm", "after_mlp_layernorm"), 0.75  # of layer 2


@dataclass(frozen=True)
class NormedAfter:
    """x += norm(mixer(norm(x))); x = (x + norm(mlp(norm(x)))) * SCALE."""

    inner: DecoderLayer
    after_mixer: Norm
    after_mlp: Norm
    ops: Ops

    @property
    def input_norm(self) -> Norm:
        return self.inner.input_norm

    @property
    def matrices(self) -> list[Linear]:
        return self.inner.matrices  # type: ignore[return-value]

    def add_to(self, normed: Normed, step: Step, kv: LayerKV, then: Norm) -> Normed:
        inner = self.inner
        assert isinstance(inner.mixer, Attention) and isinstance(inner.mlp, GatedMLP)
        seen = self.ops.linear(*inner.mixer.result(normed, step, kv))
        normed = self.ops.add_normed(normed.x, seen, self.after_mixer, inner.post_norm)
        mlp = self.ops.linear(*inner.mlp.result(normed))
        added: Normed = self.ops.add_normed(normed.x, mlp, self.after_mlp, then, SCALE)
        return added


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
        if attention.bias:
            shapes |= {f"{name}self_attn.{part}_proj.bias": (rows,) for part, rows in (own | {"o": hidden}).items()}
        shapes |= {f"{name}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        if attention.kv_from is not None:
            shapes |= {f"{name}{norm}.weight": (hidden,) for norm in AFTER}
        places, inter = [f"{name}mlp"], mlp.intermediate_size
        if isinstance(mlp, ExpertsSpec):
            shapes[f"{name}mlp.gate.weight"] = (mlp.num_experts, hidden)
            places = [f"{name}mlp.experts.{e}" for e in range(mlp.num_experts)]
        for place in places:
            shapes |= {f"{place}.{part}_proj.weight": (inter, hidden) for part in ("gate", "up")}
            shapes[f"{place}.down_proj.weight"] = (hidden, inter)
        if mlp.bias:
            rows = {"gate": inter, "up": inter, "down": hidden}
            shapes |= {f"{name}mlp.{part}_proj.bias": (count,) for part, count in rows.items()}
    return shapes


# ---- the oracle: the whole sequence at once, in plain torch, without a cache and without the package's blocks


@torch.inference_mode()
def toy_logits(folder: Path, ids: list[int]) -> Tensor:  # [rows, vocab]
    w, model = load_file(folder / "model.safetensors"), read(CONFIG)
    x, kept = w["model.embed_tokens.weight"][ids] * CONFIG["embedding_scale"], dict[int, tuple[Tensor, Tensor]]()
    position = torch.arange(len(ids))
    distance = position.unsqueeze(1) - position
    for i, layer in enumerate(model.layers):
        spec, name = layer.mixer, f"model.layers.{i}."
        assert isinstance(spec, AttentionSpec)
        h = _norm(x, w[f"{name}input_layernorm.weight"])
        q = _heads(h, w, f"{name}self_attn.q", spec)
        if spec.kv_from is None:
            v = _linear(h, w, f"{name}self_attn.v_proj").view(len(ids), -1, spec.head_dim)
            kept[i] = _heads(h, w, f"{name}self_attn.k", spec), v
        k, v = (t.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1) for t in kept[spec.kv_from or i])
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        seen = (distance >= 0) & (distance < (spec.window or len(ids)))
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
        x = x + _after(_linear(mixed.flatten(1), w, f"{name}self_attn.o_proj"), w, f"{name}{AFTER[0]}")
        h = _norm(x, w[f"{name}post_attention_layernorm.weight"])
        x = x + _after(_mlp(h, w, f"{name}mlp", layer.mlp), w, f"{name}{AFTER[1]}")
        x = x if spec.kv_from is None else x * SCALE
    cap = CONFIG["final_logit_softcapping"]
    return torch.tanh(_norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].t() / cap) * cap


def _linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def _after(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return _norm(x, w[f"{name}.weight"]) if f"{name}.weight" in w else x


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain


def _heads(h: Tensor, w: dict[str, Tensor], name: str, spec: AttentionSpec) -> Tensor:
    x = _linear(h, w, f"{name}_proj").view(len(h), -1, spec.head_dim)
    if spec.qk_norm:
        x = _norm(x, w[f"{name}_norm.weight"])
    half = spec.head_dim // 2
    angle = torch.arange(len(h)).unsqueeze(1) * spec.rope.theta ** -(torch.arange(half) / half)
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _mlp(h: Tensor, w: dict[str, Tensor], name: str, spec: DenseSpec | ExpertsSpec) -> Tensor:
    def gated(place: str, rows: Tensor) -> Tensor:
        gate, up = (_linear(rows, w, f"{place}.{part}_proj") for part in ("gate", "up"))
        turned = F.gelu(gate, approximate="tanh") if spec.activation == GELU_TANH else F.silu(gate)
        return _linear(turned * up, w, f"{place}.down_proj")

    if isinstance(spec, DenseSpec):
        return gated(name, h)
    chances, chosen = (h @ w[f"{name}.gate.weight"].t()).softmax(-1).topk(spec.top_k)
    out = torch.zeros_like(h)
    for row, (shares, experts) in enumerate(zip(chances, chosen, strict=True)):
        for share, expert in zip(shares / shares.sum(), experts.tolist(), strict=True):
            out[row] += share * gated(f"{name}.experts.{expert}", h[row])
    return out
