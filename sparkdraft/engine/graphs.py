"""Decode steps recorded once a shape and replayed by one call: a CUDA graph on a GPU, a list of calls on a CPU.

Launching a step operator by operator costs as much host time as the operators themselves take, on a GPU and on a CPU
alike. Recordings read the step's fixed input buffers, lengths included, so one serves any context. On a GPU those of
plain decoding are made at start for a few sizes, and a batch runs in the next larger one, padded with rows that write
nowhere; all others are made when a shape comes up, on a GPU for the second time. So are short prompts on a GPU; longer
ones keep it busy while the next operators are launched, and run eagerly. How to record is the kernels'.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor


class Shape(NamedTuple):
    """What a recording is made for; everything else is read on the device."""

    seqs: int
    rows: int
    max_query: int  # rows of a sequence at most
    num_read: int  # rows whose logits are computed: all, or those that the inputs name


Key = TypeVar("Key")  # what recordings differ in: a Shape, or another such tuple or number


class Graphs(Generic[Key]):
    def __init__(self, run: Callable[[Key], Tensor], ops: ModuleType) -> None:
        """run(shape) computes from the fixed input buffers."""
        self._run, self._ops = run, ops
        self._recorded: dict[Key, Any] = {}
        self._seen: set[Key] = set()  # run once, and not recorded yet

    def __contains__(self, shape: Key) -> bool:
        return shape in self._recorded

    def recording(self, shape: Key) -> Any:
        """The recording of a shape, which must have been made."""
        return self._recorded[shape]

    def record(self, shapes: list[Key]) -> None:
        """Largest first: on a GPU the smaller ones then fit into its memory."""
        for shape in sorted(shapes, reverse=True):  # type: ignore[type-var]
            if shape not in self._seen and not self._ops.Recording.RUNS:
                self._run(shape)  # the kernels are compiled; a shape that comes up has run by itself
            beside = next(iter(self._recorded.values()), None)
            self._recorded[shape] = self._ops.Recording(partial(self._run, shape), beside)

    def replay(self, shape: Key) -> Tensor:
        """The step of this shape, once; a new one is recorded as soon as that costs no step of its own.

        On a CPU it is recorded while it runs. A GPU runs it plainly first: recording takes as long as ten launches, and
        many shapes come but once.
        """
        if shape not in self._recorded:
            runs = self._ops.Recording.RUNS
            if not runs and shape not in self._seen:
                self._seen.add(shape)
                return self._run(shape)
            self.record([shape])
            if runs:
                first: Tensor = self._recorded[shape].output
                return first
        out: Tensor = self._recorded[shape].replay()
        return out


def gpu_sizes(max_seqs: int) -> list[int]:
    """1, 2, 4, then every 8th, up to max_seqs."""
    sizes = [b for b in (1, 2, 4) if b < max_seqs] + list(range(8, max_seqs, 8))
    return [*sizes, max_seqs]
