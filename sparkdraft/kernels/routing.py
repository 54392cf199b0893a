"""Which experts each row is sent to."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """The experts of each row, the likeliest first; of equal ones the lower number comes first."""

    ids: Tensor  # int32 [rows, top_k]
    weights: Tensor  # float32 [rows, top_k]
