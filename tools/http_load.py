"""CPU time of the server per streamed token, without a model: the real API and the real engine process around a backend
that writes words at a given pace.

A client process keeps the streams busy and reads the answers as bytes, so that it costs little. Printed are steps a
second, CPU time of the API process per event, CPU time of the engine process per step, and the time between two steps
of the backend, in which a GPU would wait for the host.

    python tools/http_load.py [--streams 64] [--rate 160] [--seconds 8] [--kind chat] [--profile api.prof]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import random
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sparkdraft.backend import Report
from sparkdraft.core import FinishReason, SamplingParams, StepOutput
from sparkdraft.server.app import create_app
from sparkdraft.server.config import ServerConfig
from sparkdraft.server.engine_client import EngineClient
from sparkdraft.server.engine_process import main as engine_main
from sparkdraft.server.run import Server, listen
from tests.server.echo_backend import EchoBackend, load_echo

WORDS = [" the", " quick", " brown", " fox", ",", " jumps", " over", " a", " lazy", " dog", "."]
PROMPT, OUTPUT = (64, 512), (100, 300)  # tokens, drawn from these ranges
TICKS = os.sysconf("SC_CLK_TCK")


# ---- the engine process


@dataclass
class Paced(EchoBackend):
    """Writes a word for every request at each step, 'rate' steps a second (0: as fast as it can)."""

    rate: float = 0.0
    due: float = 0.0
    returned: float = 0.0
    between: list[float] = field(default_factory=list)  # seconds from one step's end to the next one's start

    def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams, grammar: Any = None) -> None:
        super().add(request_id, [1], params)
        echo = self.running[request_id]
        echo.num_prompt, echo.left = len(prompt_ids), [7] * params.max_tokens

    def step(self) -> list[StepOutput]:
        begin = time.perf_counter()
        if self.returned and not self.ended:
            self.between.append(begin - self.returned)
        if self.rate:
            self.due = max(self.due + 1 / self.rate, begin - 0.05)
            time.sleep(max(0.0, self.due - begin))
        outputs, self.ended = self.ended, []
        for name, echo in list(self.running.items()):
            echo.left.pop()
            finish = None if echo.left else FinishReason.LENGTH
            word = WORDS[len(echo.left) % len(WORDS)]
            outputs.append(StepOutput(name, 0, [7], word, finish, num_prompt=echo.num_prompt))
            if finish:
                del self.running[name]
        self.num_steps += 1
        self.returned = time.perf_counter() if self.running else 0.0
        return outputs

    def status(self) -> Any:
        status = super().status()
        status.drafting["between"] = self.between
        return status

    def reset_counts(self) -> None:
        super().reset_counts()
        self.between = []


def load(options: dict[str, Any], report: Report) -> Paced:
    info = load_echo(options, report).info
    object.__setattr__(info, "max_model_len", 1024)
    info.plan_facts["max_seqs"] = 1024
    return Paced(info, rate=options["rate"])


# ---- the clients


def request_of(kind: str, port: int, generator: random.Random) -> tuple[bytes, int]:
    prompt, output = generator.randint(*PROMPT), generator.randint(*OUTPUT)
    body: dict[str, Any] = {"max_tokens": output, "stream": True, "temperature": 0.6, "top_p": 0.95}
    if kind == "chat":
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "x" * prompt}]
    else:
        path, body["prompt"] = "/v1/completions", [33] * prompt
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data, output


def run_clients(port: int, streams: int, seconds: float, kind: str) -> dict[str, int]:
    """Keep all streams busy for so long, and count what arrives."""
    selector, generator = selectors.DefaultSelector(), random.Random(1)
    events = reads = requests = 0
    tails: dict[socket.socket, bytes] = {}
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request_of(kind, port, generator)[0])
        selector.register(connection, selectors.EVENT_READ)
        tails[connection] = b""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for key, _ in selector.select(0.1):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            data = connection.recv(1 << 16)
            assert data, "the server closed a connection"
            reads += 1
            events += data.count(b"data: {")
            tails[connection] = (tails[connection] + data)[-40:]
            if tails[connection].endswith(b"0\r\n\r\n") and b"[DONE]" in tails[connection]:
                requests += 1
                tails[connection] = b""
                connection.sendall(request_of(kind, port, generator)[0])
    return {"events": events, "reads": reads, "requests": requests}


# ---- the API, and the measurement


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    config = ServerConfig(port=0, watchdog=False, max_queue=1024)
    listener = listen(config)
    port = listener.getsockname()[1]
    client = EngineClient(
        {"model": "load", "rate": args.rate}, command=(sys.executable, str(Path(__file__).resolve()), "--engine")
    )
    server = Server(create_app(config, client), config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.service.ready:
        await asyncio.sleep(0.05)
    command = [sys.executable, __file__, "--clients", str(port), "--kind", args.kind]
    command += ["--streams", str(args.streams), "--seconds", str(args.seconds)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    client.count_anew()
    profile = cProfile.Profile() if args.profile else None
    assert client.pid is not None
    own, engine, begin = time.process_time(), cpu_of(client.pid), time.perf_counter()
    if profile:
        profile.enable()
    work = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=environment)
    said, _ = await work.communicate()
    if profile:
        profile.disable()
        profile.dump_stats(args.profile)
    seconds = time.perf_counter() - begin
    own, engine = time.process_time() - own, cpu_of(client.pid) - engine
    status = await client.status()
    server.should_exit = True
    await serving
    counted = json.loads(said)
    between = sorted(status["drafting"]["between"])
    steps = status["steps"]
    return counted | {
        "steps_per_s": steps / args.seconds,
        "tok_s": counted["events"] / args.seconds,
        "api_us_per_event": own / counted["events"] * 1e6,
        "api_cpu": own / seconds,
        "engine_us_per_step": engine / steps * 1e6,
        "between_us_p50": median(between) * 1e6,
        "between_us_p99": between[int(0.99 * len(between))] * 1e6,
        "reads_per_event": counted["reads"] / counted["events"],
    }


def main() -> None:
    if sys.argv[1:2] == ["--engine"]:
        return engine_main(sys.argv[2:], load)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=160.0, help="steps a second; 0: as many as possible")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--kind", default="chat", choices=["chat", "completion"])
    parser.add_argument("--profile", default="", metavar="FILE")
    parser.add_argument("--clients", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.clients:
        print(json.dumps(run_clients(args.clients, args.streams, args.seconds, args.kind)))
        return
    found = asyncio.run(measure(args))
    for name, value in found.items():
        print(f"{name:>20} {value:12.2f}")


if __name__ == "__main__":
    main()
