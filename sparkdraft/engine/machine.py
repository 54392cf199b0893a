"""The machine at hand: its hardware, the kernels that can run on it, and the plan for it.

The plan itself is made by plan/resolve.py, for any machine and without torch. This file asks torch, the C++ compiler
and Triton what plan/resolve.py has to be told.
"""

from __future__ import annotations

from typing import Protocol

import torch

from sparkdraft import kernels
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.models.config import ModelConfig
from sparkdraft.plan import hardware
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.resolve import Plan, resolve
from sparkdraft.spec.caps import DrafterCaps


class Properties(Protocol):
    """What is read of torch's properties of a GPU."""

    @property
    def is_integrated(self) -> int: ...


def plan_here(config: EngineConfig, model: ModelConfig, drafter: DrafterCaps | None = None) -> Plan:
    """The plan for this machine."""
    found = detect(config)
    plan = resolve(config, model, found, native_problem(config, found), drafter)
    if plan.coded:
        check_coded_kernels(plan.kernels)
    return plan


def detect(config: EngineConfig) -> Hardware:
    """The hardware that a config means: the device it names, or the best one there is."""
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
    """driver_free: what the driver calls free.

    Where GPU and CPU share one memory, the driver leaves out what the page cache holds, which is most of the memory
    after a large file has been read. There the machine's own count is taken. No control group limits what the driver
    takes.
    """
    if properties.is_integrated:
        return hardware.available_memory() or driver_free
    return driver_free


def native_problem(config: EngineConfig, found: Hardware) -> str | None:
    """Why the C++ kernels cannot run here, or None. Asking compiles them, so it is not asked where they are not
    wanted."""
    if found.device != "cpu" or config.dtype not in ("auto", "quantised"):
        return None
    reason: str | None = kernels.load("native").unavailable_reason()
    return reason


def check_coded_kernels(name: str) -> None:
    """Refuse a coded cache where its kernels cannot be imported: the GPU's are written in Gluon, which changes between
    versions of Triton."""
    try:
        assert kernels.load(name).tq_attention
    except ImportError as error:
        raise UserError(f"kv turboquant needs the Gluon of Triton 3.6 ({error}); ask for kv fp8 or exact") from error
