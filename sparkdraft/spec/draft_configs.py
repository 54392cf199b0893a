"""The configs of drafters, whatever their kind: read, checked and declared. No torch.

spec/registry.py has what builds them. A kind that the plan and `bench offline --drafter-shape` know is a line of each
function here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkdraft.models.config import ModelConfig
from sparkdraft.spec import assistant_config, dflash_caps, dflash_config, mtp_config
from sparkdraft.spec.assistant_config import AssistantConfig
from sparkdraft.spec.caps import DrafterCaps
from sparkdraft.spec.dflash_config import DFlashConfig
from sparkdraft.spec.mtp_config import MtpConfig

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


def caps_of(draft: DraftConfig) -> DrafterCaps:
    if isinstance(draft, AssistantConfig):
        return assistant_config.caps_of(draft)
    return mtp_config.caps_of(draft) if isinstance(draft, MtpConfig) else dflash_caps.caps_of(draft)
