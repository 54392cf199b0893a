"""The losses of the engine on the CPU at hand, from what operate/forecast/cpu_rates.py measured of its kernels. No
torch."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from sparkdraft.operate.forecast.roofline import OVERLAP, Losses
from sparkdraft.plan.weight_formats import EIGHT_BITS, FOUR_BITS

ERROR = 0.20, 0.30  # of dense models and of experts, as shares of the speed


class MatmulRate(NamedTuple):
    one_row: float  # seconds of a matrix that meets one row,
    several_rows: float  # or 'rows' of them
    nbytes: int  # of the matrix
    rows: int
    operations: int  # with one row


class CpuRates(NamedTuple):
    eight_bits: MatmulRate
    four_bits: MatmulRate
    keys: float  # bytes per second, of keys and values that one row of a stream sees
    layer: float  # seconds of a layer of a recorded step that has tiny matrices


def fit(losses: Losses, found: CpuRates, bandwidth: float) -> tuple[Losses, dict[str, float]]:
    """The losses with which the model of a step gives what was measured, and operations per second by format.

    What a CPU kept near was read faster than its memory is: no share is above 1.
    """
    shares, arithmetic = {}, {}
    for name, each in ((EIGHT_BITS, found.eight_bits), (FOUR_BITS, found.four_bits)):
        read, row = _apart(each)
        shares[name], arithmetic[name] = min(each.nbytes / read / bandwidth, 1.0), each.operations / row
    kv = min(found.keys / bandwidth, 1.0)
    return replace(losses, coded=shares[EIGHT_BITS], formats=shares, kv=kv, layer=found.layer), arithmetic


def _apart(found: MatmulRate) -> tuple[float, float]:
    """Seconds of reading a matrix, and of multiplying it with a row, which overlap as `roofline.overlap` says."""
    row = 0.0
    for _ in range(50):
        read = (found.one_row**OVERLAP - row**OVERLAP) ** (1 / OVERLAP)
        rest = max(found.several_rows**OVERLAP - read**OVERLAP, 0.0)
        row = rest ** (1 / OVERLAP) / found.rows
        row = min(max(row, 1e-3 * found.one_row), 0.999 * found.one_row)  # each takes some of the time
    return read, row
