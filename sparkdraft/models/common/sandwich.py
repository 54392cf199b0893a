"""Layers with a norm before and after each sublayer, as Gemma 3 and 4 have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sparkdraft.kernels.ops import Norm, Normed, Ops
from sparkdraft.models.common.blocks import Attention, Decoder, GatedMLP, Step, load_head, load_norm
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.experts import Experts
from sparkdraft.models.common.keys import leave_others, text_prefix
from sparkdraft.models.common.layers import LayerKV, LayerSpec
from sparkdraft.models.common.rope import RopeTables
from sparkdraft.weights.linear import ExpertLinear, Linear
from sparkdraft.weights.loader import Loader


class Sublayer(Protocol):
    """An MLP whose result is normed before it is added to the stream."""

    @property
    def matrices(self) -> Sequence[Linear | ExpertLinear]: ...

    def output(self, normed: Normed, step: Step) -> Tensor:  # [rows, hidden]
        ...


@dataclass(frozen=True, slots=True)
class DenseSublayer:
    mlp: GatedMLP

    @property
    def matrices(self) -> Sequence[Linear | ExpertLinear]:
        return self.mlp.matrices

    def output(self, normed: Normed, step: Step) -> Tensor:
        return self.mlp.ops.linear(*self.mlp.result(normed))


@dataclass(frozen=True, slots=True)
class DenseAndExperts:
    """norm_1(mlp(norm(x))) + norm_2(experts(norm_0(x))): both read the stream, and so does the router."""

    mlp: GatedMLP
    experts: Experts
    router_norm: Norm
    experts_norm: Norm
    mlp_after: Norm
    experts_after: Norm

    @property
    def matrices(self) -> Sequence[Linear | ExpertLinear]:
        return [*self.mlp.matrices, *self.experts.matrices]

    def output(self, normed: Normed, step: Step) -> Tensor:
        ops, x = self.mlp.ops, normed.x
        dense = ops.rms_norm(ops.linear(*self.mlp.result(normed)), *self.mlp_after)
        routing = self.experts.route(Normed(x, self.router_norm), step)
        routed = self.experts.result(Normed(x, self.experts_norm), routing)
        return ops.add_normed(dense, routed, self.experts_after, self.experts_after).x  # nobody reads that norm


@dataclass(frozen=True, slots=True)
class SandwichLayer:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x))); x *= scale."""

    input_norm: Norm
    attention: Attention
    attention_after: Norm
    mlp_norm: Norm
    mlp: Sublayer
    mlp_after: Norm
    ops: Ops
    scale: float = 1.0

    @property
    def matrices(self) -> Sequence[Linear | ExpertLinear]:
        return [*self.attention.matrices, *self.mlp.matrices]

    def add_to(self, normed: Normed, step: Step, kv: LayerKV, then: Norm) -> Normed:
        seen = self.ops.linear(*self.attention.result(normed, step, kv))
        normed = self.ops.add_normed(normed.x, seen, self.attention_after, self.mlp_norm)
        return self.ops.add_normed(normed.x, self.mlp.output(normed, step), self.mlp_after, then, self.scale)


LoadSublayer = Callable[[LayerSpec, ModelConfig, Loader, str, Ops], Sublayer]


def load_dense(spec: LayerSpec, config: ModelConfig, load: Loader, name: str, ops: Ops) -> Sublayer:
    return DenseSublayer(GatedMLP(spec.mlp, config, load, f"{name}.mlp", ops))


def build_sandwich(
    config: ModelConfig, load: Loader, ops: Ops, context: int, sublayer: LoadSublayer, scaled: bool
) -> Decoder:
    """scaled: whether the file has a factor for each layer's result."""
    prefix, ropes = text_prefix(load), RopeTables(context, load.device)
    embedding = load.embedding(f"{prefix}embed_tokens", config.vocab_size, config.hidden_size)
    layers = []
    for i, spec in enumerate(config.layers):
        name = f"{prefix}layers.{i}"
        layers.append(
            SandwichLayer(
                load_norm(config, load, f"{name}.input_layernorm"),
                Attention(spec.mixer, config, load, f"{name}.self_attn", ops, ropes),
                load_norm(config, load, f"{name}.post_attention_layernorm"),
                load_norm(config, load, f"{name}.pre_feedforward_layernorm"),
                sublayer(spec, config, load, name, ops),
                load_norm(config, load, f"{name}.post_feedforward_layernorm"),
                ops,
                float(load.vector(f"{name}.layer_scalar", 1, torch.float32)) if scaled else 1.0,
            )
        )
    norm, head = load_norm(config, load, f"{prefix}norm"), load_head(config, load, embedding)
    leave_others(load)
    load.finish()
    return Decoder(_round_scale(config, load.dtype), layers, embedding, head, norm, context, ops, load.dtype)


def _round_scale(config: ModelConfig, dtype: torch.dtype) -> ModelConfig:
    """The scale of embeddings is a number of the weights' type: in bfloat16, 73.5 and not 73.32."""
    return replace(config, embedding_scale=float(torch.tensor(config.embedding_scale).to(dtype)))
