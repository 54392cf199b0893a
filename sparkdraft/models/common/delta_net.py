"""The recurrent mixer of Qwen3-Next and Qwen3.5, a gated DeltaNet: a short convolution, a delta rule, a gated norm.

The operators are defined in kernels/reference/recurrent.py. Projections are one matrix here: queries, keys and values
of the convolution, then the gate of the norm, then a (decay) and b (step) of each value head. Files of Qwen3.5 have
these parts one by one, files of Qwen3-Next interleaved by key head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.kernels.ops import DeltaParams, Norm, Normed, Ops
from sparkdraft.models.common.blocks import Step
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import AttentionSpec, LayerState, RecurrentSpec
from sparkdraft.weights.linear import Linear
from sparkdraft.weights.loader import Loader


class DeltaNet:
    """x += out(norm(delta rule(conv(queries, keys, values))) * silu(gate))."""

    def __init__(
        self, spec: AttentionSpec | RecurrentSpec, config: ModelConfig, load: Loader, name: str, ops: Ops
    ) -> None:
        assert isinstance(spec, RecurrentSpec), f"{name} is {spec}"
        heads, values = spec.num_value_heads, spec.num_value_heads * spec.value_dim
        self.ops, self.eps = ops, config.rms_eps
        self.columns = spec.conv_channels, spec.conv_channels + values  # where gates begin, and where a and b do
        self.made = load_projections(spec, load, name, config.hidden_size)
        self.out = load.linear({f"{name}.out_proj": config.hidden_size}, values)
        shape = (spec.conv_channels, 1, spec.conv_width)
        self.conv = load.floats(f"{name}.conv1d.weight", shape, torch.float32).squeeze(1)
        rate = -torch.exp(load.vector(f"{name}.A_log", heads, torch.float32))
        bias = load.vector(f"{name}.dt_bias", heads, torch.float32)
        self.params = DeltaParams(spec.num_key_heads, heads, spec.key_dim, spec.value_dim, rate, bias)
        self.gain = load.vector(f"{name}.norm.weight", spec.value_dim, torch.float32)  # as it is, without a 1

    @property
    def matrices(self) -> list[Linear]:
        return [self.made, self.out]

    def add_to(self, normed: Normed, step: Step, kv: LayerState, then: Norm) -> Normed:
        made, ops, (gates, rest) = self.ops.norm_linear(normed, self.made), self.ops, self.columns
        qkv = ops.causal_conv(made[:, :gates], self.conv, kv.memory, kv.slots, step.view)
        mixed = ops.delta_rule(qkv, made[:, rest:], kv.memory, kv.slots, step.view, self.params)
        seen = ops.gated_norm(mixed, made[:, gates:rest], self.gain, self.eps)
        return ops.add_linear(normed.x, seen, self.out, then)


def load_projections(spec: RecurrentSpec, load: Loader, name: str, hidden: int) -> Linear:
    """Queries, keys, values, gates, a and b of all heads."""
    heads, values = spec.num_value_heads, spec.num_value_heads * spec.value_dim
    if not load.has(f"{name}.in_proj_qkvz.weight"):
        rows = {"qkv": spec.conv_channels, "z": values, "a": heads, "b": heads}
        return load.linear({f"{name}.in_proj_{part}": count for part, count in rows.items()}, hidden)
    keys, share = spec.key_dim, heads // spec.num_key_heads
    each = _by_key_head(spec, keys, keys, share * spec.value_dim, share * spec.value_dim)
    b, a = _by_key_head(spec, share, share)
    both = torch.cat((a, b))
    parts = [(f"{name}.in_proj_qkvz", spec.conv_channels + values, torch.cat(each))]
    return load.picked_linear([*parts, (f"{name}.in_proj_ba", len(both), both)], hidden)


def _by_key_head(spec: RecurrentSpec, *widths: int) -> list[Tensor]:
    """The rows of each part in a file that keeps the parts of every key head together, in this order."""
    rows = torch.arange(spec.num_key_heads * sum(widths)).view(spec.num_key_heads, -1)
    return [part.flatten() for part in rows.split(widths, dim=1)]
