"""Runs the doctor's checks in order: software, cores, GPU, memory, then the engine, unless something is broken."""

from __future__ import annotations

import os
import time

from sparkdraft.config import EngineConfig
from sparkdraft.operate.doctor import machine, software
from sparkdraft.operate.doctor.finding import Finding, Report, Status
from sparkdraft.operate.forecast.machine import describing
from sparkdraft.util.progress import Meter
from sparkdraft.util.this_machine import OtherPrograms

ROOM = {
    "cpu": 2 * machine.GIB,
    "cuda": 16 * machine.GIB,
}  # free memory that measuring the bandwidth needs, with room to spare


def examine(config: EngineConfig, meter: Meter) -> Report:
    begin = time.monotonic()
    meter.stage("looking at the machine")
    cores, others = machine.read_cores(), OtherPrograms()
    torch = software.read_torch()
    gpus, problem = machine.read_gpus()
    cuda = None if torch.problem or config.device == "cpu" else machine.read_cuda()
    device = "cuda" if cuda else "cpu"
    found = [software.versions()]
    driver = gpus[0].driver if gpus else ""
    found += software.judge_torch(
        torch, len(gpus) * (config.device != "cpu"), driver, cuda.capability if cuda else None
    )
    found += [software.judge_triton(*software.read_triton(), device), *software.judge_c_compiler(device)]
    found += software.judge_native(device) if not torch.problem else []
    found += [*software.judge_environment(os.environ, device), *machine.judge_cores(cores, device)]
    bandwidth, at = 0.0, len(found)
    if not torch.problem:
        meter.stage("measuring the bandwidth")
        measured, bandwidth = _bandwidth(cores, cuda, problem, others)
        found += measured
    found += [
        *machine.judge_memory(machine.read_memory(), cuda.memory if cuda else None),
        machine.judge_disk(*machine.read_disk()),
    ]
    if all(each.status < Status.BROKEN for each in found):
        from sparkdraft.operate.doctor.engine import examine_engine

        found += examine_engine(config, bandwidth, meter)
    found[at:at] = machine.judge_load(others.disturbance(device))
    return Report(config.model, found, time.monotonic() - begin)


def _bandwidth(
    cores: machine.Cores, cuda: machine.Cuda | None, problem: str, others: OtherPrograms
) -> tuple[list[Finding], float]:
    """Measure the bandwidth, on a GPU with its clocks meanwhile; return the findings and bytes per second."""
    device = "cuda" if cuda else "cpu"
    memory = machine.read_memory()
    free = memory.available if cuda is None or cuda.memory.unified else cuda.memory.driver_free
    part, name = (machine.GPU, cuda.name) if cuda else ("CPU", cores.name)
    found = []
    if free < ROOM[device]:
        value = f"not measured: {free / machine.GIB:.1f} GiB are free, and it takes {ROOM[device] / machine.GIB:.0f}"
        return [Finding(part, "memory bandwidth", value, Status.NOTE)], 0.0
    measured = _measure(device, cores.usable)
    reason = others.disturbance(device)
    if cuda:
        gpus, problem = machine.read_gpus(lambda: _measure(device, cores.usable), cuda.uuid)
        others_there = machine.count_others(os.getpid(), cuda.uuid)
        reason = "other processes use the GPU" if others_there else reason
        found = machine.judge_gpu(gpus[0], others_there) if gpus else []
        if problem:
            found.append(Finding(machine.GPU, "clocks", f"not told: {problem}", Status.NOTE))
    known = describing(name) if cuda else None
    return [*found, machine.judge_bandwidth(measured, name, known, cuda.peak if cuda else 0.0, reason)], measured.best


def _measure(device: str, threads: int) -> machine.Measured:
    from sparkdraft.operate.forecast.rates import gemv_bandwidth, memory_bandwidth

    return machine.Measured(gemv_bandwidth(device, threads, 3), memory_bandwidth(device, threads, 2))
