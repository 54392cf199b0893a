"""Would the oracles see a mistake? Each of these is made on purpose, and moves logits by far more than is tolerated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft.kernels import reference
from sparkdraft.kernels.ops import SILU, Norm, RopeArgs, Routing
from sparkdraft.models.common.blocks import Attention, Decoder, GatedMLP
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.experts import Experts
from sparkdraft.models.common.layers import AttentionSpec, LayerSpec, RecurrentSpec
from sparkdraft.models.common.sandwich import DenseAndExperts, SandwichLayer
from tests.models.harness import Harness
from tests.models.tiny import TinyOf, oracle_logits, write_tiny

PROMPT = [(17 * i * i + 5 * i) % 250 + 3 for i in range(40)]
SEEN = 1e-3  # what a mistake moves some logit by, at least; the oracles tolerate a tenth of that


# ---- mistakes in reading a config


def in_attention(change: Callable[[AttentionSpec], dict[str, Any]]) -> Callable[[ModelConfig], ModelConfig]:
    def layer(spec: LayerSpec) -> LayerSpec:
        if isinstance(spec.mixer, RecurrentSpec):
            return spec
        return replace(spec, mixer=replace(spec.mixer, **change(spec.mixer)))

    return lambda config: replace(config, layers=tuple(map(layer, config.layers)))


def in_rope(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    def change(spec: AttentionSpec) -> dict[str, Any]:
        scaling = changes.get("scaling", {})
        kept = None if scaling is None else {**(spec.rope.scaling or {}), **scaling} or None
        return {"rope": replace(spec.rope, **(changes | {"scaling": kept}))}

    return in_attention(change)


def in_mlp(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    def layer(spec: LayerSpec) -> LayerSpec:
        known = {name: value for name, value in changes.items() if hasattr(spec.mlp, name)}
        return replace(spec, mlp=replace(spec.mlp, **known))

    return lambda config: replace(config, layers=tuple(map(layer, config.layers)))


def ends(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: replace(config, **changes)


window_plus_one = in_attention(lambda spec: {"window": spec.window and spec.window + 1})
no_window = in_attention(lambda spec: {"window": 0})
CONFIGS: list[tuple[str, str, Callable[[ModelConfig], ModelConfig]]] = [
    *(("window + 1", variant, window_plus_one) for variant in ("gpt_oss", "gemma3", "gemma4", "mistral", "phi3")),
    *(("no window", variant, no_window) for variant in ("qwen2-windows", "qwen3-windows", "gemma4-experts")),
    ("yarn truncated", "gpt_oss", in_rope(scaling={"truncate": True})),
    ("no yarn", "gpt_oss", in_rope(scaling=None)),
    ("theta", "qwen3_moe", in_rope(theta=1e4)),
    ("one theta for all layers", "gemma3", in_rope(theta=1e6)),
    ("full layers not stretched", "gemma3", in_rope(scaling=None)),
    ("all lanes rotated", "phi3", in_rope(rotary_dim=0)),
    ("proportional as partial", "gemma4", in_rope(scaling=None)),
    ("all pairs turn", "gemma4", in_rope(scaling={"rope_type": "proportional", "partial_rotary_factor": 1.0})),
    ("scale by head size", "gemma4", in_attention(lambda spec: {"scale": spec.head_dim**-0.5})),
    ("scale by head size", "gemma3", in_attention(lambda spec: {"scale": spec.head_dim**-0.5})),
    ("values not normed", "gemma4", in_attention(lambda s: {"values": "given" if s.window else s.values})),
    ("no clamp", "gpt_oss", in_mlp(activation=SILU)),
    ("clamp at 7", "gpt_oss", lambda c: in_mlp(activation=c.layers[0].mlp.activation._replace(limit=7.0))(c)),
    ("silu", "gemma4-experts", in_mlp(activation=SILU)),
    ("shares among all", "qwen3_moe", in_mlp(renormalise=False)),
    ("shares among the chosen", "qwen3_moe-shares", in_mlp(renormalise=True)),
    ("one expert fewer", "gpt_oss", in_mlp(top_k=1)),
    ("gains as stored", "gemma3", ends(norm_plus_one=False)),
    ("embeddings not scaled", "gemma3", ends(embedding_scale=1.0)),
    ("embeddings not scaled", "gemma4", ends(embedding_scale=1.0)),
    ("no soft cap", "gemma4", ends(softcap=0.0)),
    ("eps", "gpt_oss", ends(rms_eps=1e-2)),
]


@pytest.mark.parametrize(("name", "variant", "change"), CONFIGS, ids=[f"{v}: {n}" for n, v, _ in CONFIGS])
def test_a_config_that_is_read_wrongly(
    name: str, variant: str, change: Callable[[ModelConfig], ModelConfig], tiny_of: TinyOf
) -> None:
    moved(Harness(tiny_of(variant), change=change), tiny_of(variant))


def moved(harness: Harness, folder: Path) -> None:
    wrong, _ = harness.run({"a": PROMPT})
    assert (wrong["a"] - right_logits(folder)).abs().max() > SEEN


@cache
def right_logits(folder: Path) -> torch.Tensor:
    """The oracle's, which those without a mistake are."""
    expected = oracle_logits(folder, PROMPT)
    right, _ = Harness(folder).run({"a": PROMPT})
    torch.testing.assert_close(right["a"], expected, atol=1e-4, rtol=1e-4)
    return expected


