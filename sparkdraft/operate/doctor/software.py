"""Versions of Python, torch, Triton and the compilers, and environment variables that slow everything down."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from sparkdraft import __version__
from sparkdraft.operate.doctor.finding import Finding, Status

PART = "software"
TESTED_TORCH = ("2.11", "2.13")  # the oldest and the newest
GLUON_TRITON = "3.6"  # the version whose Gluon the kernels of a coded cache are written in
SLOWING = {
    "TRITON_INTERPRET": "GPU kernels run in Python, thousands of times slower",
    "CUDA_LAUNCH_BLOCKING": "every launch waits for the GPU, and steps cannot be captured",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor asks the driver for its memory, and steps cannot be captured",
}


@dataclass(frozen=True, slots=True)
class Torch:
    version: str = ""
    cuda: str = ""  # the CUDA that it was built for; "": a CPU build
    has_gpu: bool = False  # whether it can use one
    archs: tuple[str, ...] = ()  # GPUs that it has code for, such as sm_90
    problem: str = ""  # why it cannot be imported


def read_torch() -> Torch:
    try:
        import torch

        archs = tuple(torch.cuda.get_arch_list()) if torch.cuda.is_available() else ()
        return Torch(torch.__version__, torch.version.cuda or "", torch.cuda.is_available(), archs)
    except (ImportError, OSError, RuntimeError) as error:  # a broken installation raises any of these
        return Torch(problem=_first_line(error))


def judge_torch(torch: Torch, gpus: int, driver: str = "", capability: tuple[int, int] | None = None) -> list[Finding]:
    """gpus: number of NVIDIA GPUs that the driver lists. capability: of the one that torch uses."""
    if torch.problem:
        advice = f"install it again: pip install --force-reinstall 'torch=={TESTED_TORCH[1]}.*'"
        return [Finding(PART, "torch", f"it cannot be imported ({torch.problem})", Status.BROKEN, advice)]
    built = f"built for CUDA {torch.cuda}" if torch.cuda else "a CPU build"
    found = [_torch_version(torch, f"{torch.version}, {built}")]
    if gpus and not torch.cuda:
        value = f"there is an NVIDIA GPU, and this torch is a CPU build ({torch.version}): the engine runs on the CPU"
        advice = "install a CUDA build, such as: pip install torch --index-url https://download.pytorch.org/whl/cu130"
        found.append(Finding(PART, "torch and the GPU", value, Status.CHANGE, advice))
    elif gpus and not torch.has_gpu:
        value = f"torch is built for CUDA {torch.cuda} and cannot use the GPU with driver {driver or 'unknown'}"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        advice = "update the driver (CUDA 13 needs 580, CUDA 12 needs 525), or install a torch for an older CUDA"
        advice = advice if hidden is None else f"CUDA_VISIBLE_DEVICES is '{hidden}': unset it"
        found.append(Finding(PART, "torch and the GPU", value, Status.CHANGE, advice))
    elif capability and torch.archs and not _has_code(torch.archs, capability):
        value = f"torch has code for {', '.join(torch.archs)}, and this GPU is sm_{capability[0]}{capability[1]}"
        advice = "install a torch that was built for this GPU: a newer one, or one for a newer CUDA"
        found.append(Finding(PART, "torch and the GPU", value, Status.BROKEN, advice))
    return found


def _torch_version(torch: Torch, value: str) -> Finding:
    oldest, newest = TESTED_TORCH
    if _numbers(torch.version)[:2] < _numbers(oldest):
        advice = f"{oldest} to {newest} are tested: pip install 'torch>={oldest}'"
        return Finding(PART, "torch", f"{value}: older than {oldest}", Status.CHANGE, advice)
    if _numbers(torch.version)[:2] > _numbers(newest):
        advice = f"should something fail, try {newest}: pip install 'torch=={newest}.*'"
        return Finding(PART, "torch", f"{value}: newer than {newest}, the newest that was tested", Status.NOTE, advice)
    return Finding(PART, "torch", value)


def _has_code(archs: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Return whether torch has code for this GPU: machine code runs on GPUs of the same major number and a minor number
    no smaller, PTX on all later ones."""
    for kind, digits in re.findall(r"\b(sm|compute)_(\d+)", " ".join(archs)):
        each = int(digits[:-1]), int(digits[-1])
        if each <= capability and (kind == "compute" or each[0] == capability[0]):
            return True
    return False


# ---- Triton and compilers


def read_triton() -> tuple[str, str]:
    """Return Triton's version, or why it cannot be imported."""
    try:
        return str(import_module("triton").__version__), ""
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return "", _first_line(error)


def judge_triton(version: str, problem: str, device: str) -> Finding:
    if device == "cpu":
        value = version or "not installed"
        return Finding(PART, "Triton", f"{value}; a CPU does without: its kernels are C++")
    if problem:
        advice = "install the one that torch brings: pip install triton (a CUDA build of torch does it by itself)"
        value = f"it cannot be imported ({problem}), and the GPU kernels are written in it"
        return Finding(PART, "Triton", value, Status.BROKEN, advice)
    if _numbers(version)[:2] != _numbers(GLUON_TRITON):
        advice = f"`--kv turboquant` needs the Gluon of Triton {GLUON_TRITON}; exact and fp8 K/V do not"
        return Finding(PART, "Triton", version, Status.NOTE, advice)
    return Finding(PART, "Triton", version)


def judge_c_compiler(device: str) -> list[Finding]:
    """Check the C compiler with which Triton compiles a launcher per kernel. A CPU needs a C++ compiler
    (`judge_native`)."""
    if device == "cpu":
        return []
    names = [os.environ.get("CC", ""), "gcc", "clang"]
    compiler = next((name for name in names if name and shutil.which(name)), "")
    if compiler:
        return [Finding(PART, "C compiler", compiler)]
    advice = "install gcc (apt install gcc), or set CC: Triton compiles a launcher for each kernel with it"
    return [Finding(PART, "C compiler", "none found (looked for $CC, gcc, clang)", Status.BROKEN, advice)]


def judge_native(device: str) -> list[Finding]:
    """Compile the CPU kernels if need be, and load them."""
    if device != "cpu":
        return []
    from sparkdraft.kernels.native import build, library

    try:
        compiler = " ".join(build.find_compiler())
    except build.BuildError as error:
        advice = "install a C++ compiler (apt install g++): 4-bit weights then run several times faster than float32"
        return [Finding(PART, "C++ compiler", str(error).split(":")[0], Status.CHANGE, advice)]
    if problem := library.unavailable_reason():
        what, _, advice = problem.partition(": ")
        return [Finding(PART, "CPU kernels", what, Status.CHANGE, advice)]
    lanes = library.c.sd_lanes()
    return [
        Finding(PART, "C++ compiler", compiler, proof=f"the CPU kernels are compiled and loaded, {lanes} lanes wide")
    ]


# ---- the rest


def versions() -> Finding:
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    return Finding(PART, "sparkdraft", f"{__version__}, Python {platform.python_version()}, {system}")


def judge_environment(environment: Mapping[str, str], device: str) -> list[Finding]:
    found = []
    for name, effect in SLOWING.items() if device == "cuda" else ():
        if environment.get(name, "0") not in ("", "0"):
            value = f"it is {environment[name]}: {effect}"
            found.append(Finding(PART, name, value, Status.CHANGE, f"unset {name}"))
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
