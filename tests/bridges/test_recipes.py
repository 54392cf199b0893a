"""Recipes: every pair has one, each is a file of ours and a recipe of both launchers, and all of them mean the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from sparkdraft.bridges.container_env import merge_with_container
from sparkdraft.bridges.importing import read
from sparkdraft.bridges.recipe_formats import EUGR, FORMATS, SPARKRUN, check, rendered
from sparkdraft.bridges.recipes import Recipe, find_recipe, recipes
from sparkdraft.cli.main import main
from sparkdraft.core import UserError
from sparkdraft.drafters import pairs
from sparkdraft.server.config import merge
from tests.patience import PATIENT
from tests.server.test_serve import Started

REPORTED = {name: recipe for name, recipe in recipes().items() if recipe.source}
BOTH = pytest.mark.parametrize("form", [SPARKRUN, EUGR])


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


@BOTH
@pytest.mark.parametrize("recipe", recipes().values(), ids=lambda recipe: recipe.name)
def test_each_is_a_recipe_of_a_launcher(recipe: Recipe, form: str) -> None:
    written = yaml.safe_load(recipe.launcher(form, "0.32.0"))
    check(form, written)
    assert written["model"] == recipe.checkpoint
    command = rendered(form, written)
    back = read(command)
    assert back.values["model"] == recipe.checkpoint and back.values["host"] == "0.0.0.0"
    expected = {k: v for k, v in recipe.settings.items() if k != "memory_fraction" or v != 0.85}
    assert {name: back.values[name] for name in expected} == expected
    if recipe.drafter.is_read:
        assert back.values["drafter"] == (recipe.drafter.repo or "mtp")
        assert back.values["spec"] == str(4 if recipe.drafter.kind == "assistant" else recipe.drafter.block - 1)
    else:
        assert '"method": "' in command and f'"num_speculative_tokens": {recipe.drafter.block - 1}' in command


def test_a_recipe_has_the_depth_of_its_report() -> None:
    """The one with Gemma 4's assistant names 4 drafts, the best of those that were tried."""
    recipe = find_recipe("gemma-4-26b-a4b-fp8-spark")
    assert "with 4 drafts" in recipe.source
    assert recipe.for_vllm("0.32.0").flags["speculative-config"]["num_speculative_tokens"] == 4


def test_launchers_get_the_same_command() -> None:
    recipe = find_recipe("gemma-4-31b-spark")
    one, two = (yaml.safe_load(recipe.launcher(form, "0.32.0", "an/image:tag")) for form in (SPARKRUN, EUGR))
    assert rendered(SPARKRUN, one) == rendered(EUGR, two) and one["container"] == two["container"] == "an/image:tag"
    assert "'{{" in two["command"] and "'{{" not in one["command"]


@BOTH
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"command": "vllm serve x --port {prot}"}, "{prot}, which is no key of defaults"),
        ({"contianer": "x"}, "has 'contianer', which is no field"),
        ({"defaults": []}, "defaults of the"),
        ({"env": {"A": 1}}, "a value that is no text"),
        ({"recipe_version": "3"}, "says version 3"),
    ],
)
def test_a_wrong_recipe_is_refused(form: str, change: dict[str, Any], words: str) -> None:
    good = yaml.safe_load(find_recipe("qwen3-8b-dflash").launcher(form, "0.32.0"))
    with pytest.raises(UserError) as error:
        check(form, good | change)
    assert words in str(error.value)
    for name in FORMATS[form].required:
        with pytest.raises(UserError, match=f"has no {name}"):
            check(form, {key: value for key, value in good.items() if key != name})


def test_an_image_that_is_a_server_itself_gets_no_entrypoint() -> None:
    """sparkrun hands its launcher to the image as arguments, which vLLM's own image would read as its flags."""
    recipe = find_recipe("qwen3-8b-dflash")
    for image in ("", "vllm/vllm-openai:nightly", "docker.io/vllm/vllm-openai:v0.32.0"):
        written = yaml.safe_load(recipe.launcher(SPARKRUN, "0.32.0", image))
        assert written["executor_config"] == {"entrypoint": ""}
        with pytest.raises(UserError, match='set entrypoint to "" in executor_config'):
            check(SPARKRUN, {key: value for key, value in written.items() if key != "executor_config"})
    assert "executor_config" not in yaml.safe_load(recipe.launcher(SPARKRUN, "0.32.0", "eugr/spark-vllm:latest"))


def test_braces_that_python_would_fill_in_are_refused() -> None:
    good = yaml.safe_load(find_recipe("qwen3-8b-dflash").launcher(EUGR, "0.32.0"))
    for command in ("vllm serve x --hf-overrides '{\"a\": 1}'", "vllm serve x {", "vllm serve {}"):
        with pytest.raises(UserError, match="write braces of JSON twice"):
            check(EUGR, good | {"command": command})
    assert rendered(EUGR, good | {"command": "x '{{\"a\": {{}}}}' {port}"}) == "x '{\"a\": {}}' 8000"


def test_a_pair_that_is_broken_there_is_not_written() -> None:
    with pytest.raises(UserError, match=r"0\.30 mends it"):
        find_recipe("qwen3.5-27b-dflash").launcher(SPARKRUN, "0.25.0")


def test_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(recipes())
    assert main(["recipe", "show", "gpt-oss-120b-spark"]) == 0
    assert 'drafter = "z-lab/gpt-oss-120b-DFlash"' in capsys.readouterr().out
    assert main(["recipe", "show", "gpt-oss-120b-sprak"]) == 1
    assert "did you mean gpt-oss-120b-spark?" in capsys.readouterr().err
    assert main(["recipe", "show", "gpt-oss-120b-spark", "--container", "mine:1"]) == 1
    assert "--form sparkrun or eugr" in capsys.readouterr().err.replace("\n", " ")


def test_a_recipe_is_beaten_by_file_variables_and_flags(tmp_path: Path) -> None:
    base = {"model": "m", "max_seqs": 1, "max_rows": 1, "kv_tokens": 1, "threads": 1}
    (tmp_path / "a.toml").write_text("max_rows = 2\nkv_tokens = 2\nthreads = 2\n")
    environ = {"SPARKDRAFT_KV_TOKENS": "3", "SPARKDRAFT_THREADS": "3"}
    engine = merge({"threads": 4}, tmp_path / "a.toml", environ, base).engine
    assert (engine.model, engine.max_seqs, engine.max_rows, engine.kv_tokens, engine.threads) == ("m", 1, 2, 3, 4)


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
