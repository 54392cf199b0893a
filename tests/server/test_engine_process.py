"""The engine in its own process, with a tiny model: streams, aborts, deaths and restarts, drains, and no orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdraft.core import FinishReason, GrammarSpec, SamplingParams, StepOutput, TokenLogprob, TryLater, UserError
from sparkdraft.engine.backend import load_backend
from sparkdraft.server import engine_client
from sparkdraft.server.engine_client import (
    FIRST_START,
    EngineClient,
    EngineError,
    Mailbox,
    RequestRefused,
    RestartPolicy,
    TokenStream,
)
from sparkdraft.server.engine_process import EngineLoop
from sparkdraft.server.messages import Refused, Submit, pack_params
from sparkdraft.server.service import as_api_error
from tests.models.tiny import write_tiny
from tests.patience import PATIENT, wait_for

OPTIONS = {"dtype": "float32", "device": "cpu", "kv_tokens": 4096, "threads": 1}
LONG = SamplingParams(max_tokens=450, ignore_eos=True, num_draft=0)
PROMPT = [*range(10, 40)]
QUICK = RestartPolicy(first=0.1)
LOADING = "import time; from sparkdraft.server.engine_process import main; main(load=lambda *given: time.sleep(600))"
LOADS_FOR_EVER = (sys.executable, "-c", LOADING)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as shared:
        yield shared


@pytest.fixture(scope="module")
def client(runner: asyncio.Runner, tiny: Path) -> Iterator[EngineClient]:
    """One engine for all tests that leave it alive."""
    shared = runner.run(started(tiny))
    yield shared
    runner.run(shared.stop())


async def started(tiny: Path, restart: RestartPolicy = QUICK) -> EngineClient:
    client = EngineClient(OPTIONS | {"model": str(tiny)}, restart)
    assert client.state == "starting"
    await client.start()
    await until(lambda: client.state == "ready")
    return client


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENT
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def collect(stream: TokenStream) -> list[StepOutput]:
    return [event async for events in stream for event in events]


async def settled(client: EngineClient) -> dict[str, Any]:
    """Status once nothing runs, and the step that says so is over."""
    deadline = time.monotonic() + PATIENT
    while True:
        status = await client.status()
        if not status["running"] + status["waiting"] + status["compiling"]:
            return await client.status()
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.01)


@contextmanager
def held(client: EngineClient) -> Iterator[None]:
    """The engine makes no token meanwhile, however long that is."""
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # a test may have killed it
            os.kill(client.pid, signal.SIGCONT)


def alive(pid: int) -> bool:
    """A zombie counts as gone: only its own parent can wait for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# ---- an engine that lives


def near(some: Sequence[TokenLogprob | None], others: Sequence[TokenLogprob | None]) -> bool:
    """The same ids with the same probabilities; in float32 the last bits depend on the rows of a step, including
    drafts."""
    pairs = [(a, b) for a, b in zip(some, others, strict=True) if a and b]
    assert len(pairs) >= len(some) - 1
    same = all(a.id == b.id and [i for i, _ in a.top] == [i for i, _ in b.top] for a, b in pairs)
    return same and all(abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)


def test_the_same_text_as_in_process(runner: asyncio.Runner, client: EngineClient, tiny: Path) -> None:
    from sparkdraft.llm import LLM

    params = SamplingParams(max_tokens=40, logprobs=2, prompt_logprobs=1, n=2, stop=["zzzz"])
    llm = LLM(str(tiny), **OPTIONS)
    expected = llm.generate([PROMPT], params)[0].completions
    events = runner.run(collect(client.submit("same", PROMPT, params)))
    for index, completion in enumerate(expected):
        own = [e for e in events if e.index == index]
        assert [i for e in own for i in e.ids] == completion.ids
        assert "".join(e.text for e in own) == completion.text
        assert [e.finish for e in own][-1] == completion.finish and not any(e.finish for e in own[:-1])
        assert near([p for e in own for p in e.logprobs or []], completion.logprobs or [])
        assert near(own[0].prompt_logprobs or [], completion.prompt_logprobs or [])
        assert own[-1].num_prompt == len(PROMPT)


