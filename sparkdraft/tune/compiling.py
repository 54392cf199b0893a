"""Compiles kernels on all cores. Triton compiles a kernel where it is first launched, and the launch waits: one after
the other, each up to a few seconds' work of one core."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import KernelInterface


@contextmanager
def only_compiling() -> Iterator[None]:
    """Kernels that are launched within, by whatever thread, are not run but compiled, by as many threads as there are
    cores. When the block has ended, all of them are compiled and loaded. One that does not compile fails again where it
    is launched, and says why there. What torch launches within does run, on tensors that no kernel has written."""
    launcher, seen = KernelInterface.__getitem__, set[object]()

    def note(kernel: Any, grid: object, *arguments: object, **options: object) -> None:
        kind = (kernel, *map(_kind, arguments), *sorted((name, _kind(value)) for name, value in options.items()))
        if kind not in seen:  # Triton takes half a millisecond for each launch of a kernel that is still being compiled
            seen.add(kind)
            kernel.run(*arguments, grid=grid, warmup=True, **options)

    with _threads() as threads:
        with AsyncCompileMode(threads, ignore_errors=True) as compiled:
            KernelInterface.__getitem__ = lambda kernel, grid: partial(note, kernel, grid)
            try:
                yield
            finally:
                KernelInterface.__getitem__ = launcher
        list(threads.map(_load, [each.kernel for each in compiled.future_kernels.values() if each.kernel]))


def _threads() -> ThreadPoolExecutor:
    if not torch.cuda.is_available():  # in Triton's interpreter, which compiles nothing
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(os.cpu_count(), "compiling", torch.cuda.set_device, (torch.cuda.current_device(),))


def _kind(value: object) -> object:
    """What distinguishes kernels: at least all that Triton distinguishes them by."""
    return (value.dtype, value.data_ptr() % 16) if isinstance(value, Tensor) else (type(value), value)


def _load(kernel: Any) -> None:
    """Build what launches the kernel, by a C compiler, and load it."""
    try:
        kernel._init_handles()
    except triton.OutOfResources:
        pass  # the kernel says so whenever it is launched
    except Exception:
        kernel._run = None  # else it would be launched without having been loaded
