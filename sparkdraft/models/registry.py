"""Finds the architecture that reads a config.json, by its `model_type`. No torch.

An architecture is a file of this folder with `MODEL_TYPES`, `read` and `build`, or such a module handed to `register`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from sparkdraft.core import UserError
from sparkdraft.kernels.ops import Ops
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.util.discover import found_in
from sparkdraft.util.fields import text

if TYPE_CHECKING:
    from sparkdraft.models.common.blocks import Decoder
    from sparkdraft.weights.loader import Loader


class Architecture(Protocol):
    """One file of this folder, or an object with the same functions."""

    @property
    def MODEL_TYPES(self) -> Sequence[str]:
        """The values of `model_type` in the config.json files that it reads."""

    def read(self, config: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json. Raises UserError if it asks for a computation that is not built."""

    def build(self, config: ModelConfig, load: Loader, ops: Ops, context: int) -> Decoder:
        """Build the model, with weights. context: the most positions that it will run at."""


_known: dict[str, Architecture] = {}


def register(made: Architecture) -> None:
    """Add an architecture that is not a file of this folder, before a model of its type is opened."""
    if taken := sorted(set(model_types()) & set(made.MODEL_TYPES)):
        raise UserError(f"there is an architecture for model_type {taken[0]} already")
    _known.update(dict.fromkeys(made.MODEL_TYPES, made))


def model_types() -> tuple[str, ...]:
    """Every `model_type` that can be read."""
    if "llama" not in _known:
        for name, types in found_in("sparkdraft.models", "MODEL_TYPES"):
            module: Any = import_module(f"sparkdraft.models.{name}")
            _known.update(dict.fromkeys(types, module))
    return tuple(_known)


def architecture(model_type: str) -> Architecture:
    if model_type not in model_types():
        raise UserError(f"architecture '{model_type}' is not supported; supported are {', '.join(model_types())}")
    return _known[model_type]


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json with its own architecture's file. Raises UserError."""
    if not (model_type := text(config, "model_type")):
        raise UserError("config.json has no 'model_type': it does not describe a decoder this engine knows")
    return architecture(model_type).read(config)
