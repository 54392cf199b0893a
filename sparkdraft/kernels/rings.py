"""How many positions a recurrent layer keeps records of, and how often its state moves on: kernels/delta_rule.py.

No torch: the plan and the bookkeeping of states need these numbers too.
"""

from __future__ import annotations

FOLD = 16  # positions: a state moves on by this many, or to the end of a prompt's chunk


def record_ring(most_rows: int) -> int:
    """Records that a step may replay, and those that it writes: heads run side by side and share the ring of keys, so
    none may write over what another has yet to replay. `base` lags by up to FOLD - 1 rows and the rows of one step."""
    return FOLD - 1 + 2 * most_rows


def input_ring(most_rows: int, conv_width: int) -> int:
    """Positions from `base` to this step's last row, and those before `base` that a copy of the state must have."""
    return FOLD - 1 + most_rows + conv_width - 1
