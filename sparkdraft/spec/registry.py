"""The kinds of drafters, and how a named drafter is opened. packaged.py knows which one belongs to which model.

A drafter is a checkpoint without a tokenizer: a folder or a hub id. Its config.json says which kind it is. A new kind
is a line of KINDS and a module of its own; the plan and the engine know drafters only by their caps (spec/caps.py) and
their calls (spec/drafter.py). The drafter for the embedded model is in the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.core import UserError
from sparkdraft.models.blocks import Decoder
from sparkdraft.models.config import ModelConfig
from sparkdraft.spec import dflash, dflash_config
from sparkdraft.spec.caps import DrafterCaps
from sparkdraft.spec.dflash_caps import caps_of
from sparkdraft.spec.drafter import Drafter
from sparkdraft.spec.packaged import ASSETS, EMBEDDED
from sparkdraft.spec.packaged import default_drafter as default_drafter
from sparkdraft.weights.checkpoint import Checkpoint, open_checkpoint
from sparkdraft.weights.loader import Loader, WeightSource


class DrafterKind(Protocol):
    """One kind of drafters. 'config' is what its own `read` returned."""

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json belongs to a drafter of this kind."""

    def read(self, config: Mapping[str, Any]) -> Any:
        """Read a config.json. Raises UserError."""

    def check_fits(self, config: Any, target: ModelConfig) -> None:
        """Raises UserError if the drafter was not made for a target of this shape."""

    def caps(self, config: Any) -> DrafterCaps: ...

    def build(
        self, config: Any, load: Loader, ops: ModuleType, target: Decoder, kv: DenseKV, context: int, max_seqs: int
    ) -> Drafter:
        """Build the drafter of a checkpoint. kv: shaped as its caps say. context, max_seqs: upper limits."""


class DFlashKind:
    def recognises(self, config: Mapping[str, Any]) -> bool:
        return True  # it is asked last, and refuses by name what it does not know

    read = staticmethod(dflash_config.DFlashConfig.read)
    check_fits = staticmethod(dflash_config.check_fits)
    caps = staticmethod(caps_of)
    build = staticmethod(dflash.build)


KINDS: tuple[DrafterKind, ...] = (DFlashKind(),)


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A drafter to be loaded: its kind and config, and where its weights are."""

    kind: DrafterKind
    config: Any  # as the kind's `read` returned it
    source: WeightSource

    @property
    def caps(self) -> DrafterCaps:
        return self.kind.caps(self.config)

    def build(
        self, load: Loader, ops: ModuleType, target: Decoder, kv: DenseKV, context: int, max_seqs: int
    ) -> Drafter:
        return self.kind.build(self.config, load, ops, target, kv, context, max_seqs)


def find_drafter(name: str, target: ModelConfig) -> DraftSource:
    """Find a drafter by name, read its config and check that it fits. Raises UserError."""
    checkpoint = open_drafter(name)
    kind = next(k for k in KINDS if k.recognises(checkpoint.config))
    config = kind.read(checkpoint.config)
    kind.check_fits(config, target)
    return DraftSource(kind, config, checkpoint)


def open_drafter(name: str) -> Checkpoint:
    """Open a folder, a hub id, or the name of a drafter inside the package. Raises UserError."""
    if name in EMBEDDED.values() and not Path(name).is_dir():
        return open_checkpoint(str(ASSETS / name))
    if name.endswith(".gguf"):
        raise UserError(f"The drafter {name} is a GGUF file, which is not supported: pass a folder with safetensors.")
    return open_checkpoint(name)
