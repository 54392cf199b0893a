"""PTX that turns packed codes into float16 levels by PRMT, which looks four nibbles up in eight bytes.

That is about two integer instructions a coordinate, against four and a gather for a table in memory. An H200 has about
three a coordinate while the codes come from memory, so this decides the speed.

    a byte of a plane      codes of columns that lie a stretch apart: two of 4 bits, four of 2; a byte of the plane of
                           high bits serves columns an eighth apart and is shifted down to this stretch's
    as they lie            four bytes of a key -> of each stretch four levels, in their order: rows of keys for a dot
    in pairs               four bytes of an even key and of the odd one after it -> of each stretch twice two levels of
                           the even and the odd key in turn: tensor cores take neighbours in a sum from one register
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import triton

from sparkdraft.kernels.turboquant.layout import PLANES

AS_THEY_LIE, IN_PAIRS = (0x6240, 0x7351), (0x5140, 0x7362)  # orders of PRMT that put low and high bytes together


@triton.constexpr_function
def num_stretches(levels: tuple[float, ...]) -> int:
    """Columns that share a byte of the low plane."""
    return 8 // PLANES[len(levels).bit_length() - 1][0]


@triton.constexpr_function
def high_plane(levels: tuple[float, ...]) -> bool:
    return len(PLANES[len(levels).bit_length() - 1]) > 1


class _Ptx:
    """Instructions on 32 bits, each into a register of its own."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, operation: str, *operands: str | int) -> str:
        name = f"r{len(self.lines)}"
        kind = "u32" if operation in ("mul.lo", "sub") else "b32"
        self.lines.append(f"{operation}.{kind} {name}, {', '.join(map(str, operands))};")
        return name

    def shift(self, word: str, left: int) -> str:
        return word if left == 0 else self("shl" if left > 0 else "shr", word, abs(left))

    def choose(self, mask: int, a: str, b: str) -> str:
        """a where the mask has ones, else b: one LOP3."""
        return self("or", self("and", a, mask), self("and", b, ~mask & 0xFFFFFFFF))

    def text(self, results: list[str]) -> str:
        moves = [f"mov.b32 ${i}, {name};" for i, name in enumerate(results)]
        return "\n".join(["{", f".reg .b32 r<{len(self.lines)}>;", *self.lines, *moves, "}"])


def _each(nibble: int) -> int:
    return nibble * 0x11111111


def _lookup(ptx: _Ptx, index: str, table: list[int]) -> list[str]:
    """Bytes of a table of 8, for the nibbles of the low half of a word and for those of its high half."""
    words = [int.from_bytes(bytes(table[i : i + 4]), "little") for i in (0, 4)]
    return [ptx("prmt", *words, half) for half in (index, ptx("shr", index, 16))]


def _spread(ptx: _Ptx, word: str) -> list[str]:
    """A byte of ones for every nibble whose highest bit is set, in the order of `_lookup`."""
    up = ptx("shl", word, 4)
    return [ptx("prmt", word, up, order) for order in (0x9D8C, 0xBFAE)]  # 8 + i: the sign of byte i, eight times


def _float16(ptx: _Ptx, index: str, positive: str | None, levels: list[float], orders: tuple[int, int]) -> list[str]:
    """The two registers of 'orders' for the low half of the nibbles, then for the high half. index: nibbles that number
    the levels; positive: nibbles whose highest bit is clear where a level is negated."""
    bits = np.array(levels, np.float16).view(np.uint16)
    small = ptx("and", index, _each(7)) if len(bits) > 8 else index
    upper = _spread(ptx, index) if len(bits) > 8 else []
    planes = []
    for shift in (0, 8):
        table = [int(b) >> shift & 255 for b in bits]
        found = _lookup(ptx, small, (table[:8] * 4)[:8])
        if upper:
            other = _lookup(ptx, small, table[8:])
            pairs = zip(found, other, upper, strict=True)
            found = [ptx("or", ptx("and", a, ptx("not", m)), ptx("and", b, m)) for a, b, m in pairs]
        planes.append(found)
    if positive is not None:
        signs = [ptx("and", ptx("not", mask), 0x80808080) for mask in _spread(ptx, positive)]
        planes[1] = [ptx("or", a, b) for a, b in zip(planes[1], signs, strict=True)]
    return [ptx("prmt", low, high, order) for low, high in zip(*planes, strict=True) for order in orders]