def test_info_and_status(runner: asyncio.Runner, client: EngineClient, tiny: Path) -> None:
    from tokenizers import Tokenizer

    info = client.info
    assert info is not None and info.model == str(tiny) and info.model_type == "llama"
    assert (info.vocab_size, info.max_model_len, info.eos_ids, info.drafter) == (320, 512, [2], None)
    assert Tokenizer.from_str(info.tokenizer).encode("ab").ids
    assert info.plan_facts["dtype"] == "float32" and info.plan_facts["kv_tokens"] == 4096
    assert {fact["name"] for fact in info.facts} >= {"decode steps", "overlapped steps"}
    before = runner.run(settled(client))
    runner.run(collect(client.submit("counted", PROMPT, SamplingParams(max_tokens=9, ignore_eos=True))))
    after = runner.run(settled(client))
    assert after["tokens_generated"] - before["tokens_generated"] == 9
    assert after["prompt_tokens"] - before["prompt_tokens"] == len(PROMPT)
    assert after["kv_blocks_free"] == after["kv_blocks_total"] == 256
    assert after["uptime"] > 0 and "mean_acceptance_length" in after["drafting"]


def test_a_default_that_can_not_be_used_is_a_fallback(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "llama", "llama")
    (folder / "generation_config.json").write_text('{"temperature": "hot", "top_p": 0.5, "eos_token_id": 2}')
    stages: list[str] = []
    info = load_backend(OPTIONS | {"model": str(folder)}, lambda stage, done, total: stages.append(stage)).info
    assert sorted(set(stages), key=stages.index) == ["weights", "warm-up"]
    assert info.sampling == {"top_p": 0.5}
    assert "the model's default temperature is not used" in {fallback["name"] for fallback in info.fallbacks}
    assert "temperature 'hot'; it must be a number" in info.plan


def test_many_at_once(runner: asyncio.Runner, client: EngineClient) -> None:
    async def all_of_them() -> list[list[StepOutput]]:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        streams = [client.submit(f"many-{i}", [10 + i, 11, 12], params) for i in range(24)]
        return list(await asyncio.gather(*map(collect, streams)))

    for events in runner.run(all_of_them()):
        assert sum(len(e.ids) for e in events) == 20 and events[-1].finish is FinishReason.LENGTH


def test_what_the_engine_refuses(runner: asyncio.Runner, client: EngineClient) -> None:
    for prompt, params, said in (
        ([], SamplingParams(), "empty"),
        ([9999], SamplingParams(), "9999"),
        ([10] * 600, SamplingParams(), "shorten"),
        ([10], SamplingParams(grammar=GrammarSpec("json_schema", "{nonsense")), "schema"),
    ):
        with pytest.raises(RequestRefused, match=said) as caught:
            runner.run(collect(client.submit("refused", prompt, params)))
        assert not caught.value.retryable
    with pytest.raises(UserError):
        client.submit("refused", [10], {"temperature": -1.0})
    assert not client._mailboxes


@pytest.mark.parametrize("levels", [64, 70, 200, 5000])
def test_a_nested_schema_is_refused_and_nothing_dies(runner: asyncio.Runner, client: EngineClient, levels: int) -> None:
    pid, schema = client.pid, '{"properties":{"a":' * levels + "{}" + "}}" * levels
    for kind, text in (("json_schema", schema), ("lark", f"start: %json {schema}")):
        with pytest.raises(RequestRefused, match=r"the JSON schema has more than 100|recursion limit|bytes"):
            runner.run(collect(client.submit("deep", PROMPT, SamplingParams(grammar=GrammarSpec(kind, text)))))
    events = runner.run(collect(client.submit("after", PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))))
    assert sum(len(e.ids) for e in events) == 4 and client.pid == pid and client.restarts == 0


class Broken:
    """A backend that meets a bug in one request."""

    has_work = False

    def __init__(self, error: Exception) -> None:
        self.error, self.added, self.aborted = error, 0, [""]

    def compile_grammar(self, spec: GrammarSpec) -> str:
        if spec.text == "breaks":
            raise self.error
        return "compiled"

    def add(self, name: str, prompt_ids: list[int], params: SamplingParams, grammar: str | None) -> None:
        self.added += 1
        assert (grammar == "compiled") is (params.grammar is not None), "it would be compiled again, within the steps"
        if name.startswith("bad"):
            raise self.error

    def abort(self, name: str) -> None:
        self.aborted.append(name)
        raise KeyError(name)  # it was never in


