"""Which KV formats run where (machine, kernels, layers); what does not run is refused in a sentence. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from sparkdraft.core import UserError
from sparkdraft.kernels.turboquant.layout import KERNEL_LIMITS
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import AttentionSpec
from sparkdraft.plan.hardware import Hardware

FP8_CAPABILITY = (8, 9)  # the first GPUs that convert to fp8 and back


def check_kv(kv: str, hardware: Hardware, weights: str) -> None:
    if kv != "fp8":
        return
    if weights == "quantised":
        raise UserError("kv fp8 does not run on the CPU kernels: ask for kv exact or turboquant, or for dtype float32")
    if hardware.device == "cuda" and hardware.capability < FP8_CAPABILITY:
        has, needs = (".".join(map(str, c)) for c in (hardware.capability, FP8_CAPABILITY))
        raise UserError(f"kv fp8 needs a GPU of compute capability {needs}; {hardware.name} has {has}: keep it exact")


def check_borrowed(model: ModelConfig, coded: Sequence[AttentionSpec]) -> None:
    """Refuse borrowed layers of a coded cache: queries must be rotated as the codes are, which only the layer that
    writes the codes does."""
    owners = [model.layers[spec.kv_from].mixer for spec in model.attention if spec.kv_from is not None]
    if any(owner in coded for owner in owners):
        raise UserError("kv turboquant does not support layers that read another layer's K/V: ask for kv fp8 or exact")


def check_coded(kernels: str, head_dim: int, block_size: int) -> None:
    limits = KERNEL_LIMITS.get(kernels)
    if limits and head_dim not in limits.dims:
        dims = ", ".join(map(str, limits.dims))
        raise UserError(
            f"kv turboquant runs at head dims {dims} on the {kernels} kernels; this model's is {head_dim}: "
            "ask for kv fp8"
        )
    if limits and block_size != limits.block_size:
        raise UserError(
            f"block_size is {block_size}; kv turboquant on the {kernels} kernels has blocks of {limits.block_size}: "
            "leave it"
        )


def smaller_formats(
    model: ModelConfig, kv: str, hardware: Hardware, weights: str, kernels: str, block_size: int
) -> list[str]:
    """The formats that hold more tokens than 'kv' and that run here."""
    found = []
    for name in ("fp8", "turboquant"):
        try:
            check_kv(name, hardware, weights)
            if name == "turboquant":
                check_borrowed(model, model.cached_attention)
                for spec in model.cached_attention:
                    check_coded(kernels, spec.head_dim, block_size)
        except UserError:
            continue
        if kv == "exact" or (kv == "fp8" and name == "turboquant"):
            found.append(name)
    return found
