"""Compiles the C++ beside this file on first use, and keeps the library in the user's cache folder.

The file name holds a hash of all that the machine code depends on (sources, flags, compiler, CPU), so a cache folder
may be shared between machines, and a compile that loses a race replaces the winner's file with an equal one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from sparkdraft.util.progress import progress
from sparkdraft.weights.hub import FULL, cache_dir

SOURCES = (
    *(
        "matmul.cpp",
        "experts.cpp",
        "attention.cpp",
        "recurrent.cpp",
        "elementwise.cpp",
        "sampling.cpp",
        "turboquant.cpp",
    ),
    "replay.cpp",
    *("activation.h", "matmul.h", "simd.h", "pool.h", "turboquant.h"),
)
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
HERE = Path(__file__).parent


class BuildError(Exception):
    """One sentence for the user: what is missing, and what to do about it."""


def library(cache: Path | None = None) -> Path:
    """The compiled library, compiled now if the cache lacks it.

    $SPARKDRAFT_CXXFLAGS adds flags; -DSPARKDRAFT_PLAIN in it chooses the plain C++ that other CPUs get.
    """
    compiler = find_compiler()
    flags = (*FLAGS, _tuning_flag(), *shlex.split(os.environ.get("SPARKDRAFT_CXXFLAGS", "")))
    folder = (cache or cache_dir()) / "native"
    target = folder / f"kernels-{_fingerprint(compiler, flags)}.so"
    if not target.exists():
        _compile(compiler, flags, target)
    return target


def find_compiler() -> list[str]:
    """The first compiler there is; $CXX may hold arguments, as in 'ccache g++'."""
    candidates = [shlex.split(os.environ.get("CXX", "")), *([name] for name in COMPILERS)]
    for command in candidates:
        if command and shutil.which(command[0]):
            return command
    raise BuildError(
        "no C++ compiler found (looked for $CXX, c++, g++, clang++): install one, or run with --dtype float32"
    )


def _tuning_flag() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _fingerprint(compiler: list[str], flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    digest.update(repr((compiler, flags, _compiler_version(compiler), _cpu_flags())).encode())
    return digest.hexdigest()[:16]


def _compiler_version(compiler: list[str]) -> str:
    try:
        return subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(
            f"the C++ compiler '{shlex.join(compiler)}' does not run ({error}): "
            "set $CXX to one that does, or run with --dtype float32"
        ) from error


def _cpu_flags() -> str:
    """Return what '-march=native' stands for here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "CPU part", "CPU implementer")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: list[str], flags: tuple[str, ...], target: Path) -> None:
    """Compiles in a temporary folder, then puts the result in place in one step."""
    print("Compiling the CPU kernels, once for this machine: about ten seconds.", file=sys.stderr, flush=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with progress("compiling the CPU kernels"), tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            objects = [Path(scratch) / (name + ".o") for name in SOURCES if name.endswith(".cpp")]
            _run_all(compiler, [[*flags, "-c", str(HERE / o.stem), "-o", str(o)] for o in objects])
            whole = Path(scratch) / target.name
            _run_all(compiler, [[*flags, "-shared", *map(str, objects), "-o", str(whole)]])
            os.replace(whole, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        if isinstance(error, OSError) and error.errno in FULL:
            raise _full(target.parent) from error
        raise BuildError(
            f"the CPU kernels could not be compiled into {target.parent} ({error}): "
            "set SPARKDRAFT_CACHE to a folder that can be written, or run with --dtype float32"
        ) from error


def _run_all(compiler: list[str], arguments: list[list[str]]) -> None:
    """Runs the compiler once for each list of arguments, all at the same time."""
    pipe = subprocess.PIPE
    runs = [subprocess.Popen([*compiler, *a], stdout=pipe, stderr=pipe, text=True) for a in arguments]
    errors = [run.communicate(timeout=600)[1] for run in runs]
    for run, stderr in zip(runs, errors, strict=True):
        if run.returncode and "No space left on device" in stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if run.returncode:
            raise BuildError(_failure(compiler, stderr))


def _full(folder: Path) -> BuildError:
    return BuildError(
        f"the disk is full, and compiling the CPU kernels needs a few MB in {folder} and in "
        f"{tempfile.gettempdir()}: make room, set SPARKDRAFT_CACHE and TMPDIR to a disk that has some, or run with "
        "--dtype float32"
    )


def _failure(compiler: list[str], stderr: str) -> str:
    lines = stderr.strip().splitlines()
    first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
    return (
        f"the C++ compiler '{shlex.join(compiler)}' failed on the CPU kernels ({first.strip()}): "
        "set $CXX to another compiler, or run with --dtype float32"
    )