@pytest.mark.parametrize(
    "error", [KeyError("x"), RuntimeError("a\nb"), UserError("shorten it"), TryLater("soon", 7)], ids=str
)
def test_a_bug_that_one_request_meets_is_answered_to_it_alone(error: Exception) -> None:
    backend, sent = Broken(error), []
    wire = SimpleNamespace(inbox=SimpleQueue(), send=sent.append)
    loop = EngineLoop(backend, wire)  # type: ignore[arg-type]
    held = [pack_params(SamplingParams(grammar=GrammarSpec("regex", text))) for text in ("breaks", "fine")]
    for name, params in (("bad", {}), ("grammar", held[0]), ("bad-held", held[1]), ("odd", {"n": []}), ("good", {})):
        loop._handle(Submit(name, PROMPT, params))
    for _ in range(2):
        loop._handle(loop.wire.inbox.get(timeout=PATIENT))
    said = {message.id: message for message in sent}
    assert said.keys() == {"bad", "grammar", "bad-held", "odd"} and backend.added == 3 and not loop._compiling
    is_ours = not isinstance(error, UserError)
    assert [said[name].is_bug for name in ("bad", "grammar", "bad-held", "odd")] == [is_ours] * 3 + [False]
    assert all("\n" not in message.sentence for message in said.values())
    assert [said[name].retry_after for name in ("grammar", "odd")] == [getattr(error, "retry_after", 0), 0]


def test_what_may_work_later_is_503_and_says_when() -> None:
    client = EngineClient({})
    mailbox = client._mailboxes["x"] = Mailbox(1)
    client._receive(Refused("x", "send this one later", retry_after=7))
    assert mailbox.error is not None
    error = as_api_error(mailbox.error)
    assert (error.status, error.headers["Retry-After"]) == (503, "7")


def test_grammar(runner: asyncio.Runner, client: EngineClient) -> None:
    params = SamplingParams(max_tokens=60, grammar=GrammarSpec("regex", "(yes|no), [0-9]{3}"))
    events = runner.run(collect(client.submit("held", PROMPT, params)))
    text = "".join(e.text for e in events)
    assert text[-3:].isdigit() and text[:-5] in ("yes", "no")


@pytest.mark.parametrize("grammar", [None, GrammarSpec("json_schema", '{"type": "array", "minItems": 400}')])
def test_abort_ends_the_stream(runner: asyncio.Runner, client: EngineClient, grammar: GrammarSpec | None) -> None:
    async def aborted() -> list[StepOutput]:
        params = {"max_tokens": 450, "ignore_eos": True, "grammar": grammar, "n": 2}
        stream = client.submit("aborted", PROMPT, params)
        if grammar is None:
            await anext(stream)
            assert (await client.status())["kv_blocks_free"] < 256
        await client.abort("aborted")
        return await collect(stream)

    events = runner.run(aborted())
    assert [e.index for e in events if e.finish is FinishReason.ABORT] == [0, 1]
    assert runner.run(settled(client))["kv_blocks_free"] == 256


