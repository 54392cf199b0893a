"""A function's kernel calls, captured once and run again by a single call into C: the CPU's CUDA graph.

A capture writes down the arguments of kernel calls and computes nothing; what the kernels allocate stays allocated, so
that addresses stay true. Inputs must live at fixed addresses. Graphs of one owner, of which one runs at a time, share
their memory, so a hundred shapes take that of the largest. A torch operator that computes would be missing from the
replay, so it makes the capture fail.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparkdraft.kernels.native.library import c
from sparkdraft.kernels.ops import CannotCapture

KERNELS = (
    *("embed", "copy_rows", "linear", "rms_norm", "qk_norm_rope", "gated"),
    *("kv_write", "paged_attention", "find_pages", "make_rows", "unit_rms"),
    *("add_normed", "softcap", "route", "experts"),
    *("find_states", "causal_conv", "delta_rule", "gated_norm", "sigmoid_gate", "tq_write"),
)
MOST_INTEGERS, MOST_REALS = 14, 2  # these and the order of KERNELS as in replay.cpp
# What may be asked of a tensor during a capture: its memory and its shape. None of these computes anything.
SHAPES = {"__get__", "dim", "size", "numel", "stride", "element_size", "data_ptr", "storage_offset", "is_contiguous"}
HARMLESS = {"empty", "view", "split", "__getitem__", "__len__"} | SHAPES


CHUNK = 1 << 20  # floats that an arena takes at once, at least
ALIGN = 16  # floats: a cache line


class Arena:
    """Memory for the outputs of a graph's kernels."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self.restart()

    def restart(self) -> None:
        self._chunk, self._used = 0, 0

    def take(self, count: int) -> Tensor:  # float32 [count]
        while self._chunk < len(self._chunks):
            chunk, begin = self._chunks[self._chunk], self._used
            if begin + count <= chunk.shape[0]:
                self._used = begin + -(-count // ALIGN) * ALIGN
                return chunk[begin : begin + count]
            self._chunk, self._used = self._chunk + 1, 0
        self._chunks.append(torch.empty(max(count, CHUNK)))
        return self.take(count)


_Integers, _Reals = ctypes.c_int64 * MOST_INTEGERS, ctypes.c_double * MOST_REALS


class _Call(ctypes.Structure):
    """Mirrors 'Recorded' of replay.cpp."""

    _fields_ = (("kernel", ctypes.c_int64), ("integers", _Integers), ("reals", _Reals))


_current: Graph | None = None  # the graph that is being captured


def empty(rows: int, width: int) -> Tensor:
    """A kernel's output; during a capture it comes from the graph's arena."""
    if _current is None:
        return torch.empty(rows, width)
    return _current.arena.take(rows * width).view(rows, width)


def keep(thing: object) -> None:
    if _current is not None:
        _current.kept.append(thing)


class Graph:
    RUN_FIRST: ClassVar = False

    def __init__(self, run: Callable[[], Tensor], beside: Graph | None = None) -> None:
        """Calls 'run' once, which computes nothing: 'output' is filled by `replay`. Raises CannotCapture."""
        self.kept: list[object] = []
        self.arena: Arena = beside.arena if beside else Arena()
        self.arena.restart()
        calls: list[_Call] = []
        with _recorders(self, calls), _OnlyViews():
            self.output = run()
        self._array = (_Call * len(calls))(*calls)
        self.nbytes = ctypes.sizeof(self._array)  # the arena is shared

    @property
    def kernels(self) -> list[str]:
        return [KERNELS[call.kernel] for call in self._array]

    def replay(self) -> Tensor:
        c.sd_replay(ctypes.addressof(self._array), len(self._array))
        return self.output


@contextmanager
def _recorders(graph: Graph, calls: list[_Call]) -> Iterator[None]:
    """Replaces the kernels while it is entered."""
    global _current
    originals = {name: getattr(c, f"sd_{name}") for name in KERNELS}
    _current = graph
    for number, name in enumerate(KERNELS):
        setattr(c, f"sd_{name}", _recorder(calls, number))
    try:
        yield
    finally:
        _current = None
        for name, function in originals.items():
            setattr(c, f"sd_{name}", function)


def _recorder(calls: list[_Call], number: int) -> Callable[..., None]:
    def record(*arguments: int | float | None) -> None:
        integers = [a or 0 for a in arguments if not isinstance(a, float)]
        reals = [a for a in arguments if isinstance(a, float)]
        calls.append(_Call(number, _Integers(*integers), _Reals(*reals)))

    return record


class _OnlyViews(TorchFunctionMode):
    """Allows what allocates or looks at memory, and nothing that computes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name not in HARMLESS or (name == "__getitem__" and not _is_view(args[1])):
            raise CannotCapture(name)
        return func(*args, **(kwargs or {}))


def _is_view(index: Any) -> bool:
    """Return whether indexing with it copies nothing: a list, a mask or a tensor gathers, also within a tuple."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or type(part) in (int, slice) for part in parts)
