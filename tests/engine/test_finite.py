"""A model that computes NaN says so: at load with the tensor's name, and in any step, whoever samples it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.cli.main import main
from sparkdraft.engine.accept import NONE, NotFinite, checked, committed
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab
from tests.models.test_file_forms import config_of, tensors_of, write
from tests.models.tiny import write_tiny

NAN, INF = float("nan"), float("inf")
TENSORS = ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"]


def broken(folder: Path, name: str, value: float = NAN) -> Path:
    right = write_tiny(folder / "right", "llama")
    tensors = tensors_of(right)
    tensors[name].fill_(value)
    return write(folder / "wrong", tensors, config_of(right))


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("name", TENSORS)
def test_loading_names_the_tensor(name: str, dtype: str, tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match=f"{name} holds NaN or infinities"):
        LLM(str(broken(tmp_path, name)), device="cpu", dtype=dtype)


def test_generate_ends_with_the_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = broken(tmp_path, TENSORS[1], INF)
    assert main(["generate", "--model", str(folder), "--prompt", "Hello", "--max-tokens", "4"]) == 1
    said = capsys.readouterr()
    assert "logits are not finite numbers" in said.err and "Traceback" not in said.err
    assert not said.out.strip()


def test_rows_without_a_finite_largest_have_no_id() -> None:
    rows = torch.tensor([[0.0, 1.0], [NAN, NAN], [INF, 0.0], [-INF, -INF]])
    assert checked(rows, torch.tensor([1, 0, 0, 0])).tolist() == [1, NONE, NONE, 0]
    assert committed([5], [4, NONE]) == [4]  # a row behind a rejected draft is not used
    with pytest.raises(NotFinite):
        committed([5], [5, NONE])


@pytest.mark.parametrize("spec", ["off", "3"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("after", [0, 5])
def test_a_step_that_computes_nan_ends_its_requests(after: int, temperature: float, spec: str, tmp_path: Path) -> None:
    """after: tokens before it; then all steps are overlapped, and the host samples none of their ids itself."""
    target = write_tiny(tmp_path / "target", "qwen3")
    drafter = write_drafter(tmp_path / "drafter", zlab(body()), random_tensors(body()))
    llm = LLM(str(target), device="cpu", spec=spec, drafter="" if spec == "off" else str(drafter), ngram=False)
    params = SamplingParams(max_tokens=64, ignore_eos=True, temperature=temperature, seed=3)
    pieces = llm.stream([7, 8, 9], params)
    for _ in range(after):
        next(pieces)
    norm = llm.engine.runner.model.layers[0].input_norm
    right = norm.gain.clone()
    with torch.inference_mode():
        norm.gain.fill_(NAN)
    with pytest.raises(NotFinite, match="exceed the range of the dtype"):
        list(pieces)
    with torch.inference_mode():
        norm.gain.copy_(right)
    assert len(llm.generate([[7, 8, 9]], params)[0].completions[0].ids) == 64  # nothing of it is left
