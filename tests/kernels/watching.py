"""Which kernels an engine runs, layer by layer.

Kernels are seen where they are launched: the C functions of the native kernels, Triton's launches with their tiles, and
torch's operators that compute. A captured step launches nothing, so a step is watched with CUDA graphs and compiled
steps off; they were made by the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparkdraft.core import Batch, SamplingParams
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.host_steps import HostSteps
from sparkdraft.kernels.ops import Norm, Normed
from sparkdraft.models.common.blocks import Layer, Step
from sparkdraft.operate.instrument import replaced

ENDS = -1  # in place of a layer's number: embedding, final norm and head
TILE = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
# Torch's functions that make, look at or describe tensors and compute nothing.
LOOKING = {
    *("__get__", "__set__", "dim", "size", "numel", "stride", "element_size", "data_ptr", "storage_offset", "view"),
    *("is_contiguous", "empty", "empty_like", "split", "__getitem__", "__len__", "unsqueeze", "squeeze", "reshape"),
    *("expand", "transpose", "permute", "t", "flatten", "unflatten", "tolist", "item", "numpy", "__hash__", "unbind"),
    *("contiguous", "movedim", "chunk", "narrow", "is_floating_point", "expand_as", "detach", "record_stream"),
}


class Layered(Protocol):
    layers: Any  # a sequence of `Layer`


class Ran(NamedTuple):
    layer: int  # or ENDS
    kernel: str
    tile: tuple[int, ...] = ()  # as a Triton kernel was given it


@dataclass(slots=True)
class Watch:
    ran: list[Ran] = field(default_factory=list)
    layer: int = ENDS

    def note(self, kernel: str, tile: tuple[int, ...] = ()) -> None:
        self.ran.append(Ran(self.layer, kernel, tile))

    def of(self, layer: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((each.kernel, each.tile) for each in self.ran if each.layer == layer)


@contextmanager
def watching(model: Layered, kernels: str) -> Iterator[Watch]:
    """Records the kernels that run within the block. model: the target, or a drafter made of layers. kernels: the name
    of its kernel module."""
    watch, layers = Watch(), model.layers
    model.layers = [_Watched(layer, number, watch) for number, layer in enumerate(layers)]
    try:
        with ExitStack() as stack:
            if kernels == "native":
                stack.enter_context(_native(watch))
            elif kernels == "cuda":
                stack.enter_context(_triton(watch))
            stack.enter_context(_Operators(watch))
            yield watch
    finally:
        model.layers = layers


@dataclass(frozen=True, slots=True)
class _Watched:
    inner: Layer
    number: int
    watch: Watch

    @property
    def input_norm(self) -> Norm:
        return self.inner.input_norm

    @property
    def matrices(self) -> Any:
        return self.inner.matrices

    def add_to(self, normed: Normed, step: Step, kv: Any, then: Norm) -> Normed:
        self.watch.layer = self.number
        added = self.inner.add_to(normed, step, kv, then)
        self.watch.layer = ENDS
        return added


@contextmanager
def _native(watch: Watch) -> Iterator[None]:
    from sparkdraft.kernels.native.graph import KERNELS
    from sparkdraft.kernels.native.library import c

    originals = {name: getattr(c, f"sd_{name}") for name in KERNELS}

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            watch.note(name)
            return function(*arguments)

        return call

    with replaced(*((c, f"sd_{name}", noted(name, function)) for name, function in originals.items())):
        yield


@contextmanager
def _triton(watch: Watch) -> Iterator[None]:
    """Record Triton's launches, which all pass its class's `run`; the interpreter has a class of its own."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *arguments: Any, **options: Any) -> Any:
            tile = tuple(options[name] for name in TILE if isinstance(options.get(name), int))
            watch.note(self.fn.__name__, tile)
            return function(self, *arguments, **options)

        return run

    with replaced(*((kind, "run", noted(kind.run)) for kind in (JITFunction, InterpretedFunction))):
        yield


class _Operators(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name not in LOOKING:
            self.watch.note(f"torch.{name.strip('_')}")
        return func(*args, **(kwargs or {}))


def run_watched(engine: Engine, prompt: int = 40) -> tuple[Watch, Watch]:
    """Return the kernels of a prompt's step and of a decode step: those of the target, not of sampling or drafting."""
    runner, run, seen = engine.runner, engine.runner.run, list[Watch]()

    def watched(batch: Batch) -> Tensor:
        with watching(runner.model, engine.plan.kernels) as watch:
            logits = run(batch)
        seen.append(watch)
        return logits

    with replaced(
        (runner, "run", watched),
        (runner, "graphs", None),
        (engine, "steps", HostSteps(runner, engine.sampler, engine.drafting)),
    ):
        name = engine.add(list(range(prompt)), SamplingParams(8, num_draft=0, ignore_eos=True))
        engine.step()
        engine.step()
        engine.abort(name)
        while engine.has_work:
            engine.step()
    return seen[0], seen[1]