def test_whoever_leaves_aborts(runner: asyncio.Runner, client: EngineClient) -> None:
    async def breaks_off() -> None:
        async for _ in client.submit("left-0", PROMPT, LONG):
            break

    async def closes() -> None:
        stream = client.submit("left-1", PROMPT, LONG)
        await anext(stream)
        await stream.aclose()
        assert await collect(stream) == []

    async def is_cancelled() -> None:
        with held(client):
            task = asyncio.create_task(collect(client.submit("left-2", PROMPT, LONG)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    async def never_reads() -> None:
        client.submit("left-3", PROMPT, LONG)

    for leave in (breaks_off, closes, is_cancelled, never_reads):
        before = runner.run(settled(client))["finished"].get("abort", 0)
        runner.run(leave())
        status = runner.run(settled(client))
        assert status["finished"]["abort"] == before + 1, leave.__name__
        assert status["kv_blocks_free"] == 256 and not client._mailboxes


def test_a_slow_reader_stalls_nobody(runner: asyncio.Runner, client: EngineClient) -> None:
    async def one_sleeps() -> int:
        slow = client.submit("slow", PROMPT, LONG)
        await anext(slow)
        await collect(client.submit("fast", PROMPT, LONG))
        return 1 + len(await collect(slow))

    assert runner.run(one_sleeps()) == 450


@pytest.mark.slow
def test_a_server_that_does_not_read_loses_nothing(runner: asyncio.Runner, client: EngineClient) -> None:
    async def reads_late() -> list[StepOutput]:
        transport = client._transport
        assert transport is not None
        params = SamplingParams(max_tokens=200, n=16, logprobs=20, temperature=1.0, ignore_eos=True)
        stream = client.submit("late", PROMPT, params)  # some 2 MB of events, more than may be unsent
        transport.pause_reading()
        await asyncio.sleep(0.5)
        await client.abort("no such request")
        transport.resume_reading()
        return await collect(stream)

    events = runner.run(reads_late())
    for index in range(16):
        assert sum(len(e.ids) for e in events if e.index == index) == 200


# ---- an engine that dies


@pytest.mark.slow
def test_killed_under_load(tiny: Path) -> None:
    async def scenario() -> None:
        client = await started(tiny)
        first = client.pid
        assert first is not None
        with held(client):
            streams = [client.submit(f"r{i}", PROMPT, LONG) for i in range(8)]
            tasks = [asyncio.create_task(collect(s)) for s in streams]
            await asyncio.sleep(0.02)
            os.kill(first, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, EngineError) and r.retryable and "SIGKILL" in r.sentence for r in results), results
        assert client.state == "restarting" and client.last_error and "SIGKILL" in client.last_error
        with pytest.raises(EngineError) as caught:
            client.submit("early", PROMPT, LONG)
        assert caught.value.retryable
        with pytest.raises(EngineError):
            await client.status()
        await until(lambda: client.state == "ready")
        assert client.restarts == 1 and client.pid != first and not alive(first)
        assert len(await collect(client.submit("r0", PROMPT, LONG))) == 450
        await client.stop()
        assert client.pid is not None and not alive(client.pid)

    asyncio.run(scenario())


def test_how_long_to_wait_for_a_start_is_what_the_last_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(engine_client, "time", SimpleNamespace(monotonic=lambda: now))
    client = EngineClient(OPTIONS)
    assert client.retry_after == FIRST_START
    now += 12.5
    assert client.start_took() == 12.5
    now += 700
    client._child_lost()
    assert client.retry_after == 13 and client._not_ready().retry_after == 13
    now += 5
    assert client.retry_after == 8
    now += 5
    assert client.retry_after == 3 and client.start_took() == 10.0
    now += 60
    assert client.retry_after == 1  # a start that takes longer than it did


@pytest.mark.slow
def test_preemptions_are_counted(tiny: Path) -> None:
    async def scenario() -> None:
        client = EngineClient(OPTIONS | {"model": str(tiny), "kv_tokens": 640}, QUICK)
        await client.start()
        await until(lambda: client.state == "ready")
        client.count_anew()
        assert (await client.status())["preemptions"] == 0
        both = [collect(client.submit(name, [*PROMPT, i], LONG)) for i, name in enumerate("ab")]  # 481 tokens each
        assert [len(events) for events in await asyncio.gather(*both)] == [450, 450]
        assert (await client.status())["preemptions"] >= 1
        client.count_anew()
        assert (await client.status())["preemptions"] == 0
        await client.stop()

    asyncio.run(scenario())


def test_a_configuration_that_can_not_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = EngineClient({"model": str(tmp_path / "nothing")}, QUICK)
        await client.start()
        await until(lambda: client.state == "failed")
        assert client.last_error and "no file or folder" in client.last_error
        with pytest.raises(EngineError, match="no file or folder") as caught:
            client.submit("r", PROMPT, LONG)
        assert not caught.value.retryable
        await asyncio.sleep(0.3)
        assert client.restarts == 0 and client.state == "failed"
        assert client.pid is not None and not alive(client.pid)
        await client.stop()

    asyncio.run(scenario())


def test_back_off_doubles_and_stop_ends_it() -> None:
    async def scenario() -> None:
        client = EngineClient({}, RestartPolicy(first=0.05, most=0.1), [sys.executable, "-c", "raise SystemExit(3)"])
        begin = time.monotonic()
        await client.start()
        await until(lambda: client.restarts == 4)
        assert time.monotonic() - begin > 0.05 + 3 * 0.1
        assert client.state == "restarting" and client.last_error == "the engine process exited with code 3"
        await client.stop(1)
        assert client.state == "draining"

    asyncio.run(scenario())


def test_a_command_that_does_not_exist() -> None:
    async def scenario() -> None:
        client = EngineClient({}, QUICK, ["/nowhere/python"])
        await client.start()
        await until(lambda: client.restarts == 1)
        assert client.last_error and "could not be started" in client.last_error
        await client.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(("options", "program"), [({}, "a\0b"), ({"model": {1, 2}}, "python")])
def test_a_process_that_can_not_be_started_leaves_no_socket_open(
    options: dict[str, Any], program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: list[tuple[socket.socket, socket.socket]] = []
    make = socket.socketpair  # asyncio makes one of its own before
    monkeypatch.setattr(engine_client.socket, "socketpair", lambda: pairs.append(make()) or pairs[-1])
    with pytest.raises((ValueError, TypeError)):
        asyncio.run(EngineClient(options, command=[program])._run_child())
    assert [end.fileno() for end in pairs[-1]] == [-1, -1]


# ---- the end


def test_drain(tiny: Path) -> None:
    async def scenario() -> None:
        client = await started(tiny)
        with held(client):
            running = asyncio.create_task(collect(client.submit("running", PROMPT, LONG)))
            await asyncio.sleep(0.02)
            stopping = asyncio.create_task(client.stop(drain_seconds=PATIENT))
            await asyncio.sleep(0)
            assert client.state == "draining" and not running.done()
            with pytest.raises(EngineError, match="shutting down"):
                client.submit("late", PROMPT, LONG)
        assert len(await running) == 450
        await stopping
        assert client.pid is not None and not alive(client.pid)

    asyncio.run(scenario())


def test_a_drain_has_a_limit_and_ctrl_c_is_the_servers(tiny: Path) -> None:
    async def scenario() -> None:
        client = await started(tiny)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGINT)
        with held(client):
            running = asyncio.create_task(collect(client.submit("running", PROMPT, LONG)))
            await asyncio.sleep(0.01)
            stopping = asyncio.create_task(client.stop(drain_seconds=0.02))
            with pytest.raises(EngineError, match="shutting down"):
                await running
        await stopping
        assert not alive(client.pid)

    asyncio.run(scenario())


def test_stop_does_not_wait_for_loading() -> None:
    async def scenario() -> None:
        client = EngineClient({}, command=LOADS_FOR_EVER)
        await client.start()
        await until(lambda: client.stage == "opening")
        await client.stop(drain_seconds=PATIENT)
        assert client.pid is not None and not alive(client.pid)

    asyncio.run(scenario())


PARENT = f"""
import asyncio, sys
from sparkdraft.server.engine_client import COMMAND, EngineClient

async def main():
    options = {{"model": sys.argv[1], "dtype": "float32", "threads": 1}}
    command = {LOADS_FOR_EVER!r} if sys.argv[2] == "opening" else COMMAND
    client = EngineClient(options, command=command)
    await client.start()
    while client.stage != sys.argv[2]:
        await asyncio.sleep(0.01)
    print(client.pid, flush=True)
    await asyncio.sleep(100)

asyncio.run(main())
"""


@pytest.mark.parametrize("stage", ["opening", "ready"])
def test_no_orphan(tiny: Path, stage: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tiny), stage], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.wait()
    wait_for(lambda: not alive(child), lambda: "the engine outlived its server")


def test_the_api_side_loads_no_torch() -> None:
    code = "import sparkdraft.server.engine_client, sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
