"""Measures what a weight format costs and brings: bytes per weight, distance from floats, decode speed.

The base is the checkpoint with every matrix as floats. Each format is those floats, quantised when they are loaded
(weights/quant/quantise.py), so a checkpoint that is quantised itself, as the embedded one is, can be measured too.
cli/bench_weights.py loads models and prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.models.common.blocks import Decoder
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.models.registry import read_config
from sparkdraft.operate.bench.nearness import Measured
from sparkdraft.weights.checkpoint import Checkpoint
from sparkdraft.weights.plane_layout import StoredBytes
from sparkdraft.weights.quant.quantise import QUANTISERS
from sparkdraft.weights.quant.stored import QuantisedExperts, Stored, as_float

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

FLOATS = "floats"


def parse_formats(text: str) -> list[str]:
    """Parse a comma-separated list. Floats come first, asked for or not: all others are compared with them."""
    names = list(dict.fromkeys([FLOATS, *(part.strip() for part in text.split(","))]))
    for name in names:
        if name != FLOATS and name not in QUANTISERS:
            raise UserError(f"--formats names '{name}'; a format is {', '.join((FLOATS, *QUANTISERS))}")
    return names


class FloatCheckpoint:
    """A checkpoint whose quantised matrices are read as float32. Experts that a file holds together stay as they are:
    their floats would have another order."""

    def __init__(self, stored: Checkpoint) -> None:
        self._stored = stored
        self.path: Path = stored.path
        self.config, self.generation = stored.config, stored.generation
        self.chat_template, self.special = stored.chat_template, stored.special

    def names(self) -> list[str]:
        return self._stored.names()

    def read(self, name: str) -> Stored:
        part = self._stored.read(name)
        is_integers = isinstance(part, Tensor) and not part.is_floating_point()  # such as ids
        return part if is_integers or isinstance(part, QuantisedExperts) else as_float(part)

    def stored_bytes(self, unread: tuple[str, ...] = ()) -> StoredBytes:
        return StoredBytes(0, model_sizes(read_config(self.config)).held)

    def tokenizer_json(self) -> RawTokenizer:
        return self._stored.tokenizer_json()


def format_bytes(name: str, width: int, float_bytes: int) -> float:
    """Bytes per weight of a row of so many weights, with its scales, as the format has them."""
    if name == FLOATS:
        return float(float_bytes)
    coded = QUANTISERS[name][0](torch.ones(1, width))
    parts = (coded.codes, coded.scale, coded.offset, coded.row_scale)
    return sum(part.nbytes for part in parts if part is not None) / width


def kept_bytes(decoder: Decoder, model: ModelConfig) -> float:
    """Bytes per weight of the layers' matrices as an engine keeps them."""
    held = sum(matrix.nbytes for layer in decoder.layers for matrix in layer.matrices)
    return held / sum(layer.held for layer in model_sizes(model).layers)


@dataclass(slots=True)
class Found(Measured):
    """Everything measured about one format."""

    bytes_per_weight: float
    kept_bytes_per_weight: float | None = None  # in the engine that was timed; None: none was

    def as_dict(self, base: Measured) -> dict[str, Any]:
        kept = self.kept_bytes_per_weight
        sizes = {"bytes_per_weight": round(self.bytes_per_weight, 4)}
        return sizes | {"kept_bytes_per_weight": kept and round(kept, 4)} | Measured.as_dict(self, base)
