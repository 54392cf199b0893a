"""What this package does with a real vLLM (its build for CPUs) and a real speculators, in an environment of their own:

    python tools/vllm_env.py /tmp/vllm-venv
    TEST_VLLM_VENV=/tmp/vllm-venv python -m pytest -m slow tests/bridges/test_vllm_real.py

Minutes, most of which vLLM takes to start. Skipped where the variable names no such environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from sparkdraft.bridges.vllm.child import free_port
from sparkdraft.cli.main import main
from sparkdraft.core import SamplingParams
from sparkdraft.llm import LLM
from sparkdraft.operate.bench import serve
from sparkdraft.train.export import ExportTarget, export
from tests.drafters.tiny_drafter import body, random_tensors, zlab
from tests.models.tiny import write_tiny
from tests.patience import PATIENT

VENV = Path(os.environ.get("TEST_VLLM_VENV", "/nowhere"))
PYTHON = VENV / "bin/python"
PROGRAM = Path(__file__).with_name("in_vllm.py")
START_SECONDS = 600
CALL = "tool call is a call"
ASKED = (
    "Write a Python function that adds two numbers.",
    "Count from 1 to 30.",
    "Why is the sky blue?",
    "Name three fruits and say what each tastes like.",
)
SPECULATORS = """
import json, sys
from speculators import SpeculatorModel
model = SpeculatorModel.from_pretrained(sys.argv[1])
print(json.dumps({"class": type(model).__name__, "block": model.config.block_size, "fc": list(model.fc.weight.shape)}))
"""
TURBOQUANT = """
import json
from vllm.plugins import load_general_plugins
load_general_plugins()
from sparkdraft.bridges.vllm import plugin
before = plugin.states()
import vllm.v1.attention.backends.turboquant_attn as module
print(json.dumps({"before": before, "after": plugin.states(),
                  "support": module.TurboQuantMetadataBuilder._cudagraph_support.name}))
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (VENV / "bin/vllm").exists(),
        reason="no vLLM: `python tools/vllm_env.py /tmp/vllm-venv` makes an environment, TEST_VLLM_VENV names it",
    ),
]


def run(*words: str | Path, **environ: str) -> Any:
    """The last line that a program of that environment prints, which is JSON."""
    command = [str(PYTHON), *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(Path.cwd()), "VLLM_LOGGING_LEVEL": "WARNING", **environ}
    result = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, env=env)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return json.loads(result.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> tuple[Path, Path]:
    """The embedded model and its drafter as other engines read them."""
    folder = tmp_path_factory.mktemp("embedded")
    model, drafter = folder / "smollm2", folder / "drafter"
    assert main(["export", "safetensors", "--out", str(model)]) == 0
    command = ["train", "export", "smollm2", "--layout", "speculators", "--model", str(model), "--out", str(drafter)]
    assert main(command) == 0
    return model, drafter


def test_a_tiny_model_writes_the_same_with_a_tiny_drafter(tmp_path: Path) -> None:
    model, drafter = write_tiny(tmp_path / "tiny", "llama"), tmp_path / "drafter"
    export(zlab(body("ff")), random_tensors(body("ff")), drafter, "speculators", target=ExportTarget(str(model)))
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([list(range(3, 20)), [5, 250, 9], list(range(200, 230))]))
    found = run(PROGRAM, model, drafter, "7", "24", prompts)
    assert found["plain"]["ids"] == found["drafted"]["ids"] == found["chosen"]["ids"]
    assert all(len(ids) == 24 for ids in found["plain"]["ids"])
    assert found["drafted"]["draft_tokens"] > 0 and "draft_tokens" not in found["plain"]
    assert "failed" not in found["patches"].values()


def test_the_embedded_model_writes_the_same_and_as_many_drafts_are_accepted_as_here(
    tmp_path: Path, embedded: tuple[Path, Path]
) -> None:
    """Both engines in float32. Steps are compared: vLLM also counts drafts past the last token that was asked for."""
    model, drafter = map(str, embedded)
    options = {"drafter": drafter, "spec": "15", "ngram": False, "max_model_len": 512, "max_seqs": 4}
    own = LLM(model, dtype="float32", profile="none", **options)
    ids = [own.chat_ids([{"role": "user", "content": text}]) for text in ASKED]
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(ids))
    found = run(PROGRAM, *embedded, "15", "64", prompts)
    print(json.dumps({how: found[how] | {"ids": []} for how in ("drafted", "chosen")}))  # for the figures in docs
    assert found["plain"]["ids"] == found["drafted"]["ids"] == found["chosen"]["ids"]
    ours = [result.completions[0] for result in own.generate(ids, SamplingParams(max_tokens=64, ignore_eos=True))]
    assert [each.ids for each in ours] == found["plain"]["ids"]
    steps = sum((each.speculation or {})["num_spec_steps"] for each in ours)
    print(f"steps: {steps} here, {found['drafted']['drafts']} in vLLM")
    assert abs(found["drafted"]["drafts"] / steps - 1) <= 0.2, "vLLM's key norm on CPUs costs 12 %"
    assert steps < len(ids) * 64 / 2.5, "over 2.5 tokens a step"
    assert found["drafted"]["draft_tokens"] == 15 * found["drafted"]["drafts"]
    assert found["chosen"]["draft_tokens"] < 15 * found["chosen"]["drafts"], "some steps verified fewer drafts"


def test_speculators_reads_the_export(embedded: tuple[Path, Path]) -> None:
    found = run("-c", SPECULATORS, embedded[1])
    assert found == {"class": "DFlashDraftModel", "block": 16, "fc": [576, 5 * 576]}


