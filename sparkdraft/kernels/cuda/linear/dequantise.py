"""How words of codes become numbers: a plane of weights/plane_layout.py, and a group's scale or offset.

LEVELS says what a code means (weights/quant/stored.py). Where x is bfloat16 (PACKED), two weights of a register are
decoded at once by a few PTX instructions; elsewhere, and in Triton's interpreter, Triton does it. Every level is exact
in bfloat16:

    int4, int8    an integer as the mantissa of 128 + integer, less 128 (and less what makes it signed)
    e2m1, e4m3    the bits of a small float as the lowest bits of bfloat16's exponent and the highest of its mantissa,
                  times a power of two. e2m1's scale is multiplied in with it, exactly: both have few bits
    iq4_nl        a table of 16 bytes, by byte permutation

e2m1 is 2 ** 126 too small as it lies, and 2 ** 126 times a scale may overflow: the scale is multiplied by 2 ** 110, and
the sum by `unit`. Elsewhere a unit is 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparkdraft.weights.plane_layout import SIZES
from sparkdraft.weights.plane_layout import STRIP as _STRIP
from sparkdraft.weights.quant.stored import LEVELS as _LEVELS

_NEGATIVE_ZERO = "mov.b32 z, 0x80008000;"  # a product is an fma with it, on all GPUs that have bfloat16
STRIP = tl.constexpr(_STRIP)  # lines that lie together
SCALED = tl.constexpr(((110 + 127) << 7) * 0x00010001)  # 2 ** 110 in bfloat16, twice: it multiplies the scale of e2m1
_E2M1, _E4M3 = tl.constexpr(2.0**126), tl.constexpr(2.0**120)  # by which their bits are too small as they lie


def _asm(*lines: str) -> str:
    return "{ .reg .b32 a, b, c, d, z; " + " ".join(lines) + " }"


def _signed(name: str) -> list[str]:
    """From int8 in the low byte of each half to bfloat16 in $0."""
    return [
        "mov.b32 c, 0x43004300;",
        f"lop3.b32 a, {name}, 0x007F007F, c, 0xEA;", f"lop3.b32 b, {name}, 0x00800080, c, 0xEA;",  # (a & b) | c
        "mov.b32 z, 0xBF80BF80;", "fma.rn.bf16x2 $0, b, z, a;",
    ]  # fmt: skip


def _int4(number: int) -> str:
    return _asm(
        f"shr.u32 a, $1, {4 * number};", "mov.b32 c, 0x43004300;", "lop3.b32 a, a, 0x000F000F, c, 0xEA;",
        "mov.b32 b, 0x3F803F80;", "mov.b32 z, 0xC308C308;", "fma.rn.bf16x2 $0, a, b, z;",  # 1, -136
    )  # fmt: skip


def _int8(number: int) -> str:
    return _asm(f"shr.u32 d, $1, {8 * number};", *_signed("d"))


def _e2m1_ptx(number: int) -> str:
    """$2: the scale, times 2 ** 110."""
    if number < 3:
        bits = [f"shl.b32 a, $1, {3 * number};", "and.b32 a, a, 0x81C081C0;"]
    else:
        bits = [
            "shl.b32 a, $1, 4;", "and.b32 a, a, 0x80008000;",
            "shr.u32 b, $1, 6;", "lop3.b32 a, b, 0x01800180, a, 0xEA;",  # (b & mask) | a
            "shr.u32 c, $1, 4;", "lop3.b32 a, c, 0x00400040, a, 0xEA;",
        ]  # fmt: skip
    return _asm(*bits, _NEGATIVE_ZERO, "fma.rn.bf16x2 $0, a, $2, z;")


def _e4m3_ptx(number: int) -> str:
    if number == 0:
        bits = ["and.b32 a, $1, 0x87F087F0;"]
    else:
        bits = [
            "shl.b32 a, $1, 4;", "and.b32 a, a, 0x80F080F0;",
            "shr.u32 b, $1, 4;", "lop3.b32 a, b, 0x07000700, a, 0xEA;",
        ]  # fmt: skip
    return _asm(*bits, "mov.b32 b, 0x7B807B80;", _NEGATIVE_ZERO, "fma.rn.bf16x2 $0, a, b, z;")  # 2 ** 120


def _iq4_nl(number: int) -> str:
    """Three bits of a code choose among eight bytes of the table, and the fourth between its halves."""
    values = _LEVELS["iq4_nl"].values
    assert values is not None
    table = bytes(int(value) & 255 for value in values)
    words = [int.from_bytes(table[i : i + 4], "little") for i in range(0, 16, 4)]
    return _asm(
        f"shr.u32 d, $1, {4 * number};", "and.b32 a, d, 0x00070007;", "shr.u32 b, a, 8;", "or.b32 a, a, b;",
        f"mov.b32 b, {words[0]:#010x};", f"mov.b32 c, {words[1]:#010x};", "prmt.b32 b, b, c, a;",
        f"mov.b32 c, {words[2]:#010x};", f"mov.b32 z, {words[3]:#010x};", "prmt.b32 c, c, z, a;",
        "and.b32 d, d, 0x00080008;", "shr.u32 d, d, 3;", "mul.lo.u32 d, d, 255;",
        "and.b32 c, c, d;", "not.b32 d, d;", "and.b32 b, b, d;", "or.b32 d, b, c;", *_signed("d"),
    )  # fmt: skip


PTX = {
    "int4": [_int4(number) for number in range(4)],
    "e2m1": [_e2m1_ptx(number) for number in range(4)],
    "iq4_nl": [_iq4_nl(number) for number in range(4)],
    "int8": [_int8(number) for number in range(2)],
    "e4m3": [_e4m3_ptx(number) for number in range(2)],
}


@triton.constexpr_function
def ptx(levels: str, number: int) -> str:
    return PTX[levels][number]


@triton.constexpr_function
def planes_of(levels: str) -> int:
    """Planes of a tile."""
    return len(PTX[levels])


@triton.constexpr_function
def unit(levels: str, packed: bool) -> float:
    """Return what a finished sum must be multiplied by."""
    return 2.0**16 if levels == "e2m1" and packed else 1.0


@triton.constexpr_function
def group_bytes(kind: str) -> int:
    """Of a scale or an offset."""
    return SIZES[kind]


@triton.constexpr_function
def _level(levels: str, code: int) -> int:
    return int(_LEVELS[levels].values[code])  # type: ignore[index]


@triton.jit
def line_of_strip(line, PIECES, SIZE):
    """Where the first piece of a line lies; the next is STRIP * SIZE further. A line has so many, of SIZE each."""
    return line // STRIP * (STRIP * PIECES * SIZE) + line % STRIP * SIZE


@triton.jit
def plane(words, scale, NUMBER: tl.constexpr, LEVELS: tl.constexpr, TYPE: tl.constexpr, PACKED: tl.constexpr):
    """One plane [lines, PLANE] in TYPE of int16 words [lines, PLANE]. scale: [lines, 1] for e2m1, else None.

    PACKED: the scale is a pair of bfloat16 in an int32, times SCALED; else it is float32.
    """
    if PACKED:
        PTX: tl.constexpr = ptx(LEVELS, NUMBER)
        if scale is None:
            value = tl.inline_asm_elementwise(PTX, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
        else:
            # of two weights, the words are one register, and the scale is twice the same one
            value = tl.inline_asm_elementwise(PTX, "=r,r,r,r", [words, scale], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        value = _apart(words.to(tl.int32), NUMBER, LEVELS)
        if scale is not None:
            value = value * scale
        value = value.to(TYPE)
    return value


@triton.jit
def _apart(word, NUMBER: tl.constexpr, LEVELS: tl.constexpr):
    """float32 of int32 words."""
    if LEVELS == "e2m1":
        last = ((word << 4) & 0x8000) | ((word >> 6) & 0x0180) | ((word >> 4) & 0x0040)
        bits = (word << (3 * NUMBER)) & 0x81C0 if NUMBER < 3 else last
        return (bits << 16).to(tl.float32, bitcast=True) * _E2M1
    elif LEVELS == "int4":
        return (((word >> (4 * NUMBER)) & 15) - 8).to(tl.float32)
    elif LEVELS == "iq4_nl":
        code = (word >> (4 * NUMBER)) & 15
        value = tl.zeros_like(word)
        for each in tl.static_range(16):
            value = tl.where(code == each, _level(LEVELS, each), value)
        return value.to(tl.float32)
    elif LEVELS == "int8":
        return ((((word >> (8 * NUMBER)) & 255) ^ 128) - 128).to(tl.float32)
    else:
        tl.static_assert(LEVELS == "e4m3")
        bits = word & 0x87F0 if NUMBER == 0 else ((word << 4) & 0x80F0) | ((word >> 4) & 0x0700)
        return (bits << 16).to(tl.float32, bitcast=True) * _E4M3


@triton.jit
def scale_factor(word, byte, KIND: tl.constexpr, PACKED: tl.constexpr):
    """A byte's scale as `plane` wants it."""
    bits = (word >> (8 * byte)) & 255
    if not PACKED:
        return group_number(word, byte, KIND)
    elif KIND == "e8m0":  # (bits + 110) << 7 in both halves, by one multiplication
        return bits * (0x00010001 << 7) + (110 << 7) * 0x00010001
    else:
        tl.static_assert(KIND == "e5m3")
        return bits * (0x00010001 << 4) + ((110 + 111) << 7) * 0x00010001


@triton.jit
def group_number(word, first_byte, KIND: tl.constexpr):
    """float32 of a scale or offset that lies in a 32-bit word from a byte on. KIND: of weights/plane_layout.py."""
    if KIND == "f32":
        return word.to(tl.float32, bitcast=True)
    else:
        bits = word >> (8 * first_byte)
        if KIND == "f16":
            return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        elif KIND == "bf16":
            return (bits << 16).to(tl.float32, bitcast=True)
        elif KIND == "e8m0":
            return ((bits & 255) << 23).to(tl.float32, bitcast=True)
        else:
            tl.static_assert(KIND == "e5m3")
            return (((bits & 255) << 20) + (111 << 23)).to(tl.float32, bitcast=True)
