"""Machines that are folders: an `ssh` on the PATH runs commands here, each host with a home folder, a PATH and an
environment of its own, and with the faults that a test plants. `vllm` there is a stand-in whose ranks really connect.

Every process of a simulation has its folder in FAKE_CLUSTER, so those that are left behind can be counted.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.patience import PATIENT

NOT_THEIRS = ("NCCL_", "GLOO_", "SPARKDRAFT_")  # variables of this machine
SSH = """#!{python}
import json, os, subprocess, sys, time

args = sys.argv[1:]
at = args.index("--")
assert "-oBatchMode=yes" in args[:at], args
host, script = args[at + 1], args[at + 2]
home = os.path.join({root!r}, host)
if not os.path.isdir(home):
    sys.exit(print("ssh: Could not resolve hostname " + host + ": Name or service not known", file=sys.stderr) or 255)
with open(os.path.join(home, "fault.json")) as file:
    fault = json.load(file)
if fault.get("refuses"):
    sys.exit(print(fault["refuses"], file=sys.stderr) or 255)
if fault.get("frozen"):
    time.sleep(600)
env = {{**os.environ, **fault.get("environ", {{}}), "HOME": home, "FAKE_HOST": host}}
env["PATH"] = os.path.join(home, "bin") + ":" + os.environ["PATH"]
remote = subprocess.Popen(["sh", "-c", script], env=env, cwd=home, start_new_session=True)
for each in (0, 1):
    os.close(each)  # only the other side holds the pipes
status = remote.wait()
sys.exit(255 if status < 0 else status)
"""

VLLM = """#!{python}
import json, os, socket, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

args, home = sys.argv[1:], os.path.expanduser("~")
if args == ["--version"]:
    sys.exit(print({version!r}))


def value(name):
    return args[args.index(name) + 1]


def planted(name):
    return os.path.exists(os.path.join(home, name))


rank, count = int(value("--node-rank")), int(value("--nnodes"))
where = value("--master-addr"), int(value("--master-port"))
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(os.path.join(home, "called%d.json" % rank), "w") as file:
    json.dump({{"args": args, "environ": dict(os.environ), "pids": [os.getpid(), helper.pid]}}, file)
print("stand-in rank", rank, "of", count, flush=True)
if planted("fails"):
    sys.exit("ValueError: the stand-in cannot load this model")


def gone(peer):
    try:
        peer.recv(1)
    except OSError:
        pass
    print("EngineDeadError: another rank is gone", flush=True)
    os._exit(1)


if rank:
    for _ in range(600):
        try:
            peer = socket.create_connection(where)
            break
        except OSError:
            time.sleep(0.1)
    gone(peer)
listener = socket.create_server(where)
peers = [listener.accept()[0] for _ in range(count - 1)]
for peer in peers:
    threading.Thread(target=gone, args=(peer,), daemon=True).start()
made = 0


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer("vllm:generation_tokens_total{{engine=\\"0\\"}} %d\\n" % made if self.path == "/metrics" else "ok")

    def do_POST(self):
        global made
        key = os.environ.get("VLLM_API_KEY")
        if key and self.headers.get("Authorization") != "Bearer " + key:
            return self.answer("no", 401)
        self.rfile.read(int(self.headers["Content-Length"]))
        while planted("hangs"):
            time.sleep(0.1)
        made += 1
        self.answer('{{"choices": [{{"text": "x"}}]}}')

    def answer(self, text, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *rest):
        pass


ThreadingHTTPServer((value("--host"), int(value("--port"))), Handler).serve_forever()
"""


def free_ports(count: int) -> list[int]:
    found = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in found]
    for each in found:
        each.close()
    return ports


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def write_vllm(path: Path, version: str = "0.32.0") -> None:
    write_program(path, VLLM.format(python=sys.executable, version=version))


class Simulation:
    """Two machines, spark-1 and spark-2, or more, or this machine so many times (local)."""

    def __init__(self, root: Path, count: int = 2, local: bool = False, **settings: Any) -> None:
        self.root, self.cache = root, root / "cache"
        self.labels = [f"spark-{i}" for i in range(1, count + 1)]
        self.port, self.master = free_ports(2)
        write_program(root / "ssh-bin" / "ssh", SSH.format(python=sys.executable, root=str(root)))
        write_vllm(root / "ssh-bin" / "vllm")  # of this machine
        for each in self.labels:
            self.fault(each)
            write_vllm(root / each / "bin" / "vllm")
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(NOT_THEIRS)},
            "PATH": f"{root / 'ssh-bin'}:{os.environ['PATH']}",
            "FAKE_CLUSTER": str(root),
            "SPARKDRAFT_CACHE": str(self.cache),
            "PYTHONPATH": os.pathsep.join(["."] if not os.environ.get("PYTHONPATH") else [os.environ["PYTHONPATH"]]),
        }
        if local:
            (root / "home").mkdir()
            self.environ["HOME"] = str(root / "home")
        lines = [f"port = {self.master}", *(f"{name} = {value!r}" for name, value in settings.items())]
        for i, each in enumerate(self.labels):
            address, ip = ("local", "127.0.0.1") if local else (each, f"127.0.0.{count - i}")  # no two have the same
            lines += ["[[host]]", f'address = "{address}"', f'ip = "{ip}"', 'interfaces = ["lo"]']
        self.file = root / "sparks.toml"
        self.file.write_text("\n".join(lines) + "\n")

    def fault(self, host: str, **fault: Any) -> None:
        """refuses: what ssh says. frozen: ssh never answers. environ: variables there."""
        (self.root / host).mkdir(exist_ok=True)
        (self.root / host / "fault.json").write_text(json.dumps(fault))

    def processes(self, host: str = "") -> list[int]:
        """Those that run and belong to the simulation, or to one host of it."""
        wanted = f"FAKE_HOST={host}".encode() if host else f"FAKE_CLUSTER={self.root}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                environ = (path / "environ").read_bytes().split(b"\0")
                if f"FAKE_CLUSTER={self.root}".encode() in environ and wanted in environ:
                    found.append(int(path.name))
        return [each for each in found if each != os.getpid()]

    def signal(self, host: str, number: int) -> None:
        for pid in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def words(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "sparkdraft.cli.main", "cluster", args[0], str(self.file), *args[1:]]

    def command(self, *args: str, seconds: float = PATIENT) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.words(*args), capture_output=True, text=True, timeout=seconds, env=self.environ)

    def state(self) -> dict[str, Any]:
        path = self.cache / "cluster" / "sparks" / "state.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def called(self, rank: int, home: str = "") -> Mapping[str, Any]:
        return dict(json.loads((self.root / (home or self.labels[rank]) / f"called{rank}.json").read_text()))

    @contextmanager
    def up(self, *args: str) -> Iterator[subprocess.Popen[str]]:
        flags = ["--model", "Qwen/Qwen3-8B", "--port", str(self.port), *args]
        with open(self.root / "up.log", "w") as log:
            process = subprocess.Popen(self.words("up", *flags), stderr=log, text=True, env=self.environ)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def said(self) -> str:
        return (self.root / "up.log").read_text()


@contextmanager
def clean(simulation: Simulation) -> Iterator[Simulation]:
    """Kills what a failed test leaves; a test that passes asserts before that nothing is left."""
    try:
        yield simulation
    finally:
        for pid in simulation.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
