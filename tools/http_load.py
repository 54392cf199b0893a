"""What HTTP costs where the engine costs nothing: `bench serve` on the real API and the real engine process, around a
backend that writes a word per request at a given number of steps a second.

Printed are the share of the tokens per second that such a backend can write of the same requests, CPU time of the API
process per token and of the engine process per step, and the time between two steps of the backend, in which a GPU
would wait for the host.

    python tools/http_load.py [--streams 1,16,64] [--rate 160] [--requests 256] [--profile api.prof]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import heapq
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sparkdraft.backend import BackendStatus, Report
from sparkdraft.core import FinishReason, SamplingParams, StepOutput
from sparkdraft.operate.bench.traffic import Lengths, Traffic
from sparkdraft.server.app import create_app
from sparkdraft.server.config import ServerConfig
from sparkdraft.server.engine_client import EngineClient
from sparkdraft.server.engine_process import main as engine_main
from sparkdraft.server.run import Server, address_of, listen
from tests.server.echo_backend import EchoBackend, load_echo

WORDS = [" the", " quick", " brown", " fox", ",", " jumps", " over", " a", " lazy", " dog", "."]
PROMPT, OUTPUT = "64:512", "100:300"  # tokens
TICKS = os.sysconf("SC_CLK_TCK")


# ---- the engine process


@dataclass
class Paced(EchoBackend):
    """Writes a word for every request at each step, 'rate' steps a second."""

    rate: float = 0.0
    due: float = 0.0  # when the next step ends
    returned: float = 0.0  # when the last step ended, while requests run
    between: list[float] = field(default_factory=list)  # seconds from one step's end to the next one's start

    def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams, grammar: Any = None) -> None:
        super().add(request_id, [1], params)
        echo = self.running[request_id]
        echo.num_prompt, echo.left = len(prompt_ids), [7] * params.max_tokens

    def step(self) -> list[StepOutput]:
        begin = time.perf_counter()
        if self.returned:
            self.between.append(begin - self.returned)
        self.due = max(self.due + 1 / self.rate, begin)
        time.sleep(self.due - begin)
        outputs, self.ended = self.ended, []
        for name, echo in list(self.running.items()):
            echo.left.pop()
            finish = None if echo.left else FinishReason.LENGTH
            word = WORDS[len(echo.left) % len(WORDS)]
            outputs.append(StepOutput(name, 0, [7], word, finish, num_prompt=echo.num_prompt))
            if finish:
                del self.running[name]
        self.returned = time.perf_counter() if self.running else 0.0
        return outputs

    def status(self) -> BackendStatus:
        return replace(super().status(), drafting={"between": self.between})


def load(options: dict[str, Any], report: Report) -> Paced:
    info = load_echo(options, report).info
    return Paced(
        replace(info, max_model_len=1024, vocab_size=30_000, plan_facts={"max_seqs": 1024}), rate=options["rate"]
    )


# ---- the API, and the measurement


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def could_be(streams: int, requests: int, rate: float) -> float:
    """Tokens a second of these requests if each began in the step after the last one's end."""
    planned = Traffic(Lengths.read("", PROMPT), Lengths.read("", OUTPUT), requests).plan(streams)
    ends = [0] * streams
    for each in planned:
        heapq.heapreplace(ends, ends[0] + each.output_len)
    return sum(each.output_len for each in planned) * rate / max(ends)


async def bench(url: str, streams: int, requests: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "sparkdraft.cli.main", "bench", "serve", "--url", url, "--prompt-len", PROMPT]
    command += ["--output-len", OUTPUT, "--concurrency", str(streams), "--requests", str(requests)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    work = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=environment)
    said, _ = await work.communicate()
    return dict(json.loads(said.splitlines()[-1])["rows"][0])


async def measure(args: argparse.Namespace, streams: int) -> str:
    config = ServerConfig(port=0, watchdog=False, max_queue=1024)
    listener = listen(config)
    command = (sys.executable, str(Path(__file__).resolve()), "--engine")
    client = EngineClient({"model": "load", "rate": args.rate}, command=command)
    server = Server(create_app(config, client, warms_up=False), config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.service.ready:
        await asyncio.sleep(0.05)
    assert client.pid is not None
    own, engine = time.process_time(), cpu_of(client.pid)
    row = await bench(address_of(listener), streams, args.requests)
    own, engine = time.process_time() - own, cpu_of(client.pid) - engine
    status = await client.status()
    server.should_exit = True
    await serving
    between = sorted(status["drafting"]["between"])
    share = row["tok_s"] / could_be(streams, args.requests, args.rate)
    high = between[int(0.99 * len(between))]
    return (
        f"{streams:7} {row['tok_s']:8.0f} {share:6.1%} {1e6 * own / status['tokens_generated']:13.1f} "
        f"{1e6 * engine / status['steps']:14.0f} {1e6 * median(between):11.0f} / {1e6 * high:.0f}"
    )


def main() -> None:
    if sys.argv[1:2] == ["--engine"]:
        return engine_main(sys.argv[2:], load)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", default="1,16,64")
    parser.add_argument("--rate", type=float, default=160.0, help="steps a second (default 160)")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--profile", default="", metavar="FILE", help="write a profile of the API process there")
    args = parser.parse_args()
    print("streams    tok/s  share  API us/token engine us/step  between steps us p50 / p99")
    profile = cProfile.Profile()
    for streams in map(int, args.streams.split(",")):
        if args.profile:
            profile.enable()
        print(asyncio.run(measure(args, streams)), flush=True)
        profile.disable()
    if args.profile:
        profile.dump_stats(args.profile)


if __name__ == "__main__":
    main()
