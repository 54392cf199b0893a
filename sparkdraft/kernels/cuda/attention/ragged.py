"""Which rows of a ragged batch a program works on, where a launch is shaped by the number of all rows alone.

Sequence s owns the programs from query_start[s] // TILE + EXTRA * s on. Its n rows make at most n // TILE + EXTRA tiles
(EXTRA 1 where tiles begin at its first row, 2 where they lie anywhere), so it has enough; the rest have no rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_tile(number, query_start, seqs, TILE: tl.constexpr, EXTRA: tl.constexpr, BLOCK_S: tl.constexpr):
    """The sequence of program 'number', and which of its tiles it is."""
    s = tl.arange(0, BLOCK_S)
    start = tl.load(query_start + s, mask=s < seqs, other=0)
    offset = start // TILE + EXTRA * s
    sequence = tl.sum(((offset <= number) & (s < seqs)).to(tl.int32), 0) - 1
    return sequence, number - (tl.load(query_start + sequence) // TILE + EXTRA * sequence)


def count_tiles(rows: int, seqs: int, tile: int, extra: int) -> int:
    return rows // tile + extra * seqs
