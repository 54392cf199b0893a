"""The lines of a CPU that need their own processes: `generate` as a user types it, and the server."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx

from sparkdraft.config import NO_PROFILE
from sparkdraft.core import SamplingParams, UserError
from sparkdraft.llm import LLM
from sparkdraft.operate.bench.accept import chat_prompts, read_prompts
from sparkdraft.operate.bench.offline_throughput import throughput
from sparkdraft.operate.bench.serve import keep_busy
from sparkdraft.operate.bench.serve_client import Client, Messages
from sparkdraft.operate.bench.speed.check import Names
from sparkdraft.operate.bench.speed.lines import for_streams
from sparkdraft.operate.bench.speed.ratios import Metrics, Progress, Sample, in_turn, joined, part

COMMAND = (sys.executable, "-m", "sparkdraft.cli.main")
CLASSES = {"code": "code", "json": "json", "questions": "qa", "prose": "prose"}  # line -> class of prompts.jsonl
OUTPUT_LEN = 128
NUM_PROMPTS = {"code": 3, "json": 3, "questions": 6, "prose": 3}  # questions differ most: 0.95 to 1.15 of plain steps
SERVER_ROUNDS, SERVER_REQUESTS, SERVER_LEN = 2, 8, 64
READY_SECONDS, END_SECONDS, POLL = 300.0, 60.0, 0.2
LAST_LINES = 5  # of the output of a process that failed


def drafted(name: str, wanted: Names, progress: Progress) -> dict[str, Sample]:
    """Run each prompt of a class in four fresh processes: off, default, default, off."""
    found = []
    count = NUM_PROMPTS[name]
    for done, prompt in enumerate(read_prompts(count)[CLASSES[name]]):
        plain, auto = (partial(_fresh, prompt, spec) for spec in ("off", "auto"))
        found.append(in_turn(plain, auto, 1, part(progress, done, count)))
    metrics = {f"drafted-{name}": "tok_s", "start-with-drafter": "start_ms", "start-in-steps": "steps_ms"}
    return {
        line: joined((each[metric] for each in found), differ=metric == "tok_s")
        for line, metric in metrics.items()
        if line in wanted
    }


def _fresh(prompt: str, spec: str) -> Metrics:
    """start_ms: from the command to the first token, including loading.

    steps_ms: the two sides of another ratio, the time of 1000 plain steps and the default's start.
    """
    report = generate(prompt, spec, OUTPUT_LEN)
    steps = 1000 * 1e3 / report["tok_s"] if spec == "off" else report["start_ms"]
    return {"tok_s": report["tok_s"], "start_ms": report["start_ms"], "steps_ms": steps}


def generate(prompt: str, spec: str, max_tokens: int, engine: Sequence[str] = ("--device", "cpu")) -> dict[str, Any]:
    """The report of `sparkdraft generate --chat --json` for one prompt, greedy. engine: its flags.

    Python keeps its compiled modules, as it does for a user: compiling them anew takes half a second of every start.
    """
    flags = ("--prompt", prompt, "--spec", spec, "--max-tokens", str(max_tokens), "--temperature", "0", "--no-profile")
    command = [*COMMAND, "generate", "--chat", "--json", *engine, *flags]
    keeping = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, env=keeping)
    if done.returncode:
        raise UserError(f"`sparkdraft generate` failed with status {done.returncode}: {_last_lines(done.stderr)}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


# ---- the server


def server(wanted: Names, progress: Progress) -> dict[str, Sample]:
    """The same requests through HTTP and through an engine of this process, both with the defaults."""
    llm = LLM("smollm2", device="cpu", profile=NO_PROFILE)
    texts = [prompt for name in CLASSES.values() for prompt in read_prompts(SERVER_REQUESTS // 4)[name]]
    messages: list[Messages] = [[{"role": "user", "content": text}] for text in texts]
    counts = [streams for streams in (1, 4) if for_streams("server", streams) in wanted]
    samples = {}
    with serving() as url:
        for done, streams in enumerate(counts):
            offline, online = partial(_offline, llm, texts, streams), partial(_online, url, messages, streams)
            offline(), online()  # afterwards both have the prompts in their prefix cache
            inner = part(progress, done * SERVER_ROUNDS, len(counts) * SERVER_ROUNDS)
            found = in_turn(offline, online, SERVER_ROUNDS, inner)
            samples[for_streams("server", streams)] = found["tok_s"]
    return samples


def _offline(llm: LLM, texts: list[str], streams: int) -> Metrics:
    params = SamplingParams(SERVER_LEN)
    requests = [(ids, params) for ids in chat_prompts(llm, texts)]
    return {"tok_s": throughput(llm.engine, requests, streams).tok_s}


def _online(url: str, messages: list[Messages], streams: int) -> Metrics:
    async def measure() -> Metrics:
        async with Client(url, streams=streams) as client:
            await client.open()
            load = await keep_busy(client, messages, streams, SERVER_LEN)
            if failed := [sample.error for sample in load.samples if sample.error]:
                raise UserError(f"the server did not answer a request: {failed[0]}")
            return {"tok_s": sum(sample.tokens for sample in load.samples) / load.seconds}

    return asyncio.run(measure())


@contextmanager
def serving() -> Iterator[str]:
    """The address of `sparkdraft serve` in its own process, once it is ready; it is stopped afterwards."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*COMMAND, "serve", "--device", "cpu", "--no-profile", "--port", str(port)], stdout=said, stderr=said
        )
        try:
            if not _ready(url, process):
                said.seek(0)
                raise UserError(f"`sparkdraft serve` did not become ready: {_last_lines(said.read().decode())}")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return True
        except httpx.HTTPError:
            pass  # it does not listen yet
        time.sleep(POLL)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_lines(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-LAST_LINES:]) or "it said nothing"
