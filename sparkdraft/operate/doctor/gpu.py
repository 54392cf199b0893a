"""The GPU's clocks, power and driver, as nvidia-smi tells them while the GPU works. No torch."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparkdraft.operate.doctor.finding import Finding, Status
from sparkdraft.util.nvidia_smi import HELD_BACK, REASONS, SECONDS, ask, held_back

PART = "GPU"
FIELDS = (
    *("name", "driver_version", "pstate", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit"),
    *("power.default_limit", "temperature.gpu", REASONS),
)
# The numbers among them, as GpuState names them.
NUMBERS = ("sm_mhz", "max_sm_mhz", "mem_mhz", "watts", "limit_watts", "default_watts", "celsius")
LEAST_CLOCK = 0.6  # of the highest clock, under load
STUCK_MHZ = 900  # below it under load a GPU is in a low-power state
HOT_C = 87
NEW_DRIVER = {"GB10": 580}  # the first driver series that knows a GPU


@dataclass(frozen=True, slots=True)
class GpuState:
    """None: the driver does not tell, as a GB10's does not of its memory's clock."""

    name: str
    driver: str
    pstate: str
    sm_mhz: float | None = None
    max_sm_mhz: float | None = None
    mem_mhz: float | None = None
    watts: float | None = None
    limit_watts: float | None = None
    default_watts: float | None = None
    celsius: float | None = None
    held_back: int = 0  # bits of HELD_BACK

    @property
    def reasons(self) -> list[str]:
        return [text for bit, text in HELD_BACK.items() if self.held_back & bit]


def read_gpus(meanwhile: Callable[[], object] | None = None, gpu: str = "") -> tuple[list[GpuState], str]:
    """All GPUs of the driver, or the one with this UUID, or why it cannot be asked. meanwhile: work for the GPU,
    repeated until it has answered: the clocks of an idle GPU say nothing."""
    rows, problem = ask(FIELDS, gpu, meanwhile) if meanwhile else ask(FIELDS, gpu)
    return [state(row) for row in rows], problem


def count_others(own: int, gpu: str = "") -> int:
    """Processes that use the GPU with this UUID, but for the one with this number; 0 where the driver does not tell."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader", *(["-i", gpu] if gpu else [])]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len({line.strip() for line in told.splitlines() if line.strip().isdecimal()} - {str(own)})


def state(row: Sequence[str]) -> GpuState:
    """Of FIELDS as nvidia-smi prints them."""
    name, driver, pstate, *numbers, reasons = row
    told = zip(NUMBERS, map(_number, numbers), strict=True)
    return GpuState(name, driver, pstate, **dict(told), held_back=held_back(reasons) or 0)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]", "[Not Supported]"
        return None


def judge_gpu(state: GpuState, others: int = 0) -> list[Finding]:
    """others: processes that use the GPU beside this one."""
    found = [Finding(PART, "GPU", f"{state.name}, driver {state.driver}"), *_driver(state), _clocks(state)]
    if state.limit_watts and state.default_watts and state.limit_watts < 0.98 * state.default_watts:
        value = f"{state.limit_watts:.0f} W, and {state.default_watts:.0f} W by default"
        advice = f"`sudo nvidia-smi -pl {state.default_watts:.0f}` lifts it, if nobody set it on purpose"
        found.append(Finding(PART, "power limit", value, Status.CHANGE, advice))
    if state.celsius and state.celsius >= HOT_C:
        advice = "see to its cooling: clocks fall from here on"
        found.append(Finding(PART, "temperature", f"{state.celsius:.0f} degrees C", Status.CHANGE, advice))
    if others:
        many = "one other process uses" if others == 1 else f"{others} other processes use"
        advice = "what is measured here is lower than the GPU could do: stop them and look again"
        found.append(Finding(PART, "others", f"{many} the GPU", Status.NOTE, advice))
    return found


def _driver(state: GpuState) -> list[Finding]:
    series = int(state.driver.split(".")[0]) if state.driver.split(".")[0].isdecimal() else 0
    for part, least in NEW_DRIVER.items():
        if part in state.name and 0 < series < least:
            value = f"{state.driver}; a {part} needs {least} or later"
            return [Finding(PART, "driver", value, Status.CHANGE, f"update the driver to {least} or later")]
    return []


def _clocks(state: GpuState) -> Finding:
    shown = [f"{state.sm_mhz:.0f} MHz" if state.sm_mhz else "the clock is not told"]
    shown += [f"of {state.max_sm_mhz:.0f}"] * bool(state.max_sm_mhz)
    value = " ".join(shown) + f" under load, {state.pstate}"
    value += f", {state.watts:.0f} W" if state.watts else ""
    value += f" of {state.limit_watts:.0f}" if state.watts and state.limit_watts else ""
    by = " and ".join(state.reasons)
    is_low = state.sm_mhz and state.max_sm_mhz and state.sm_mhz < LEAST_CLOCK * state.max_sm_mhz
    if not is_low:
        return Finding(PART, "clocks", value + (f"; held back by {by}" if by else ""))
    if state.sm_mhz and state.sm_mhz < STUCK_MHZ and not by:
        return Finding(PART, "clocks", f"{value}: stuck in a low-power state", Status.CHANGE, unstick(state.name))
    advice = f"held back by {by}: see to it" if by else "look at `nvidia-smi -q -d CLOCK,PERFORMANCE` while it works"
    return Finding(PART, "clocks", value, Status.CHANGE, advice)


def unstick(name: str) -> str:
    """How to leave a low-power state that the driver does not name."""
    if "GB10" in name:
        return (
            "pull the power supply's plug for a minute, at the wall and at the machine: a USB-PD negotiation that "
            "failed leaves a GB10 at 500 to 850 MHz, and the clocks shown may be normal"
        )
    return "reboot; look at `nvidia-smi -q -d PERFORMANCE,POWER` while it works, and at the power cables"
