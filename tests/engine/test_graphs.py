"""Making a recording computes nothing, because a step advances requests. A limited number is kept."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkdraft.engine.graphs import Graphs
from sparkdraft.kernels import native
from sparkdraft.plan.memory import GRAPHS

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


class Captured:
    """As a CUDA graph: it is captured after a run."""

    NAME, RUN_FIRST, nbytes = "cuda", True, 1

    def __init__(self, run: Callable[[], Tensor], beside: object) -> None:
        self.replay = run


class Listed(Captured):
    """As a CPU's list of calls: it is made at once."""

    NAME, RUN_FIRST = "native", False


def kernels(kind: type[Captured], compiled: list[list[int]] | None = None) -> Any:
    """compiled: the shapes of each call that compiles ahead."""
    found, calls = SimpleNamespace(Graph=kind, NAME=kind.NAME, compiler=None), [] if compiled is None else compiled
    if kind.RUN_FIRST:
        found.compiler = SimpleNamespace(compile_ahead=lambda steps: calls.append([step.args[0] for step in steps]))
    return found


@pytest.mark.parametrize("kind", [Captured, Listed])
def test_a_call_is_one_step_whether_it_is_launched_recorded_or_replayed(kind: type[Captured]) -> None:
    steps: list[int] = []

    def step(shape: int) -> Tensor:
        steps.append(shape)
        return torch.tensor(len(steps))

    graphs = Graphs(step, kernels(kind))
    assert [int(graphs.replay(4)) for _ in range(4)] == [1, 2, 3, 4]
    graphs.record([1, 2])
    assert steps == [4, 4, 4, 4, *([2, 1] if kind.RUN_FIRST else [])], "recorded ahead, the largest first"


def test_kernels_are_compiled_before_a_shape_runs_and_those_of_all_shapes_at_start_together() -> None:
    compiled: list[list[int]] = []
    graphs = Graphs(lambda shape: torch.tensor(shape), kernels(Captured, compiled))
    graphs.record([1, 2, 3])
    assert compiled == [[3, 2, 1]], "the largest first, whose memory serves the others"
    for _ in range(3):
        graphs.replay(4)
        graphs.replay(1)
    assert compiled == [[3, 2, 1], [4]]


def test_kernels_of_a_shape_are_compiled_once_however_often_its_recording_is_dropped() -> None:
    compiled: list[list[int]] = []
    graphs, shapes = Graphs(lambda shape: torch.tensor(shape), kernels(Captured, compiled)), range(500)
    for _ in range(3):
        for shape in shapes:
            graphs.replay(shape)
    assert compiled == [[shape] for shape in shapes]


@pytest.mark.parametrize("kind", [Captured, Listed])
def test_of_a_thousand_shapes_few_are_held_and_all_give_their_own_result(kind: type[Captured]) -> None:
    alive: weakref.WeakSet[Captured] = weakref.WeakSet()

    class Counted(kind):  # type: ignore[misc, valid-type]
        def __init__(self, run: Callable[[], Tensor], beside: object) -> None:
            super().__init__(run, beside)
            alive.add(self)

    most, numbers = GRAPHS[kind.NAME].most, random.Random(0)
    graphs = Graphs(lambda shape: torch.tensor(shape), kernels(Counted))
    graphs.record([0, 1])
    for number in range(2, 1002):
        for shape in (number, number, numbers.randrange(2, number + 1)):
            assert int(graphs.replay(shape)) == shape
        gc.collect(0)
        assert len(alive) == graphs.num_held <= 2 + most
    assert graphs.num_held == 2 + most and 0 in graphs and 1 in graphs, "those made at start stay"


def test_the_shape_replayed_longest_ago_is_let_go() -> None:
    most = GRAPHS["native"].most
    graphs = Graphs(lambda shape: torch.tensor(shape), kernels(Listed))
    for shape in range(most):
        graphs.replay(shape)
    graphs.replay(0)
    graphs.replay(most)
    assert 0 in graphs and 1 not in graphs and most in graphs


