"""Each cause that the watchdog knows begins and ends with its warning, its metric and its reaction."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkdraft.backend import DRAFTING, GROWTH, PREFIX_CACHE
from sparkdraft.core import SamplingParams
from sparkdraft.engine.drift import BATCH, LEARNT, CoreWait, StepDrift
from sparkdraft.server.watchdog import (
    COLLAPSED,
    FIRST_PAUSE,
    GIB,
    LEAST_STEPS,
    SLOW,
    Alarm,
    Cause,
    Memory,
    Watchdog,
    memory_left,
    throttling,
)
from tests.fakes import FakeBlock, fake_engine
from tests.server.conftest import FakeClient, Live, live

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


class Machine:
    """What the watchdog reads, as a test says it is."""

    def __init__(self, server: Live, client: FakeClient) -> None:
        self.server, self.client = server, client
        self.memory: float | None = 0.5  # the share of its memory that can still be had
        self.total = 16 * GIB
        self.idle = False  # no decode steps run
        self.throttled: tuple[list[str], str] = [], ""
        self.now = 0.0
        self.status: dict[str, Any] = {"step_drift": 1.0, "steps_compared": 0, "drafting": {}}
        client.status = self._status  # type: ignore[method-assign]
        service = server.service
        service.watchdog = Watchdog(service, self._memory, lambda gpu: self.throttled, lambda: self.now)

    def _memory(self) -> Memory | None:
        return None if self.memory is None else Memory(self.memory * self.total, self.total)

    async def _status(self) -> dict[str, Any]:
        self.status["steps_compared"] += not self.idle
        return self.status

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            asyncio.run(self.server.service.watchdog.look())

    def metric(self, name: str, cause: str) -> float:
        lines = self.server.http.get("/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith(f'sparkdraft_watchdog_{name}{{cause="{cause}"}}')]
        return float(line.split()[-1])

    def drafts(self, steps: int, accepted: int) -> None:
        """So many more steps have drafted, and so many of their first drafts were accepted."""
        before = self.status["drafting"]
        taken = (before.get("per_position_accepted") or [0])[0] + accepted
        steps += before.get("num_spec_steps", 0)
        self.status["drafting"] = {"num_spec_steps": steps, "per_position_accepted": [taken]}


@pytest.fixture
def machine() -> Iterator[Machine]:
    client = FakeClient(lambda prompt, params: prompt)
    assert client.info
    client.info = replace(client.info, plan_facts=client.info.plan_facts | {"device": "cuda", "gpu_memory": "shared"})
    with live(client) as server:
        yield Machine(server, client)


# ---- causes


def test_memory_that_runs_low_stops_growth_and_then_new_work(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.memory = 0.05
    machine.look(2)
    assert machine.client.switched == [] and machine.server.http.get("/health").json() == {"status": "ok"}
    machine.look()
    assert machine.client.switched == [(GROWTH, False)]
    health = machine.server.http.get("/health")
    assert health.status_code == 200 and health.json()["status"] == "degraded"
    assert "memory low: 5.0% of the memory is available" in health.json()["warnings"][0]
    assert machine.metric("active", "memory low") == 1 and machine.metric("value", "memory low") == 0.05
    assert machine.server.post("/v1/chat/completions", **ASKED).status_code == 200

    machine.memory = 0.02
    machine.look(2)
    health = machine.server.http.get("/health")
    assert health.status_code == 503 and health.json()["status"] == "overloaded"
    refused = machine.server.post("/v1/chat/completions", **ASKED)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 10
    assert "2.0% of the memory is available" in refused.json()["error"]["message"]

    machine.memory = 0.08  # between the thresholds of the one, and past those of the other
    machine.look(5)
    assert machine.server.post("/v1/chat/completions", **ASKED).status_code == 200
    assert machine.metric("active", "memory critical") == 0 and machine.metric("active", "memory low") == 1
    machine.memory = 0.5
    machine.look(5)
    assert machine.client.switched == [(GROWTH, False), (GROWTH, True)]
    assert machine.server.http.get("/health").json() == {"status": "ok"}
    assert machine.metric("alarms_total", "memory low") == machine.metric("alarms_total", "memory critical") == 1
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split(":")[0] for line in said] == [
        "memory low", "memory critical", "memory critical has ended", "memory low has ended",
    ]  # fmt: skip


@pytest.mark.parametrize(("cause", "capacity"), [("steps slow", 4 + 256 // 3), ("GPU throttled", 4 + 256 // 2)])
def test_a_slow_machine_lets_fewer_requests_wait(machine: Machine, cause: str, capacity: int) -> None:
    if cause == "steps slow":
        machine.status["step_drift"] = 3.0
    else:
        machine.throttled = ["hardware thermal slowdown"], ""
    machine.look(SLOW.patience)
    assert machine.metric("active", cause) == 1
    gate = machine.server.service.gate
    assert gate.capacity == capacity
    with gate.enter(gate.max_seqs):
        answer = machine.server.post("/v1/chat/completions", **ASKED, n=64)
        assert answer.status_code == 200, "what must wait is not refused"
    with gate.enter(capacity):
        refused = machine.server.post("/v1/chat/completions", **ASKED)
        message = refused.json()["error"]["message"]
        assert refused.status_code == 429 and message.startswith("The server is overloaded; retry in 1 s.")
        assert f"the limit is {capacity} (lower than usual: " in message
    machine.status["step_drift"], machine.throttled = 1.2, ([], "")
    machine.look(10)
    assert machine.metric("active", cause) == 0 and gate.capacity == 4 + 256


def test_slow_steps_do_not_end_for_want_of_readings_while_a_request_runs(machine: Machine) -> None:
    machine.status |= {"step_drift": 3.0, "running": 1}
    machine.look(SLOW.patience)
    machine.idle = True  # its steps are of a new kind, or beside other programs' load
    machine.look(20)
    assert machine.metric("active", SLOW.name) == 1
    machine.status["running"] = 0
    machine.look(SLOW.calm)
    assert machine.metric("active", SLOW.name) == 0


def test_an_engine_too_busy_to_answer_is_no_reading(machine: Machine) -> None:
    machine.status |= {"step_drift": 3.0, "running": 1}
    machine.look()
    machine.idle = True
    answered = machine.client.status

    async def silent() -> dict[str, Any]:
        return {}

    for _ in range(SLOW.patience):  # the same steps, read again after each time without an answer
        machine.client.status = silent  # type: ignore[method-assign]
        machine.look()
        machine.client.status = answered  # type: ignore[method-assign]
        machine.look()
    assert machine.metric("active", SLOW.name) == 0


def test_steps_that_cannot_be_compared_are_said_and_not_reacted_to(machine: Machine) -> None:
    machine.idle, machine.status["steps_compared"] = True, None

    async def status() -> dict[str, Any]:
        return machine.status

    machine.client.status = status  # type: ignore[method-assign]
    machine.look(20)
    assert "how long threads wait for a core" in machine.server.service.watchdog.unread[SLOW.name]
    assert machine.server.service.watchdog.warnings == []


def test_a_gpu_that_cannot_be_asked_is_said_and_not_reacted_to(machine: Machine) -> None:
    machine.throttled = [], "there is no nvidia-smi"
    machine.look(20)
    watched = machine.server.http.get("/v1/status").json()["watchdog"]
    assert watched["not watched"] == {"GPU throttled": "there is no nvidia-smi"}
    assert not watched["causes"]["GPU throttled"]["active"]


def test_a_cause_that_is_no_longer_read_ends(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.throttled = ["heat, by the driver"], ""
    machine.status["step_drift"] = 3.0
    machine.look(SLOW.patience)
    watchdog = machine.server.service.watchdog
    assert len(watchdog.warnings) == 2 and "the GPU is throttled (heat, by the driver)" in watchdog.warnings[0]
    machine.throttled, machine.idle = ([], "nvidia-smi does not run"), True
    machine.look(10)
    assert watchdog.warnings == [] and machine.server.service.gate.slowdown == 1
    assert "steps slow has ended: there are no new readings; back to normal" in caplog.messages
    machine.throttled = [], ""
    machine.look(5)
    assert watchdog.unread == {}, "it can be read again"
    machine.throttled = ["heat, by the driver"], ""
    machine.look(10)
    machine.throttled = [], ""
    machine.look(10)
    assert "GPU throttled has ended: the GPU is not throttled; back to normal" in caplog.messages


def test_a_new_engine_is_not_slow_because_the_old_one_was(machine: Machine) -> None:
    machine.status["step_drift"] = 3.0
    machine.look(SLOW.patience)
    assert machine.client.info and machine.server.service.gate.slowdown == 3
    machine.client.info, machine.idle = replace(machine.client.info, created=2), True
    machine.look()
    assert machine.server.service.gate.slowdown == 1


def test_little_of_a_large_memory_is_enough(machine: Machine) -> None:
    machine.memory, machine.total = 0.02, 512 * GIB
    machine.look(9)
    assert machine.server.service.watchdog.warnings == []


def test_where_the_gpu_has_its_own_memory_a_full_system_is_only_said(machine: Machine) -> None:
    assert machine.client.info
    facts = machine.client.info.plan_facts | {"gpu_memory": "own"}
    machine.client.info = replace(machine.client.info, plan_facts=facts)
    machine.memory = 0.01
    machine.look(9)
    said = machine.server.service.watchdog.warnings
    assert len(said) == 2 and all("this is only a warning" in text for text in said)
    assert machine.client.switched == [] and not machine.server.service.gate.closed


def test_drafting_rests_while_nothing_is_accepted_and_is_tried_again(machine: Machine) -> None:
    machine.drafts(LEAST_STEPS - 1, 0)
    machine.look(5)
    assert machine.client.switched == [], "too few to tell"
    for _ in range(2):
        machine.drafts(LEAST_STEPS, 1)
        machine.look()
    assert machine.client.switched == [(DRAFTING, False)]
    assert machine.metric("active", COLLAPSED.name) == 1
    machine.now += FIRST_PAUSE - 1
    machine.look(9)
    assert machine.client.switched == [(DRAFTING, False)]
    machine.now += 1
    machine.look()
    assert machine.client.switched[1:] == [(DRAFTING, True)]
    assert machine.metric("active", COLLAPSED.name) == 0

    for _ in range(2):
        machine.drafts(LEAST_STEPS, 0)
        machine.look()
    assert machine.client.switched[2:] == [(DRAFTING, False)]
    machine.now += FIRST_PAUSE
    machine.look()
    assert len(machine.client.switched) == 3, "the second pause is twice as long"
    machine.now += FIRST_PAUSE
    machine.look()
    machine.drafts(LEAST_STEPS, LEAST_STEPS // 2)
    machine.look(3)
    assert machine.client.switched[3:] == [(DRAFTING, True)] and machine.server.service.watchdog._pause == FIRST_PAUSE


def test_a_new_engine_is_told_what_the_old_one_was(machine: Machine) -> None:
    machine.memory = 0.05
    machine.look(3)
    assert machine.client.info and machine.server.service.text
    machine.client.info = replace(machine.client.info, created=2)
    machine.server.wait_for(lambda: machine.server.service.ready)
    machine.look()
    assert machine.client.switched == [(GROWTH, False), (GROWTH, False)]


def test_a_value_near_a_threshold_does_not_switch_back_and_forth() -> None:
    alarm = Alarm(Cause("x", 0.10, 0.20, "", patience=2, calm=3))
    states = []
    for value in (0.09, 0.11, 0.09, 0.09, 0.15, 0.21, 0.21, 0.19, 0.21, 0.21, 0.21, 0.15, None, 0.11):
        alarm.take(value)
        states.append(alarm.active)
    assert states == [False] * 3 + [True] * 7 + [False] * 4 and alarm.times == 1


# ---- what is read


def test_memory_is_that_of_the_machine_or_of_the_control_group(tmp_path: Path) -> None:
    assert memory_left(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 250 kB\nHugePages_Total: 0\n"
    )
    assert memory_left(tmp_path) == Memory(250 << 10, 1000 << 10)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert memory_left(tmp_path) == Memory(250 << 10, 1000 << 10)
    (group / "memory.max").write_text("1000\n")
    (group / "memory.current").write_text("990\n")
    (group / "memory.stat").write_text("anon 900\ninactive_file 30\nactive_file 10\n")
    assert memory_left(tmp_path) == Memory(50, 1000), "files are dropped first"
    here = memory_left()
    assert here and 0 < here.available < here.total, "and here"


@pytest.mark.parametrize(
    ("script", "names", "problem"),
    [
        ("echo 0x0000000000000000", [], ""),
        ("echo 0x0000000000000005", [], ""),  # idle, or at its power limit
        ("echo 0x1; echo 0x60", ["heat, by the driver", "heat, by the hardware"], ""),
        ("echo 0xa0", ["heat, by the driver", "the power supply's brake"], ""),
        ("echo '[N/A]'", [], "does not say: [N/A]"),
        ("echo 'NVML: Driver/library version mismatch' >&2; exit 18", [], "version mismatch"),
    ],
)  # fmt: skip
def test_throttling_is_read_from_nvidia_smi(script: str, names: list[str], problem: str, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    found, why = throttling(program=str(program))
    assert found == names and (problem in why if problem else why == "")


def test_without_nvidia_smi_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PATH", "/nowhere")
    assert throttling() == ([], "nvidia-smi is not installed")


def test_drift_is_against_the_fastest_steps_of_a_kind() -> None:
    drift = StepDrift(lambda: 0.0)
    for _ in range(LEARNT + 80):
        drift.learn(1, 1, 100, 0.010)
        drift.learn(2, 8, 100, 0.030)
    assert drift.ratio == pytest.approx(1.0)
    drift.learn(1, 4, 100, 5.0)  # the first of its kind, which was compiled
    assert drift.ratio == pytest.approx(1.0)
    for _ in range(300):
        drift.learn(1, 1, 100, 0.030)
    assert drift.ratio == pytest.approx(3.0, rel=0.05)
    drift.forget_recent()
    assert drift.ratio is None
    for _ in range(100):
        drift.learn(1, 1, 100, 0.030)
    assert drift.ratio == pytest.approx(3.0, rel=0.01), "what is usual is not forgotten, and does not rise"


def test_steps_that_read_more_of_the_cache_are_another_kind() -> None:
    drift = StepDrift(lambda: 0.0)
    for _ in range(LEARNT + 80):
        drift.learn(16, 16, 9_000, 0.018)
    before = drift.num_compared
    for _ in range(LEARNT + 80):
        drift.learn(16, 16, 15_000, 0.050)
    assert drift.ratio == pytest.approx(1.0) and before < drift.num_compared <= before + 160


def test_steps_beside_other_programs_load_are_not_compared() -> None:
    waited = 0.0
    drift = StepDrift(lambda: waited)
    for _ in range(LEARNT + 100):
        drift.learn(1, 1, 100, 0.010)
    before = drift.num_compared
    waited = 1.2 * BATCH  # of steps that take three times as long, two thirds
    for _ in range(200):
        drift.learn(1, 1, 100, 0.030)
    assert drift.ratio == pytest.approx(1.0) and drift.num_compared == before
    waited = 0.0
    for _ in range(200):
        drift.learn(1, 1, 100, 0.030)
    assert drift.ratio and drift.ratio > 2.5, "the machine is free, and they still are slow"


def test_waiting_for_a_core_is_read_per_thread(tmp_path: Path) -> None:
    wait = CoreWait(tmp_path)
    assert wait() is None, "no thread says how long"
    for thread, waited in (("7", 5_000_000_000), ("8", 1_000_000_000)):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"9 {waited} 3\n")
    wait()
    (tmp_path / "8" / "schedstat").write_text("9 3500000000 4\n")
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "schedstat").write_text("9 77000000000 4\n")
    assert wait() == 2.5, "a thread that is new has no reading before"
    for thread in "789":
        (tmp_path / thread / "schedstat").write_text("0 0 0\n")
    assert wait() is None, "a kernel that does not count says 0"
    assert not StepDrift(lambda: None).is_known


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel has no schedstat")
def test_a_thread_that_shares_its_core_has_waited() -> None:
    """Two processes that compute, on one core: each waits while the other runs."""
    code = (
        "import os, time; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from sparkdraft.engine.drift import "
        "CoreWait; child = os.fork(); wait = CoreWait(); wait(); end = time.process_time() + 0.2\n"
        "while time.process_time() < end: pass\n"
        "if child: print(wait()); os.waitpid(child, 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0.02


def test_a_step_reads_the_context_of_all_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, contexts = fake_engine(num_blocks=64), []
    monkeypatch.setattr(engine.drift, "learn", lambda seqs, rows, context, seconds: contexts.append((seqs, context)))
    for length in (30, 10):
        engine.add([1] * length, SamplingParams(max_tokens=4, ignore_eos=True))
    drain(engine)
    assert (2, 34 + 12) in contexts, "the first has written two more meanwhile"


# ---- what the engine does


def drain(engine: Any) -> list[int]:
    ids: list[int] = []
    while engine.has_work:
        for output in engine.step():
            ids += output.ids
    return ids


def test_parts_of_an_engine_go_off_and_on_without_changing_the_text() -> None:
    engine = fake_engine(FakeBlock(0.7), num_blocks=32)
    params = SamplingParams(max_tokens=24, ignore_eos=True, num_draft=7)

    def write(prompt: int) -> tuple[list[int], int, int]:
        engine.reset_counts()
        engine.add([prompt] * 9, params)
        (waiting,) = engine.scheduler.waiting
        ids = drain(engine)
        return ids, engine.drafting.total.num_draft_tokens, waiting.num_cached

    first = write(1)
    assert first[1] > 0 and write(1)[2] == 8
    for part in (DRAFTING, PREFIX_CACHE, GROWTH):
        engine.switch(part, False)
    assert write(1) == write(1) == (first[0], 0, 0)
    for part in (DRAFTING, PREFIX_CACHE, GROWTH):
        engine.switch(part, True)
    again, hit = write(1), write(1)
    assert again[0] == hit[0] == first[0] and again[1] > 0 and hit[2] == 8


def test_a_cache_that_may_not_grow_uses_no_fresh_block_and_gives_all_back() -> None:
    engine = fake_engine(num_blocks=64, max_model_len=40, max_seqs=8)
    engine.switch(GROWTH, False)
    kept = 40 // 4 + 1
    assert engine.pool.num_held == 64 - kept
    for i in range(6):
        engine.add([i] * 20, SamplingParams(max_tokens=16, ignore_eos=True))
    drain(engine)
    assert engine.pool._num_used <= kept and engine.pool.num_free == kept
    engine.switch(GROWTH, True)
    assert engine.pool.num_held == 0 and sorted(engine.pool.allocate() for _ in range(64)) == list(range(64))


def test_blocks_that_were_used_before_are_used_on_while_the_cache_may_not_grow() -> None:
    engine = fake_engine(num_blocks=64, max_model_len=40, max_seqs=8)
    names = [engine.add([i] * 20, SamplingParams(max_tokens=16, ignore_eos=True)) for i in range(5)]
    while engine.pool._num_used <= 40 // 4 + 1:
        engine.step()
    used = engine.pool._num_used
    engine.switch(GROWTH, False)
    assert engine.pool.num_held == 64 - used
    engine.abort(names[0])
    drain(engine)
    assert engine.pool._num_used == used == engine.pool.num_free
