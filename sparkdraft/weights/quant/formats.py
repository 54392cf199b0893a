"""The quantised formats of safetensors files: finds the format of each matrix, and checks what was read.

The tensors beside a matrix's name decide how it is stored, so one file may mix formats and floats. The config adds what
bytes cannot say, and must agree with what was found (stated.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.quant.base import WeightFormat, damaged
from sparkdraft.weights.quant.compressed_tensors import Int8, PackQuantized
from sparkdraft.weights.quant.fp4 import Mxfp4Experts, Mxfp4Packed, Nvfp4ModelOpt, Nvfp4Packed
from sparkdraft.weights.quant.fp8 import Fp8
from sparkdraft.weights.quant.gptq import QWeight
from sparkdraft.weights.quant.stated import Said, Stated, read_stated
from sparkdraft.weights.quant.stored import LEVELS, Coded, Permuted, Quantised, QuantisedExperts, scale_values

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
# Scales that are ignored, because activations and K/V are not quantised by a checkpoint's scales: those of inputs stand
# beside a quantised matrix X, as X.input_scale; those of K and V beside a projection or an attention.
OF_INPUTS = ("input_scale", "input_global_scale", "input_zero_point")
OF_ATTENTION = (
    *(f".self_attn.{part}" for part in ("q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale")),
    *(".q_proj.q_scale", ".k_proj.k_scale", ".v_proj.v_scale", ".k_proj.output_scale", ".v_proj.output_scale"),
    *(".k_proj.k_bias", ".v_proj.v_bias", ".attn.k_scale", ".attn.v_scale"),
)
# Tensors that change what a matrix means and are not supported, by the end of their names.
REFUSED = {
    ".pre_quant_scale": "its inputs are to be scaled first (AWQ of ModelOpt, not folded into the norms)",
    ".svdquant_lora_a": "a matrix of low rank is to be added (SVDQuant)",
    ".svdquant_lora_b": "a matrix of low rank is to be added (SVDQuant)",
    ".weight_rotation": "its inputs are to be rotated first",
    ".input_rotation": "its inputs are to be rotated first",
}


@dataclass(frozen=True, slots=True)
class Found:
    format: WeightFormat
    tensors: tuple[str, ...]


def find_matrices(path: Path, dtypes: Mapping[str, str]) -> dict[str, Found]:
    """Return the quantised matrices by name. Two that claim one tensor or one name are an error."""
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
    """Return the tensors that are known and not needed."""
    beside = {f"{name.removesuffix('.weight')}.{part}" for name in matrices for part in OF_INPUTS}
    beside |= {f"{name}_{part}" for name in matrices for part in OF_INPUTS}  # of experts that are stored together
    return {name for name in dtypes if name in beside or name.endswith(OF_ATTENTION)}


def check_config(path: Path, config: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> Stated | None:
    """Return what the config states, or None. Raise UserError for quantisation that no format reads.

    files: those of stated.FILES that exist, by name.
    """
    stated = read_stated(path, config, files)
    if stated is None or any(each.states(stated.said) for each in FORMATS):
        return stated
    form = stated.said.get("format")
    raise UserError(
        f"The checkpoint {path} is quantised ({stated.method}{f', {form}' if form else ''}) in a way that is not read; "
        f"{', '.join(each.name for each in FORMATS)} are: use the same model unquantised, or a GGUF file of it."
    )


# Weights of real models are at most a few units. Applying a tensor's scale in the wrong direction makes them
# (2688 / amax)^2 times as large: thousands at least.
LARGEST, LEAST = 1000.0, 1e-8
MOST_OF_BYTES = {"int8": 127.0, "e4m3": 448.0}  # the largest level of those that have no table


def check_matrix(what: str, matrix: Quantised, said: Said) -> None:
    """Raise UserError if the matrix contradicts the config or cannot hold weights. what: file and name."""
    if isinstance(matrix, QuantisedExperts):
        for number, expert in enumerate(matrix.experts):
            check_matrix(f"{what}, expert {number}", expert, said)
        return
    coded = matrix.sorted if isinstance(matrix, Permuted) else matrix
    if isinstance(coded, Coded):
        check_said(what, coded, said)
        check_sizes(what, coded)


def check_said(what: str, coded: Coded, said: Said) -> None:
    wrong = None
    is_float = coded.levels.startswith("e")
    group = coded.shape[1] if said.group == -1 else said.group
    if said.is_dense:
        wrong = "that it is not quantised"
    elif said.bits is not None and said.bits != coded.bits:
        wrong = f"{said.bits} bits"
    elif said.is_float is not None and said.is_float != is_float:
        wrong = "floats" if said.is_float else "integers"
    elif group is not None and coded.bits == 4 and coded.group != group:
        wrong = f"groups of {said.group}"
    elif said.symmetric and coded.offset is not None:
        wrong = "that it is symmetric"
    if wrong:
        has = f"{coded.bits}-bit {'floats' if is_float else 'integers'} in groups of {coded.group}"
        offsets = ", with zero points" if coded.offset is not None else ""
        raise UserError(
            f"{what} is stored as {has}{offsets}, and the config ({said.by}) says {wrong}: fetch config and weights of "
            "one model."
        )


def check_sizes(what: str, coded: Coded) -> None:
    """Raise UserError unless the scales are finite and give weights of a usual size."""
    reach = largest_weights(coded)
    if not bool(torch.isfinite(reach).all()):
        raise damaged(what, "has scales that are no finite numbers")
    used = reach[reach > 0]
    if not used.numel():
        return  # all zero: an expert that was never trained
    typical = float(used.median())
    if not LEAST < typical < LARGEST:
        raise UserError(
            f"{what} would hold weights of up to {typical:.3g}, and weights of a model lie between {LEAST:g} and "
            f"{LARGEST:g}: its scales are inverted, or of another matrix; quantise the model again or fetch the file "
            "again."
        )


def largest_weights(coded: Coded) -> Tensor:  # [out]
    """The largest weight that each row could hold, from its scales alone."""
    values = LEVELS[coded.levels].values
    most = max(map(abs, values)) if values else MOST_OF_BYTES[coded.levels]
    reach = torch.full((coded.shape[0],), most, device=coded.codes.device)
    if coded.scale is not None:
        reach = reach * scale_values(coded.scale).abs().amax(1)
    if coded.offset is not None:
        reach = reach + coded.offset.float().abs().amax(1)
    return reach if coded.row_scale is None else reach * coded.row_scale.abs()
