"""The proof itself: what ran is seen, layer by layer, and nothing that did not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sparkdraft import LLM
from sparkdraft.cli.main import main
from sparkdraft.kernels import native, reference
from sparkdraft.operate.doctor import engine
from sparkdraft.operate.instrument import ENDS, Watch, _triton, listed
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab
from tests.kernels.triton_device import gpu_only
from tests.models.tiny import TinyOf, write_tiny


@pytest.fixture(scope="session")
def tiny(tiny_of: TinyOf) -> Path:
    return tiny_of("qwen3_moe")


def names(watch: Watch, layer: int) -> list[str]:
    return [kernel for kernel, _ in watch.of(layer)]


def test_native_kernels_are_seen_by_layer(tiny: Path) -> None:
    """The second layer is dense, the others have experts."""
    llm = LLM(str(tiny), device="cpu", dtype="quantised", spec="off")
    prompt, row = engine.run_watched(llm.engine)
    for number in range(len(llm.model_config.layers)):
        ran = names(row, number)
        assert ran.count("paged_attention") == 1 and ran.count("kv_write") == 1
        assert ("experts" in ran and "route" in ran) == (number != 1) and ("gated" in ran) == (number == 1)
    assert names(row, ENDS)[0] == "embed" and names(row, ENDS)[-1] == "linear"
    assert names(prompt, 0) == names(row, 0), "native kernels are the same for a prompt"
    recorded = llm.engine.runner.graphs
    assert recorded, "recordings are back"
    (shape,) = [shape for shape in recorded._kept if shape.rows == 1]
    assert recorded.recording(shape).kernels == [each.kernel for each in row.ran], "what is replayed is what was seen"


def test_an_operator_that_is_left_to_torch_is_seen(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "gated", reference.gated)
    llm = LLM(str(tiny), device="cpu", dtype="quantised", spec="off")
    _, row = engine.run_watched(llm.engine)
    assert any(name.startswith("torch.") for name in names(row, 1))
    assert not any(name.startswith("torch.") for name in names(row, 0)), "experts have an activation of their own"
    found = engine._plan(llm.engine)
    (change,) = (each for each in found if each.status)
    assert "is not one of the CPU kernels" in change.value


def test_torchs_operators_are_seen(tiny: Path) -> None:
    llm = LLM(str(tiny), device="cpu", dtype="float32", spec="off")
    _, row = engine.run_watched(llm.engine)
    assert "torch.linear" in names(row, 0) and all(each.kernel.startswith("torch.") for each in row.ran)


def test_counted_steps(tiny: Path) -> None:
    recorded, off = (
        engine.run_counted(LLM(str(tiny), device="cpu", dtype="quantised", spec="off", graphs=graphs).engine)
        for graphs in (True, False)
    )
    assert recorded.replayed == recorded.steps - 1 and recorded.kernels > 10, "all but the prompt's"
    assert off.replayed == 0 and off.steps == recorded.steps and len(off.seconds) == off.steps


def test_a_drafters_kernels_are_seen(tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "target", "qwen3")
    own = write_drafter(tmp_path / "drafter", zlab(body("ff")), random_tensors(body("ff")))
    llm = LLM(str(target), device="cpu", dtype="quantised", drafter=str(own), ngram=False)
    watch, proposer = engine.run_drafter_watched(llm.engine), llm.engine.drafting.proposer
    assert watch and proposer and "propose" not in vars(proposer.drafter), "all is back in its place"
    for number in range(2):
        assert names(watch, number).count("paged_attention") == 1 and "gated" in names(watch, number)
    (found,) = engine._drafter(llm.engine, watch)
    assert found.name == "drafter's layers 0-1" and "in both directions" in found.value
    assert "paged_attention" in found.proof


def test_tritons_launches_are_seen_with_their_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from sparkdraft.kernels.cuda.linear import few_tokens
    from sparkdraft.weights.linear import WeightTiles

    for kind in (JITFunction, InterpretedFunction):  # no GPU: nothing runs
        monkeypatch.setattr(kind, "run", lambda *_, **__: None)
    watch = Watch()
    with _triton(watch):
        few_tokens.linear(
            torch.zeros(2, 64, dtype=torch.float16), WeightTiles(torch.zeros(48, 64, dtype=torch.float16))
        )
    assert len(watch.ran) == 1 and len(watch.ran[0].tile) == 4, "lines, columns, warps, stages"
    few_tokens.linear(torch.zeros(2, 64, dtype=torch.float16), WeightTiles(torch.zeros(48, 64, dtype=torch.float16)))
    assert len(watch.ran) == 1, "it ends with its block"


def test_kernels_are_listed_in_order() -> None:
    assert listed([("_attend", (16, 64, 4, 3)), ("linear", ()), ("linear", ())]) == "attend [16x64x4x3], 2 x linear"


@gpu_only
def test_the_whole_command_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(write_tiny(tmp_path / "tiny", "llama")), "--device", "cuda", "--json"]) <= 1
    report = json.loads(capsys.readouterr().out)
    names = {each["name"]: each for each in report["findings"]}
    assert {"GPU", "clocks", "memory bandwidth", "matrix tiles", "attention tiles", "kernel launches"} <= names.keys()
    assert "launched ahead" in names["overlapped steps"]["proof"] and "replayed" in names["decode steps"]["proof"]
