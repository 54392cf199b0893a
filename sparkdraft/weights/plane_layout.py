"""The layout of 4-bit and 8-bit codes in a GPU's memory, without torch, so that a plan can count bytes.

A row of the matrix is cut into tiles, and a tile into planes: 4 planes of 4-bit codes, 2 of 8-bit codes. Word j of a
tile, of 16 bits, holds column j of every plane, so that one mask (and a shift) turns a tile into a plane of numbers:

    tile c, word j    | plane 0: column c * tile + j | plane 1: column c * tile + plane + j | ...

Strips of 16 rows lie after each other, and within a strip its tiles, so that a kernel reads contiguous memory.

    strip | tile 0: row 0, row 1, ... row 15 | tile 1: row 0, ... | ...          the last strip is filled up with zeros

A plane never spans two groups. Scales are in the type that they are stored in, 4 bytes to a word, in the order of their
groups; within a strip, word 0 of its 16 rows, then word 1. Only e4m3 scales (NVFP4's) become "e5m3": they are never
negative, so the sign bit extends the exponent, and a shift and an addition convert their bits to bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

PLANES = (64, 32, 16)  # columns of a plane, the best first: long rows in memory and few steps
STRIP = 16  # rows; kernels take multiples of it
MOST_WASTE = 0.03  # share of padding at which a smaller plane is chosen
SIZES = {"": 0, "e8m0": 1, "e5m3": 1, "f16": 2, "bf16": 2, "f32": 4}  # bytes of a scale or an offset


class PlaneLayout(NamedTuple):
    levels: str  # of weights/quant/stored.py
    bits: int
    width: int  # columns of the matrix
    plane: int  # columns of a plane
    group: int  # columns that share a scale; 0: there are neither scales nor offsets by group
    scale: str  # a type of SIZES
    offset: str

    @property
    def tile(self) -> int:
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
        """Groups per row, padding included."""
        return -(-self.tiles * self.tile // self.group) if self.group else 0

    def group_words(self, kind: str) -> int:
        """32-bit words per row of scales (or offsets) of a type."""
        return -(-self.groups * SIZES[kind] // 4)

    @property
    def row_bytes(self) -> int:
        return 2 * self.words + 4 * (self.group_words(self.scale) + self.group_words(self.offset))

    @property
    def name(self) -> str:
        """The name under which launches are tuned."""
        grouped = f"_{self.scale}_{self.group}" if self.scale else ""
        return f"{self.levels}{grouped}{'_offset' if self.offset else ''}"


def layout_of(levels: str, bits: int, width: int, group: int = 0, scale: str = "", offset: str = "") -> PlaneLayout:
    """Choose the plane that fits best. group: a multiple of the smallest plane, or 0."""
    found = [PlaneLayout(levels, bits, width, plane, group, scale, offset) for plane in PLANES if not group % plane]
    assert found, f"groups of {group}"
    size = max(SIZES[scale], SIZES[offset])
    one_word = [each for each in found if not group or each.tile * size <= 4 * group]  # a tile's scales: one load
    tight = [each for each in one_word if each.tiles * each.tile <= (1 + MOST_WASTE) * width]
    return (tight or one_word or found)[0 if tight else -1]


class CodeForm(NamedTuple):
    """The types of a `Coded` matrix without its numbers: they determine its layout and size."""

    levels: str  # of weights/quant/stored.py
    bits: int
    group: int  # columns that share a scale; 0: all of a row
    scale: str = ""  # a type of SIZES; "": none
    offset: str = ""
    row_scale: bool = False

    def layout(self, width: int) -> PlaneLayout | str:
        """The layout of rows of this width, or why kernels have no form for them."""
        scale, group = "" if self._is_by_row(width) else self.scale, self.group or width
        group = group if scale or self.offset else 0
        if group % PLANES[-1]:
            return f"groups of {group} columns; kernels read groups of {PLANES[-1]} and its multiples"
        if scale == "e5m3" and (self.levels != "e2m1" or self.offset):
            return f"{self.levels} codes with e4m3 scales"
        return layout_of(self.levels, self.bits, width, group, scale, self.offset)

    def has_row_scale(self, width: int) -> bool:
        """True if each output row has a float32 number beside its planes."""
        return self.row_scale or (bool(self.scale) and self._is_by_row(width))

    def nbytes(self, rows: int, width: int) -> int | None:
        """Bytes of a matrix in planes; None: it is kept as floats."""
        layout = self.layout(width)
        if isinstance(layout, str):
            return None
        return -(-rows // STRIP) * STRIP * layout.row_bytes + rows * 4 * self.has_row_scale(width)

    def table_bytes(self, rows: int, width: int) -> int:
        """Bytes of a table in which rows are looked up, which keeps the order of its file."""
        groups = width // (self.group or width)
        each = width * self.bits // 8 + groups * (SIZES[self.scale] + SIZES[self.offset])
        return rows * (each + 4 * self.row_scale)

    @property
    def per_weight(self) -> float:
        """Bytes per weight, without numbers per row and without padding."""
        by_group = (SIZES[self.scale] + SIZES[self.offset]) / self.group if self.group else 0.0
        return self.bits / 8 + by_group

    def _is_by_row(self, width: int) -> bool:
        """True if a scale per row is the only scale."""
        return (self.group or width) == width and not self.offset and not self.row_scale


# GGUF's types as a GPU keeps them. Q4_1's offsets get 8 scales added, and stay float16 only if all sums are exact.
GGUF_FORMS = {
    "q4_0": CodeForm("int4", 4, 32, "f16"),
    "q4_1": CodeForm("int4", 4, 32, "f16", "f32"),
    "q8_0": CodeForm("int8", 8, 32, "f16"),
    "q5_0": CodeForm("int8", 8, 32, "f16"),
    "q5_1": CodeForm("int8", 8, 32, "f16", "f16"),
    "q4_k": CodeForm("int4", 4, 32, "f32", "f32"),
    "q5_k": CodeForm("int8", 8, 32, "f32", "f32"),
    "q6_k": CodeForm("int8", 8, 16, "f32"),
    "iq4_nl": CodeForm("iq4_nl", 4, 32, "f16"),
    "iq4_xs": CodeForm("iq4_nl", 4, 32, "f32"),
}


ROWS = (1, 16, 64)  # tokens for which a pass is timed: one stream, a usual batch, a large one


class PassTimes(NamedTuple):
    """Seconds that the quantised matrices of a model take on this GPU, for each of ROWS."""

    codes: tuple[float, ...]  # as they are stored
    floats: tuple[float, ...]  # decoded to bfloat16


class StoredBytes(NamedTuple):
    """The contents of a file as a GPU keeps them."""

    quantised: int  # bytes of planes and of tables of codes
    floats: int  # numbers that are kept as floats
    times: PassTimes | None = None  # None: not measured

    def kept(self, itemsize: float) -> int:
        """Bytes in memory, with floats of this size."""
        return int(self.quantised + self.floats * itemsize)


class StoredMatrix(NamedTuple):
    """One tensor or matrix of a file, before it is read."""

    name: str
    rows: int  # over all experts
    width: int
    form: CodeForm | None = None  # None: floats


ROUTERS = ("mlp.gate.weight", "router.weight", "router.proj.weight", "shared_expert_gate.weight")  # decoded into floats
EMBEDDINGS = ("embed_tokens.weight", "token_embd.weight")


def count_stored(matrices: Iterable[StoredMatrix], tied: bool = False) -> StoredBytes:
    """Add up the sizes. tied: the embedding is also the head; as codes it is kept in two orders."""
    quantised = floats = 0
    for name, rows, width, form in matrices:
        size = form.nbytes(rows, width) if form and not name.endswith(ROUTERS) else None
        is_table = form is not None and name.endswith(EMBEDDINGS)
        if form and is_table:
            quantised += form.table_bytes(rows, width)
        if size is not None and (tied or not is_table):
            quantised += size
        elif not is_table or (tied and size is None):
            floats += rows * width
    return StoredBytes(quantised, floats)
