"""The machine at hand: its hardware, the kernels that can run on it, and the plan for it.

plan/resolve.py plans for any machine and without torch; this file asks torch, the C++ compiler and Triton for the
facts.
"""

from __future__ import annotations

import torch

from sparkdraft.cache.formats import kv_format
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.drafters.base import DrafterCaps
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.plan import hardware
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.resolve import Plan, resolve
from sparkdraft.util.this_machine import usable_cores
from sparkdraft.weights.plane_layout import StoredBytes


def plan_here(
    config: EngineConfig,
    model: ModelConfig,
    drafter: DrafterCaps | None = None,
    stored: StoredBytes | None = None,
    found: Hardware | None = None,
) -> Plan:
    """The plan for this machine. stored: what the model's file holds. found: the machine, if its free memory is counted
    otherwise."""
    found = found or detect(config)
    plan = resolve(config, model, found, native_problem(config, found), drafter, stored)
    kv_format(plan.kv).check_kernels(plan.kernels)
    return plan


def detect(config: EngineConfig) -> Hardware:
    """The hardware that a config means: the device that it names, or the best one available."""
    cores = usable_cores()
    if config.threads > cores:
        raise UserError(
            f"threads is {config.threads}; this process may use {cores} cores: ask for fewer, or for 0 (all of them)"
        )
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise UserError("device cuda was asked for, but torch finds no CUDA GPU; leave it on auto, or choose cpu")
    if config.device == "cpu" or not has_gpu:
        return hardware.cpu()
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    is_integrated = torch.cuda.get_device_properties().is_integrated
    free = free_gpu_memory(bool(is_integrated), torch.cuda.mem_get_info()[0])
    return Hardware("cuda", name, cores, free, capability)


def free_gpu_memory(is_integrated: bool, driver_free: int) -> int:
    """The free memory of a GPU in bytes. driver_free: what the driver reports as free.

    Where GPU and CPU share one memory, the driver does not count the page cache, so the operating system's number is
    used.
    """
    return (hardware.available_memory() if is_integrated else 0) or driver_free


def gpu_facts(device: str) -> dict[str, str]:
    """Return what the watchdog must know of the GPU: its name for nvidia-smi, and whose its memory is."""
    if device != "cuda" or not torch.cuda.is_available():
        return {}
    found = torch.cuda.get_device_properties()
    return {"gpu": f"GPU-{found.uuid}", "gpu_memory": "shared" if found.is_integrated else "own"}


def native_problem(config: EngineConfig, found: Hardware) -> str | None:
    """Why the C++ kernels cannot run here, or None. Asking compiles them."""
    if found.device != "cpu" or config.dtype not in ("auto", "quantised"):
        return None
    from sparkdraft.kernels import native

    return native.unavailable_reason()
