"""How long others wait for the API while one huge request is refused or tokenised.

Starts a server with the embedded model, lets one stream run, and asks for /health again and again: first with nothing
else, then beside each huge request. A row gives the answer's status and time, the longest wait for /health, and the
longest pause between two pieces of the stream. The stream's pauses hold the engine's own steps too, so the row "nothing
else" is what to compare with.

    python tools/api_latency.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

JSON = {"Content-Type": "application/json"}
QUIET = 2.0  # seconds of the row without a huge request
SERVE = "import sys; from sparkdraft.cli.main import main; sys.exit(main(sys.argv[1:]))"


def huge_requests() -> dict[str, tuple[str, bytes]]:
    """By name: the path, and the body."""
    letters = random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=1_300_000)
    texts = {
        "1.3 million CJK characters": "\u6f22" * 1_300_000,
        "1.3 million random letters": "".join(letters),
        "300,000 random letters": "".join(letters[:300_000]),
        "60,000 CJK characters": "\u6f22" * 60_000,
    }
    bodies = {name: {"messages": [{"role": "user", "content": text}], "max_tokens": 1} for name, text in texts.items()}
    found = {name: ("/v1/chat/completions", json.dumps(body).encode()) for name, body in bodies.items()}
    found["1 million ids to /detokenize"] = ("/detokenize", json.dumps({"tokens": [5] * 1_000_000}).encode())
    found["200,000 nested lists"] = ("/v1/completions", b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}")
    found["200,000 lists in a list"] = ("/v1/completions", b'{"prompt": [' + b"[1]," * 200_000 + b"[1]]}")
    found["a body of 64 MB"] = ("/v1/completions", b" " * (64 << 20))
    return found


@dataclass(slots=True)
class Waits:
    """Seconds, collected by two threads while a server runs."""

    port: int
    health: list[float] = field(default_factory=list)
    pieces: list[float] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def ask_health(self) -> None:
        while not self.stop.is_set():
            self.health.append(call(self.port, "GET", "/health")[1])
            time.sleep(0.005)

    def read_streams(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        while not self.stop.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
            connection.request("POST", "/v1/completions", json.dumps(body), JSON)
            answer, last = connection.getresponse(), 0.0
            while not self.stop.is_set() and answer.readline():
                now = time.perf_counter()
                if last:
                    self.pieces.append(now - last)
                last = now
            connection.close()


def call(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, float]:
    """The status, and seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    begin = time.perf_counter()
    connection.request(method, path, body, JSON if body else {})
    answer = connection.getresponse()
    answer.read()
    seconds = time.perf_counter() - begin
    connection.close()
    return answer.status, seconds


@contextmanager
def server() -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", SERVE, "serve", "--port", str(port)])
    try:
        while process.poll() is None:
            try:
                if call(port, "GET", "/health")[0] == 200:
                    break
            except OSError:
                pass
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def measure(port: int, request: tuple[str, bytes] | None) -> dict[str, float]:
    waits = Waits(port)
    threads = [threading.Thread(target=run) for run in (waits.ask_health, waits.read_streams)]
    for thread in threads:
        thread.start()
    while len(waits.pieces) < 20:
        time.sleep(0.01)
    waits.health.clear()
    waits.pieces.clear()
    status, seconds = call(port, "POST", *request) if request else (200, time.sleep(QUIET) or QUIET)
    waits.stop.set()
    for thread in threads:
        thread.join()
    return {"status": status, "answer_s": seconds, "health_s": max(waits.health), "stream_s": max(waits.pieces)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of which the worst is shown (default 3)")
    rounds = parser.parse_args().rounds
    rows: dict[str, dict[str, float]] = {}
    print(f"{'beside':<30} {'status':>6} {'answer, ms':>11} {'/health, ms':>12} {'stream, ms':>11}")
    with server() as port:
        for name, request in {"nothing else": None, **huge_requests()}.items():
            found = [measure(port, request) for _ in range(rounds)]
            row = rows[name] = {key: max(each[key] for each in found) for key in found[0]}
            times = " ".join(f"{1000 * row[key]:>11.0f}" for key in ("answer_s", "health_s", "stream_s"))
            print(f"{name:<30} {row['status']:>6.0f} {times}", flush=True)
    print(json.dumps({"bench": "api_latency", "rounds": rounds, "rows": rows}))


if __name__ == "__main__":
    main()
