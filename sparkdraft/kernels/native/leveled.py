"""How quantised matrices are kept for the C++ matmuls.

What fits GroupQuant exactly becomes it, the fastest form. Other codes whose levels are small integers (INT4 with zero
points, MXFP4, NVFP4, K-quants) keep their bits and the file's scales: `LeveledLinear`. The rest (FP8, groups of columns
that are not neighbours) is rounded to 8 bits, and the kept matrix says so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparkdraft.kernels.native.library import c
from sparkdraft.kernels.native.packed import NativeLinear, PackedLinear, PackedParts
from sparkdraft.weights.linear import CannotKeep, Linear, ToFloats
from sparkdraft.weights.quant.stored import GROUP, LEVELS, Coded, GroupQuant, Permuted, Stored, as_float, scale_values

HALF = GROUP // 2
# Levels as integers: what they are to be divided by, and the integers.
UNITS = {"int4": 1, "e2m1": 2, "iq4_nl": 1, "int8": 1}
TABLES = {
    name: torch.tensor([int(unit * value) for value in LEVELS[name].values or range(16)], dtype=torch.int8)
    for name, unit in UNITS.items()
}


@dataclass(frozen=True, slots=True)
class Form:
    """How the codes of a matrix lie in memory; parts of one matrix must agree in it."""

    levels: str
    scales: int  # per group of 32
    scale_bytes: int
    offsets: int

    def joined(self, other: Form) -> Form | None:
        """A form that both fit without rounding."""
        if self.levels != other.levels:
            return None
        pairs = ((self.scales, other.scales), (self.scale_bytes, other.scale_bytes), (self.offsets, other.offsets))
        return Form(self.levels, *(max(pair) for pair in pairs))


@dataclass(frozen=True, slots=True)
class Packable:
    """A matrix that is about to be packed."""

    matrix: GroupQuant | Coded
    form: Form | None  # None: GroupQuant's
    rounded: str = ""


def keep_matrix(parts: Sequence[Stored], bias: Tensor | None, floats: ToFloats) -> Linear:
    ready = packable(parts)
    if whole := pack_alike(ready, bias):
        return whole
    sizes = [part.matrix.shape[0] for part in ready]
    biases = [None] * len(ready) if bias is None else list(bias.split(sizes))
    kept = [pack_alike([part], each) for part, each in zip(ready, biases, strict=True)]
    return PackedParts([part for part in kept if part is not None])


def keep_table(part: Stored, floats: ToFloats) -> Stored:
    if part.shape[1] % GROUP:
        return floats(part)
    (ready,) = packable([part])
    matrix = ready.matrix
    return matrix if isinstance(matrix, GroupQuant) else GroupQuant.from_float(matrix.dequantize())


def packable(parts: Sequence[Stored]) -> list[Packable]:
    """Raises CannotKeep."""
    width = parts[0].shape[1]
    if width % GROUP:
        raise CannotKeep(f"width {width} is no multiple of {GROUP}")
    return [_packable(part) for part in parts]


def _packable(part: Stored) -> Packable:
    if isinstance(part, GroupQuant):
        return Packable(part, None)
    if isinstance(part, Tensor):
        return Packable(GroupQuant.from_float(part), None)
    if isinstance(part, Permuted):
        return rounded(part, "groups of columns that are not neighbours (desc_act)")
    if not isinstance(part, Coded):
        return rounded(part, f"the CPU kernels have no form for {type(part).__name__}")
    if (group := as_group_quant(part)) is not None:
        return Packable(group, None)
    if part.levels not in UNITS:
        return rounded(part, f"the CPU kernels multiply integers, and {part.levels} are floats")
    step = GROUP if part.group % GROUP == 0 or part.scale is None else HALF
    if part.group % step or (part.offset is not None and step == HALF):
        return rounded(part, f"the CPU kernels have groups of {step} columns, and {part.group} is no multiple of it")
    scale = scale_values(part.scale) if part.scale is not None else torch.ones(1)
    exact = torch.equal(scale.half().float(), scale)
    return Packable(part, Form(part.levels, GROUP // step, 2 if exact else 4, int(part.offset is not None)))


def rounded(part: Stored, why: str) -> Packable:
    return Packable(GroupQuant.from_float(as_float(part)), None, why)


def pack_alike(parts: Sequence[Packable], bias: Tensor | None) -> NativeLinear | None:
    """One matrix of parts that agree in form, or None."""
    forms = [part.form for part in parts]
    kept: NativeLinear
    if all(form is None for form in forms):
        groups = [part.matrix for part in parts if isinstance(part.matrix, GroupQuant)]
        if len({group.bits for group in groups}) > 1:
            return None
        kept = PackedLinear.pack(groups, bias)
    else:
        form = forms[0]
        for other in forms[1:]:
            form = form.joined(other) if form and other else None
        if form is None:
            return None
        kept = LeveledLinear([part.matrix for part in parts if isinstance(part.matrix, Coded)], form, bias)
    kept.rounded = next((part.rounded for part in parts if part.rounded), "")
    return kept


def as_group_quant(coded: Coded) -> GroupQuant | None:
    """The same integers with halves for scales and offsets, if that rounds nothing."""
    if coded.levels not in ("int4", "int8") or coded.scale is None or coded.row_scale is not None:
        return None
    if coded.group % GROUP or (coded.levels == "int8" and coded.offset is not None):
        return None
    scale = scale_values(coded.scale)
    offset = coded.offset.float() if coded.offset is not None else torch.zeros_like(scale)
    if coded.levels == "int4":
        offset = offset - 8 * scale
    if not torch.equal(scale.half().float(), scale) or not torch.equal(offset.half().float(), offset):
        return None
    times = coded.group // GROUP

    def each(part: Tensor) -> Tensor:
        return part.half().repeat_interleave(times, 1) if times > 1 else part.half()

    if coded.levels == "int8":
        return GroupQuant(8, coded.codes.view(torch.int8).unflatten(1, (-1, GROUP)), each(scale), None)
    return GroupQuant(4, body(coded), each(scale), each(offset))


def body(coded: Coded) -> Tensor:
    """Codes in the order of GroupQuant: uint8 [out, groups, 16 or 32]."""
    if coded.bits == 8:
        return coded.codes.unflatten(1, (-1, GROUP))
    pairs = coded.codes.unflatten(1, (-1, 2, GROUP // 4))  # the two halves of a group
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)  # [out, groups, 2, 16]
    return codes[:, :, 0] | codes[:, :, 1] << 4


class Levels(ctypes.Structure):
    """Mirrors 'Levels' of matmul.h."""

    _fields_ = [(name, c_int64) for name in ("table", "scales", "scale_bytes", "offsets", "row_scale")]


class LeveledLinear(NativeLinear):
    """Codes of 4 or 8 bits and what they mean. Several matrices that read the same input make one."""

    __slots__ = ("_levels", "_row_scale")

    def __init__(self, parts: Sequence[Coded], form: Form, bias: Tensor | None) -> None:
        width, lanes = parts[0].shape[1], c.sd_lanes()
        bits, head_bytes = LEVELS[form.levels].bits, form.scales * form.scale_bytes + 4 * form.offsets
        out = sum(part.shape[0] for part in parts)
        padded = -(-out // lanes) * lanes
        self._row_scale = torch.zeros(padded)
        places = (TABLES[form.levels].data_ptr(), form.scales, form.scale_bytes, form.offsets)
        self._levels = Levels(*places, self._row_scale.data_ptr())
        data = torch.zeros(padded * (width // GROUP) * (head_bytes + (16 if bits == 4 else 32)), dtype=torch.uint8)
        super().__init__(data, bits, (out, width), bias, ctypes.addressof(self._levels))
        self.nbytes += self._row_scale.nbytes
        first = 0
        for part in parts:
            self._fill(first, part, form)
            first += part.shape[0]

    def _fill(self, first: int, part: Coded, form: Form) -> None:
        rows, width = part.shape
        unit = 1 / UNITS[form.levels]
        self._row_scale[first : first + rows] = unit if part.row_scale is None else part.row_scale * unit
        codes, heads = body(part).contiguous(), head(part, form, width // GROUP)
        c.sd_pack_leveled(self._handle, first, rows, codes.data_ptr(), heads.data_ptr())


def head(part: Coded, form: Form, groups: int) -> Tensor:
    """Scales and offset of each group of 32, as bytes [out, groups, bytes]."""
    rows = part.shape[0]

    def spread(values: Tensor, count: int) -> Tensor:  # to 'count' per group of 32
        return values.repeat_interleave(groups * count // values.shape[1], 1).view(rows, groups, count)

    scale = scale_values(part.scale) if part.scale is not None else torch.ones(rows, 1)
    scales = spread(scale, form.scales).to(torch.float16 if form.scale_bytes == 2 else torch.float32)
    fields = [scales.contiguous().view(torch.uint8)]
    if form.offsets:
        offset = part.offset.float() if part.offset is not None else torch.zeros(rows, 1)
        # The units of levels are divided out at the end, of offsets too.
        fields.append((spread(offset, 1) * UNITS[form.levels]).contiguous().view(torch.uint8))
    return torch.cat(fields, -1).contiguous()


def all_rounded(parts: Sequence[Packable]) -> list[Packable]:
    """Parts that do not agree in form, as integers of 8 bits."""

    def eight(part: Packable) -> Packable:
        if isinstance(part.matrix, GroupQuant) and part.matrix.bits == 8:
            return part
        return replace(rounded(part.matrix, "gate and up of an expert are in different forms"), form=None)

    return [eight(part) for part in parts]
