"""A step that raises ends the requests of its batch, and the engine process goes on; a GPU's error ends the process.

The engine process is the real one with a tiny model; `SABOTAGE` makes its steps raise while a request with a certain
seed runs, and lets a request with another seed wait after its first tokens until such a request has come.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkdraft.config import EngineConfig
from sparkdraft.server.engine_client import EngineClient, RestartPolicy
from tests.server.conftest import Live, live

BUG, GPU_ERROR = 1300, 1301  # seeds: a step raises while a request with one of them runs
HELD = 1302  # seed of a request that is still running when the one with BUG comes
SABOTAGE = f"""
import sys, time, torch
from sparkdraft.engine.runner import Runner
from sparkdraft.server.engine_process import EngineLoop, main

run = Runner.run
def broken(self, batch):
    seeds = {{work.request.params.seed for work in batch.work}}
    if {BUG} in seeds:
        raise ZeroDivisionError("the runner met a bug")
    if {GPU_ERROR} in seeds:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    return run(self, batch)
Runner.run = broken

step, num_held = EngineLoop._step, 0
def held(self):
    global num_held
    scheduler = self.backend.engine.scheduler
    seeds = {{request.params.seed for request in [*scheduler.running, *scheduler.waiting]}}
    num_held += {HELD} in seeds
    if num_held > 5 and {HELD} in seeds and {BUG} not in seeds:
        return time.sleep(0.001)
    step(self)
EngineLoop._step = held
sys.stderr = open(sys.argv[1], "a", buffering=1)
main(sys.argv[2:])
"""


@pytest.fixture
def server(tiny_folder: Path, tmp_path: Path) -> Iterator[Live]:
    engine = EngineConfig(model=str(tiny_folder), device="cpu", kv_tokens=4096, max_seqs=2)
    client = EngineClient(
        engine, RestartPolicy(first=0.1), (sys.executable, "-P", "-c", SABOTAGE, str(tmp_path / "log"))
    )
    with live(client, engine=engine, served_name="tiny") as running:
        yield running


def complete(server: Live, prompt: list[int], **more: Any) -> Any:
    return server.post("/v1/completions", prompt=prompt, temperature=0, **more)


def test_the_batch_gets_500_and_the_process_lives_on(server: Live, tmp_path: Path) -> None:
    client = server.service.client
    pid, right = client.pid, complete(server, [10, 11, 12], max_tokens=5).json()["choices"][0]["text"]
    events: list[dict[str, Any]] = []
    body = {"prompt": [20, 21], "max_tokens": 400, "ignore_eos": True, "temperature": 0, "seed": HELD}
    stream = threading.Thread(target=lambda: events.extend(server.events("/v1/completions", **body)))
    stream.start()
    server.wait_for(lambda: server.http.get("/v1/status").json()["engine"]["running"] == 1)
    error = complete(server, [10], seed=BUG, n=2)
    stream.join()
    assert error.status_code == 500 and error.json()["error"]["code"] == "internal_error"
    assert "ZeroDivisionError: the runner met a bug" in error.json()["error"]["message"]
    assert events[-1]["error"]["type"] == "server_error" and len(events) > 1  # its stream had begun
    assert complete(server, [10, 11, 12], max_tokens=5).json()["choices"][0]["text"] == right
    assert (client.pid, client.restarts) == (pid, 0) and server.service.ready
    engine = server.http.get("/v1/status").json()["engine"]
    assert engine["kv_blocks_free"] == engine["kv_blocks_total"] and engine["finished"]["error"] == 3  # texts
    log = (tmp_path / "log").read_text()
    assert log.count("Traceback") == 1 and "in broken" in log


def test_what_waits_is_served_after_a_failed_step(server: Live) -> None:
    """Two run at once: of these five, one breaks its step, and those that were not in it are answered."""
    answers: list[int] = []

    def ask(seed: int) -> None:
        answers.append(complete(server, [10, 11], max_tokens=60, ignore_eos=True, seed=seed).status_code)

    threads = [threading.Thread(target=ask, args=[seed]) for seed in (1, 2, BUG, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) == {200, 500} and answers.count(500) <= 2
    assert server.service.client.restarts == 0


def test_a_gpus_error_restarts_the_process(server: Live) -> None:
    error = complete(server, [10], seed=GPU_ERROR)
    assert error.status_code == 503 and "illegal memory access" in error.json()["error"]["message"]
    server.wait_for(lambda: server.service.client.restarts == 1 and server.service.ready)
    assert complete(server, [10, 11, 12], max_tokens=5).status_code == 200


def test_a_process_whose_every_step_fails_gives_up(server: Live) -> None:
    from sparkdraft.server.engine_process import MOST_FAILURES

    for _ in range(MOST_FAILURES - 1):
        assert complete(server, [10], seed=BUG).status_code == 500
    assert server.service.client.restarts == 0
    assert complete(server, [10], seed=BUG).status_code == 503
    server.wait_for(lambda: server.service.client.restarts == 1 and server.service.ready)