def _levels_of(ptx: _Ptx, low: str, high: str | None, levels: list[float], orders: tuple[int, int]) -> list[str]:
    """low: nibbles, of which 2 bits count where a code has 2 or 3; high: nibbles whose lowest bit is the high one."""
    half = len(levels) // 2
    if len(levels) <= 8:
        index = ptx("and", low, _each(3))
        if high is not None:
            index = ptx("or", index, ptx("and", ptx("shl", high, 2), _each(4)))
        return _float16(ptx, index, None, levels, orders)
    if high is None:
        return _float16(ptx, ptx("and", low, _each(7)), low, levels[half:], orders)
    return _float16(ptx, low, ptx("shl", high, 3), levels[half:], orders)


def _table(levels: tuple[float, ...]) -> list[float]:
    """In the order of codes as they are kept: the negative ones from the middle out, then the positive."""
    half = len(levels) // 2
    return [float(level) for level in (*levels[half - 1 :: -1], *levels[half:])]


@lru_cache
def as_they_lie(levels: tuple[float, ...]) -> str:
    """Inputs: bytes of the low plane; of the high plane if there is one, and a byte that it is shifted down by, once in
    four. Outputs: float16, a tensor a stretch."""
    ptx, table = _Ptx(), _table(levels)
    count = num_stretches(levels)
    low, high = f"${2 * count}", None
    if high_plane(levels):
        high = ptx("shr", f"${2 * count + 1}", f"${2 * count + 2}")
    registers: list[list[str]] = [[] for _ in range(count)]
    for s in range(count // 2):  # nibbles hold two stretches: these, and of 2 bits the ones between them
        words = (ptx.shift(low, -2 * s), None if high is None else ptx.shift(high, -2 * s))
        found = _levels_of(ptx, *words, table, AS_THEY_LIE)
        registers[s], registers[s + count // 2] = found[0::2], found[1::2]
    return ptx.text([name for stretch in registers for name in stretch])


@lru_cache
def in_pairs(levels: tuple[float, ...]) -> str:
    """Inputs: bytes of the low plane of even keys and of odd ones; of the high plane of both, and their shift. Outputs:
    float16, two tensors a stretch: of the first two bytes and of the last two."""
    ptx, bits, table = _Ptx(), len(levels).bit_length() - 1, _table(levels)
    count, mask = num_stretches(levels), 0x0F0F0F0F
    width = 8 // count
    first, registers = 4 * count, []
    even, odd = f"${first}", f"${first + 1}"
    high = [ptx("shr", f"${first + i}", f"${first + 4}") for i in (2, 3)] if high_plane(levels) else []
    if high and bits == 3:
        high = [ptx("and", word, 0x55555555) for word in high]  # so that no neighbour falls on a nibble's highest bit
    # Nibbles of the even and the odd key in turn: two words, with two stretches in a nibble where they have 2 bits.
    mixed = [ptx.choose(mask, even, ptx.shift(odd, 4)), ptx.choose(mask, ptx.shift(even, -4), odd)]
    above: str | None
    for s in range(count):
        low = ptx.shift(mixed[s * width // 4], -(s * width % 4))
        if bits == 3:  # the high bits come to lie at bit 2 at once
            above = ptx.choose(mask, ptx.shift(high[0], 2 - 2 * s), ptx.shift(high[1], 6 - 2 * s))
            registers += _float16(ptx, ptx.choose(_each(3), low, above), None, table, IN_PAIRS)
        else:
            above = ptx.choose(mask, ptx.shift(high[0], -4 * s), ptx.shift(high[1], 4 - 4 * s)) if high else None
            registers += _levels_of(ptx, low, above, table, IN_PAIRS)
    return ptx.text(registers)


@triton.constexpr_function
def registers(outputs: int, inputs: int) -> str:
    """Constraints of an inline assembly that is handed 32 bits at a time."""
    return ",".join(["=r"] * outputs + ["r"] * inputs)
