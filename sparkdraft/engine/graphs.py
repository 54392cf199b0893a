"""Steps captured once per shape and replayed by one call: a CUDA graph on a GPU, a compiled list of calls on a CPU.

Launching a step operator by operator costs as much host time as the operators themselves take. A graph reads the step's
fixed input buffers, lengths included, so it serves any context length.

On a GPU, graphs of plain decoding are captured at start for a few batch sizes; a batch runs in the next larger one,
with padding. Short prompts are captured too. Longer prompts run eagerly, because they keep the GPU busy. All other
shapes are captured when they come up: on a CPU at once, on a GPU the second time. Before a shape first runs on a GPU,
its kernels are compiled on all cores. Graphs made at start stay; of the others a limited number is kept, on a GPU a
limited number of bytes, least recently replayed first to go. A shape for whose capture no memory was left runs plainly
from then on.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from torch import OutOfMemoryError

from sparkdraft.kernels.ops import CapturedStep, Ops
from sparkdraft.plan.memory import GRAPHS


class Shape(NamedTuple):
    """What a graph is captured for; everything else is read on the device."""

    seqs: int
    rows: int
    max_query: int  # rows per sequence at most
    num_read: int  # rows whose logits are computed: all, or those that the inputs name


Key = TypeVar("Key")  # what distinguishes graphs: a Shape, or another tuple or number


class Graphs(Generic[Key]):
    def __init__(self, run: Callable[[Key], Any], ops: Ops) -> None:
        """run(shape) computes one step from the fixed input buffers. `replay` returns what it returns."""
        assert ops.Graph, f"{ops.NAME} kernels cannot be captured"
        self._run, self._graph, self._compiler = run, ops.Graph, ops.compiler
        self._limits = GRAPHS[ops.NAME]  # of graphs kept beside those made at start
        self._kept: dict[Key, CapturedStep] = {}  # graphs made at start
        self._recent: OrderedDict[Key, CapturedStep] = OrderedDict()  # made later, the last replayed at the end
        self._seen: OrderedDict[Key, None] = OrderedDict()  # shapes that ran once and are not captured yet
        self._compiled = set[Key]()  # shapes whose kernels were compiled ahead; a graph may be dropped, these stay
        self.seconds = 0.0  # that a graph made at start took
        self._plain: dict[Key, None] = {}  # shapes that run plainly: no memory was left to capture them

    def __contains__(self, shape: Key) -> bool:
        return shape in self._kept or shape in self._recent

    @property
    def num_held(self) -> int:
        return len(self._kept) + len(self._recent)

    @property
    def nbytes(self) -> int:
        """Bytes that graphs hold, without the memory that they share."""
        return sum(graph.nbytes for graph in (*self._kept.values(), *self._recent.values()))

    @property
    def fallbacks(self) -> list[str]:
        """Why steps are launched one operator at a time although they could be captured: one reason, or none."""
        if not self._plain:
            return []
        kinds = "1 kind" if len(self._plain) == 1 else f"{len(self._plain)} kinds"
        return [f"no memory was left to capture {kinds} of step, the first of them {next(iter(self._plain))}"]

    def graph(self, shape: Key) -> CapturedStep:
        """The graph of a shape, which must exist."""
        return self._kept[shape] if shape in self._kept else self._recent[shape]

    def record(self, shapes: list[Key]) -> None:
        """Captures graphs that stay, the largest first: on a GPU the smaller ones then fit into its memory."""
        begin = time.perf_counter()
        shapes = sorted(shapes, reverse=True)  # type: ignore[type-var]
        self._compile(shapes)
        for shape in shapes:
            if self._graph.RUN_FIRST:
                self._run(shape)  # this loads what a capture may not
            if graph := self._make(shape):
                self._kept[shape] = graph
        self.seconds = (time.perf_counter() - begin) / max(len(shapes), 1)

    def replay(self, shape: Key) -> Any:
        """Runs one step of this shape, captured.

        On a CPU a new shape is captured at once. A GPU runs it plainly the first time: a capture takes as long as ten
        launches, and many shapes come only once.
        """
        graph = self._kept.get(shape, self._recent.get(shape))
        if graph is None:
            if self._graph.RUN_FIRST and shape not in self._seen and shape not in self._plain:
                self._remember(self._seen, shape, None)
                self._compile([shape])
                return self._run(shape)
            self._seen.pop(shape, None)
            graph = None if shape in self._plain else self._make(shape)
            if graph is None:
                return self._run(shape)
            # Old graphs are dropped after the new one is made, not before: making it has waited for everything that ran
            # on the device, so the dropped ones are no longer in use.
            self._remember(self._recent, shape, graph)
            while self._limits.room and len(self._recent) > 1 and self._held > self._limits.room:
                self._recent.popitem(last=False)
        elif shape in self._recent:
            self._recent.move_to_end(shape)
        return graph.replay()

    def _compile(self, shapes: list[Key]) -> None:
        """Compiles kernels on all cores, before the run that would compile them one after the other."""
        new = [shape for shape in shapes if shape not in self._compiled]
        if new and self._compiler:
            self._compiler.compile_ahead([partial(self._run, shape) for shape in new])
            self._compiled.update(new)

    @property
    def _held(self) -> int:
        return sum(graph.nbytes for graph in self._recent.values())

    def _make(self, shape: Key) -> CapturedStep | None:
        """Captures a shape, which computes nothing. None: there is no memory for it, now and from now on."""
        beside = next(iter((*self._kept.values(), *self._recent.values())), None)
        try:
            return self._graph(partial(self._run, shape), beside)
        except OutOfMemoryError:
            self._plain[shape] = None
            return None

    def _remember(self, shapes: OrderedDict[Key, Any], shape: Key, value: Any) -> None:
        shapes[shape] = value
        if len(shapes) > self._limits.most:
            shapes.popitem(last=False)


# Tokens of drafted steps: a GPU multiplies up to 16 in the time of one.
_PACKED = np.array([16 * part << octave for octave in range(16) for part in (2, 3)]) // 2


def packed_tokens(tokens: ArrayLike, most: ArrayLike) -> Any:
    """The tokens that a captured step runs, of the few numbers for which there are graphs: enough for these, and no
    more than 'most', which is one for each slot and for each of its drafts."""
    return np.minimum(_PACKED[np.searchsorted(_PACKED, tokens)], most)


def gpu_sizes(max_seqs: int, drafting: bool = False) -> list[int]:
    """1, 2, 4, then every 8th, up to max_seqs; powers of two for steps that draft, of which there are more kinds."""
    if drafting:
        return [*(1 << n for n in range((max_seqs - 1).bit_length())), max_seqs]
    sizes = [b for b in (1, 2, 4) if b < max_seqs] + list(range(8, max_seqs, 8))
    return [*sizes, max_seqs]
