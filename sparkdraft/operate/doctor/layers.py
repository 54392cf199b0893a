"""A model's layers in words: what each is made of, how its matrices and its keys and values are kept."""

from __future__ import annotations

from collections.abc import Sequence

from sparkdraft.cache.formats import kv_format
from sparkdraft.models.common.layers import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, RecurrentSpec
from sparkdraft.plan.resolve import Plan


def describe(spec: LayerSpec, plan: Plan) -> str:
    return f"{_mixer(spec.mixer, plan)}; {_mlp(spec.mlp)}"


def _mixer(spec: AttentionSpec | RecurrentSpec, plan: Plan) -> str:
    if isinstance(spec, RecurrentSpec):
        return f"delta rule of {spec.num_value_heads} heads, {spec.key_dim} x {spec.value_dim}"
    is_slid = spec.window in {window.window for window in plan.windows}
    return attention(spec, kv_format(plan.kv).in_windows if is_slid else plan.kv)


def attention(spec: AttentionSpec, kv: str) -> str:
    """kv: how its keys and values are kept."""
    parts = [f"attention of {spec.num_heads} heads over {spec.num_kv_heads}, head dim {spec.head_dim}, K/V {kv}"]
    parts += ["in both directions"] * (not spec.causal)
    parts += [f"window {spec.window}"] * bool(spec.window)
    parts += [f"reads the K/V of layer {spec.kv_from}"] * (spec.kv_from is not None)
    parts += ["sinks"] * spec.sinks + ["gated"] * spec.gated
    return ", ".join(parts)


def _mlp(spec: DenseSpec | ExpertsSpec) -> str:
    if isinstance(spec, ExpertsSpec):
        shared = f" and a shared one of {spec.shared_size}" if spec.shared_size else ""
        return f"{spec.top_k} of {spec.num_experts} experts of {spec.intermediate_size}{shared}"
    return f"MLP of {spec.intermediate_size}"


def runs(numbers: Sequence[int]) -> str:
    """0-3, 5 of [0, 1, 2, 3, 5]."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
