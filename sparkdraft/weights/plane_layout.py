"""How codes of 4 and 8 bits lie in a GPU's memory: sizes alone, so that a plan can count them. No torch.

A row of the matrix is cut into tiles, and a tile into planes: 4 planes of 4-bit codes, 2 of 8-bit codes. Word j of a
tile, of 16 bits, holds column j of every plane, so that one mask (and a shift) turns a tile of words into a plane of
numbers, two per register, and each plane meets its own columns of x in their order:

    tile c, word j    | plane 0: column c * tile + j | plane 1: column c * tile + plane + j | ...

A plane never spans two groups. Scales lie row by row in the type that they are stored in, 4 bytes to a word, in the
order of their groups. Only e4m3 (NVFP4's) become "e5m3": they are never negative, so the bit of the sign is one more of
the exponent, all numbers are normal ones, and a shift and a sum make their bits bfloat16's. The last tile is filled up
with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

PLANES = (64, 32, 16)  # columns of a plane, the best first: long rows in memory and few steps
MOST_WASTE = 0.03  # of the tiles may be filling where a smaller plane avoids it
SIZES = {"": 0, "e8m0": 1, "e5m3": 1, "f16": 2, "bf16": 2, "f32": 4}  # bytes of a scale or an offset


class PlaneLayout(NamedTuple):
    levels: str  # of weights/quant/coded.py
    bits: int
    width: int  # columns of the matrix
    plane: int  # columns of a plane
    group: int  # columns that share a scale; 0: there are neither scales nor offsets by group
    scale: str  # a type of SIZES
    offset: str

    @property
    def tile(self) -> int:
        """Columns of a tile."""
        return self.plane * 16 // self.bits

    @property
    def tiles(self) -> int:
        return -(-self.width // self.tile)

    @property
    def words(self) -> int:
        """16-bit words of codes per row."""
        return self.tiles * self.plane

    @property
    def groups(self) -> int:
        """Groups per row, those of the filling included."""
        return -(-self.tiles * self.tile // self.group) if self.group else 0

    def group_words(self, kind: str) -> int:
        """32-bit words per row of scales, or of offsets, of a type."""
        return -(-self.groups * SIZES[kind] // 4)

    @property
    def row_bytes(self) -> int:
        return 2 * self.words + 4 * (self.group_words(self.scale) + self.group_words(self.offset))

    @property
    def name(self) -> str:
        """Under which launches are tuned: what a kernel reads and how it decodes it."""
        grouped = f"_{self.scale}_{self.group}" if self.scale else ""
        return f"{self.levels}{grouped}{'_offset' if self.offset else ''}"


def layout_of(levels: str, bits: int, width: int, group: int = 0, scale: str = "", offset: str = "") -> PlaneLayout:
    """The plane that fits best. group: a multiple of the smallest plane, or 0."""
    found = [PlaneLayout(levels, bits, width, plane, group, scale, offset) for plane in PLANES if not group % plane]
    assert found, f"groups of {group}"
    size = max(SIZES[scale], SIZES[offset])
    one_word = [each for each in found if not group or each.tile * size <= 4 * group]  # a tile's scales: one load
    tight = [each for each in one_word if each.tiles * each.tile <= (1 + MOST_WASTE) * width]
    return (tight or one_word or found)[0 if tight else -1]


class StoredBytes(NamedTuple):
    """What a file holds, by its tensors' types."""

    quantised: int  # bytes of quantised matrices, with their scales
    floats: int  # numbers in all other tensors

    def kept(self, itemsize: float) -> int:
        """Bytes in memory where quantised matrices are kept as they are, and others as floats of that size."""
        return int(self.quantised * (1 + MOST_WASTE) + self.floats * itemsize)


def count_stored(tensors: Iterable[tuple[str, bool, tuple[int, ...], int]], twice: str = "") -> StoredBytes:
    """tensors: name, whether it is read as codes, shape, and bytes. twice: an embedding that is the head as well, which
    is kept in two orders if it is codes."""
    quantised = floats = 0
    for name, is_coded, shape, size in tensors:
        if is_coded and len(shape) > 1:
            quantised += 2 * size if name == twice else size
        else:
            floats += prod(shape)
    return StoredBytes(quantised, floats)
