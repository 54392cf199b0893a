"""The same for recurrent layers, gated attention and shared experts: would the oracles see a mistake?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkdraft.kernels import reference
from sparkdraft.kernels.ops import AttentionView, DeltaParams, RecurrentState
from sparkdraft.models.common import delta_net
from sparkdraft.models.common.blocks import Attention, Decoder
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.delta_net import DeltaNet
from sparkdraft.models.common.experts import SharedExperts
from sparkdraft.models.common.layers import RecurrentSpec
from tests.models.harness import Harness
from tests.models.test_oracle_sees import ends, in_mlp, in_rope, moved
from tests.models.tiny import TinyOf

VARIANTS = ("qwen3_5", "qwen3_next", "qwen3_5_moe")


@pytest.fixture(scope="module")
def folders(tiny_of: TinyOf) -> dict[str, Path]:
    return {variant: tiny_of(variant) for variant in VARIANTS}


CONFIGS: list[tuple[str, str, Callable[[ModelConfig], ModelConfig]]] = [
    ("gains as stored", "qwen3_5", ends(norm_plus_one=False)),
    ("all lanes rotated", "qwen3_next", in_rope(rotary_dim=0)),
    ("theta", "qwen3_5", in_rope(theta=1e4)),
    ("shares among all", "qwen3_next", in_mlp(renormalise=False)),
    ("one expert fewer", "qwen3_5_moe", in_mlp(top_k=2)),
]


@pytest.mark.parametrize(("name", "variant", "change"), CONFIGS, ids=[f"{v}: {n}" for n, v, _ in CONFIGS])
def test_a_config_that_is_read_wrongly(
    name: str, variant: str, change: Callable[[ModelConfig], ModelConfig], folders: dict[str, Path]
) -> None:
    moved(Harness(folders[variant], change=change), folders[variant])


# ---- mistakes in the weights


def parts(model: Decoder, kind: type) -> Iterator[Any]:
    for layer in model.layers:
        for part in (layer.mixer, layer.mlp):  # type: ignore[attr-defined]
            if isinstance(part, kind):
                yield part


def gate_split_in_halves(model: Decoder) -> None:
    """As if a file had all queries, then all gates."""
    for attention in parts(model, Attention):
        weight, spec = attention.qkv.weight, attention.spec
        width = spec.query_width
        queries, gates = (
            weight[rows].view(spec.num_heads, -1, weight.shape[1]) for rows in (slice(width), slice(-width, None))
        )
        stored = torch.stack((queries, gates), 1).flatten(0, 2)
        weight[:width], weight[-width:] = stored[:width].clone(), stored[width:].clone()


def no_output_gate(model: Decoder) -> None:
    for attention in parts(model, Attention):
        attention.qkv.weight[-attention.spec.query_width :] = 0


def conv_reversed(model: Decoder) -> None:
    for net in parts(model, DeltaNet):
        net.conv.copy_(net.conv.flip(1))


def norm_plus_one(model: Decoder) -> None:
    for net in parts(model, DeltaNet):
        net.gain += 1


def decay_without_exp(model: Decoder) -> None:
    for net in parts(model, DeltaNet):
        net.params = replace(net.params, rate=-torch.log(-net.params.rate).abs())


def no_bias_of_decays(model: Decoder) -> None:
    for net in parts(model, DeltaNet):
        net.params.bias.zero_()


def decay_and_step_swapped(model: Decoder) -> None:
    for net in parts(model, DeltaNet):
        both = net.made.weight[net.columns[1] :]
        both.copy_(both.roll(len(both) // 2, 0))


def values_and_gates_swapped(model: Decoder) -> None:
    for net in parts(model, DeltaNet):
        gates, rest = net.columns
        both = net.made.weight[2 * gates - rest : rest]
        both.copy_(both.roll(len(both) // 2, 0))


def no_gate_of_the_shared_expert(model: Decoder) -> None:
    for mlp in parts(model, SharedExperts):
        mlp.gate.weight.zero_()


def no_shared_expert(model: Decoder) -> None:
    for mlp in parts(model, SharedExperts):
        mlp.mlp.down.weight.zero_()


MODELS: list[tuple[str, str, Callable[[Decoder], None]]] = [
    ("the gate split in halves", "qwen3_5", gate_split_in_halves),
    ("no gate", "qwen3_5", no_output_gate),
    ("the convolution reversed", "qwen3_5", conv_reversed),
    ("a gain of 1 + w", "qwen3_5", norm_plus_one),
    ("A_log as it is", "qwen3_5", decay_without_exp),
    ("no dt_bias", "qwen3_5", no_bias_of_decays),
    ("a and b swapped", "qwen3_next", decay_and_step_swapped),
    ("v and z swapped", "qwen3_next", values_and_gates_swapped),
    ("no gate of the shared expert", "qwen3_next", no_gate_of_the_shared_expert),
    ("no shared expert", "qwen3_5_moe", no_shared_expert),
]


@pytest.mark.parametrize(("name", "variant", "change"), MODELS, ids=[f"{v}: {n}" for n, v, _ in MODELS])
@torch.inference_mode()
def test_weights_in_the_wrong_place(
    name: str, variant: str, change: Callable[[Decoder], None], folders: dict[str, Path]
) -> None:
    harness = Harness(folders[variant])
    change(harness.model)
    moved(harness, folders[variant])


def test_projections_that_are_not_interleaved(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Qwen3-Next's file had each part of all heads together."""

    def flat(spec: RecurrentSpec, *widths: int) -> list[Tensor]:
        counts = [spec.num_key_heads * width for width in widths]
        return list(torch.arange(sum(counts)).split(counts))

    monkeypatch.setattr(delta_net, "_by_key_head", flat)
    moved(Harness(folders["qwen3_next"]), folders["qwen3_next"])


