"""Engines whose steps run as a GPU's or as a CPU's, whatever this machine is."""

from __future__ import annotations

from sparkdraft import LLM
from sparkdraft.engine.device_steps import DeviceSteps
from sparkdraft.engine.graphs import gpu_sizes
from sparkdraft.engine.host_steps import HostSteps


def on_device(llm: LLM) -> LLM:
    """The steps of a GPU. On a CPU they run uncaptured, with the empty slots that captured steps have."""
    engine = llm.engine
    engine.steps = steps = DeviceSteps(engine.runner, engine.sampler, engine.drafting)

    def padded(num_requests: int, depth: int = 0) -> int:
        sizes = gpu_sizes(engine.runner.plan.max_seqs, depth > 0)
        return next(size for size in (0, *sizes) if size >= num_requests)

    steps._size = padded  # type: ignore[method-assign]
    return llm


def on_host(llm: LLM) -> LLM:
    """The steps of a CPU, which are the reference of the other."""
    engine = llm.engine
    engine.steps = HostSteps(engine.runner, engine.sampler, engine.drafting)
    return llm


def device_steps(llm: LLM) -> DeviceSteps:
    assert isinstance(llm.engine.steps, DeviceSteps)
    return llm.engine.steps
