"""What a DFlash drafter declares, from its config alone (spec/caps.py). No torch."""

from __future__ import annotations

from sparkdraft.plan.memory import drafter_bytes
from sparkdraft.spec.caps import DrafterCaps
from sparkdraft.spec.dflash_config import DFlashConfig


def caps_of(draft: DFlashConfig) -> DrafterCaps:
    num_weights = drafter_bytes(draft, itemsize=1)
    return DrafterCaps("dflash", draft.taps, draft.block_size - 1, draft.model.attention, num_weights)
