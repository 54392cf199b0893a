"""How an engine says it runs, on this machine's CPU: with and without recordings."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdraft import LLM
from sparkdraft.core import Fact
from sparkdraft.engine.facts import asked, asked_by_drafter
from sparkdraft.kernels import native, reference
from sparkdraft.models.common.layers import ExpertsSpec
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab
from tests.models.tiny import write_tiny


def facts(tiny: Path, **options: object) -> dict[str, Fact]:
    return {fact.name: fact for fact in LLM(str(tiny), device="cpu", **options).facts()}


def test_steps_that_are_not_recorded_say_why(tiny: Path) -> None:
    found = facts(tiny, dtype="float32")
    assert found["decode steps"].reason == "the reference kernels cannot be captured"
    assert found["drafts and bits"].reason == "float32 products are torch's own"
    assert found["overlapped steps"].value == "off"


def test_the_embedded_model_replays_its_steps() -> None:
    recorded, off = (LLM("smollm2", device="cpu", spec="off", graphs=graphs) for graphs in (True, False))
    found = {fact.name: fact for fact in recorded.facts()}
    assert not recorded.fallbacks()
    assert found["decode steps"].value.startswith("replayed from graphs") and not found["decode steps"].reason
    assert not found["drafts and bits"].reason
    assert Fact("decode steps", "launched one operator at a time", "graphs is off") in off.facts()


def test_what_loading_settles_for_is_said_and_the_plan_stays_as_it_was(tmp_path: Path) -> None:
    """48 columns do not divide into groups of 32: the matrix stays float32, and its steps are recorded all the same."""
    odd = write_tiny(tmp_path / "odd", "llama", intermediate_size=48)
    llm = LLM(str(odd), device="cpu", dtype="quantised")
    assert llm.plan.fallbacks == () and llm.engine.decodes_exactly
    assert llm.engine.runner.graphs and llm.engine.runner.unrecorded == []
    said = {fallback.name: fallback.reason for fallback in llm.fallbacks()}
    assert list(said) == ["a float32 matrix among quantised ones"]
    assert "width 48 is no multiple of 32" in said["a float32 matrix among quantised ones"]
    shown = llm.plan.describe(llm.fallbacks())
    assert all(f"fallback {name}: {reason}" in shown for name, reason in said.items())
    (fact,) = (fact for fact in llm.facts() if fact.name == "drafts and bits")
    assert not fact.reason


def test_an_operator_that_is_left_to_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "gated", reference.gated)
    llm = LLM(str(write_tiny(tmp_path / "tiny", "llama")), device="cpu", dtype="quantised")
    assert llm.plan.fallbacks == () and llm.plan.graphs and not llm.engine.runner.graphs
    said = {fallback.name: fallback.reason for fallback in llm.fallbacks()}
    assert said == {
        "decode steps are launched one operator at a time": "a step calls 'float', which is not one of the CPU kernels"
    }


def test_a_model_with_biases_is_replayed(tmp_path: Path) -> None:
    llm = LLM(str(write_tiny(tmp_path / "biased", "llama-tied-biased")), device="cpu", dtype="quantised")
    assert llm.fallbacks() == [] and llm.engine.runner.graphs


def test_what_a_model_asks_of_its_kernels(tmp_path: Path) -> None:
    """Every expert matrix and every head dim: a GPU's kernels say of each whether its tiles were measured."""
    llm = LLM(str(write_tiny(tmp_path / "experts", "qwen3_moe")), device="cpu", dtype="float32")
    found = asked(llm.engine.runner.model, llm.plan)
    specs = [layer.mlp for layer in llm.model_config.layers if isinstance(layer.mlp, ExpertsSpec)]
    assert [each.top_k for each in found.experts] == [spec.top_k for spec in specs] and specs
    for each, spec in zip(found.experts, specs, strict=True):
        assert each.gate_up.tiles and each.gate_up.tiles.shape[0] == spec.num_experts * 2 * spec.intermediate_size
        assert each.down.tiles and each.down.tiles.shape[1] == spec.intermediate_size
    assert found.head_dims == {spec.head_dim for spec in llm.model_config.attention} and not found.coded_dims
    assert found.itemsize == 4 and found.most_rows == llm.plan.max_step_tokens


def test_what_a_drafter_asks_of_its_kernels(tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "target", "qwen3")
    own = write_drafter(tmp_path / "drafter", zlab(body()), random_tensors(body()))
    llm = LLM(str(target), device="cpu", dtype="float32", drafter=str(own))
    proposer = llm.engine.drafting.proposer
    assert proposer
    found = asked_by_drafter(proposer.drafter, llm.plan)
    hidden, caps = llm.model_config.hidden_size, proposer.drafter.caps
    assert (hidden, len(caps.aux_layers) * hidden) in {each.shape for each in found.matrices}, (
        "the matrix that reads aux hidden states"
    )
    assert found.head_dims == {spec.head_dim for spec in caps.kv}
