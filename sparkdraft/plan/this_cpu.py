"""The losses of the engine on the CPU at hand, from what its kernels were measured to reach. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from sparkdraft.plan.roofline import OVERLAP, Losses
from sparkdraft.plan.weight_formats import EIGHT_BITS, FOUR_BITS

ERROR = 0.20, 0.30  # of dense models and of experts, as shares of the speed


class Matmul(Protocol):
    """Of one matrix: what bench/cpu_rates.py measures."""

    @property
    def one_row(self) -> float: ...  # seconds

    @property
    def several_rows(self) -> float: ...

    @property
    def rows(self) -> int: ...  # several

    @property
    def nbytes(self) -> int: ...

    @property
    def operations(self) -> int: ...  # with one row


class Measured(Protocol):
    @property
    def eight_bits(self) -> Matmul: ...

    @property
    def four_bits(self) -> Matmul: ...

    @property
    def keys(self) -> float: ...  # bytes per second

    @property
    def layer(self) -> float: ...  # seconds


def fit(losses: Losses, found: Measured, bandwidth: float) -> tuple[Losses, dict[str, float]]:
    """The losses with which the model of a step gives what was measured, and operations per second by format.

    What a CPU kept near was read faster than its memory is: no share is above 1.
    """
    shares, arithmetic = {}, {}
    for name, each in ((EIGHT_BITS, found.eight_bits), (FOUR_BITS, found.four_bits)):
        read, row = _apart(each)
        shares[name], arithmetic[name] = min(each.nbytes / read / bandwidth, 1.0), each.operations / row
    kv = min(found.keys / bandwidth, 1.0)
    return replace(losses, coded=shares[EIGHT_BITS], formats=shares, kv=kv, layer=found.layer), arithmetic


def _apart(found: Matmul) -> tuple[float, float]:
    """Seconds of reading a matrix, and of multiplying it with a row, which overlap as `roofline.overlap` says."""
    row = 0.0
    for _ in range(50):
        read = (found.one_row**OVERLAP - row**OVERLAP) ** (1 / OVERLAP)
        rest = max(found.several_rows**OVERLAP - read**OVERLAP, 0.0)
        row = rest ** (1 / OVERLAP) / found.rows
        row = min(max(row, 1e-3 * found.one_row), 0.999 * found.one_row)  # each takes some of the time
    return read, row
