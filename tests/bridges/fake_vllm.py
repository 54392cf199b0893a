"""A program that behaves as `vllm` does where a parent and a client can see it: it says its version, serves /health,
/metrics and chats, refuses tools if it was given no parser of calls, has a helper process in another session, and ends
on SIGTERM. Written to a file as an executable."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

PROGRAM = r"""#!{python}
import json, os, select, signal, subprocess, sys, threading, time
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
    for i in range(30):
        print("line", i, flush=True)
    print("the fake fails", file=sys.stderr)
    sys.exit(3)


METRICS = '''# HELP vllm:generation_tokens_total Tokens; the sum over engines equals vllm:all_tokens.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0"}} 7.0
python_info 1.0
'''


NO_PARSER = "requires --tool-call-parser to be set"


def said(body):
    # A small model: vLLM holds the arguments of a required call to their schema only if the tool is strict.
    if not body.get("tools"):
        return {{"content": "one two"}}
    is_strict = body["tools"][0]["function"].get("strict")
    call = {{"name": "get_weather", "arguments": '{{"city": "Paris"}}' if is_strict else '"Paris"'}}
    return {{"tool_calls": [{{"id": "1", "index": 0, "type": "function", "function": call}}]}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/die":
            os._exit(9)
        if self.path == "/metrics":
            return self.write(METRICS.encode(), "text/plain")
        if self.path == "/health" and os.path.exists("{record}.sick"):
            return self.send_error(503)
        self.answer({{"path": self.path, "data": [{{"id": "m"}}]}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/slow":
            open("{record}.asked", "w").close()
            try:
                for _ in range(600):
                    time.sleep(0.05)
                    if not select_closed(self.connection):
                        continue
                    open("{record}.gone", "w").close()
                    return
            finally:
                self.close_connection = True
            return
        if body.get("tools") and "--tool-call-parser" not in args:
            return self.write(json.dumps({{"error": {{"message": NO_PARSER}}}}).encode(), "application/json", 400)
        if not body.get("stream"):
            message = {{"role": "assistant", **said(body)}}
            usage = {{"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}
            choices = [{{"message": message, "finish_reason": "stop"}}]
            return self.answer({{"model": "m", "choices": choices, "usage": usage}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        pieces = [said(body)] if body.get("tools") else [{{"content": "one "}}, {{"content": "two"}}]
        for piece in pieces:
            self.event(json.dumps({{"choices": [{{"index": 0, "delta": piece}}]}}))
            while body.get("user") == "waits" and not os.path.exists("{record}.read"):
                if select_closed(self.connection):
                    return open("{record}.gone", "w").close()
                time.sleep(0.01)
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, text):
        raw = ("data: " + text + "\n\n").encode()
        self.wfile.write(hex(len(raw))[2:].encode() + b"\r\n" + raw + b"\r\n")

    def answer(self, body):
        self.write(json.dumps(body).encode(), "application/json")

    def write(self, raw, kind, status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *rest):
        pass


def select_closed(connection):
    return bool(select.select([connection], [], [], 0)[0]) and not connection.recv(1)


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client may leave in the middle of an answer
            super().handle_error(request, client)


server = Server((args[args.index("--host") + 1], int(args[args.index("--port") + 1])), Handler)


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
