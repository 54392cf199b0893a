"""How a ragged batch is laid out over the paged cache: all that an attention kernel must know besides q, K and V.

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
