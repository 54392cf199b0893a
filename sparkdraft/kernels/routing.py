"""Which experts each row is sent to."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """The experts of each row, the likeliest first; of equal ones the lower number comes first. A dead row, which
    belongs to no sequence, has none: its numbers are -1, and nothing is said about its result."""

    ids: Tensor  # int32 [rows, top_k]
    weights: Tensor  # float32 [rows, top_k]
