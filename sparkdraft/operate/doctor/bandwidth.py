"""How fast this machine reads its memory, which is how fast it decodes, against what such a machine should give."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdraft.operate.doctor.finding import Finding, Status
from sparkdraft.operate.doctor.gpu import PART, unstick
from sparkdraft.operate.forecast.machine import Machine


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes per second."""

    gemv: float  # a matrix times a vector
    copy: float  # the better of a copy and a sum

    @property
    def best(self) -> float:
        return max(self.gemv, self.copy)


LEAST_OF_PEAK = 0.6  # of what the memory's clock and width give, where no file describes a GPU
LEAST_CPU = 4e9  # bytes per second that any machine with memory of its own reads
LEAST_GEMV = 0.7  # of a copy: a matrix that is read slower is not read as it should be


def judge_bandwidth(measured: Measured, name: str, known: Machine | None, peak: float = 0.0, busy: str = "") -> Finding:
    """known: the file that describes the machine. peak: of the memory by its clock and width; 0: not told. busy: why
    the measurement may be too low."""
    value = f"{measured.gemv / 1e9:.1f} GB/s by a matrix times a vector, {measured.copy / 1e9:.1f} by a copy"
    is_gpu = bool(known and known.hardware.device == "cuda") or bool(peak)
    if known and known.slow_below:
        least, expected = known.slow_below, f"{known.title} gives {known.rates.bandwidth / 1e9:.0f}"
    elif peak:
        least, expected = LEAST_OF_PEAK * peak, f"its memory is made for {peak / 1e9:.0f}"
    else:
        least, expected = LEAST_CPU, f"any machine gives more than {LEAST_CPU / 1e9:.0f}"
    value += f"; {expected}"
    part = PART if is_gpu else "CPU"
    if measured.best >= least:
        return Finding(part, "memory bandwidth", value)
    if busy:
        advice = f"{busy}: look again when it is idle"
        return Finding(part, "memory bandwidth", value, Status.NOTE, advice, "measured now")
    slow = "stuck in a low-power state? " if is_gpu else ""
    advice = slow + (
        unstick(name) if is_gpu else "another program or the host takes the memory's time: look with `top`"
    )
    return Finding(part, "memory bandwidth", f"{value}: too slow", Status.CHANGE, advice, "measured now")
