"""Asks torch what this machine has, and picks the device a config means. The torch side of plan/hardware.py."""

from __future__ import annotations

from typing import Protocol

import torch

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.plan import hardware
from sparkdraft.plan.hardware import Hardware


class Properties(Protocol):
    """What is read of torch's properties of a GPU."""

    @property
    def is_integrated(self) -> int: ...


def detect(config: EngineConfig) -> Hardware:
    cores = hardware.usable_cores()
    if config.threads > cores:
        raise UserError(
            f"threads is {config.threads}; the cores this process may use are {cores}: ask for no more, or 0"
        )
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise UserError("device cuda was asked for, but torch finds no CUDA GPU; leave it on auto, or choose cpu")
    if config.device == "cpu" or not has_gpu:
        return hardware.cpu()
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    free = free_gpu_memory(torch.cuda.get_device_properties(), torch.cuda.mem_get_info()[0])
    return Hardware("cuda", name, cores, free, capability)


def free_gpu_memory(properties: Properties, driver_free: int) -> int:
    """driver_free: what the driver calls free. Where GPU and CPU share one memory, it leaves out what the page cache
    holds, which is most of the memory after a large file has been read; there the machine's own count is taken. No
    control group limits what the driver takes."""
    if properties.is_integrated:
        return hardware.available_memory() or driver_free
    return driver_free
