"""Recordings never take a step of their own: what runs moves the state of requests on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkdraft.engine.graphs import Graphs


class Captured:
    """As a CUDA graph: capturing computes nothing, replaying does."""

    RUNS = False

    def __init__(self, run: Callable[[], Tensor], beside: object) -> None:
        self.replay = run


class RunOnce(Captured):
    """As a CPU's list of calls: making it is a run."""

    RUNS = True

    def __init__(self, run: Callable[[], Tensor], beside: object) -> None:
        super().__init__(run, beside)
        self.output = run()


@pytest.mark.parametrize("kind", [Captured, RunOnce])
def test_a_call_is_one_step_whether_it_is_launched_recorded_or_replayed(kind: type) -> None:
    steps: list[int] = []

    def step(shape: int) -> Tensor:
        steps.append(shape)
        return torch.tensor(len(steps))

    ops: Any = SimpleNamespace(Recording=kind)
    graphs = Graphs(step, ops)
    assert [int(graphs.replay(4)) for _ in range(4)] == [1, 2, 3, 4]
    graphs.record([1, 2])
    assert steps == [4, 4, 4, 4, 2, 1], "recorded ahead: each has run once, the largest first"
