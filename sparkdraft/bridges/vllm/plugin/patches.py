"""Patches of another program's modules, each bound to the versions that need it and applied when its module is loaded.

A patch says which versions it is for. In others it is not looked at: no module is imported for it, and nothing is
printed. In one of its versions it waits until the program itself imports the module, looks whether the code there is
what it was written for, and changes it. A patch that finds something else says so in one line and changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

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
    module: str  # the module that is changed, by its whole name
    apply: Callable[[ModuleType], None]  # raises DoesNotApply or DoesNotConcern
    since: str  # the first version that has the problem
    until: str  # the first version that does not; empty: none is known
    sources: tuple[str, ...]

    def concerns(self, version: str) -> bool:
        """Whether this version has the problem. Builds before a release count as that release (0.20.2rc1 as 0.20.2)."""
        number = parsed(version)
        return parsed(self.since) <= number and (not self.until or number < parsed(self.until))


class Patches:
    """The patches of one process, and what became of each."""

    def __init__(self, patches: Sequence[Patch], version: str, skip: str, say: Callable[[str], None]) -> None:
        """skip: names, separated by commas. say: gets a line about what did not work."""
        self.patches, self.version, self._say = patches, version, say
        self.states: dict[str, str] = {}
        left_out = {name.strip() for name in skip.split(",") if name.strip()}
        if unknown := sorted(left_out - {patch.name for patch in patches}):
            names = ", ".join(patch.name for patch in patches)
            say(f"sparkdraft: no patch is named {', '.join(unknown)}; there are {names}")
        for patch in patches:
            self.states[patch.name] = self._first_state(patch, left_out)

    def bind(self) -> None:
        """Apply what is needed: at once where its module is loaded already, else when it is."""
        waiting = [patch for patch in self.patches if self.states[patch.name] == WAITING]
        for patch in waiting:
            if patch.module in sys.modules:
                self._apply(patch, sys.modules[patch.module])
        if late := {patch.module for patch in waiting if self.states[patch.name] == WAITING}:
            sys.meta_path.insert(0, _AfterImport(late, self._loaded))

    def count(self, state: str) -> int:
        return sum(each == state for each in self.states.values())

    def _first_state(self, patch: Patch, left_out: set[str]) -> str:
        if patch.name in left_out:
            return SKIPPED
        try:
            return WAITING if patch.concerns(self.version) else NOT_NEEDED
        except UserError as error:  # a version that is no number
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
    """Calls back after a module of the given names has been executed. Finds nothing itself: the others do."""

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
    """A loader that hands on to another, and says when the module is whole."""

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
