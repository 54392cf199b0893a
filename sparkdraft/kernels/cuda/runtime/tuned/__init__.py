"""Which tile a kernel runs with: JSON files beside this one, and the user's own in the cache folder.

A file holds {kernel: {format: {shape: tile}}}, where a tile is the list of integers that the kernel's `Tile` takes, and
"attention_decode" has a list of tiles, in order of their rows. The last file wins:

    fits_99kb.json, fits_227kb.json    chosen to fit the shared memory of a program; measured nowhere
    sm_90.json                         measured on GPUs of that compute capability
    <cache folder>/tuned/sm_90.json    measured on this machine, by `sparkdraft tune` or tools/cuda_*.py --tune

The shape of a recurrent layer is its key and value dimensions, for prompts after its number of value heads. The shape
of experts ends in the pairs of a block, or, of few tokens, in a token's choices; that of "wide_rows" in the rows of a
block. A format is the floats' bits, or the name of a layout of codes (weights/plane_layout.py). A shape that no file
has is left to the kernel's own rule.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

from sparkdraft.core import UserError
from sparkdraft.kernels.cuda.runtime.gpu import Gpu
from sparkdraft.weights.hub import cache_dir

Shape = tuple[int, ...]


class Key(NamedTuple):
    """What a launch looks a tile up by."""

    kernel: str
    form: str
    shape: Shape


Tables = dict[tuple[str, str], dict[Shape, Any]]  # (kernel, format) -> shape -> tile
LISTS = ("attention_decode",)  # kernels that have a list of tiles per shape
NUMBERS = {"few_rows": 4, "attention_chunk": 4, "attention_decode": 4, "block_attention": 5}  # integers of a tile
NUMBERS |= {"experts_gate_up": 4, "experts_down": 4, "wide_rows": 4}
NUMBERS |= {"experts_few_gate_up": 4, "experts_few_down": 4, "experts_row_down": 4}
NUMBERS |= {"delta_rule": 2, "delta_inside": 1, "delta_through": 3}
# Kernels whose tiles may have more numbers: into how many parts 'in' is split, and into how many slices each part.
MORE = {"few_rows": 2, "experts_few_gate_up": 2, "experts_few_down": 2, "experts_row_down": 2}


def user_file(gpu: Gpu) -> Path:
    return cache_dir() / "tuned" / f"{gpu.name}.json"


@lru_cache
def measured(gpu: Gpu) -> Tables:
    """Tiles measured on such a GPU; the user's own win."""
    return _laid_over(files(__name__) / f"{gpu.name}.json", user_file(gpu))


@lru_cache
def tables(gpu: Gpu) -> Tables:
    rooms = ["fits_99kb.json", *["fits_227kb.json"] * gpu.roomy]
    return _merged(_laid_over(*(files(__name__) / room for room in rooms)), measured(gpu))


def find(gpu: Gpu, key: Key) -> Any:
    """The tile of a launch, or None: the kernel's own rule."""
    return tables(gpu).get((key.kernel, key.form), {}).get(key.shape)


def is_measured(gpu: Gpu, key: Key) -> bool:
    return key.shape in measured(gpu).get((key.kernel, key.form), {})


def save(path: Path, found: Tables) -> None:
    """Adds tiles to a file, which need not exist yet."""
    merged = _merged(_laid_over(path), found)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(merged) + "\n", encoding="utf-8")


def text(tables: Tables) -> str:
    content: dict[str, dict[str, dict[str, Any]]] = {}
    for (kernel, form), tiles in sorted(tables.items()):
        by_shape = {"x".join(map(str, shape)): tile for shape, tile in tiles.items()}
        content.setdefault(kernel, {})[form] = by_shape
    made = json.dumps(content, indent=1)
    return re.sub(r"\[[\s\d,]+\]", lambda tile: json.dumps(json.loads(tile[0])), made)  # a tile is one line


def _laid_over(*paths: Traversable) -> Tables:
    return _merged(*(_read(path) for path in paths if path.is_file()))


def _merged(*layers: Tables) -> Tables:
    found: Tables = {}
    for layer in layers:
        for key, tiles in layer.items():
            found[key] = found.get(key, {}) | tiles
    return found


def _read(path: Traversable) -> Tables:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {
            (kernel, form): {_shape(text): _tile(kernel, tile) for text, tile in tiles.items()}
            for kernel, formats in content.items()
            for form, tiles in formats.items()
        }
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"{path} holds no tiles of kernels ({error}): remove it, or write it again with `sparkdraft tune`"
        ) from error


def _shape(text: str) -> Shape:
    return tuple(int(number) for number in text.split("x"))


def _tile(kernel: str, tile: Any) -> Any:
    """Checked here, so that an error in a file is named."""
    if kernel not in NUMBERS:
        raise ValueError(f"there is no kernel {kernel}")
    for each in tile if kernel in LISTS else [tile]:
        good = isinstance(each, list) and NUMBERS[kernel] <= len(each) <= NUMBERS[kernel] + MORE.get(kernel, 0)
        if not good or not all(type(number) is int and number > 0 for number in each):
            raise ValueError(f"a tile of {kernel} is {NUMBERS[kernel]} integers above 0, not {each}")
        if kernel.startswith("experts") and each[4:5] not in ([], [1]):
            raise ValueError(f"a tile of {kernel} splits 'in' into 1 part, not {each[4]}")
    return tile
