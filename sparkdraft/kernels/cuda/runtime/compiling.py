"""Compiles the kernels of a step on all cores, before the step first runs.

Triton compiles a kernel where it is first launched, up to a few seconds each, and a step launches fifty.
`compile_ahead` captures steps and drops the capture: torch's launches go into the capture, Triton's to threads that
compile them. Nothing runs on the GPU. Tensors that a step makes once and keeps must be device constants
(weights/constants.py). A step that fails here is compiled where it is launched, and `compiled_late` says why.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import KernelInterface

from sparkdraft.kernels.cuda.runtime.graph import capturing
from sparkdraft.util.this_machine import usable_cores

compiled_late: list[str] = []  # why kernels are not compiled ahead in this process; after one failure it is not tried


@contextmanager
def only_compiling() -> Iterator[None]:
    """Kernels that this thread launches within are compiled, not run, by as many threads as there are cores. One that
    does not compile fails again where it is launched. What torch launches does run, unless it is captured."""
    from triton.runtime._async_compile import AsyncCompileMode, active_mode  # not public: a start can do without it

    launcher, seen, own = KernelInterface.__getitem__, set[object](), threading.get_ident()

    def note(kernel: Any, grid: object, *arguments: object, **options: object) -> None:
        kind = (kernel, *map(_kind, arguments), *sorted((name, _kind(value)) for name, value in options.items()))
        if kind not in seen:  # Triton takes half a millisecond for each launch of a kernel that is still being compiled
            seen.add(kind)
            kernel.run(*arguments, grid=grid, warmup=True, **options)

    with _threads() as threads:
        try:
            with AsyncCompileMode(threads, ignore_errors=True) as compiled:
                KernelInterface.__getitem__ = lambda kernel, grid: (
                    partial(note, kernel, grid) if threading.get_ident() == own else launcher(kernel, grid)
                )
                try:
                    yield
                finally:
                    KernelInterface.__getitem__ = launcher
        finally:
            active_mode.set(None)  # Triton leaves it set where it fails itself, and would run nothing any more
        list(threads.map(_load, [each.kernel for each in compiled.future_kernels.values() if each.kernel]))


def compile_ahead(steps: Iterable[Callable[[], object]]) -> None:
    """Compiles what these functions launch, the one that takes the most memory first. A failure is noted, and the steps
    compile when they run; after a lack of memory other steps are still tried."""
    if compiled_late:
        return
    try:
        with only_compiling(), _thrown_away():
            for step in steps:
                step()
    except Exception as error:  # of the step, of CUDA, of Triton or of its threads
        if not isinstance(error, torch.OutOfMemoryError):
            words = str(error).partition("\n")[0]
            compiled_late.append(f"compiling them ahead failed in this process: {type(error).__name__}: {words}")


@contextmanager
def _thrown_away() -> Iterator[None]:
    """Captures what is launched within, and drops the capture with its memory.

    "relaxed", because a first run may load a library. The workspace of cuBLAS on its stream stays: torch holds it, and
    graphs captured on the same stream use it.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)  # one that is not made ready for being launched
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # where all launches are Triton's
        try:
            with capturing(graph, torch.cuda.graph_pool_handle(), capture_error_mode="relaxed"):
                yield
        finally:
            del graph
            torch.cuda.empty_cache()  # now, since the cache of a model may have left little


def _threads() -> ThreadPoolExecutor:
    if not torch.cuda.is_available():  # in Triton's interpreter, which compiles nothing
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(usable_cores(), "compiling", torch.cuda.set_device, (torch.cuda.current_device(),))


def _kind(value: object) -> object:
    """Return what distinguishes kernels: at least all that Triton distinguishes them by."""
    return (value.dtype, value.data_ptr() % 16) if isinstance(value, Tensor) else (type(value), value)


def _load(kernel: Any) -> None:
    """Builds what launches the kernel, by a C compiler, and loads it."""
    try:
        kernel._init_handles()
    except triton.OutOfResources:
        pass  # the kernel says so whenever it is launched
    except Exception:
        kernel._run = None  # else it would be launched without having been loaded
