"""All that an attention kernel must know besides q, K and V: how a ragged batch is laid out over the paged cache
(`AttentionView`, the same for all layers of a step), how a layer attends (`AttentionParams`, the same in all steps),
and how its queries, keys and values are made of their projections (`RopeArgs`).

Sequence s owns rows query_start[s] .. query_start[s+1] of the batch. Its last row sees context_len[s] keys, so row i
of its n rows stands at position context_len[s] - n + i. A prompt chunk, a single decode row and a drafted block differ
only in n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionView:
    query_start: Tensor  # int32 [seqs + 1], first row of each sequence
    context_len: Tensor  # int32 [seqs], keys in the cache once this step's rows are written
    block_tables: Tensor  # int32 [seqs, max_blocks], physical block of each 'block_size' positions
    max_query: int  # upper bound on rows a sequence: a host number that shapes the launch, never read per row
    max_context: int  # upper bound on context_len, likewise


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How one layer attends. A new way to attend is a field here, and no signature changes."""

    scale: float  # of a query's products with the keys
    causal: bool = True  # False: rows of one sequence see each other in both directions
    window: int = 0  # a row sees keys nearer than this; 0: all
    sinks: Tensor | None = None  # float32 [heads]: one more logit in each head's softmax, with no value; not scaled


class RopeArgs(NamedTuple):
    """How one layer's queries, keys and values are made of the rows that its projection gives."""

    positions: Tensor  # int32 [rows]
    table: Tensor  # float32 [max_position, rotary_dim]: cosines, then sines
    num_heads: int
    num_kv_heads: int
    q_norm: Tensor | None  # [head_dim]: gain of an RMS norm of each head, before it is rotated
    k_norm: Tensor | None
    eps: float
    # Values: "given": as they are projected; "normed": each head divided by its RMS; "keys": they are the keys as they
    # are projected, each head divided by its RMS, and the projection has no values.
    values: str = "given"

    @property
    def projected_heads(self) -> int:
        return self.num_heads + self.num_kv_heads * (1 if self.values == "keys" else 2)
