"""What shapes a launch on a GPU: its SMs, its shared memory, and its tensor core instruction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

ROOMY_MAJORS = (9, 10)  # compute capabilities whose programs may take 227 KB of shared memory; others take 99


@dataclass(frozen=True, slots=True)
class Gpu:
    major: int  # of the compute capability
    minor: int
    sms: int

    @property
    def name(self) -> str:
        return f"sm_{self.major}{self.minor}"

    @property
    def roomy(self) -> bool:
        return self.major in ROOMY_MAJORS

    @property
    def shared(self) -> int:  # bytes that a program may take
        return (227 if self.roomy else 99) << 10

    @property
    def wgmma(self) -> bool:  # tensor cores read shared memory
        return self.major == 9

    @property
    def tcgen05(self) -> bool:  # tensor cores have a memory of their own, from 64 lines and 16 columns on
        return self.major == 10


INTERPRETED = Gpu(0, 0, 8)  # small, so that few rows still make several programs and splits


@lru_cache
def gpu_of(device: torch.device) -> Gpu:
    """INTERPRETED under Triton's interpreter (CPU tensors)."""
    if device.type != "cuda":
        return INTERPRETED
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.major, found.minor, found.multi_processor_count)
