"""Kernels compiled ahead, on all cores: nothing runs meanwhile, and afterwards nothing is left to compile."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl

from sparkdraft.core import Fallback
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.graphs import Graphs
from sparkdraft.kernels import cuda
from sparkdraft.kernels.cuda.runtime import compiling, ending, graph
from sparkdraft.kernels.cuda.runtime.compiling import compile_ahead, only_compiling
from sparkdraft.kernels.ops import AttentionParams
from sparkdraft.weights.quant.stored import LEVELS, Coded, _level_values
from tests.kernels.triton_device import DEVICE, NO_GPU, gpu, gpu_only, integers, randn

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Why kernels were not compiled ahead; nothing of it is left for other tests."""
    monkeypatch.setattr(compiling, "compiled_late", [])
    yield compiling.compiled_late


@triton.jit
def _add(x, out, value, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) + value)


@triton.jit
def _broken(x, out, value, SIZE: tl.constexpr):
    tl.static_assert(SIZE < 0, "no size will do")


def launch(x: Tensor, kernel: object = _add, value: int = 7) -> Tensor:
    out = torch.full_like(x, -1)
    kernel[(1,)](x, out, value, SIZE=x.shape[0])  # type: ignore[index]
    return out


@gpu
def test_what_is_launched_meanwhile_does_not_run() -> None:
    x = torch.arange(16, device=DEVICE, dtype=torch.int32)
    with only_compiling():
        first = launch(x)
    assert bool((first == -1).all())
    assert torch.equal(launch(x), x + 7)


@gpu
def test_what_another_thread_launches_meanwhile_runs() -> None:
    x, found = torch.arange(16, device=DEVICE, dtype=torch.int32), list[Tensor]()
    with only_compiling():
        other = Thread(target=lambda: found.append(launch(x)))
        other.start()
        other.join()
    assert torch.equal(found[0], x + 7)


@gpu_only
def test_nothing_is_left_to_compile() -> None:
    hook, compiled = triton.knobs.runtime.jit_post_compile_hook, []
    x = torch.arange(64, device="cuda")
    triton.knobs.runtime.jit_post_compile_hook = lambda **_: compiled.append(1)
    try:
        with only_compiling():
            for value in (3, 3, 16):  # Triton compiles another kernel for what 16 divides
                launch(x, value=value)
        assert len(compiled) == 2
        compiled.clear()
        assert torch.equal(launch(x, value=3) + launch(x, value=16), 2 * x + 19) and not compiled
    finally:
        triton.knobs.runtime.jit_post_compile_hook = hook


@gpu_only
def test_a_kernel_that_does_not_compile_fails_where_it_is_launched() -> None:
    x = torch.arange(32, device="cuda")
    with only_compiling():
        launch(x, _broken)
    with pytest.raises(triton.CompilationError, match="no size will do"):
        launch(x, _broken)


# Steps


@gpu_only
def test_a_captured_step_computes_nothing_and_leaves_nothing_to_compile(late: list[str]) -> None:
    hook, compiled = triton.knobs.runtime.jit_post_compile_hook, []
    x, y = torch.arange(128, device="cuda"), torch.zeros(128, device="cuda", dtype=torch.int64)

    def step() -> Tensor:
        y.copy_(launch(x, value=3) + launch(x.int(), value=16))  # torch's launches wait as well
        return y

    triton.knobs.runtime.jit_post_compile_hook = lambda **_: compiled.append(1)
    try:
        compile_ahead([step, step])
        assert len(compiled) == 2 and not bool(y.any()) and not late
        compiled.clear()
        assert torch.equal(step(), 2 * x + 19) and not compiled
    finally:
        triton.knobs.runtime.jit_post_compile_hook = hook


@gpu_only
def test_a_step_whose_kernel_does_not_compile_fails_where_it_is_launched(late: list[str]) -> None:
    x = torch.arange(256, device="cuda")
    compile_ahead([lambda: launch(x, _broken)])
    assert not late
    with pytest.raises(triton.CompilationError, match="no size will do"):
        launch(x, _broken)


@gpu_only
def test_the_memory_of_a_capture_goes_back_at_once(late: list[str]) -> None:
    x = torch.zeros(1 << 24, device="cuda")
    gc.collect()  # a capture collects too: what failed tests before this one left would be counted
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    compile_ahead([lambda: (x + 1) * 2, lambda: x + 3])
    assert not late
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (allocated, reserved)


def wait(x: Tensor) -> Tensor:
    return x + x.sum().item()


def fail(x: Tensor) -> Tensor:
    raise ValueError("a step of no use\nand more of it")


@gpu_only
@pytest.mark.parametrize("step, reason", [(wait, "captur"), (fail, "ValueError: a step of no use")])
def test_after_a_capture_that_fails_steps_run_and_are_recorded(
    step: Callable[[Tensor], Tensor], reason: str, late: list[str]
) -> None:
    """Reading a number waits for the device, which breaks a capture off."""
    x, stream = torch.arange(512, device="cuda"), torch.cuda.current_stream()
    compile_ahead([lambda: step(x)])
    assert len(late) == 1 and reason in late[0] and "\n" not in late[0]
    assert torch.cuda.current_stream() == stream
    graphs = Graphs(lambda shape: launch(x) + shape, cuda)
    graphs.record([1, 2])
    assert torch.equal(graphs.replay(2), x + 9) and torch.equal(graphs.replay(1), x + 8)
    assert len(late) == 1, "it is not tried again"
    del graphs
    torch.cuda.empty_cache()


