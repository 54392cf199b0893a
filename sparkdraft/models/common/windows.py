"""Which layers of a model see a sliding window, as config.json says it. No torch.

A window counts the row itself: with a window of 8 a row sees itself and the 7 before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.models.common.keys import refused
from sparkdraft.util.fields import flag, listed, whole

FULL, SLIDING = "full_attention", "sliding_attention"


def window_of(config: Mapping[str, Any]) -> int:
    """The window of the layers that slide; 0 if the key is absent or null."""
    return whole(config, "sliding_window") or 0


def types_of(
    config: Mapping[str, Any], otherwise: Sequence[str], known: tuple[str, ...] = (FULL, SLIDING)
) -> list[str]:
    """The type of each layer, one of the known; otherwise: where the config does not say."""
    given = listed(config, "layer_types", str)
    types = list(otherwise) if given is None else given
    for each in types:
        if each not in known:
            raise refused("layer_types with", each, known)
    if len(types) != len(otherwise):
        raise UserError(
            f"config.json has {len(types)} layer_types and num_hidden_layers {len(otherwise)}: fetch it again."
        )
    return types


def windows_of(types: Sequence[str], window: int) -> list[int]:
    """Of each layer, 0 where it sees everything."""
    if SLIDING in types and not window:
        raise UserError(
            f"config.json has a {SLIDING} among its layer_types and no sliding_window in force: "
            f"set one, or make all layers {FULL}."
        )
    return [window if each == SLIDING else 0 for each in types]


def qwen_windows(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """Qwen 2 and 3: a window counts where use_sliding_window says so, by default from layer max_window_layers on."""
    window = window_of(config) if flag(config, "use_sliding_window") else 0
    first = whole({"max_window_layers": 28, **config}, "max_window_layers", low=0) or 0
    types = [SLIDING if window and i >= first else FULL for i in range(num_layers)]
    return windows_of(types_of(config, types), window)


def every_nth_full(num_layers: int, pattern: int) -> list[str]:
    """Layers slide, but for every 'pattern'-th."""
    return [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(num_layers)]


def refuse_windows(config: Mapping[str, Any], slides_by_default: bool) -> None:
    """All layers must see the whole context.

    slides_by_default: whether a sliding_window counts without use_sliding_window.
    """
    for each in listed(config, "layer_types", str) or ():
        if each != FULL:
            raise refused("layer_types with", each, (FULL,))
    window = window_of(config) if flag(config, "use_sliding_window", slides_by_default) else 0
    if 0 < window < config["max_position_embeddings"] and config.get("layer_types") is None:
        raise refused("sliding_window", window, ())