def test_graphs_hold_no_more_bytes_than_are_planned_but_one_is_always_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sized(Captured):
        def __init__(self, run: Callable[[], Tensor], beside: object) -> None:
            super().__init__(run, beside)
            self.nbytes = 10 * int(run())

    monkeypatch.setitem(GRAPHS, "cuda", GRAPHS["cuda"]._replace(room=100))
    graphs = Graphs(lambda shape: torch.tensor(shape), kernels(Sized))
    graphs.record([9])
    for shape in (1, 2, 3, 4, 1, 5, 11):
        assert [int(graphs.replay(shape)) for _ in range(3)] == [shape] * 3
        held = [each for each in range(20) if each in graphs]
        assert graphs.nbytes == 10 * sum(held)
        assert held == {4: [1, 2, 3, 4, 9], 5: [1, 4, 5, 9], 11: [9, 11]}.get(shape, held)


def test_a_capture_without_memory_is_not_tried_again_and_costs_no_step() -> None:
    tried: list[int] = []

    class Full(Captured):
        def __init__(self, run: Callable[[], Tensor], beside: object) -> None:
            super().__init__(run, beside)
            tried.append(int(run()))
            if tried[-1] > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")

    graphs = Graphs(lambda shape: torch.tensor(shape), kernels(Full))
    graphs.record([1, 4])
    assert 4 not in graphs and graphs.num_held == 1
    for _ in range(200):
        for shape in (2, 4, 5, 1):
            assert int(graphs.replay(shape)) == shape
    assert tried == [4, 1, 2, 5] and graphs.num_held == 2
    assert graphs.fallbacks == ["no memory was left to capture 2 kinds of step, the first of them 4"]
    for shape in range(10, 210):  # whatever comes, these run plainly
        graphs.replay(shape)
    graphs.replay(4)
    assert tried == [4, 1, 2, 5]


@pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
def test_recordings_of_a_cpu_outlive_the_one_whose_memory_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first recording, whose memory all others share, is dropped; the kernels are the real ones."""
    monkeypatch.setitem(GRAPHS, "native", GRAPHS["native"]._replace(most=3))
    x, weight = torch.randn(40, 576), torch.rand(576)

    def step(rows: int) -> Tensor:
        return native.rms_norm(native.rms_norm(x[:rows], weight, 1e-5), weight, 1e-5)

    graphs = Graphs(step, native)
    for rows in [40, 1, 7, 33, 2, 7, 39, 40, 5, 7, 1] * 3:
        x.copy_(torch.randn(40, 576))
        assert torch.equal(graphs.replay(rows), step(rows))
        assert graphs.num_held <= 3 and 0 < graphs.nbytes < 10_000


@pytest.mark.gpu
@no_gpu
def test_cuda_graphs_that_are_let_go_give_their_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparkdraft.kernels import cuda

    monkeypatch.setitem(GRAPHS, "cuda", GRAPHS["cuda"]._replace(most=4))
    x, weight = torch.randn(256, 1024, device="cuda"), torch.rand(1024, device="cuda")

    def step(rows: int) -> Tensor:
        y = x[:rows]
        for _ in range(200):
            y = cuda.rms_norm(y, weight, 1e-5)
        return y

    graphs, reserved = Graphs(step, cuda), []
    for _ in range(6):
        for rows in range(8, 136, 8):
            for _way in ("plainly", "recorded", "replayed"):
                x.copy_(torch.randn(256, 1024, device="cuda"))
                assert torch.equal(graphs.replay(rows), step(rows))
            assert graphs.num_held <= 4
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] - reserved[1] < 64 << 20, "later turns take no more of the GPU's memory than the second"


@pytest.mark.gpu
@no_gpu
def test_a_capture_that_runs_out_of_memory_leaves_a_gpu_that_runs_and_captures() -> None:
    from sparkdraft.kernels import cuda

    x, weight = torch.randn(64, 1024, device="cuda"), torch.rand(1024, device="cuda")
    asked = [torch.cuda.get_device_properties().total_memory]

    def step(rows: int) -> Tensor:
        y = cuda.rms_norm(x[:rows], weight, 1e-5)
        if rows == 32 and torch.cuda.is_current_stream_capturing():
            torch.empty(asked[0], dtype=torch.uint8, device="cuda")
        return y

    graphs, stream = Graphs(step, cuda), torch.cuda.current_stream()
    for _ in range(3):
        for rows in (16, 32, 64):
            x.copy_(torch.randn(64, 1024, device="cuda"))
            assert torch.equal(graphs.replay(rows), step(rows))
            assert torch.cuda.current_stream() == stream
    assert 16 in graphs and 64 in graphs and 32 not in graphs and len(graphs.fallbacks) == 1
    assert 0 < graphs.nbytes < 64 << 20
