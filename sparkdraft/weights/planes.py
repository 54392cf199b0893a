"""Quantised matrices in the order in which a GPU reads them (plane_layout.py), made from `Coded` and turned back.

Nothing is rounded. `pack` stacks matrices of one format into one, a piece at a time to save memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdraft.weights.linear import CannotKeep
from sparkdraft.weights.plane_layout import STRIP, CodeForm, PlaneLayout
from sparkdraft.weights.quant.base import has_nan
from sparkdraft.weights.quant.stored import LEVELS, Coded, scale_values

PIECE = 1 << 22  # weights repacked at once: 16 MB as 32-bit integers
TYPES = {torch.uint8: "e8m0", torch.float8_e4m3fn: "e5m3"}
TYPES |= {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
_DTYPES = {name: dtype for dtype, name in TYPES.items()}
MOST_E8M0 = 144  # kernels multiply e2m1 by 2 ** (e - 17) in bfloat16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class Planes:
    layout: PlaneLayout
    out: int  # rows of the matrix; the last strip may have more
    codes: Tensor  # int16 [strips, tiles, STRIP, plane]
    scale: Tensor | None  # int32 [strips, words, STRIP]
    offset: Tensor | None  # int32 [strips, words, STRIP]
    row_scale: Tensor | None  # float32 [out]

    @property
    def shape(self) -> tuple[int, int]:
        return self.out, self.layout.width

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scale, self.offset, self.row_scale) if t is not None)

    def part(self, first: int, last: int) -> Planes:
        """Output rows from first to last; without a copy if a strip begins with the first."""
        if first % STRIP:
            return self.take(torch.arange(first, last))
        strips = slice(first // STRIP, -(-last // STRIP))
        scale, offset = (None if t is None else t[strips] for t in (self.scale, self.offset))
        row_scale = None if self.row_scale is None else self.row_scale[first:last]
        return Planes(self.layout, last - first, self.codes[strips], scale, offset, row_scale)

    def take(self, ids: Tensor) -> Planes:
        ids = ids.to(self.codes.device, torch.long)
        made = empty(self.layout, len(ids), self.codes.device, self.row_scale is not None)
        rows = torch.arange(len(ids), device=ids.device)
        for target, source in ((made.codes, self.codes), (made.scale, self.scale), (made.offset, self.offset)):
            if target is not None and source is not None:
                _put(target, rows, _rows(source, ids))
        if made.row_scale is not None and self.row_scale is not None:
            made.row_scale.copy_(self.row_scale[ids])
        return made

    def coded(self) -> Coded:
        """Turn it back into what it was packed from."""
        layout, out = self.layout, self.out
        every = torch.arange(out, device=self.codes.device)
        words = _rows(self.codes, every).view(out, layout.tiles, 1, layout.plane).int()
        codes = torch.cat(_find(layout.levels, words), 2).view(out, -1)[:, : layout.width].to(torch.uint8)
        if layout.bits == 4:
            codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
        return Coded(
            layout.levels, codes.contiguous(), layout.group or layout.width,
            self._groups(self.scale, layout.scale), self._groups(self.offset, layout.offset), self.row_scale,
        )  # fmt: skip

    def _groups(self, words: Tensor | None, kind: str) -> Tensor | None:
        if words is None:
            return None
        dtype, count = _DTYPES[kind], self.layout.width // self.layout.group
        lines = _rows(words, torch.arange(self.out, device=words.device))
        numbers = lines.view(_INTEGERS[dtype.itemsize])[:, :count]
        return (_from_e5m3(numbers) if kind == "e5m3" else numbers.contiguous()).view(dtype)


def _rows(strips: Tensor, ids: Tensor) -> Tensor:
    """Gather rows of the matrix from [strips, pieces, STRIP, ...] into [ids, pieces, ...]."""
    return strips[ids // STRIP, :, ids % STRIP].contiguous()


def _put(strips: Tensor, ids: Tensor, rows: Tensor) -> None:
    strips[ids // STRIP, :, ids % STRIP] = rows


def plan_layout(parts: Iterable[Coded]) -> PlaneLayout:
    """The layout that fits all of the parts. Raises CannotKeep if there is none."""
    found = {_layout(part) for part in parts}
    if len(found) > 1:
        raise CannotKeep(f"parts of different formats ({' and '.join(sorted(each.name for each in found))})")
    return found.pop()


def form_of(part: Coded) -> CodeForm:
    scale, offset = ("" if each is None else TYPES[each.dtype] for each in (part.scale, part.offset))
    return CodeForm(part.levels, part.bits, part.group, scale, offset, part.row_scale is not None)


def _layout(part: Coded) -> PlaneLayout:
    layout = form_of(part).layout(part.shape[1])
    if isinstance(layout, str):
        raise CannotKeep(layout)
    return layout


def pack(parts: Sequence[Coded], device: torch.device, layout: PlaneLayout | None = None) -> Planes:
    """Stack the parts, which have one layout, into one matrix. Raises CannotKeep."""
    layout = layout or plan_layout(parts)
    made = empty(layout, sum(part.shape[0] for part in parts), device, any(has_row_scale(part) for part in parts))
    fill(made, parts)
    return made


def empty(layout: PlaneLayout, out: int, device: torch.device, row_scale: bool) -> Planes:
    strips = -(-out // STRIP)
    scale, offset = (
        torch.zeros((strips, layout.group_words(kind), STRIP), dtype=torch.int32, device=device) if kind else None
        for kind in (layout.scale, layout.offset)
    )
    codes = torch.zeros((strips, layout.tiles, STRIP, layout.plane), dtype=torch.int16, device=device)
    return Planes(layout, out, codes, scale, offset, torch.ones(out, device=device) if row_scale else None)


def has_row_scale(part: Coded) -> bool:
    return form_of(part).has_row_scale(part.shape[1])


def fill(made: Planes, parts: Iterable[Coded], first: int = 0) -> None:
    """Write the parts into rows from `first` on."""
    for part in parts:
        _check(part)
        step = max(PIECE // part.shape[1], 1)
        for start in range(0, part.shape[0], step):
            last = min(start + step, part.shape[0])
            _fill(made, first + start, part, slice(start, last))
        first += part.shape[0]


def _fill(made: Planes, first: int, part: Coded, at: slice) -> None:
    layout, device = made.layout, made.codes.device
    codes = part.codes[at].to(device)
    if layout.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    if layout.scale == "e5m3" and part.scale is not None:  # which has no zero
        codes = codes * (part.scale[at].view(torch.uint8) != 0).to(device).repeat_interleave(layout.group, 1)
    out = codes.shape[0]
    rows = torch.arange(first, first + out, device=device)
    whole = torch.zeros((out, layout.tiles * layout.tile), dtype=torch.int32, device=device)
    whole[:, : layout.width] = codes
    _put(made.codes, rows, _place(layout.levels, whole.view(out, layout.tiles, -1, layout.plane)))
    for target, source in ((made.scale, part.scale), (made.offset, part.offset)):
        if target is not None and source is not None:
            integers = source[at].contiguous().view(_INTEGERS[source.element_size()]).to(device)
            integers = _to_e5m3(integers) if source.dtype == torch.float8_e4m3fn else integers
            words = torch.zeros((out, target.shape[1]), dtype=torch.int32, device=device)
            words.view(integers.dtype)[:, : integers.shape[1]] = integers
            _put(target, rows, words)
    if made.row_scale is not None:
        if part.row_scale is not None:
            made.row_scale[rows] = part.row_scale[at].to(made.row_scale)
        elif made.scale is None and part.scale is not None:
            made.row_scale[rows] = scale_values(part.scale[at].contiguous()).view(-1).to(made.row_scale)


def _check(part: Coded) -> None:
    """Raise CannotKeep for codes that kernels would decode wrongly."""
    if part.levels == "e4m3" and has_nan(part.codes):
        raise CannotKeep("it holds numbers that are not a number")
    if part.scale is None:
        return
    if part.scale.dtype == torch.uint8 and bool((part.scale > MOST_E8M0).any()):
        raise CannotKeep(f"it has scales above 2 ** {MOST_E8M0 - 127}")
    if part.scale.dtype == torch.float8_e4m3fn and bool((part.scale.view(torch.uint8) > 0x7E).any()):
        raise CannotKeep("it has scales that are negative or not a number")


def _to_e5m3(e4m3: Tensor) -> Tensor:
    """Recode numbers that are not negative: (1 + m / 8) * 2 ** (e - 16), and 0 for 0."""
    bits = e4m3.view(torch.float8_e4m3fn).float().view(torch.int32)
    return torch.where(e4m3 == 0, 0, (bits >> 20) - (111 << 3)).to(torch.uint8)


def _from_e5m3(e5m3: Tensor) -> Tensor:
    numbers = ((e5m3.int() << 20) + (111 << 23)).view(torch.float32).where(e5m3 != 0, 0.0)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8)


# Where the bits of each code are within a word; kernels/cuda/linear/dequantise.py decodes them.


def _place(levels: str, codes: Tensor) -> Tensor:  # int32 [out, tiles, planes, plane] -> int16 [out, tiles, plane]
    word = torch.zeros_like(codes[:, :, 0])
    for code, (put, _) in zip(codes.unbind(2), _PLACES[levels], strict=True):
        word |= put(code)
    return word.to(torch.int16)


def _find(levels: str, words: Tensor) -> list[Tensor]:
    """int32 codes by plane, each in the shape of `words`."""
    return [find(words) for _, find in _PLACES[levels]]


Place = Callable[[Tensor], Tensor]
_Places = tuple[tuple[Place, Place], ...]  # how a code of each plane is put into a word and found in it


def _in_order(bits: int) -> _Places:
    mask = (1 << bits) - 1
    return tuple((lambda c, s=s: c << s, lambda w, s=s: (w >> s) & mask) for s in range(0, 16, bits))  # type: ignore[misc]


def _e2m1(shift: int) -> tuple[Place, Place]:
    """After a left shift by `shift`, the sign is at bfloat16's sign and the rest at its lowest exponent bits."""

    def put(code: Tensor) -> Tensor:
        return (((code & 8) << 12) | ((code & 7) << 6)) >> shift

    def find(word: Tensor) -> Tensor:
        moved = word << shift
        return ((moved >> 12) & 8) | ((moved >> 6) & 7)

    return put, find


_E2M1_LAST: tuple[Place, Place] = (  # what the first three leave free: bits 14, 13, 11 and 10
    lambda c: ((c & 8) << 8) | ((c & 6) << 12) | ((c & 1) << 10),
    lambda w: ((w >> 8) & 8) | ((w >> 12) & 6) | ((w >> 10) & 1),
)
_E4M3: _Places = (
    (lambda c: ((c & 0x80) << 8) | ((c & 0x7F) << 4), lambda w: ((w >> 8) & 0x80) | ((w >> 4) & 0x7F)),
    (
        lambda c: ((c & 0x80) << 4) | ((c & 0x70) << 8) | (c & 0x0F),
        lambda w: ((w >> 4) & 0x80) | ((w >> 8) & 0x70) | (w & 0x0F),
    ),
)
_PLACES: dict[str, _Places] = {
    "int4": _in_order(4),
    "iq4_nl": _in_order(4),
    "e2m1": (_e2m1(0), _e2m1(3), _e2m1(6), _E2M1_LAST),
    "int8": _in_order(8),
    "e4m3": _E4M3,
}
assert _PLACES.keys() == LEVELS.keys()
