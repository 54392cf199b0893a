"""Which layers of a model see a sliding window, as config.json says it. No torch.

A window counts the row itself: with a window of 8 a row sees itself and the 7 before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.models.keys import refused

FULL, SLIDING = "full_attention", "sliding_attention"


def window_of(config: Mapping[str, Any]) -> int:
    """The window of the layers that slide; 0 if the key is absent or null."""
    window = config.get("sliding_window")
    if window is None:
        return 0
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise UserError(
            f"config.json has sliding_window {window!r}; a window is 1 token or more, and null means that there is "
            "none: correct it, or fetch the file again."
        )
    return window


def types_of(
    config: Mapping[str, Any], otherwise: Sequence[str], known: tuple[str, ...] = (FULL, SLIDING)
) -> list[str]:
    """The type of each layer, one of the known; otherwise: where the config does not say."""
    given = config.get("layer_types")
    types = list(otherwise if given is None else given)
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
    window = window_of(config) if config.get("use_sliding_window") else 0
    first = config.get("max_window_layers", 28) or 0
    types = [SLIDING if window and i >= first else FULL for i in range(num_layers)]
    return windows_of(types_of(config, types), window)


def every_nth_full(num_layers: int, pattern: int) -> list[str]:
    """Layers slide, but for every 'pattern'-th."""
    return [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(num_layers)]


def refuse_windows(config: Mapping[str, Any], slides_by_default: bool) -> None:
    """All layers must see the whole context.

    slides_by_default: whether a sliding_window counts without use_sliding_window.
    """
    for each in config.get("layer_types") or ():
        if each != FULL:
            raise refused("layer_types with", each, (FULL,))
    window = window_of(config) if config.get("use_sliding_window", slides_by_default) else 0
    if 0 < window < config["max_position_embeddings"] and config.get("layer_types") is None:
        raise refused("sliding_window", window, ())
