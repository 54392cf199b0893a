"""8-bit integers in symmetric groups of 32: what compressed-tensors calls int-quantized, and train/export.py writes.

    X.weight        int8 [out, in]
    X.weight_scale  float16 [out, in / 32]

A `GroupQuant` of 8 bits holds them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.quant.group import GROUP, GroupQuant

SCALE = "_scale"  # X.weight_scale beside X.weight
# How compressed-tensors states it, as the weights of a group of its config.
INT8_GROUPS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


class Int8Groups:
    name = f"compressed-tensors' int-quantized weights of 8 bits in symmetric groups of {GROUP}"

    def states(self, quantization: Mapping[str, Any]) -> bool:
        method, form, groups = (quantization.get(key) for key in ("quant_method", "format", "config_groups"))
        known = (method, form) == ("compressed-tensors", "int-quantized")
        return known and isinstance(groups, dict) and bool(groups) and all(map(_is_int8, groups.values()))

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        return (tensor, (tensor, tensor + SCALE)) if tensor.endswith(".weight") and dtypes[tensor] == "I8" else None

    def read(self, what: str, *tensors: Tensor) -> GroupQuant:
        integers, scale = tensors
        shape = (*integers.shape[:1], integers.shape[-1] // GROUP)
        if integers.dim() != 2 or integers.shape[1] % GROUP or scale.shape != shape or scale.dtype != torch.float16:
            kind = f"{tuple(scale.shape)} of {str(scale.dtype).removeprefix('torch.')}"
            raise UserError(
                f"{what} has shape {tuple(integers.shape)} and its scales {kind}; float16 scales of {shape}, one for "
                f"{GROUP} columns, are read: export the checkpoint again."
            )
        return GroupQuant(8, integers.view(*shape, GROUP), scale, None)


def _is_int8(group: Any) -> bool:
    weights = group.get("weights") if isinstance(group, dict) else None
    return isinstance(weights, dict) and INT8_GROUPS.items() <= weights.items() and not group.get("input_activations")
