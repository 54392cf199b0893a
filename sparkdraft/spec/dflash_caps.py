"""What a DFlash drafter declares, from its config alone (spec/caps.py). No torch."""

from __future__ import annotations

from collections.abc import Collection

from sparkdraft.plan.memory import drafter_bytes
from sparkdraft.spec.caps import DrafterCaps
from sparkdraft.spec.dflash_config import DFlashConfig


def caps_of(draft: DFlashConfig, names: Collection[str] = ()) -> DrafterCaps:
    """names: of the tensors in its file, where that is known: it may bring an embedding and a head of its own."""
    num_weights = drafter_bytes(draft, 1, _has(names, "embed_tokens.weight"), _has(names, "lm_head.weight"))
    own_head = draft.draft_vocab_size < draft.model.vocab_size
    sizes = (draft.taps, draft.block_size - 1, draft.model.attention, num_weights)
    return DrafterCaps("dflash", *sizes, own_head=own_head, sees=draft.sees)


def _has(names: Collection[str], name: str) -> bool:
    """In the file's own prefix or without one, as spec/dflash.py looks for it. Training's copy of the target's head has
    another name."""
    return any(each == name or each.endswith(f".{name}") for each in names)
