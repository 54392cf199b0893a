"""The drafter that the engine runs with when the user names none, opened: drafters/choice.py decides."""

from __future__ import annotations

from typing import NamedTuple

from sparkdraft.core import Fallback
from sparkdraft.drafters.choice import pick
from sparkdraft.drafters.registry import DraftSource, find_drafter, find_head
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.weights.checkpoint import Checkpoint


class Choice(NamedTuple):
    drafter: DraftSource | None
    fallbacks: list[Fallback]


def choose(model: str, config: ModelConfig, checkpoint: Checkpoint | None = None) -> Choice:
    """model: as the user named it. checkpoint: the model's, which may hold a head that drafts."""

    def head() -> DraftSource:
        assert checkpoint is not None, "a head was found in it"
        return find_head(checkpoint, config)

    names = checkpoint.names() if checkpoint else ()
    found = pick(model, config, names, lambda folder: find_drafter(folder, config), head)
    return Choice(found.drafter, found.fallbacks)