def test_the_patch_for_turboquant_applies_when_its_module_is_loaded_and_can_be_left_out() -> None:
    found = run("-c", TURBOQUANT)
    name = "turboquant-verify-graphs"
    assert found["before"][name] == "waiting" and found["after"][name] == "applied"
    assert found["support"] == "UNIFORM_SINGLE_TOKEN_DECODE"
    found = run("-c", TURBOQUANT, SPARKDRAFT_VLLM_SKIP=name)
    assert found["after"][name] == "skipped" and found["support"] == "UNIFORM_BATCH"


def _serving(url: str, *flags: str, **environ: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`serve`, from the moment that it is ready."""
    command = (sys.executable, "-m", "sparkdraft.cli.main", "serve", "--served-name", "m", "--max-model-len", "1024")
    port = url.rpartition(":")[2]
    process = subprocess.Popen([*command, "--port", port, *flags], env={**os.environ, **environ})
    deadline = time.monotonic() + START_SECONDS
    try:
        while _health(url) != 200:
            assert process.poll() is None and time.monotonic() < deadline, "it did not become ready"
            time.sleep(0.5)
        yield url, process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def front(embedded: tuple[Path, Path]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    model, drafter = map(str, embedded)
    flags = ("--engine", "vllm", "--model", model, "--drafter", drafter, "--max-seqs", "4", "--no-graphs")
    path = f"{VENV / 'bin'}:{os.environ['PATH']}"
    yield from _serving(f"http://127.0.0.1:{free_port()}", *flags, PATH=path, SPARKDRAFT_API_KEY="key")


@pytest.fixture(scope="module")
def own(embedded: tuple[Path, Path]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Our own engine on the same files and in the same numbers; it computes slowly in float32 on a CPU."""
    flags = ("--model", str(embedded[0]), "--dtype", "float32", "--spec", "off", "--no-canary", "--profile", "none")
    yield from _serving(f"http://127.0.0.1:{free_port()}", *flags)


def _health(url: str) -> int:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code
    except httpx.HTTPError:
        return 0


def _get(url: str, path: str) -> httpx.Response:
    return httpx.get(f"{url}{path}", headers={"Authorization": "Bearer key"}, timeout=PATIENT, trust_env=False)


def test_it_is_served_behind_our_front(front: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, _ = front
    client = OpenAI(base_url=f"{url}/v1", api_key="key", timeout=PATIENT)
    messages: Any = [{"role": "user", "content": "Count from 1 to 20."}]
    answer = client.chat.completions.create(model="m", messages=messages, max_tokens=32, temperature=0)
    stats = (answer.model_extra or {})["metrics"]["speculative_decoding"]
    assert stats["num_spec_steps"] > 0 and stats["num_draft_tokens"] == 15 * stats["num_spec_steps"]
    stream = client.chat.completions.create(model="m", messages=messages, max_tokens=32, temperature=0, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == answer.choices[0].message.content and len(pieces) > 2
    assert httpx.get(f"{url}/v1/models", timeout=PATIENT, trust_env=False).status_code == 401
    metrics = _get(url, "/metrics").text
    assert "\nsparkdraft_spec_decode_num_accepted_tokens_total{" in metrics and "vllm:" not in metrics
    assert "sparkdraft_engine_ready 1" in metrics and f'canary_probe_passed{{probe="{CALL}"}} 1' in metrics


def test_it_answers_every_question_and_is_not_degraded(front: tuple[str, subprocess.Popen[bytes]]) -> None:
    """A slow machine skips the last questions at the start; `check --url` asks all of them."""
    url, _ = front
    findings = _get(url, "/v1/status").json()["canary"]
    assert _get(url, "/health").json() == {"status": "ok"}, findings
    call = next(finding for finding in findings if finding["probe"] == CALL)
    assert call["status"] == "passed" and "a required call of get_weather" in call["detail"], call
    assert main(["check", "--url", url, "--api-key", "key", "--timeout", "120"]) == 0


def test_both_engines_write_the_same(
    front: tuple[str, subprocess.Popen[bytes]], own: tuple[str, subprocess.Popen[bytes]]
) -> None:
    """By the openai client, and by what `bench serve` sends and reads."""
    texts, benched = [], []
    for url, _ in (front, own):
        client = OpenAI(base_url=f"{url}/v1", api_key="key", timeout=PATIENT)
        answers = [
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": text}], max_tokens=24, temperature=0
            )
            for text in ASKED
        ]
        texts.append([(each.choices[0].message.content, each.usage and each.usage.prompt_tokens) for each in answers])
        result = serve.Result(serve.Settings(url, "key", streams=(1,), classes=("qa",), output_len=24, requests=2))
        asyncio.run(serve.measure(result.settings, result, lambda what, done, total: None))
        print(serve.markdown(serve.summary(result)))  # for the figures in docs
        benched.append([(sample.text, sample.tokens, sample.error) for sample in result.cells[0].load.samples])
    assert texts[0] == texts[1]
    assert benched[0] == benched[1] and len(benched[0]) == 2 and all(text for text, _, _ in benched[0])


def test_a_signal_ends_all_of_it(front: tuple[str, subprocess.Popen[bytes]]) -> None:
    _, process = front
    below = _below(process.pid)
    assert len(below) >= 3, "vLLM runs in several processes"
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENT) == 0 and not [pid for pid in below if Path(f"/proc/{pid}").exists()]


def _below(pid: int) -> list[int]:
    """All processes that a process has started, and those that these have."""
    own = [int(word) for task in Path(f"/proc/{pid}/task").glob("*/children") for word in task.read_text().split()]
    return own + [each for child in own for each in _below(child)]
