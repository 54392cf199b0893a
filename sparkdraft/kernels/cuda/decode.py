"""How a tile of a weight matrix becomes numbers: one Triton function per format, handed to a kernel as a constant.

A decoding is given where the codes of a tile [BLOCK_N, BLOCK_K] are, and gives the tile in TYPE, the type of x. What is
one number per output row (the scale of a tensor, of a channel, or of one part of a stacked matrix) is no part of it:
it multiplies the finished sum (`row_scale` in few_rows.py), which costs nothing and rounds nothing on the way. A new
format is a function here and a line in DECODINGS, under the name that its matrices give (`WeightTiles` in
weights/linear.py).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(place, inside):
    """What lies outside is 0; inside None: nothing does. A weight is read once, and shall not displace x in the L2."""
    if inside is None:
        return tl.load(place, eviction_policy="evict_first")
    else:
        return tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def plain(place, inside, TYPE: tl.constexpr):
    """Floats that are of x's type already."""
    return _load(place, inside)


@triton.jit
def fp8(place, inside, TYPE: tl.constexpr):
    """float8_e4m3fn, of which every wider float type holds each value exactly."""
    return _load(place, inside).to(TYPE)


DECODINGS = {"plain": plain, "fp8": fp8}
