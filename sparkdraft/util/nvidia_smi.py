"""Asks nvidia-smi about the GPUs of the driver, or about the one that torch uses. No torch."""

from __future__ import annotations

import csv
import subprocess
import time
from collections.abc import Callable, Sequence

REASONS = "clocks_event_reasons.active"
REASONS_BEFORE_535 = "clocks_throttle_reasons.active"  # the same field in older drivers
# Bits of REASONS that lower the clocks. Idle (1) and clocks that an application set (2) are no faults.
POWER_LIMIT = 0x04  # which a GPU reaches under full load, too
HELD_BACK = {
    POWER_LIMIT: "the power limit",
    0x08: "a slowdown of the hardware (heat, or its power supply)",
    0x20: "heat, by the driver",
    0x40: "heat, by the hardware",
    0x80: "the power supply's brake",
}
SECONDS = 10  # that nvidia-smi may take


def ask(
    fields: Sequence[str],
    gpu: str = "",
    meanwhile: Callable[[], object] = lambda: time.sleep(0.01),
    program: str = "nvidia-smi",
) -> tuple[list[list[str]], str]:
    """The fields of each GPU, or why they cannot be asked. gpu: the UUID of the only one that is asked. meanwhile:
    repeated until there is an answer."""
    rows, problem, code = _ask(fields, gpu, meanwhile, program)
    if code and REASONS in fields:
        older = [REASONS_BEFORE_535 if name == REASONS else name for name in fields]
        rows, problem, code = _ask(older, gpu, meanwhile, program)
    return rows, problem


def held_back(reasons: str) -> int | None:
    """The bits of REASONS as nvidia-smi prints them; None where it does not tell."""
    try:
        return int(reasons, 16)
    except ValueError:  # "[N/A]"
        return None


def _ask(
    fields: Sequence[str], gpu: str, meanwhile: Callable[[], object], program: str
) -> tuple[list[list[str]], str, int]:
    """The rows, the problem, and the exit status."""
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    command += ["-i", gpu] if gpu else []
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as asked:
            deadline = time.monotonic() + SECONDS
            meanwhile()  # once at least, however soon it answers
            while asked.poll() is None and time.monotonic() < deadline:
                meanwhile()
            is_late = asked.poll() is None
            asked.kill()  # does nothing to one that has ended
            text = asked.communicate()[0]
    except FileNotFoundError:
        return [], "nvidia-smi is not installed", 0
    except OSError as error:
        return [], f"nvidia-smi cannot be run ({error.strerror})", 0
    if is_late:
        return [], f"nvidia-smi did not answer within {SECONDS} s", 0
    if asked.returncode:
        said = text.strip().splitlines()[0] if text.strip() else asked.returncode
        return [], f"nvidia-smi fails ({said})", asked.returncode
    rows = csv.reader(text.strip().splitlines(), skipinitialspace=True)
    return [row for row in rows if len(row) == len(fields)], "", 0
