"""Engines whose steps run as a GPU's or as a CPU's, whatever this machine is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from sparkdraft import LLM
from sparkdraft.engine.device_steps import DeviceSteps
from sparkdraft.engine.host_steps import HostSteps


class Uncaptured:
    """Graphs that run what others replay, with the same padding."""

    fallbacks: tuple[str, ...] = ()
    seconds = 0.0

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self.run, self._kinds = run, set[Any]()

    def __contains__(self, kind: object) -> bool:
        return kind in self._kinds

    def record(self, kinds: Iterable[Any]) -> None:
        self._kinds.update(kinds)

    def replay(self, kind: Any) -> Any:
        self._kinds.add(kind)
        return self.run(kind)


def on_device(llm: LLM) -> LLM:
    """The steps of a GPU. On a CPU they are not captured."""
    engine = llm.engine
    engine.steps = steps = DeviceSteps(engine.runner, engine.sampler, engine.drafting)
    if engine.plan.device == "cpu":
        steps._steps = Uncaptured(lambda kind: steps.slots.step(kind))  # type: ignore[assignment]
        steps._forwards = Uncaptured(lambda kind: steps.slots.forward(kind))  # type: ignore[assignment]
        steps._prompts = Uncaptured(steps._step_with_prompts)  # type: ignore[assignment]
        steps._prompt_forwards = Uncaptured(steps._forward_prompts)  # type: ignore[assignment]
        steps._catching_up = Uncaptured(steps.slots.catch_up)  # type: ignore[assignment]
        steps.measure = lambda *_: None  # type: ignore[method-assign]
        steps.capture()
    else:
        with torch.inference_mode():
            steps.capture()
    return llm


def on_host(llm: LLM) -> LLM:
    """The steps of a CPU, which are the reference of the other."""
    engine = llm.engine
    engine.steps = HostSteps(engine.runner, engine.sampler, engine.drafting)
    return llm


def device_steps(llm: LLM) -> DeviceSteps:
    assert isinstance(llm.engine.steps, DeviceSteps)
    return llm.engine.steps
