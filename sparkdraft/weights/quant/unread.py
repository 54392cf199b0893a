"""Tensors of a file before they are read: what a plan needs to say how large a quantised matrix will be in memory."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from torch import Tensor

from sparkdraft.weights.plane_layout import CodeForm

# Types of scales as safetensors spells them, and as weights/plane_layout.py does.
SCALES = {"F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E4M3": "e5m3", "U8": "e8m0", "F8_E8M0": "e8m0"}


class Unread(NamedTuple):
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it
    read: Callable[[], Tensor]  # for small ones, whose numbers decide

    @property
    def scale(self) -> str:
        return SCALES.get(self.dtype, "f32")

    def of_expert(self, experts: int) -> tuple[int, ...]:
        """The shape for one of so many experts; 0: there are none."""
        is_each = experts and len(self.shape) > 0 and self.shape[0] in (1, experts)
        return self.shape[1:] if is_each else self.shape


class Size(NamedTuple):
    rows: int  # over all experts
    width: int
    form: CodeForm | None  # None: it is decoded into floats


def experts_of(codes: Unread) -> int:
    """How many experts a tensor of codes holds; 0: it is one matrix."""
    return codes.shape[0] if len(codes.shape) == 3 else 0


def is_single(shape: tuple[int, ...], out: int) -> bool:
    """Whether scales are one number, or one per output row."""
    return prod(shape) == 1 or shape in ((out,), (out, 1))
