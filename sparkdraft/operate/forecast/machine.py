"""The machines that speed is predicted for: the files of machines/, a user's file, or the machine at hand.

A file has what the machine reaches, what engines lose on it, and the source of each number. The machine at hand is
measured in a few seconds; a GPU takes the losses of the file that matches its name. Only measuring imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkdraft.core import UserError
from sparkdraft.operate.forecast.roofline import OVERLAP, Losses, Rates
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.weight_formats import BYTES, EIGHT_BITS, FOUR_BITS
from sparkdraft.util.names import did_you_mean, spelled, user_path

if TYPE_CHECKING:
    from sparkdraft.operate.forecast.rates import CpuRates, MatmulRate


FOLDER = Path(__file__).parent / "machines"
HERE = "this"
UNKNOWN_GPU = "rtx-5090"  # whose losses a GPU gets that no file describes: they have the widest range


class Error(NamedTuple):
    """The error of the model of a step, as a share of the speed."""

    dense: float
    experts: float


@dataclass(frozen=True, slots=True)
class EngineLosses:
    origin: str  # where the numbers come from, in words
    expected: Losses
    low: Losses  # where all is as bad as may be expected,
    high: Losses  # or as good; both the expected where an engine was measured on this machine
    error: Error

    @property
    def is_measured(self) -> bool:
        return self.low == self.high


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    title: str
    hardware: Hardware
    unified: bool  # GPU and CPU share one memory
    rates: Rates
    engines: Mapping[str, EngineLosses]
    slow_below: float = 0.0  # bandwidth below which the machine is in a state that it should not be in
    matches: tuple[str, ...] = ()  # parts of GPUs' names that this file describes
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    native_problem: str | None = None  # why the CPU kernels cannot run

    def losses(self, engine: str = "sparkdraft") -> EngineLosses:
        if engine not in self.engines:
            raise UserError(f"{self.title} has no losses of '{engine}'; it has those of {', '.join(self.engines)}")
        return self.engines[engine]


def known_machines() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def find_machine(name: str) -> Machine:
    """Return the machine of a known name, 'this' one, or that of a file. Raises UserError."""
    if name == HERE:
        return this_machine()
    if found := spelled(name, known_machines()):
        return read_machine(FOLDER / f"{found}.json")
    path = user_path(name)
    if not path.is_file():
        question = did_you_mean(name, known_machines())
        raise UserError(
            f"Unknown machine '{name}'{f'; {question}' if question else '.'} Known machines are "
            f"{', '.join(known_machines())} and {HERE}; a file like those of operate/forecast/machines works too"
        )
    return read_machine(path)


def read_machine(path: Path) -> Machine:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        memory = int(float(data["memory_gib"]) * 2**30)
        capability = (int(data["capability"][0]), int(data["capability"][1]))
        hardware = Hardware(str(data["device"]), str(data["title"]), int(data["cores"]), memory, capability)
        rates = Rates(
            float(data["bandwidth_gb_s"]) * 1e9, {str(k): float(v) * 1e12 for k, v in data["tflop_s"].items()}
        )
        engines = {str(name): _engine(each) for name, each in data["engines"].items()}
        matches, sources, notes = (tuple(map(str, data.get(key, ()))) for key in ("matches", "sources", "notes"))
        slow, unified = float(data.get("slow_below_gb_s", 0)) * 1e9, bool(data["unified"])
        machine = Machine(path.stem, hardware.name, hardware, unified, rates, engines, slow, matches, sources, notes)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"the machine file {path} cannot be used ({reason}): compare it with gb10.json") from error
    if hardware.device not in ("cpu", "cuda") or not rates.arithmetic or min(rates.bandwidth, memory) <= 0:
        raise UserError(f"the machine file {path} needs a device (cpu or cuda), memory, bandwidth and tflop_s above 0")
    return machine


def this_machine() -> Machine:
    """Measure this machine: its free memory, bandwidth, and the speed of a GPU's matmuls or of the CPU kernels."""
    from sparkdraft.config import EngineConfig
    from sparkdraft.engine.machine import detect, native_problem
    from sparkdraft.operate.forecast.rates import matmul_rate, memory_bandwidth

    config = EngineConfig()
    found = detect(config)
    problem, base = native_problem(config, found), like(found)
    bandwidth = memory_bandwidth(found.device, found.cores, repeats=3)
    if found.device == "cuda":
        base = replace(base, rates=Rates(bandwidth, {"bfloat16": matmul_rate()}), notes=_notes(found, base))
    else:
        base = _cpu_like(base, found, bandwidth, measured=problem is None)
    notes = base.notes
    if bandwidth < base.slow_below and _is(found, base):
        slow = f"memory reads {bandwidth / 1e9:.0f} GB/s, below {base.slow_below / 1e9:.0f}: is it in a slow state?"
        notes = (slow, *notes)
    return replace(
        base,
        name=HERE,
        title=f"this machine ({found.name})",
        hardware=found,
        notes=notes,
        sources=("measured now, by operate/forecast/rates.py",),
        native_problem=problem,
    )


