"""The kinds of drafters, and how a named drafter is opened. packaged.py knows which one belongs to which model.

A drafter is a checkpoint without a tokenizer: a folder or a hub id. Its config.json says which kind it is. A new kind
is a line of KINDS and a module of its own; the plan and the engine know drafters only by their caps
(drafters/caps.py) and
their calls (drafters/drafter.py). The drafter for the embedded model is in the package. An MTP head is no
checkpoint but a part of the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.core import UserError
from sparkdraft.drafters import assistant, assistant_config, dflash, dflash_config, mtp, mtp_config
from sparkdraft.drafters.caps import DrafterCaps
from sparkdraft.drafters.dflash_caps import caps_of
from sparkdraft.drafters.draft_configs import DraftConfig, among
from sparkdraft.drafters.drafter import Drafter
from sparkdraft.drafters.id_files import read_ids
from sparkdraft.drafters.packaged import ASSETS, EMBEDDED
from sparkdraft.drafters.packaged import default_drafter as default_drafter
from sparkdraft.kernels.ops import Ops
from sparkdraft.models.common.blocks import Decoder
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.registry import read_config
from sparkdraft.plan.weight_formats import drafter_at_load
from sparkdraft.weights.checkpoint import Checkpoint, open_checkpoint
from sparkdraft.weights.loader import Loader, WeightSource


class DrafterBuilder(Protocol):
    """What makes a drafter of its config, once that is read."""

    def caps(self, config: Any) -> DrafterCaps: ...

    def build(
        self,
        config: Any,
        load: Loader,
        ops: Ops,
        target: Decoder,
        kv: DenseKV,
        context: int,
        max_seqs: int,
        ids: Tensor | None,
    ) -> Drafter:
        """Build the drafter of a checkpoint. kv: shaped as its caps say. context, max_seqs: upper limits. ids: the only
        ones to be drafted, ascending, in place of the file's; None: as the file says."""


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
    ids: tuple[int, ...] | None = None  # the only ones to be drafted, ascending; None: as the file says
    weights: str = "auto"  # how its floats are quantised at load, as of EngineConfig.drafter_weights

    @property
    def caps(self) -> DrafterCaps:
        caps = self.kind.caps(self.config)
        if isinstance(self.kind, DFlashKind):  # whose file may bring an embedding and a head of its own
            caps = caps_of(self.config, self.source.names())
        return drafter_at_load(caps, self.weights)

    def asked(self, weights: str, vocabulary: str, target: ModelConfig) -> DraftSource:
        """The same with what the user asks for. vocabulary: a file of ids, or "". Raises UserError."""
        source = replace(self, weights=weights)
        if not vocabulary:
            return source
        ids, names = read_ids(vocabulary, target.vocab_size), self.source.names()
        config = among(self.config, len(ids), names)
        return replace(source, config=config, ids=ids if len(ids) < target.vocab_size else None)

    def build(self, load: Loader, ops: Ops, target: Decoder, kv: DenseKV, context: int, max_seqs: int) -> Drafter:
        ids = None if self.ids is None else torch.tensor(self.ids, dtype=torch.int64, device=load.device)
        return self.kind.build(self.config, load, ops, target, kv, context, max_seqs, ids)


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
