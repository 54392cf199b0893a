"""Decode steps recorded once per shape and replayed by one call: a CUDA graph on a GPU, a list of calls on a CPU.

Launching a step operator by operator costs as much host time as the operators themselves take, on a GPU and on a CPU
alike. Recordings read the step's fixed input buffers, lengths included, so one serves any context. On a GPU those of
plain decoding are made at start for a few sizes, and a batch runs in the next larger one, padded with rows that write
nowhere; all others are made when a shape comes up, on a GPU for the second time. So are short prompts on a GPU; longer
ones keep it busy while the next operators are launched, and run eagerly. Recordings made at start stay; of the others a
limited number is held, and the one replayed longest ago is let go. How to record is the kernels'.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from sparkdraft.plan.memory import RECORDINGS


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
        self._most = RECORDINGS[ops.NAME].most  # beside those made at start
        self._kept: dict[Key, Any] = {}  # made at start
        self._recent: OrderedDict[Key, Any] = OrderedDict()  # made since then, the last replayed at the end
        self._seen: OrderedDict[Key, None] = OrderedDict()  # run once, and not recorded yet

    def __contains__(self, shape: Key) -> bool:
        return shape in self._kept or shape in self._recent

    @property
    def num_held(self) -> int:
        return len(self._kept) + len(self._recent)

    def recording(self, shape: Key) -> Any:
        """The recording of a shape, which must have been made."""
        return self._kept[shape] if shape in self._kept else self._recent[shape]

    def record(self, shapes: list[Key]) -> None:
        """Make recordings that stay. Largest first: on a GPU the smaller ones then fit into its memory."""
        for shape in sorted(shapes, reverse=True):  # type: ignore[type-var]
            if not self._ops.Recording.RUNS:
                self._run(shape)  # the kernels are compiled
            self._kept[shape] = self._make(shape)

    def replay(self, shape: Key) -> Tensor:
        """The step of this shape, once; a new one is recorded as soon as that costs no step of its own.

        On a CPU it is recorded while it runs. A GPU runs it plainly first: recording takes as long as ten launches, and
        many shapes come but once.
        """
        recording = self._kept.get(shape, self._recent.get(shape))
        if recording is None:
            runs = self._ops.Recording.RUNS
            if not runs and shape not in self._seen:
                self._remember(self._seen, shape, None)
                return self._run(shape)
            self._seen.pop(shape, None)
            recording = self._make(shape)
            # After the new one is made, not before: making it has waited for all that ran on the device, so the one
            # that is let go is in use no more.
            self._remember(self._recent, shape, recording)
            if runs:
                first: Tensor = recording.output
                return first
        elif shape in self._recent:
            self._recent.move_to_end(shape)
        out: Tensor = recording.replay()
        return out

    def _make(self, shape: Key) -> Any:
        beside = next(iter((*self._kept.values(), *self._recent.values())), None)
        return self._ops.Recording(partial(self._run, shape), beside)

    def _remember(self, shapes: OrderedDict[Key, Any], shape: Key, value: Any) -> None:
        shapes[shape] = value
        if len(shapes) > self._most:
            shapes.popitem(last=False)


def gpu_sizes(max_seqs: int) -> list[int]:
    """1, 2, 4, then every 8th, up to max_seqs."""
    sizes = [b for b in (1, 2, 4) if b < max_seqs] + list(range(8, max_seqs, 8))
    return [*sizes, max_seqs]