def _cpu_like(base: Machine, found: Hardware, bandwidth: float, measured: bool) -> Machine:
    """Return a CPU with the losses measured on its own kernels, or with those of the file if they do not run."""
    share = found.cores / base.hardware.cores
    arithmetic = {fmt: rate * share for fmt, rate in base.rates.arithmetic.items()}
    if not measured:
        return replace(base, rates=Rates(bandwidth, arithmetic), notes=(f"losses are those of {base.title}",))
    from sparkdraft.operate.forecast.rates import measure_cpu

    engine = base.losses()
    losses, quantised = fit(engine.expected, measure_cpu(found.cores), bandwidth)
    origin = "measured now, on its own CPU kernels"
    engines = dict(base.engines) | {"sparkdraft": EngineLosses(origin, losses, losses, losses, Error(*ERROR))}
    return replace(base, rates=Rates(bandwidth, arithmetic | quantised), engines=engines)


def describing(name: str) -> Machine | None:
    """Return the file that describes a GPU of this name."""
    return next((each for each in _files() if any(part in name for part in each.matches)), None)


def like(found: Hardware) -> Machine:
    """Return the file whose losses are nearest to this hardware's."""
    if found.device == "cpu":
        return next(each for each in _files() if each.hardware.device == "cpu")
    return describing(found.name) or read_machine(FOLDER / f"{UNKNOWN_GPU}.json")


def _files() -> list[Machine]:
    return [read_machine(FOLDER / f"{name}.json") for name in known_machines()]


def _is(found: Hardware, machine: Machine) -> bool:
    return any(part in found.name for part in machine.matches)


def _notes(found: Hardware, base: Machine) -> tuple[str, ...]:
    if _is(found, base):
        return base.notes
    return (f"no file describes {found.name}: losses are those expected of {base.title}",)


def _engine(data: Mapping[str, Any]) -> EngineLosses:
    expected = _losses(data["losses"])
    low, high = (_losses(data["losses"] | data.get(side, {})) for side in ("low", "high"))
    error = Error(float(data["error"]["dense"]), float(data["error"]["experts"]))
    return EngineLosses(str(data["from"]), expected, low, high, error)


def _losses(data: Mapping[str, Any]) -> Losses:
    known = {each.name for each in fields(Losses)}
    if unknown := sorted(data.keys() - known):
        raise ValueError(f"'{unknown[0]}' is no loss; losses are {', '.join(sorted(known))}")
    losses, formats = Losses(**data), {fmt.partition("-")[0] for fmt in BYTES}
    if unknown := sorted(losses.formats.keys() - formats):
        raise ValueError(f"'{unknown[0]}' is no format; formats are {', '.join(sorted(formats))}")
    shares = (losses.floats, losses.coded, losses.experts, losses.kv, losses.rows, losses.compute)
    if min(*shares, *losses.formats.values()) <= 0:
        raise ValueError("shares must be above 0")
    return losses


# ---- the engine's losses on this CPU, fitted to what rates.py measured

ERROR = 0.20, 0.30  # of dense models and of experts, as shares of the speed


def fit(losses: Losses, found: CpuRates, bandwidth: float) -> tuple[Losses, dict[str, float]]:
    """Return the losses at which the model of a step reproduces the measurements, and operations per second by format.
    Data that stayed in the CPU's caches was read faster than memory is, so shares are capped at 1."""
    shares, arithmetic = {}, {}
    for name, each in ((EIGHT_BITS, found.eight_bits), (FOUR_BITS, found.four_bits)):
        read, row = _apart(each)
        shares[name], arithmetic[name] = min(each.nbytes / read / bandwidth, 1.0), each.operations / row
    kv = min(found.keys / bandwidth, 1.0)
    return replace(losses, coded=shares[EIGHT_BITS], formats=shares, kv=kv, layer=found.layer), arithmetic


def _apart(found: MatmulRate) -> tuple[float, float]:
    """Split a time into reading a matrix and multiplying it with a row, which overlap as `roofline.overlap` says."""
    row = 0.0
    for _ in range(50):
        read = (found.one_row**OVERLAP - row**OVERLAP) ** (1 / OVERLAP)
        rest = max(found.several_rows**OVERLAP - read**OVERLAP, 0.0)
        row = rest ** (1 / OVERLAP) / found.rows
        row = min(max(row, 1e-3 * found.one_row), 0.999 * found.one_row)  # each takes some of the time
    return read, row
