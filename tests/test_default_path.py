"""The embedded model exactly as a newcomer starts it: no fallback, and every decode step is replayed from a recording.

Counts, not times: a step that is launched one operator at a time takes twice as long and writes the same text, so only
a count shows it. The three ways to start it are `LLM("smollm2")`, `make demo` and `make serve`.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sparkdraft import LLM, SamplingParams
from sparkdraft.engine.graphs import Shape
from tests.patience import PATIENT
from tests.server.test_serve import started

ROOT = Path(__file__).parent.parent
QUESTION = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
REPEATED = "red green blue yellow white black " * 4


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM("smollm2")


@pytest.fixture
def eager(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often the model and the drafter were launched one operator at a time."""
    calls: Counter[str] = Counter()
    block = llm.engine.drafting.proposer
    assert block
    for owner, name in ((llm.engine.runner, "_forward"), (block, "_run_pass"), (block, "_observe")):
        original = getattr(owner, name)

        def counted(*args: object, name: str = name, original: object = original) -> object:
            calls[name] += 1
            return original(*args)  # type: ignore[operator]

        monkeypatch.setattr(owner, name, counted)
    # Recordings already made keep the functions they were made with; new shapes are recorded through these.
    for graphs, owner, name in (
        (block._passes, block, "_run_pass"),
        (block._observing, block, "_observe"),
    ):
        monkeypatch.setattr(graphs, "_run", getattr(owner, name))
    yield calls


def test_the_plan_holds_no_fallback(llm: LLM) -> None:
    assert llm.fallbacks() == []
    assert llm.plan.kernels == "native" and llm.plan.weights == "quantised" and llm.plan.graphs
    assert llm.engine.runner.graphs and llm.engine.drafting.proposer


@pytest.mark.parametrize(
    ("depth", "repeats", "source"),
    [(0, False, ""), (1, False, "dflash"), (3, False, "dflash"), (15, False, "dflash"), (3, True, "ngram")],
)
def test_plain_drafted_and_ngram_steps_are_replayed(
    depth: int, repeats: bool, source: str, llm: LLM, eager: Counter[str]
) -> None:
    """The second time a request is sent, all of its shapes are recorded: only its prompt is launched eagerly."""
    prompt = llm.encode(REPEATED) if repeats else llm.chat_ids(QUESTION)
    params = SamplingParams(max_tokens=40, num_draft=depth, ignore_eos=True)
    first = llm.generate([prompt], params)[0].completions[0]
    eager.clear()
    again = llm.generate([prompt], params)[0].completions[0]
    assert again.ids == first.ids
    assert eager == {"_forward": 1}, "the prompt's rows, and nothing else"
    sources = again.speculation["sources"] if again.speculation else {}
    assert not source or source in sources, sources


def test_a_paused_drafters_step_is_a_plain_step_and_the_taps(llm: LLM) -> None:
    plain = LLM("smollm2", spec="off")
    shape = Shape(1, 1, 0, 1)
    assert llm.engine.runner.graphs and plain.engine.runner.graphs
    paused, alone = (x.engine.runner.graphs.graph(shape).kernels for x in (llm, plain))  # type: ignore[union-attr]
    num_aux = len(llm.engine.runner.aux_layers)
    assert "copy_rows" not in alone and Counter(paused)["copy_rows"] == num_aux > 0
    assert [kernel for kernel in paused if kernel != "copy_rows"] == alone


def recipe(target: str) -> list[str]:
    """The arguments of the command that `make target` runs."""
    found = re.search(rf"^{target}:.*\n\t\$\(BIN\)/sparkdraft (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert found, f"make {target} runs no sparkdraft"
    return found.group(1).split()


def test_make_demo_has_nothing_to_say(smollm2_path: Path) -> None:
    """With fewer tokens: tests/test_readme.py runs all of it, in the long tests."""
    command = [sys.executable, "-m", "sparkdraft.cli.main", *recipe("demo"), "--max-tokens", "32"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT)
    assert result.returncode == 0, result.stderr
    assert "note" not in result.stderr and "fallback" not in result.stderr, result.stderr
    assert "The two texts are the same" in result.stdout


@pytest.mark.slow
def test_make_serve_has_nothing_to_say(smollm2_path: Path) -> None:
    assert recipe("serve") == ["serve"]
    with started() as server:
        url = server.wait_for(r"chat +(http://127\.0\.0\.1:\d+)/").group(1)
        server.wait_for("ready after")
        status = httpx.get(url + "/v1/status", timeout=PATIENT).json()
        assert status["fallbacks"] == [], status["fallbacks"]
        assert status["plan_facts"]["graphs"] and status["plan_facts"]["kernels"] == "native"
        assert not [line for line in server.lines if "note" in line or "fallback" in line]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENT) == 0
