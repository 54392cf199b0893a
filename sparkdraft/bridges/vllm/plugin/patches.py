"""The patch of vLLM's TurboQuant cache. It is applied when vLLM imports the module; no file is edited.

A module that is not what the patch was written for is left as it is, and one line says so.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from sparkdraft.bridges.vllm.broken import parsed
from sparkdraft.core import UserError

NAME = "turboquant-verify-graphs"
PROBLEM = (
    "texts turn into garbage with TurboQuant and drafts, because CUDA graphs of verify batches keep the lengths of "
    "their trial run"
)
MODULE = "vllm.v1.attention.backends.turboquant_attn"
SINCE = "0.20"  # the first version with the problem (vllm #40831, #52475, #53180); no later release is without it

NOT_NEEDED = "not needed"  # by this version
SKIPPED = "skipped"  # left out by the user
WAITING = "waiting"  # its module has not been imported in this process
APPLIED = "applied"
FAILED = "failed"  # the code is not what the patch was written for


class DoesNotApply(Exception):
    """The module is not what the patch was written for; the text says how."""


def apply(module: ModuleType) -> None:
    """Restricts CUDA graphs to plain decoding. Raises DoesNotApply."""
    try:
        builder, support = module.TurboQuantMetadataBuilder, module.AttentionCGSupport
    except AttributeError as error:
        raise DoesNotApply(str(error)) from None
    if "supports_spec_as_decode=False" not in inspect.getsource(builder):
        raise DoesNotApply("verify batches are handled as decoding there")
    if builder._cudagraph_support != support.UNIFORM_BATCH:
        raise DoesNotApply("no graphs are captured of such batches anyway")
    builder._cudagraph_support = support.UNIFORM_SINGLE_TOKEN_DECODE


class Patch:
    """The patch in one process."""

    def __init__(self, version: str, skip: str, say: Callable[[str], None], module: str = MODULE) -> None:
        """skip: names of patches to leave out, separated by commas."""
        self.version, self._say, self._module = version, say, module
        if NAME in (name.strip() for name in skip.split(",")):
            self.state = SKIPPED
            return
        try:
            self.state = WAITING if parsed(version) >= parsed(SINCE) else NOT_NEEDED  # 0.20.2rc1 counts as 0.20.2
        except UserError as error:  # not a version
            self._fail(str(error))

    def bind(self) -> None:
        """Applies the patch if it is needed: now if its module is loaded, else right after it is."""
        if self.state == WAITING and self._module in sys.modules:
            self._apply(sys.modules[self._module])
        elif self.state == WAITING:
            sys.meta_path.insert(0, _AfterImport(self._module, self._apply))

    def _apply(self, module: ModuleType) -> None:
        try:
            apply(module)
        except DoesNotApply as error:
            self._fail(str(error))
        else:
            self.state = APPLIED
            self._say(f"sparkdraft: the patch {NAME} is applied to vLLM {self.version}: {PROBLEM}")

    def _fail(self, why: str) -> None:
        self.state = FAILED
        self._say(f"sparkdraft: the patch {NAME} does not apply to vLLM {self.version}: {why}; without it, {PROBLEM}")


class _AfterImport(MetaPathFinder):
    """Calls back once, after a module of this name was executed. The other finders find it."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            del loader.exec_module  # the class's own again
            execute(module)
            self._then(module)

        loader = spec.loader
        loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
