"""The kinds of drafters, and how a named drafter is opened. packaged.py knows which one belongs to which model.

A drafter is a checkpoint without a tokenizer: a folder or a hub id. Its config.json says which kind it is. A new kind
is a line of KINDS and a module of its own; the plan and the engine know drafters only by their caps (spec/caps.py) and
their calls (spec/drafter.py). The drafter for the embedded model is in the package. An MTP head is no checkpoint but a
part of the target's.
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
from sparkdraft.models.registry import read_config
from sparkdraft.spec import assistant, assistant_config, dflash, dflash_config, mtp, mtp_config
from sparkdraft.spec.caps import DrafterCaps
from sparkdraft.spec.dflash_caps import caps_of
from sparkdraft.spec.draft_configs import DraftConfig
from sparkdraft.spec.drafter import Drafter
from sparkdraft.spec.packaged import ASSETS, EMBEDDED
from sparkdraft.spec.packaged import default_drafter as default_drafter
from sparkdraft.weights.checkpoint import Checkpoint, open_checkpoint
from sparkdraft.weights.loader import Loader, WeightSource


class DrafterBuilder(Protocol):
    """What makes a drafter of its config, once that is read."""

    def caps(self, config: Any) -> DrafterCaps: ...

    def build(
        self, config: Any, load: Loader, ops: ModuleType, target: Decoder, kv: DenseKV, context: int, max_seqs: int
    ) -> Drafter:
        """Build the drafter of a checkpoint. kv: shaped as its caps say. context, max_seqs: upper limits."""


class DrafterKind(DrafterBuilder, Protocol):
    """One kind of drafters that are checkpoints of their own. 'config' is what its own `read` returned."""

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json belongs to a drafter of this kind."""

    def read(self, config: Mapping[str, Any]) -> Any:
        """Read a config.json. Raises UserError."""

    def check_fits(self, config: Any, target: ModelConfig) -> None:
        """Raises UserError if the drafter was not made for a target of this shape."""


class DFlashKind:
    def recognises(self, config: Mapping[str, Any]) -> bool:
        return True  # it is asked last, and refuses by name what it does not know

    read = staticmethod(dflash_config.DFlashConfig.read)
    check_fits = staticmethod(dflash_config.check_fits)
    caps = staticmethod(caps_of)
    build = staticmethod(dflash.build)


class AssistantKind:
    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == assistant_config.TYPE

    read = staticmethod(assistant_config.AssistantConfig.read)
    check_fits = staticmethod(assistant_config.check_fits)
    caps = staticmethod(assistant_config.caps_of)
    build = staticmethod(assistant.build)


class MtpBuilder:
    caps = staticmethod(mtp_config.caps_of)
    build = staticmethod(mtp.build)


KINDS: tuple[DrafterKind, ...] = (AssistantKind(), DFlashKind())


def builder_of(draft: DraftConfig) -> DrafterBuilder:
    if isinstance(draft, mtp_config.MtpConfig):
        return MtpBuilder()
    return AssistantKind() if isinstance(draft, assistant_config.AssistantConfig) else DFlashKind()


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A drafter to be loaded: its kind and config, and where its weights are."""

    kind: DrafterBuilder
    config: Any  # as the kind reads it
    source: WeightSource

    @property
    def caps(self) -> DrafterCaps:
        if isinstance(self.kind, DFlashKind):  # whose file may bring an embedding and a head of its own
            return caps_of(self.config, self.source.names())
        return self.kind.caps(self.config)

    def build(
        self, load: Loader, ops: ModuleType, target: Decoder, kv: DenseKV, context: int, max_seqs: int
    ) -> Drafter:
        return self.kind.build(self.config, load, ops, target, kv, context, max_seqs)


def find_drafter(name: str, target: ModelConfig) -> DraftSource:
    """Find a drafter by name, read its config and check that it fits. Raises UserError."""
    checkpoint = open_drafter(name)
    if mtp_config.is_target(checkpoint.config):  # another file of the target, which may have kept its head
        return find_head(checkpoint, target, in_target=False)
    kind = next(k for k in KINDS if k.recognises(checkpoint.config))
    config = kind.read(checkpoint.config)
    kind.check_fits(config, target)
    return DraftSource(kind, config, checkpoint)


def find_head(checkpoint: Checkpoint, target: ModelConfig, in_target: bool = True) -> DraftSource:
    """The MTP head in a checkpoint of the target, or in another one of its shape. Raises UserError."""
    names = frozenset(checkpoint.names())
    head = mtp_config.MtpConfig.of(target if in_target else read_config(checkpoint.config), names, in_target)
    mtp_config.check_names(head, names, checkpoint.path)
    mtp_config.check_fits(head, target)
    return DraftSource(MtpBuilder(), head, checkpoint)


def open_drafter(name: str) -> Checkpoint:
    """Open a folder, a hub id, or the name of a drafter inside the package. Raises UserError."""
    if name in EMBEDDED.values() and not Path(name).is_dir():
        return open_checkpoint(str(ASSETS / name))
    if name.endswith(".gguf"):
        raise UserError(f"The drafter {name} is a GGUF file, which is not supported: pass a folder with safetensors.")
    return open_checkpoint(name)
