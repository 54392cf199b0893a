"""Recipes: every pair has one, each is a file of ours, and vLLM gets a command that means the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from sparkdraft.bridges.container_env import merge_with_container
from sparkdraft.bridges.importing import read
from sparkdraft.bridges.recipes import Recipe, find_recipe, recipes
from sparkdraft.bridges.vllm.command import Choices, shell, vllm_command
from sparkdraft.cli.main import main
from sparkdraft.drafters import pairs
from sparkdraft.server.config import merge
from tests.patience import PATIENT
from tests.server.test_serve import Started

REPORTED = {name: recipe for name, recipe in recipes().items() if recipe.source}


def test_every_pair_has_a_recipe() -> None:
    served = {(recipe.target.name, recipe.drafter.repo, recipe.drafter.kind) for recipe in recipes().values()}
    assert served == {(t.name, d.repo, d.kind) for t in pairs.targets() for d in t.drafters}
    targets = {recipe.target.name.split("/")[1] for recipe in REPORTED.values()}
    assert targets == {
        *("gemma-4-31B-it", "Qwen3.5-35B-A3B", "Qwen3-Coder-Next", "Qwen3.5-27B", "gpt-oss-120b", "gemma-4-26B-A4B-it"),
    }


@pytest.mark.parametrize("recipe", recipes().values(), ids=lambda recipe: recipe.name)
def test_each_is_a_file_of_ours(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "server.toml").write_text(recipe.toml())
    config = merge({}, tmp_path / "server.toml", {})
    assert config.engine.model == recipe.checkpoint
    known = next((d for t in pairs.targets() for d in t.drafters if d.repo and d.repo == config.engine.drafter), None)
    assert known.is_read if known else config.engine.drafter in ("none", "mtp")
    assert recipe.drafter.kind != "mtp" or config.engine.drafter == "mtp"


@pytest.mark.parametrize("recipe", recipes().values(), ids=lambda recipe: recipe.name)
def test_each_is_a_command_of_vllm(recipe: Recipe) -> None:
    back = read(shell(vllm_command(merge(recipe.options(), None, {}), Choices())))
    assert back.values["model"] == recipe.checkpoint
    expected = {k: v for k, v in recipe.settings.items() if k != "memory_fraction" or v != 0.85}
    assert {name: back.values[name] for name in expected} == expected
    if recipe.drafter.is_read:
        assert back.values["drafter"] == (recipe.drafter.repo or "mtp")
        # Gemma 4's assistant drafts 4 tokens, the best of the depths that its report tried
        assert back.values["spec"] == str(4 if recipe.drafter.kind == "assistant" else recipe.drafter.block - 1)


def test_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(recipes())
    assert main(["recipe", "show", "gpt-oss-120b-spark"]) == 0
    assert 'drafter = "z-lab/gpt-oss-120b-DFlash"' in capsys.readouterr().out
    assert main(["recipe", "show", "gpt-oss-120b-sprak"]) == 1
    assert "did you mean gpt-oss-120b-spark?" in capsys.readouterr().err


def test_a_recipe_is_beaten_by_file_variables_and_flags(tmp_path: Path) -> None:
    base = {"model": "m", "max_seqs": 1, "max_step_tokens": 1, "kv_tokens": 1, "threads": 1}
    (tmp_path / "a.toml").write_text("max_step_tokens = 2\nkv_tokens = 2\nthreads = 2\n")
    environ = {"SPARKDRAFT_KV_TOKENS": "3", "SPARKDRAFT_THREADS": "3"}
    engine = merge({"threads": 4}, tmp_path / "a.toml", environ, base).engine
    assert (engine.model, engine.max_seqs, engine.max_step_tokens, engine.kv_tokens, engine.threads) == (
        "m",
        1,
        2,
        3,
        4,
    )


def test_a_recipes_drafter_is_for_its_own_model_alone(tmp_path: Path) -> None:
    base, file = find_recipe("qwen3-8b-dflash").options(), tmp_path / "other.toml"
    file.write_text('model = "other"\n')
    assert merge({}, None, {}, base).engine.drafter == base["drafter"]
    assert merge({"model": base["model"]}, None, {}, base).engine.drafter == base["drafter"]
    for config in (
        merge({"model": "other"}, None, {}, base),
        merge({}, file, {}, base),
        merge_with_container({}, None, {"MODEL_PATH": "other"}, base),
    ):
        assert (config.engine.model, config.engine.drafter) == ("other", "auto")
    assert merge_with_container({"drafter": "mine"}, None, {"MODEL_PATH": "other"}, base).engine.drafter == "mine"


def test_run_starts_what_the_recipe_says(tmp_path: Path) -> None:
    """Without the model at hand it says so; the flags of `serve` are its own."""
    command = [sys.executable, "-m", "sparkdraft.cli.main", "recipe", "run", "qwen3-8b-dflash", "--host", "0.0.0.0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT)
    assert result.returncode == 1 and "--allow-public" in result.stderr


@pytest.mark.slow
def test_a_recipe_serves_the_embedded_model_in_the_place_of_its_own(smollm2_path: Path) -> None:
    flags = ("--model", "smollm2", "--device", "cpu", "--max-model-len", "512")
    server = Started(*flags, verbs=("recipe", "run", "qwen3.5-27b-nvfp4-spark"))
    try:
        url = server.wait_for(r"chat +(http://127\.0\.0\.1:\d+)/").group(1)
        server.wait_for("ready after")
        server.wait_for("drafter: dflash, up to 15 drafts")
        status = httpx.get(url + "/v1/status", timeout=PATIENT).text
        assert "context 512 tokens, 16 requests at once" in status, status
    finally:
        server.process.kill()
        server.process.wait()
