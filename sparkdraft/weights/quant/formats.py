"""The formats in which a safetensors file may hold a matrix, and which of them each matrix has.

The tensors decide: their names and types beside a matrix's name say how it is stored, matrix by matrix, so one file may
mix formats and floats. The config explains what bytes cannot say, and is compared with what was found (stated.py,
checks.py). A new format is one file beside this one and one line in FORMATS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.quant.e2m1 import Mxfp4Packed, Nvfp4ModelOpt, Nvfp4Packed
from sparkdraft.weights.quant.fp8 import Fp8
from sparkdraft.weights.quant.int8 import Int8
from sparkdraft.weights.quant.mxfp4 import Mxfp4Experts
from sparkdraft.weights.quant.pack_quantized import PackQuantized
from sparkdraft.weights.quant.qweight import QWeight
from sparkdraft.weights.quant.stated import NOTHING, Said, Stated, read_stated
from sparkdraft.weights.quant.stored import Quantised
from sparkdraft.weights.quant.unread import Size, Unread


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

    def read(self, what: str, *tensors: Tensor, said: Said = NOTHING) -> Quantised:
        """The matrix, from those tensors; what: file and name, for errors; said: what the config says of it."""

    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        """Of what `read` would return, without reading it."""


FORMATS: tuple[WeightFormat, ...] = (
    Int8(),
    Fp8(),
    Nvfp4ModelOpt(),
    Nvfp4Packed(),
    Mxfp4Packed(),
    Mxfp4Experts(),
    PackQuantized(),
    QWeight(),
)
# Known, and not needed: activations and K/V are not rounded by a checkpoint's scales. Those of inputs stand beside a
# quantised matrix X, as X.input_scale; those of K and V beside a projection or an attention.
OF_INPUTS = ("input_scale", "input_global_scale", "input_zero_point")
OF_ATTENTION = (
    *(f".self_attn.{part}" for part in ("q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale")),
    *(".q_proj.q_scale", ".k_proj.k_scale", ".v_proj.v_scale", ".k_proj.output_scale", ".v_proj.output_scale"),
    *(".k_proj.k_bias", ".v_proj.v_bias", ".attn.k_scale", ".attn.v_scale"),
)
# What changes what a matrix means, and is not read: by the end of a tensor's name.
REFUSED = {
    ".pre_quant_scale": "its inputs are to be scaled first (AWQ of ModelOpt, not folded into the norms)",
    ".svdquant_lora_a": "a matrix of low rank is to be added (SVDQuant)",
    ".svdquant_lora_b": "a matrix of low rank is to be added (SVDQuant)",
    ".weight_rotation": "its inputs are to be rotated first",
    ".input_rotation": "its inputs are to be rotated first",
}


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
        for ending, reason in REFUSED.items():
            if tensor.endswith(ending):
                raise UserError(f"{path} has the tensor {tensor}: {reason}, which is not read; use another file.")
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


def unused_tensors(dtypes: Mapping[str, str], matrices: Mapping[str, Found]) -> set[str]:
    """Tensors that are known and not needed."""
    beside = {f"{name.removesuffix('.weight')}.{part}" for name in matrices for part in OF_INPUTS}
    beside |= {f"{name}_{part}" for name in matrices for part in OF_INPUTS}  # of experts that are stored together
    return {name for name in dtypes if name in beside or name.endswith(OF_ATTENTION)}


def check_config(path: Path, config: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> Stated | None:
    """What the config states, or None. Refuse, by name, what no format reads. files: of stated.FILES, by name."""
    stated = read_stated(path, config, files)
    if stated is None or any(each.states(stated.said) for each in FORMATS):
        return stated
    form = stated.said.get("format")
    raise UserError(
        f"The checkpoint {path} is quantised ({stated.method}{f', {form}' if form else ''}) in a way that is not read; "
        f"{', '.join(each.name for each in FORMATS)} are: use the same model unquantised, or a GGUF file of it."
    )
