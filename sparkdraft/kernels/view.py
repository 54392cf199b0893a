"""All that an attention kernel must know besides q, K and V: how a ragged batch is laid out over the paged cache
(`AttentionView`, the same for all layers of a step) and how a layer attends (`AttentionParams`, the same in all steps).

Sequence s owns rows query_start[s] .. query_start[s+1] of the batch. Its last row sees context_len[s] keys, so row i
of its n rows stands at position context_len[s] - n + i. A prompt chunk, a single decode row and a drafted block differ
only in n.
"""

from __future__ import annotations

from dataclasses import dataclass

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
