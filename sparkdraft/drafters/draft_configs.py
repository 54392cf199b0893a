"""The configs of drafters, whatever their kind: read, checked and declared. No torch.

drafters/registry.py has what builds them. A kind that the plan and `bench offline --drafter-shape` know is a line
of each function here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.drafters import assistant_config, dflash_caps, dflash_config, mtp_config
from sparkdraft.drafters.assistant_config import AssistantConfig
from sparkdraft.drafters.caps import DrafterCaps
from sparkdraft.drafters.dflash_config import DFlashConfig
from sparkdraft.drafters.mtp_config import MtpConfig
from sparkdraft.models.common.config import ModelConfig

DraftConfig = DFlashConfig | AssistantConfig | MtpConfig  # the last is found in the target's own file


def read_draft_config(config: Mapping[str, Any]) -> DraftConfig:
    """Raises UserError."""
    kind = AssistantConfig if config.get("model_type") == assistant_config.TYPE else DFlashConfig
    return kind.read(config)


def check_fits(draft: DraftConfig, target: ModelConfig) -> None:
    """Raises UserError if the drafter was not made for a target of this shape."""
    if isinstance(draft, AssistantConfig):
        assistant_config.check_fits(draft, target)
    elif isinstance(draft, MtpConfig):
        mtp_config.check_fits(draft, target)
    else:
        dflash_config.check_fits(draft, target)


def caps_of(draft: DraftConfig, names: Collection[str] = ()) -> DrafterCaps:
    """names: of the tensors in its file, where that is known."""
    if isinstance(draft, AssistantConfig):
        return assistant_config.caps_of(draft)
    return mtp_config.caps_of(draft) if isinstance(draft, MtpConfig) else dflash_caps.caps_of(draft, names)


def among(draft: DraftConfig, number: int, names: Collection[str] = ()) -> DraftConfig:
    """The same drafter, which drafts among so many ids. Raises UserError for one whose head cannot be cut."""
    if isinstance(draft, AssistantConfig) and draft.num_clusters:
        raise _uncut("this assistant's head scores a few clusters of ids, not all rows")
    if isinstance(draft, DFlashConfig) and dflash_caps.has_table(names, "lm_head.weight"):
        raise _uncut(f"this drafter brings a head of its own, of {draft.draft_vocab_size} ids")
    whole = draft.model.vocab_size if isinstance(draft, DFlashConfig) else 0
    return replace(draft, draft_vocab_size=number if number < draft.model.vocab_size else whole)


def _uncut(why: str) -> UserError:
    return UserError(f"draft_vocab leaves out rows of the head that a drafter reads, and {why}: leave draft_vocab out")
