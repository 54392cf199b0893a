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
    assert found["decode steps"].reason == "the reference kernels cannot be recorded"
    assert found["drafts and bits"].reason == "float32 products are torch's own"
    assert found["overlapped steps"].value == "off"


def test_the_embedded_model_replays_its_steps() -> None:
    recorded, off = (LLM("smollm2", device="cpu", spec="off", graphs=graphs) for graphs in (True, False))
    found = {fact.name: fact for fact in recorded.facts()}
    assert not recorded.fallbacks()
    assert found["decode steps"].value.startswith("replayed from recordings") and not found["decode steps"].reason
    assert not found["drafts and bits"].reason
    assert Fact("decode steps", "launched one operator at a time", "graphs is off") in off.facts()


def test_what_loading_and_running_settle_for_is_said_and_the_plan_stays_as_it_was(tmp_path: Path) -> None:
    """48 columns do not divide into groups of 32: the matrix stays float32, and steps with it are not recorded."""
    odd = write_tiny(tmp_path / "odd", "llama", intermediate_size=48)
    llm = LLM(str(odd), device="cpu", dtype="quantised")
    assert llm.plan.fallbacks == () and llm.plan.graphs and not llm.engine.decodes_exactly
    said = {fallback.name: fallback.reason for fallback in llm.fallbacks()}
    assert list(said) == ["a float32 matrix among quantised ones", "decode steps are launched one operator at a time"]
    assert "width 48 is no multiple of 32" in said["a float32 matrix among quantised ones"]
    assert "is not one of the CPU kernels" in said["decode steps are launched one operator at a time"]
    shown = llm.plan.describe(llm.fallbacks())
    assert all(f"fallback {name}: {reason}" in shown for name, reason in said.items())
    (fact,) = (fact for fact in llm.facts() if fact.name == "drafts and bits")
    assert fact.reason == "float32 products are torch's own"
