"""What is wrong with a matrix that was read: the config contradicts it, or its numbers cannot be weights.

Both mean that text would be garbage without a word, so both are refused, and the matrix is named.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.quant.coded import LEVELS, Coded, scale_values
from sparkdraft.weights.quant.qweight import Permuted
from sparkdraft.weights.quant.stated import Said
from sparkdraft.weights.quant.stored import Quantised, QuantisedExperts

# Weights of real models are at most a few units. A scale of a tensor that is read in the wrong direction makes them
# 2688 / amax times as large twice over: thousands at least.
LARGEST, LEAST = 1000.0, 1e-8


def check_matrix(what: str, matrix: Quantised, said: Said) -> None:
    """what: file and name."""
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
    """Scales must be numbers, and such that weights are of a size that weights have."""
    reach = largest_weights(coded)
    if not bool(torch.isfinite(reach).all()):
        raise UserError(f"{what} has scales that are no finite numbers: fetch the file again.")
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
    """How large a weight of each row could be, from its scales alone."""
    values = LEVELS[coded.levels].values
    dtype = LEVELS[coded.levels].dtype
    if values is not None:
        most = max(map(abs, values))
    else:
        assert dtype is not None
        most = torch.finfo(dtype).max if dtype.is_floating_point else 127.0
    out = coded.shape[0]
    reach = torch.full((out,), float(most), device=coded.codes.device)
    if coded.scale is not None:
        reach = reach * scale_values(coded.scale).abs().amax(1)
    if coded.offset is not None:
        reach = reach + coded.offset.float().abs().amax(1)
    return reach if coded.row_scale is None else reach * coded.row_scale.abs()
