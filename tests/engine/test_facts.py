"""How an engine says it runs, on this machine's CPU: with and without recordings."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdraft import LLM
from sparkdraft.core import Fact
from tests.models.tiny import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "llama")


def facts(tiny: Path, **options: object) -> dict[str, Fact]:
    return {fact.name: fact for fact in LLM(str(tiny), device="cpu", **options).facts()}


def test_steps_that_are_not_recorded_say_why(tiny: Path) -> None:
    found = facts(tiny, dtype="float32")
    assert found["decode steps"].reason == "the reference kernels can not be recorded"
    assert found["drafts and bits"].reason == "float32 products are torch's own"
    assert found["overlapped steps"].value == "off"


def test_the_embedded_model_replays_its_steps() -> None:
    recorded, off = (LLM("smollm2", device="cpu", spec="off", graphs=graphs) for graphs in (True, False))
    found = {fact.name: fact for fact in recorded.facts()}
    assert not recorded.plan.fallbacks
    assert found["decode steps"].value.startswith("replayed from recordings") and not found["decode steps"].reason
    assert not found["drafts and bits"].reason
    assert Fact("decode steps", "launched one operator at a time", "graphs is off") in off.facts()
