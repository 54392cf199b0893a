"""What a DFlash drafter declares, from its config and the names of its tensors (drafters/caps.py). No torch."""

from __future__ import annotations

from collections.abc import Collection

from sparkdraft.drafters.caps import DrafterCaps
from sparkdraft.drafters.dflash_config import DFlashConfig
from sparkdraft.models.common.layers import AttentionSpec
from sparkdraft.models.common.sizes import Matrices, count, layer_matrices


def caps_of(draft: DFlashConfig, names: Collection[str] = ()) -> DrafterCaps:
    """names: of the tensors in its file, where that is known: it may bring an embedding and a head of its own."""
    vocab, hidden, number = draft.model.vocab_size, draft.model.hidden_size, draft.draft_vocab_size
    own_head = number < vocab or has_table(names, "lm_head.weight")  # of its file, or rows of the target's
    embedding = vocab * hidden if has_table(names, "embed_tokens.weight") else 0
    matrices = (*_matrices(draft), *(((number, hidden),) if own_head else ()))
    return DrafterCaps(
        "dflash",
        draft.taps,
        draft.block_size - 1,
        draft.model.attention,
        count(matrices) + embedding,
        own_head=own_head,
        num_read=count(matrices),
        num_ids=number if number < vocab else 0,
        matrices=matrices,
        sees=draft.sees,
    )


def has_table(names: Collection[str], name: str) -> bool:
    """In the file's own prefix or without one, as drafters/dflash.py looks for it. Training's copy of the target's
    head has another name."""
    return any(each == name or each.endswith(f".{name}") for each in names)


def _matrices(draft: DFlashConfig) -> Matrices:
    """The projection of the target's states, the layers', and keys and values of all layers a second time, as one."""
    model, hidden = draft.model, draft.model.hidden_size
    inside = [each for spec in model.layers for part in layer_matrices(spec, hidden).values() for each in part]
    keys_values = sum(2 * spec.kv_width for spec in model.attention if isinstance(spec, AttentionSpec))
    return (hidden, len(draft.taps) * draft.target_hidden_size), *inside, (keys_values, hidden)
