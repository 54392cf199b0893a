"""Published shapes with random weights, made small, through their own architecture, a drafter and the whole bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkdraft.cli.main import main
from sparkdraft.drafters.mtp import MtpConfig
from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.operate.bench import random_model
from sparkdraft.operate.forecast import rates

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_global_key_value_heads": 1, "head_dim": 32, "global_head_dim": 64, "num_experts": 16, "num_local_experts": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 48, "moe_intermediate_size": 32, "sliding_window": 16, "num_target_layers": 6,
    "max_position_embeddings": 1024, "backbone_hidden_size": 64,
}  # fmt: skip
LAYERS = 6


def small(config: dict[str, Any]) -> dict[str, Any]:
    """The same config.json with fewer and narrower layers; keys that it does not have stay away."""
    own = {key: SMALL.get(key, value) for key, value in config.items()}
    if "text_config" in config:
        return own | {"text_config": small(config["text_config"])}
    if own.get("moe_intermediate_size") is None and "num_local_experts" in own:
        own["intermediate_size"] = 64  # MXFP4 has groups of 32 in both directions
    count = min(LAYERS, config["num_hidden_layers"])
    if "layer_types" in own:
        own["layer_types"] = own["layer_types"][-count:]  # the last one is over everything
    if "dflash_config" in own:
        own["dflash_config"] = {"mask_token_id": 4, "target_layer_ids": [1, 3, 4]}
    return own | {"num_hidden_layers": count}


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    for files in (random_model.TARGET_FILES, random_model.DRAFTER_FILES):
        for name, config in files.items():
            monkeypatch.setitem(files, name, small(config))
    monkeypatch.setitem(rates.SIZE, "cpu", 1 << 20)


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize("drafter", list(random_model.DRAFTER_FILES))
def test_a_published_shape_runs_with_its_drafter(drafter: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = drafter.rsplit("-", 1)[0]
    flags = ["--shape", name, "--drafter-shape", drafter, "--dtype", "float32", "--threads", "1"]
    flags += ["--synthetic-acceptance", "2.5", "--spec", "3", "--prompt-len", "20", "--concurrency", "2"]
    assert main(["bench", "offline", *flags, "--output-len", "20"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    (row,) = json.loads(out.splitlines()[-1])["rows"]
    assert row["length"] == pytest.approx(2.5, rel=0.1) and row["rows"] == 8
    model = random_model.shape(name)
    assert row["floor_gb"]["target"] == pytest.approx(4 * model_sizes(model).read(8) / 1e9, abs=1e-4)
    assert ("choose independently" in out) == (name not in ("gemma4-31b", "qwen3.5-27b"))


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize("name", ["qwen3.5-27b", pytest.param("qwen3.5-35b-a3b", marks=pytest.mark.slow)])
def test_a_shape_runs_with_an_mtp_head(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--shape", name, "--drafter-shape", "mtp", "--dtype", "float32", "--threads", "1", "--output-len", "20"]
    flags += ["--synthetic-acceptance", "2.5", "--spec", "3", "--prompt-len", "20", "--concurrency", "2"]
    assert main(["bench", "offline", *flags]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = found["rows"]
    assert row["length"] == pytest.approx(2.5, rel=0.1) and row["rows"] == 8 and found["drafter"] == "mtp"
    head = MtpConfig.of(random_model.shape(name)).caps()
    assert row["floor_gb"]["drafter"] == pytest.approx(3 * 4 * (head.num_read + 256 * 64) / 1e9, abs=1e-4)


@pytest.mark.usefixtures("little")
def test_a_shape_runs_with_a_quantised_drafter_and_few_ids(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKDRAFT_CACHE", str(tmp_path / "cache"))
    ids = tmp_path / "ids"
    ids.write_text("".join(f"{each}\n" for each in range(0, 256, 4)))
    flags = ["--shape", "qwen3.5-27b", "--drafter-shape", "qwen3.5-27b-dflash", "--dtype", "float32", "--threads", "1"]
    flags += ["--synthetic-acceptance", "2.5", "--spec", "3", "--prompt-len", "20", "--concurrency", "1"]
    flags += ["--output-len", "20", "--drafter-weights", "fp8", "--draft-vocab", str(ids), "--verbose"]
    assert main(["bench", "offline", *flags]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["drafter_weights"] == "fp8" and found["draft_ids"] == 64
    model = random_model.shape("qwen3.5-27b")
    draft = random_model.drafter_shape("qwen3.5-27b-dflash", model)
    layers = sum(layer.held for layer in model_sizes(draft.model).layers)
    expected = 4 * (layers + 64 * 64) / 1e9  # a CPU's float32 kernels keep the rounded numbers as floats
    assert found["rows"][0]["floor_gb"]["drafter"] == pytest.approx(expected, abs=1e-4)
    assert not (tmp_path / "cache" / "quantised").exists(), "random weights are no file"


@pytest.mark.slow
@pytest.mark.usefixtures("little")
def test_depths_of_a_shape_with_a_synthetic_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    name = "gpt-oss-20b"
    flags = ["--shape", name, "--drafter-shape", f"{name}-dflash", "--dtype", "float32", "--threads", "1"]
    flags += ["--synthetic-acceptance", "3", "--concurrency", "1,2", "--depths", "0,7", "--output-len", "24"]
    assert main(["bench", "depth", *flags]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "SYNTHETIC ACCEPTANCE: each of 7 drafts" in said
    report = json.loads(said.splitlines()[-1])
    assert report["synthetic"]["length"] == 3
    cells = {(c["streams"], c["kind"], c["depth"]): c for c in report["cells"]}
    assert set(cells) == {(n, kind, d) for n in (1, 2) for kind in ("random", "all") for d in (0, 7, "auto")}
    assert cells[1, "all", 7]["length"] == pytest.approx(3, rel=0.15) and cells[1, "all", 7]["rows"] == 8
    assert cells[2, "random", 0]["length"] == 1
