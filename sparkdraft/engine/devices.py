"""Asks torch what this machine has, and picks the device a config means. The torch side of plan/hardware.py."""

from __future__ import annotations

import torch

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.plan import hardware
from sparkdraft.plan.hardware import Hardware


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
    free, _ = torch.cuda.mem_get_info()
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return Hardware("cuda", name, cores, free, capability)
