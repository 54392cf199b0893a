"""A function's kernel calls, recorded once and run again by a single call into C: what a CUDA graph is to a GPU.

While a function is recorded, the kernels it calls run as usual and their arguments are written down; all that the
kernels allocate stays allocated, so that the addresses stay true. Inputs must therefore live at fixed addresses. A
torch operator that computes would be missing from the replay: it makes the recording fail, with its name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparkdraft.kernels import Unrecordable
from sparkdraft.kernels.native.library import c

KERNELS = ("embed", "copy_rows", "linear", "rms_norm", "qk_norm_rope", "silu_mul", "kv_write", "paged_attention")
MOST_INTEGERS = 14  # this and the order of KERNELS as in replay.cpp
HARMLESS = {"empty", "view", "split", "__getitem__", "__get__", "data_ptr", "stride", "element_size"}


class _Call(ctypes.Structure):
    """Mirrors 'Recorded' of replay.cpp."""

    _fields_ = (
        ("kernel", ctypes.c_int64),
        ("integers", ctypes.c_int64 * MOST_INTEGERS),
        ("real", ctypes.c_double),
    )


_current: Recording | None = None  # the recording that is being made


def empty(rows: int, width: int) -> Tensor:
    """A kernel's output; a recording keeps it, since its address is in there."""
    y = torch.empty(rows, width)
    keep(y)
    return y


def keep(thing: object) -> None:
    if _current is not None:
        _current.kept.append(thing)


class Recording:
    def __init__(self, run: Callable[[], Tensor], beside: Recording | None = None) -> None:
        """Runs 'run' once. Raises Unrecordable. 'beside' is of use on a GPU only: memory is not shared here."""
        self.kept: list[object] = []
        self._calls: list[_Call] = []
        with self._recorders(), _OnlyViews():
            self.output = run()
        self._array = (_Call * len(self._calls))(*self._calls)

    def replay(self) -> Tensor:
        """The same calls on what the inputs hold now; returns the same tensor, filled anew."""
        c.sd_replay(ctypes.addressof(self._array), len(self._array))
        return self.output

    @contextmanager
    def _recorders(self) -> Iterator[None]:
        global _current
        originals = {name: getattr(c, f"sd_{name}") for name in KERNELS}
        _current = self
        for number, name in enumerate(KERNELS):
            setattr(c, f"sd_{name}", self._recorder(number, originals[name]))
        try:
            yield
        finally:
            _current = None
            for name, function in originals.items():
                setattr(c, f"sd_{name}", function)

    def _recorder(self, number: int, function: Callable[..., None]) -> Callable[..., None]:
        def record(*arguments: int | float | None) -> None:
            function(*arguments)
            integers = [a or 0 for a in arguments if not isinstance(a, float)]
            reals = [a for a in arguments if isinstance(a, float)]
            self._calls.append(_Call(number, (ctypes.c_int64 * MOST_INTEGERS)(*integers), *reals))

        return record


class _OnlyViews(TorchFunctionMode):
    """Lets through what allocates or looks at memory, and nothing that computes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        gathers = name == "__getitem__" and isinstance(args[1], Tensor)
        if name not in HARMLESS or gathers:
            raise Unrecordable(name)
        return func(*args, **(kwargs or {}))
