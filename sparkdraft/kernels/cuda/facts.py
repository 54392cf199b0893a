"""What these kernels can say of the GPU they run on: whether their tiles were measured there, and how they launch."""

from __future__ import annotations

from collections.abc import Set

import torch

from sparkdraft.core import Fact
from sparkdraft.kernels.cuda import few_rows, pdl

MEASURED_MAJOR = 9  # compute capability of the GPUs on which tiles were measured (Hopper)

Capability = tuple[int, int]
Shape = tuple[int, int]  # out, in


def facts(matrices: Set[Shape], itemsize: int, device: torch.device) -> list[Fact]:
    """matrices: each shape that the model multiplies with; itemsize: bytes of a weight."""
    capability = torch.cuda.get_device_capability(device)
    gpu = few_rows._gpu(device)
    return [
        matrix_tiles(matrices, itemsize, gpu, capability),
        attention_tiles(capability),
        launches(device, capability),
    ]


def matrix_tiles(matrices: Set[Shape], itemsize: int, on: few_rows.Gpu, capability: Capability) -> Fact:
    name, gpu = "matrix tiles", _name(capability)
    tuned: Set[Shape] = few_rows.tuned(on).keys() if itemsize == 2 else set()
    guessed = sorted(matrices - tuned)
    if not guessed:
        return Fact(name, f"measured on {gpu}")
    if not tuned:
        return Fact(name, "chosen by rule", f"no tiles for weights of {itemsize} bytes were measured on {gpu}")
    shapes = ", ".join(f"{out} x {in_}" for out, in_ in guessed)
    return Fact(name, f"measured for {len(matrices & tuned)} of {len(matrices)} shapes", f"by rule: {shapes}")


def attention_tiles(capability: Capability) -> Fact:
    gpu = _name(capability)
    if capability[0] == MEASURED_MAJOR:
        return Fact("attention tiles", f"measured on {gpu}")
    return Fact("attention tiles", "chosen to fit its shared memory", f"no tiles were measured on {gpu}")


def launches(device: torch.device, capability: Capability) -> Fact:
    """Programmatic dependent launch: a kernel is set up while the one before still runs."""
    if pdl.active(device):
        return Fact("kernel launches", "overlapped")
    return Fact(
        "kernel launches", "one after the other", f"overlap needs sm_90 or later; this GPU is {_name(capability)}"
    )


def _name(capability: Capability) -> str:
    return "sm_{}{}".format(*capability)
