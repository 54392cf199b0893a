"""Dimensions of published models and drafters, without their weights. No torch.

Models with equal layers are a line of SHAPES. For the others, and for published drafters, shapes.json has their
config.json. random_model.py fills them with random weights; `sparkdraft plan` needs the dimensions alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.drafters.base import DraftConfig, kinds
from sparkdraft.drafters.find import read_draft_config
from sparkdraft.models.common.config import ModelConfig, uniform_config
from sparkdraft.models.registry import read_config
from sparkdraft.util.names import did_you_mean, spelled

_qwen3, _llama = partial(uniform_config, "qwen3", qk_norm=True), partial(uniform_config, "llama")

SHAPES = {
    "tiny": _qwen3(8, 64, 128, 4, 2, 32, 512, 4096, 1e-6, 1e6, None, True, qk_norm=True),  # does it run at all?
    "smollm2-135m": _llama(30, 576, 1536, 9, 3, 64, 49152, 8192, 1e-5, 1e5, None, True),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e-6, 1e6, None, True, qk_norm=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, 8, 128, 151936, 40960, 1e-6, 1e6, None, True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e-6, 1e6, None, False, qk_norm=True),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8, 128, 128256, 131072, 1e-5, 5e5, None, False),
}
_FILES = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
TARGET_FILES: dict[str, dict[str, Any]] = _FILES["targets"]  # as in config.json
DRAFTER_FILES: dict[str, dict[str, Any]] = _FILES["drafters"]  # DFlash in z-lab's dialect; some lack RoPE's theta


def targets() -> list[str]:
    """All names of models; util/names.py allows other spellings."""
    return [*SHAPES, *TARGET_FILES]


def drafters() -> list[str]:
    return [*_drafter_shapes(), *DRAFTER_FILES]


def _drafter_shapes() -> dict[str, Callable[[ModelConfig], DraftConfig]]:
    return {name: shape for kind in kinds().values() for name, shape in kind.shapes.items()}


def shape(name: str) -> ModelConfig:
    found = spelled(name, targets())
    if found is None:
        raise UserError(f"shape '{name}' is not known: {_known(name, targets())}")
    return read_config(TARGET_FILES[found]) if found in TARGET_FILES else SHAPES[found]


def drafter_shape(name: str, target: ModelConfig) -> DraftConfig:
    """Return the drafter of this name, if it fits the target."""
    found = spelled(name, drafters())
    if found is None:
        raise UserError(f"drafter shape '{name}' is not known: {_known(name, drafters())}")
    shapes = _drafter_shapes()
    draft = shapes[found](target) if found in shapes else read_draft_config(DRAFTER_FILES[found])
    draft.check_fits(target)
    return draft


def _known(name: str, names: list[str]) -> str:
    question = did_you_mean(name, names)
    return f"{question} Known are {', '.join(names)}" if question else f"known are {', '.join(names)}"
