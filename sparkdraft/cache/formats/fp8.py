"""Keys and values rounded to 8-bit floats (e4m3), without a scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdraft.cache.formats import Machine
from sparkdraft.cache.formats.dense import DenseFormat
from sparkdraft.core import UserError

if TYPE_CHECKING:
    import torch

CAPABILITY = (8, 9)  # the first GPUs that convert to fp8 and back


class Fp8(DenseFormat):
    name = title = notation = in_windows = losses = "fp8"
    help = "fp8 (half the memory)"
    share = 0.5
    limit = 0.05  # four mantissa bits, the first of which is not stored, give 0.026

    def itemsize(self, exact: int) -> int:
        return 1

    def dtype(self, exact: torch.dtype) -> torch.dtype:
        import torch

        return torch.float8_e4m3fn

    def check_machine(self, machine: Machine, weights: str) -> None:
        if weights == "quantised":
            raise UserError(
                "kv fp8 does not run on the CPU kernels: ask for kv exact or turboquant, or for dtype float32"
            )
        if machine.device == "cuda" and machine.capability < CAPABILITY:
            has, needs = (".".join(map(str, c)) for c in (machine.capability, CAPABILITY))
            raise UserError(
                f"kv fp8 needs a GPU of compute capability {needs}; {machine.name} has {has}: keep it exact"
            )


FORMAT = Fp8()
