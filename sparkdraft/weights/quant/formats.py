"""The formats in which a safetensors file may hold a matrix, and which of them each matrix has.

The tensors decide: their names and types beside a matrix's name say how it is stored, matrix by matrix, so one file may
mix formats and floats. The config is asked only whether it states something that no format here reads. A new format is
one file beside this one and one line in FORMATS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.quant.int8_groups import Int8Groups
from sparkdraft.weights.quant.mxfp4 import Mxfp4Experts
from sparkdraft.weights.quant.stored import Quantised


class WeightFormat(Protocol):
    name: str  # in words, for whoever is told what is read

    def states(self, quantization: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` describes weights of this format."""

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        """If a matrix of this format begins at the tensor: its name, X.weight, and all tensors that it is made of.
        Matrices of experts that are stored together have the one name X.

        dtypes: the type of every tensor of the file, as safetensors spells it. What is made of a tensor that is missing
        is an error when it is read.
        """

    def read(self, what: str, *tensors: Tensor) -> Quantised:
        """The matrix, from those tensors; what: file and name, for errors."""


FORMATS: tuple[WeightFormat, ...] = (Int8Groups(), Mxfp4Experts())


@dataclass(frozen=True, slots=True)
class Found:
    """A matrix that is not simply a tensor of the file."""

    format: WeightFormat
    tensors: tuple[str, ...]


def find_matrices(path: Path, dtypes: Mapping[str, str]) -> dict[str, Found]:
    """Quantised matrices by name. Two that claim one tensor, or one name, are an error that names them."""
    found: dict[str, Found] = {}
    taken: dict[str, str] = {}  # tensor -> the matrix it is a part of
    for tensor in dtypes:
        for each in FORMATS:
            if claim := each.find(tensor, dtypes):
                name, tensors = claim
                if name in found or (name in dtypes and name not in tensors):
                    raise UserError(f"{path} holds {name} twice, once as {tensor}: remove the one that is left over")
                found[name] = Found(each, tensors)
                for part in tensors:
                    if taken.setdefault(part, name) != name:
                        raise UserError(f"{path}: both {taken[part]} and {name} claim the tensor {part}")
    return found


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse, by name, weights that the config states and no format reads."""
    stated = config.get("quantization_config") or config.get("compression_config")
    if not stated:
        return
    said = stated if isinstance(stated, dict) else {"quant_method": stated}
    if any(each.states(said) for each in FORMATS):
        return
    method, form = said.get("quant_method"), said.get("format")
    raise UserError(
        f"The checkpoint {path} is quantised ({method}{f', {form}' if form else ''}) in a way that is not read; "
        f"{' and '.join(each.name for each in FORMATS)} are: use the same model unquantised, or a GGUF file of it."
    )
