"""Patches of vLLM's modules. Each is bound to the versions that need it and is applied when vLLM imports the module.

In other versions nothing is imported for a patch and nothing is printed. A patch that finds other code than it was
written for says so in one line and changes nothing. No patch edits a file.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from sparkdraft.bridges.vllm.broken import parsed
from sparkdraft.core import UserError

NOT_NEEDED = "not needed"  # this version, or this machine, does not have the problem
SKIPPED = "skipped"  # left out by the user
WAITING = "waiting"  # its module has not been imported in this process
APPLIED = "applied"
FAILED = "failed"  # the code is not what the patch was written for
STATES = (NOT_NEEDED, SKIPPED, WAITING, APPLIED, FAILED)


class DoesNotApply(Exception):
    """The module is not what the patch was written for; the text says how."""


class DoesNotConcern(Exception):
    """This machine does not have the problem."""


@dataclass(frozen=True, slots=True)
class Patch:
    name: str
    problem: str  # one line, for users
    module: str  # full name of the module to change
    apply: Callable[[ModuleType], None]  # raises DoesNotApply or DoesNotConcern
    since: str  # the first version with the problem; no release without it is known
    sources: tuple[str, ...]


def _attribute(module: ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        raise DoesNotApply(f"{module.__name__} has no {name}")
    return getattr(module, name)


def _turboquant_graphs(module: ModuleType) -> None:
    """Restricts CUDA graphs to plain decoding: a graph of a verify batch keeps the lengths of its trial run."""
    builder, support = _attribute(module, "TurboQuantMetadataBuilder"), _attribute(module, "AttentionCGSupport")
    if "supports_spec_as_decode=False" not in inspect.getsource(builder):
        raise DoesNotApply("verify batches are handled as decoding there")
    if builder._cudagraph_support != support.UNIFORM_BATCH:
        raise DoesNotApply("no graphs are captured of such batches anyway")
    builder._cudagraph_support = support.UNIFORM_SINGLE_TOKEN_DECODE


def _keys_by_layer(module: ModuleType) -> None:
    """Normalises the drafter's context keys layer by layer. The kernel for CPUs uses the weights of the first layer for
    all; it is tried first, so a fixed build stays as it is."""
    model, torch, ops = (_attribute(module, name) for name in ("DFlashQwen3Model", "torch", "ops"))
    if not _attribute(module, "current_platform").is_cpu():
        raise DoesNotConcern
    if not hasattr(model, "_normalize_context_k"):
        raise DoesNotApply("context keys are not normalised by _normalize_context_k")
    keys, weights = torch.ones(2, 1, 1, 16), torch.tensor([[1.0], [2.0]]).expand(2, 16).contiguous()
    normed = torch.empty_like(keys)
    ops.rms_norm(normed, keys, weights, 1e-6)
    if normed[1, 0, 0, 0] > 1.5 or "_k_norm_weights[layer_idx]" in inspect.getsource(model._normalize_context_k):
        raise DoesNotConcern

    def by_layer(self: Any, all_k: Any) -> Any:
        found = torch.empty_like(all_k)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(found[layer], all_k[layer], weight, self._rms_norm_eps)
        return found

    model._normalize_context_k = by_layer


PATCHES = (
    Patch(
        "turboquant-verify-graphs",
        "texts turn into garbage with TurboQuant and drafts, because CUDA graphs of verify batches keep the "
        "lengths of their trial run",
        "vllm.v1.attention.backends.turboquant_attn",
        _turboquant_graphs,
        "0.20",
        ("vllm #40831", "vllm #52475", "vllm #53180"),
    ),
    Patch(
        "cpu-dflash-key-norm",
        "a DFlash drafter on a CPU reads its context with the key norm of its first layer in all layers, and fewer of "
        "its drafts are accepted",
        "vllm.model_executor.models.qwen3_dflash",
        _keys_by_layer,
        "0.25",
        ("vllm/model_executor/models/qwen3_dflash.py of 0.31 and 0.32",),
    ),
)


class Patches:
    """The patches of one process and the state of each."""

    def __init__(self, patches: Sequence[Patch], version: str, skip: str, say: Callable[[str], None]) -> None:
        """skip: names, separated by commas. say: prints a line."""
        self.patches, self.version, self._say = patches, version, say
        self.states: dict[str, str] = {}
        left_out = {name.strip() for name in skip.split(",") if name.strip()}
        if unknown := sorted(left_out - {patch.name for patch in patches}):
            names = ", ".join(patch.name for patch in patches)
            say(f"sparkdraft: no patch is named {', '.join(unknown)}; there are {names}")
        for patch in patches:
            self.states[patch.name] = self._first_state(patch, left_out)

    def bind(self) -> None:
        """Applies what is needed: now if its module is loaded, else right after it is."""
        waiting = [patch for patch in self.patches if self.states[patch.name] == WAITING]
        for patch in waiting:
            if patch.module in sys.modules:
                self._apply(patch, sys.modules[patch.module])
        if late := {patch.module for patch in waiting if self.states[patch.name] == WAITING}:
            sys.meta_path.insert(0, _AfterImport(late, self._loaded))

    def _first_state(self, patch: Patch, left_out: set[str]) -> str:
        if patch.name in left_out:
            return SKIPPED
        try:
            # 0.20.2rc1 counts as 0.20.2
            return WAITING if parsed(self.version) >= parsed(patch.since) else NOT_NEEDED
        except UserError as error:  # not a version
            self._say(f"sparkdraft: no patch is applied: {error}")
            return FAILED

    def _loaded(self, module: ModuleType) -> None:
        for patch in self.patches:
            if patch.module == module.__name__ and self.states[patch.name] == WAITING:
                self._apply(patch, module)

    def _apply(self, patch: Patch, module: ModuleType) -> None:
        try:
            patch.apply(module)
        except DoesNotConcern:
            self.states[patch.name] = NOT_NEEDED
        except DoesNotApply as error:
            self.states[patch.name] = FAILED
            self._say(
                f"sparkdraft: the patch {patch.name} does not apply to vLLM {self.version}: {error}; "
                f"without it, {patch.problem}"
            )
        else:
            self.states[patch.name] = APPLIED
            self._say(f"sparkdraft: the patch {patch.name} is applied to vLLM {self.version}: {patch.problem}")


class _AfterImport(MetaPathFinder):
    """Calls back after a module of the given names was executed. The other finders find it."""

    def __init__(self, names: set[str], then: Callable[[ModuleType], None]) -> None:
        self._names, self._then = names, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Calling(spec.loader, self._then)
                return spec
        return None


class _Calling(Loader):
    """A loader that delegates to another and calls back when the module is complete."""

    def __init__(self, loader: Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)