def step_of_all_constants() -> tuple[Callable[[int], Tensor], int]:
    """A step that takes its parts of attention together by counters, codes a key and reads it back, and looks a row of
    codes up; and the number of its results."""
    from tests.kernels import test_cuda, test_cuda_turboquant

    torch.manual_seed(0)
    dtype, params = torch.bfloat16, AttentionParams(64**-0.5)
    q, k, v, view = test_cuda.make_batch([1], [700], 8, 2, 64, dtype, padding=0)
    layer, _, coded_view = test_cuda_turboquant.make_batch([1], [300], 8, 2, 64, dtype)
    queries, new = randn(1, 8, 64, dtype=dtype), randn(2, 1, 2, 64, dtype=dtype)
    slots = integers([int(coded_view.block_tables[0, 299 // 16]) * 16 + 299 % 16])
    codes = torch.randint(256, (32, 64), dtype=torch.uint8, device="cuda")
    table = Coded("e2m1", codes, 32, torch.rand(32, 4, device="cuda"))

    def step(shape: int) -> Tensor:
        rotated = queries.clone()  # changed in place
        cuda.tq_write(layer, *new, slots, rotated)
        parts = [
            cuda.paged_attention(q, k, v, view, params)[:1],
            cuda.tq_attention(layer, rotated, coded_view, params)[:1],
            cuda.embed(slots % 32, table),
        ]
        return torch.cat([part.flatten().float() for part in parts])

    return step, 2 * 8 * 64 + 128


def run_fresh(way: str, path: str) -> None:
    """In a process that has made no constant: run the step plainly, or compile it ahead, record and replay it."""
    from sparkdraft.kernels.cuda.attention.turboquant.rotation import signs

    step, count = step_of_all_constants()
    with torch.inference_mode():
        dirty = torch.full((1 << 30,), 255, dtype=torch.uint8, device="cuda")  # memory that nobody fills is not zero
        del dirty
        torch.cuda.empty_cache()
        if way == "plainly":
            found = step(0)
        else:
            graphs = Graphs(step, cuda)
            graphs.record([0])
            found = graphs.replay(0).clone()
            assert torch.equal(graphs.replay(0), found) and torch.equal(step(0), found)
        assert not compiling.compiled_late, compiling.compiled_late
        assert found.shape == (count,) and not found.isnan().any()
        assert ending.counters.cache_info().currsize == 1, "attention was not split"  # type: ignore[attr-defined]
        device = found.device
        assert not ending.counters(device).any() and bool((signs(64, device).abs() == 1).all())
        assert _level_values("e2m1", device).tolist() == list(LEVELS["e2m1"].values or ())
        torch.save(found.cpu(), path)


@gpu_only
def test_a_step_compiled_ahead_in_a_fresh_process_equals_one_that_ran_plainly(tmp_path: Path) -> None:
    """The constants of kernels are first asked for by a capture, which fills nothing."""
    found = []
    for way in ("plainly", "ahead"):
        path, kept = tmp_path / f"{way}.pt", tmp_path / way
        program = f"from tests.kernels.test_cuda_compiling import run_fresh; run_fresh({way!r}, {str(path)!r})"
        env = os.environ | {"TRITON_CACHE_DIR": str(kept), "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        found.append(torch.load(path))
    assert torch.equal(*found)


# What goes wrong


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_what_cannot_be_captured_is_noted_and_stops_nobody(late: list[str]) -> None:
    runs: list[int] = []
    compile_ahead([lambda: runs.append(1)])
    assert not runs and len(late) == 1 and late[0].startswith("compiling them ahead failed in this process: ")
    compile_ahead([lambda: runs.append(1)])
    assert not runs and len(late) == 1, "it is not tried again"


def test_torch_is_told_of_a_capture_that_broke_off(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, tuple[int, int]]] = []

    def pool() -> tuple[int, int]:
        raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")

    def end(device: int, pool: tuple[int, int]) -> None:
        told.append(("end", device, pool))
        raise RuntimeError("not currently recording to this pool")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *where: told.append(("release", *where)))
    monkeypatch.setattr(graph, "_broken", [])
    ended, broken = SimpleNamespace(pool=lambda: (0, 1)), SimpleNamespace(pool=pool)
    graph._end(ended, 0, (0, 1))  # type: ignore[arg-type]
    assert not told and not graph._broken
    graph._end(broken, 0, (0, 1))  # type: ignore[arg-type]
    assert told == [("end", 0, (0, 1)), ("release", 0, (0, 1))] and graph._broken == [broken]


def test_an_engine_says_why_its_kernels_are_compiled_one_by_one() -> None:
    def engine(ops: object) -> SimpleNamespace:
        runner = SimpleNamespace(model=SimpleNamespace(ops=ops), unrecorded=[])
        drafting, plan, steps = (
            SimpleNamespace(proposer=None),
            SimpleNamespace(fallbacks=()),
            SimpleNamespace(graphs=[]),
        )
        return SimpleNamespace(runner=runner, drafting=drafting, plan=plan, steps=steps, _fallbacks=[])

    said = Engine.fallbacks.fget  # type: ignore[attr-defined]
    assert said(engine(SimpleNamespace(compiler=None))) == []
    assert said(engine(SimpleNamespace(compiler=SimpleNamespace(compiled_late=[])))) == []
    late = SimpleNamespace(compiler=SimpleNamespace(compiled_late=["no memory"]))
    assert said(engine(late)) == [Fallback("GPU kernels are compiled one by one", "no memory")]
