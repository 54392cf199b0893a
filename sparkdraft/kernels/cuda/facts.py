"""What these kernels can say of the GPU they run on: whether their tiles were measured there, and how they launch."""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch

from sparkdraft.core import Fact
from sparkdraft.kernels.cuda import few_rows, pdl, tuned
from sparkdraft.kernels.cuda.gpu import Gpu, gpu_of
from sparkdraft.weights.linear import WeightTiles

Matrix = tuple[str, tuple[int, int]]  # format of a weight, and (out, in)


def facts(matrices: Iterable[WeightTiles], device: torch.device) -> list[Fact]:
    """matrices: all that the model multiplies with and the kernels for few rows read."""
    gpu = gpu_of(device)
    return [
        matrix_tiles({(each.format, each.shape) for each in matrices}, gpu),
        attention_tiles(gpu),
        launches(device, gpu),
    ]


def matrix_tiles(matrices: Set[Matrix], gpu: Gpu) -> Fact:
    name, found = "matrix tiles", tuned.measured(gpu)
    guessed = sorted(m for m in matrices if m[1] not in found.get((few_rows.KERNEL, m[0]), {}))
    if not guessed:
        return Fact(name, f"measured on {gpu.name}")
    if len(guessed) == len(matrices):
        formats = " or ".join(sorted({form for form, _ in matrices}))
        return Fact(
            name, "chosen by rule", f"no tiles for {formats} weights of these shapes were measured on {gpu.name}"
        )
    shapes = ", ".join(f"{out} x {in_} ({form})" for form, (out, in_) in guessed)
    return Fact(name, f"measured for {len(matrices) - len(guessed)} of {len(matrices)} shapes", f"by rule: {shapes}")


def attention_tiles(gpu: Gpu) -> Fact:
    if any(kernel.startswith("attention") for kernel, _ in tuned.measured(gpu)):
        return Fact("attention tiles", f"measured on {gpu.name}")
    return Fact("attention tiles", "chosen to fit its shared memory", f"no tiles were measured on {gpu.name}")


def launches(device: torch.device, gpu: Gpu) -> Fact:
    """Programmatic dependent launch: a kernel is set up while the one before still runs."""
    if pdl.active(device):
        return Fact("kernel launches", "overlapped")
    return Fact("kernel launches", "one after the other", f"overlap needs sm_90 or later; this GPU is {gpu.name}")
