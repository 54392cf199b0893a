"""A program that behaves as `vllm` does where a parent can see it: it says its version, serves /health, has a helper
process in another session, and ends on SIGTERM. Written to a file as an executable."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

PROGRAM = """#!{python}
import json, os, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

args = sys.argv[1:]
if args == ["--version"]:
    print("{version}")
    sys.exit(0)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open("{record}.new", "w") as file:
    json.dump({{"args": args, "key": os.environ.get("VLLM_API_KEY"), "pids": [os.getpid(), helper.pid]}}, file)
os.rename("{record}.new", "{record}")
if "{mode}" == "fails":
    print("the fake fails", file=sys.stderr)
    sys.exit(3)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{"served": args[args.index("--port") + 1]}})

    def answer(self, body):
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *rest):
        pass


server = ThreadingHTTPServer((args[args.index("--host") + 1], int(args[args.index("--port") + 1])), Handler)


def end(number, frame):
    with open("{record}.signal", "w") as file:
        file.write(signal.Signals(number).name)
    if "{mode}" != "stubborn":
        threading.Thread(target=server.shutdown).start()


for each in (signal.SIGTERM, signal.SIGINT):
    signal.signal(each, end)
server.serve_forever()
"""


def write_fake(folder: Path, version: str = "0.32.0", mode: str = "serves") -> Path:
    """Returns the file into which it writes how it was called. mode: serves, fails, or stubborn (no signal ends it)."""
    folder.mkdir(exist_ok=True)
    program, record = folder / "vllm", folder / "called.json"
    program.write_text(PROGRAM.format(python=sys.executable, version=version, record=record, mode=mode))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return record
