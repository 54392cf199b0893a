"""`train export` of a drafter that is a checkpoint already, such as the one in the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sparkdraft.cli.main import main
from sparkdraft.core import UserError
from sparkdraft.drafters.find import default_drafter
from sparkdraft.train.export import read_drafter
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.quant.stored import as_float
from tests.drafters.tiny_drafter import body, random_tensors, speculators, write_drafter, zlab
from tests.models.tiny import write_tiny


def test_a_drafter_is_written_in_the_other_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write_tiny(tmp_path / "target", "llama")
    drafter = write_drafter(tmp_path / "drafter", zlab(body("ff")), random_tensors(body("ff")))
    out = tmp_path / "out"
    command = ["train", "export", str(drafter), "--layout", "speculators", "--out", str(out)]
    assert main(command) == 1 and "name it with --model" in capsys.readouterr().err
    assert main([*command, "--model", str(target), "--vocab", "9"]) == 1 and "--vocab" in capsys.readouterr().err
    assert main([*command, "--model", str(target)]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(target)
    before, after = open_checkpoint(str(drafter)), open_checkpoint(str(out))
    for name in before.names():
        assert torch.equal(as_float(after.read(name)), as_float(before.read(name)).bfloat16().float()), name
    again = write_drafter(tmp_path / "s", speculators(body("ff")), random_tensors(body("ff")))
    with pytest.raises(UserError, match="in the speculators layout"):
        read_drafter(str(again))


@pytest.mark.slow
def test_the_drafter_of_the_package_is_written_for_other_engines(tmp_path: Path, smollm2_path: Path) -> None:
    assert main(["train", "export", "smollm2", "--layout", "speculators", "--out", str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    packaged = default_drafter("smollm2")
    assert packaged is not None
    _, tensors, ids = read_drafter(packaged)
    written = open_checkpoint(str(tmp_path / "out"))
    assert (
        ids is not None
        and config["draft_vocab_size"] == len(ids)
        and written.read("lm_head.weight").shape[0] == len(ids)
    )
    assert torch.equal(as_float(written.read("fc.weight")), tensors["fc.weight"].bfloat16().float())


def test_a_run_that_does_not_exist_is_named_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with one slash may be a folder's, or the hub's."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["train", "export", "runs/frist", "--out", str(tmp_path / "out")]) == 1
    assert "There is no run and no drafter in a folder runs/frist, and as a hub id" in capsys.readouterr().err
    assert main(["train", "export", str(tmp_path / "frist"), "--out", str(tmp_path / "out")]) == 1
    assert "frist holds no training run" in capsys.readouterr().err