# ---- mistakes in the operators


def with_tiled_heads(
    qkv: Tensor, decay_beta: Tensor, memory: RecurrentState, slots: Tensor, view: AttentionView, params: DeltaParams
) -> Tensor:
    """Value head h reads key head h % key heads."""
    width, share = params.num_key_heads * params.key_dim, params.num_value_heads // params.num_key_heads
    q, k, v = qkv.split([width, width, qkv.shape[1] - 2 * width], 1)
    each = replace(params, num_key_heads=params.num_value_heads)
    return reference.delta_rule(
        torch.cat((q.repeat(1, share), k.repeat(1, share), v), 1), decay_beta, memory, slots, view, each
    )


def gated_by_sigmoid(o: Tensor, gate: Tensor, gain: Tensor, eps: float) -> Tensor:
    return reference.gated_norm(o, gate, gain, eps) / gate  # silu(x) = x * sigmoid(x)


def without_silu(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    y = reference.causal_conv(x, weight, *rest)
    return torch.where(y > 0, y, 0)


OPERATORS: list[tuple[str, str, Callable[..., Tensor]]] = [
    ("value heads tiled", "delta_rule", with_tiled_heads),
    ("sigmoid in the norm", "gated_norm", gated_by_sigmoid),
    ("relu after the convolution", "causal_conv", without_silu),
]


class Changed:
    """The reference's operators, but for one."""

    def __init__(self, name: str, wrong: Callable[..., Tensor]) -> None:
        setattr(self, name, wrong)

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)


@pytest.mark.parametrize(("what", "name", "wrong"), OPERATORS, ids=[what for what, _, _ in OPERATORS])
@torch.inference_mode()
def test_operators_that_compute_something_else(
    what: str, name: str, wrong: Callable[..., Tensor], folders: dict[str, Path]
) -> None:
    harness = Harness(folders["qwen3_5"])
    for net in parts(harness.model, DeltaNet):
        net.ops = Changed(name, wrong)
    moved(harness, folders["qwen3_5"])