# ---- mistakes in the weights, and in who reads what


def experts_of(model: Decoder) -> Iterator[Experts]:
    for layer in model.layers:
        mlp = getattr(layer, "mlp", None)
        if isinstance(mlp, DenseAndExperts):
            yield mlp.experts
        elif isinstance(mlp, Experts):
            yield mlp


def halves_swapped(model: Decoder) -> None:
    for experts in experts_of(model):
        assert experts.gate_up.floats is not None
        experts.gate_up.floats.copy_(experts.gate_up.floats.roll(experts.gate_up.floats.shape[1] // 2, 1))


def split_in_halves(model: Decoder) -> None:
    """As if gpt-oss's rows did not alternate."""
    for experts in experts_of(model):
        floats = experts.gate_up.floats
        assert floats is not None
        even, odd = floats.chunk(2, 1)
        floats.copy_(torch.stack((even, odd), 2).flatten(1, 2))


def without(part: str) -> Callable[[Decoder], None]:
    def change(model: Decoder) -> None:
        for experts in experts_of(model):
            matrix = getattr(experts, part)
            matrix.bias.zero_()

    return change


def no_expert_scale(model: Decoder) -> None:
    for experts in experts_of(model):
        experts.scale = None


def no_sinks(model: Decoder) -> None:
    for layer in model.layers:
        attention = layer.mixer  # type: ignore[attr-defined]
        assert isinstance(attention, Attention)
        attention.params = replace(attention.params, sinks=None)


def scaled_sinks(model: Decoder) -> None:
    for layer in model.layers:
        params = layer.mixer.params  # type: ignore[attr-defined]
        layer.mixer.params = replace(params, sinks=params.sinks * params.scale)  # type: ignore[attr-defined]


def no_qkv_bias(model: Decoder) -> None:
    for layer in model.layers:
        layer.mixer.qkv.bias.zero_()  # type: ignore[attr-defined]


def in_layers(change: Callable[[SandwichLayer], dict[str, Any]]) -> Callable[[Decoder], None]:
    def all_layers(model: Decoder) -> None:
        assert isinstance(model.layers, list)
        for i, layer in enumerate(model.layers):
            model.layers[i] = replace(layer, **change(layer))

    return all_layers


def normed_router(layer: SandwichLayer) -> dict[str, Any]:
    """The router reads what the MLP reads, and not the stream."""
    assert isinstance(layer.mlp, DenseAndExperts)
    norm = layer.mlp.router_norm
    return {"mlp": replace(layer.mlp, router_norm=Norm(norm.gain * layer.mlp_norm.gain, norm.eps))}


def experts_norm_of_the_mlp(layer: SandwichLayer) -> dict[str, Any]:
    assert isinstance(layer.mlp, DenseAndExperts)
    return {"mlp": replace(layer.mlp, experts_norm=layer.mlp_norm)}


def same_norm_after_both(layer: SandwichLayer) -> dict[str, Any]:
    assert isinstance(layer.mlp, DenseAndExperts)
    return {"mlp": replace(layer.mlp, experts_after=layer.mlp.mlp_after)}


def gate_and_up_swapped(model: Decoder) -> None:
    for layer in model.layers:
        mlp = layer.mlp  # type: ignore[attr-defined]
        assert isinstance(mlp, GatedMLP)
        weight = mlp.gate_up.weight  # type: ignore[attr-defined]
        weight.copy_(weight.roll(len(weight) // 2, 0))


MODELS: list[tuple[str, str, Callable[[Decoder], None]]] = [
    *(("halves swapped", variant, halves_swapped) for variant in ("qwen3_moe", "gpt_oss", "gemma4-experts")),
    ("rows do not alternate", "gpt_oss", split_in_halves),
    *((f"no bias of {part}", "gpt_oss", without(part)) for part in ("router", "gate_up", "down")),
    ("no sinks", "gpt_oss", no_sinks),
    ("sinks are scaled", "gpt_oss", scaled_sinks),
    ("no bias", "qwen2", no_qkv_bias),
    ("halves swapped", "phi3", gate_and_up_swapped),
    ("no scale of experts", "gemma4-experts", no_expert_scale),
    ("the router reads the normed stream", "gemma4-experts", in_layers(normed_router)),
    ("experts read the MLP's norm", "gemma4-experts", in_layers(experts_norm_of_the_mlp)),
    ("one norm after both", "gemma4-experts", in_layers(same_norm_after_both)),
    ("no layer scalar", "gemma4", in_layers(lambda layer: {"scale": 1.0})),
    ("norms swapped", "gemma3", in_layers(lambda layer: {"mlp_after": layer.mlp_norm, "mlp_norm": layer.mlp_after})),
    ("no norm after attention", "gemma4", in_layers(lambda layer: {"attention_after": layer.mlp_after})),
]


@pytest.mark.parametrize(("name", "variant", "change"), MODELS, ids=[f"{v}: {n}" for n, v, _ in MODELS])
@torch.inference_mode()
def test_weights_in_the_wrong_place(
    name: str, variant: str, change: Callable[[Decoder], None], tiny_of: TinyOf
) -> None:
    harness = Harness(tiny_of(variant))
    change(harness.model)
    moved(harness, tiny_of(variant))


def test_values_of_rotated_keys(tiny_of: TinyOf, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, right = tiny_of("gemma4"), reference.make_qkv
    expected, _ = Harness(folder).run({"a": PROMPT})

    def rotated(qkv: torch.Tensor, args: RopeArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = right(qkv, args)
        return q, k, reference.unit_rms(k, args.eps) if args.values == "keys" else v

    monkeypatch.setattr(reference, "make_qkv", rotated)
    wrong, _ = Harness(folder).run({"a": PROMPT})
    assert (wrong["a"] - expected["a"]).abs().max() > SEEN


def test_equal_logits_of_a_router_go_to_the_lower_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts 3 and 6 have one row of the router, so where one of them is chosen last, it is a tie."""
    folder = write_tiny(tmp_path, "qwen3_moe", num_experts_per_tok=1)
    harness = Harness(folder)
    with torch.inference_mode():
        for experts in experts_of(harness.model):
            router = experts.router.weight  # type: ignore[attr-defined]
            router[6] = router[3]
    picked: list[torch.Tensor] = []
    right = reference.norm_route

    def watched(*args: Any) -> Routing:
        routing = right(*args)
        picked.append(routing.ids)
        return routing

    monkeypatch.setattr(reference, "norm_route", watched)
    first, _ = harness.run({"a": PROMPT})
    ids = torch.cat(picked)
    assert (ids == 3).any() and not (ids == 6).any()
    monkeypatch.setattr(reference, "norm_route", lambda *args: _swapped(right(*args)))
    other, _ = harness.run({"b": PROMPT})
    assert (other["b"] - first["a"]).abs().max() > SEEN


def _swapped(routing: Routing) -> Routing:
    return Routing(torch.where(routing.ids == 3, 6, routing.ids).int(), routing.weights)
