"""`sparkdraft tune` as typed, over a tiny model: a real run from prompts to a profile, and a sentence for mistakes."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparkdraft.cli import tune
from sparkdraft.cli.main import main
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.engine import profile
from sparkdraft.engine.load import open_model
from sparkdraft.engine.profile import read_profile
from sparkdraft.operate.bench.ratios import Sample
from sparkdraft.operate.tune import search
from sparkdraft.operate.tune.engines import Engines, make_loads
from sparkdraft.operate.tune.search import BURST, LONG, ONE, SEVERAL, TILES
from sparkdraft.plan import resolve
from tests.fakes import fake_plan

FLAGS = ["--device", "cpu", "--dtype", "float32", "--output-len", "8", "--spec", "off"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "folder", lambda: tmp_path / "profiles")


def prompts(tmp_path: Path) -> str:
    path = tmp_path / "mine.txt"
    path.write_text("The sea is wide\nWhat is a tide?\n")
    return str(path)


@pytest.mark.slow
def test_a_short_run_from_prompts_to_a_profile(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All is real but the verdict: whether a tiny model gains is chance, so here every gain counts, even a loss."""
    monkeypatch.setattr(search.Compared, "is_faster", property(lambda self: self.ratio > 0))
    monkeypatch.setattr(search, "LEAST_ROUNDS", 1)
    monkeypatch.setattr(search, "MOST_ROUNDS", 1)
    monkeypatch.setitem(resolve.MAX_TOKENS, "cpu", 64)
    out = tmp_path / "shared.toml"
    command = ["tune", "--model", str(tiny), *FLAGS, "--prompts", prompts(tmp_path), "--threads", "1", "--json"]
    status = main([*command, "--max-seqs", "2", "--out", str(out)])
    *text, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert status == 0 and text[0].endswith("drafter none; 2 prompts") and "max_seqs 2" in text[1]
    assert found["kept"] and found["old"] == {"max_seqs": 2, "threads": 1}
    assert (
        found["new"] == found["old"] | {"max_step_tokens": found["new"]["max_step_tokens"]} and found["skipped"] == []
    )
    assert found["loads"].keys() == {ONE, SEVERAL, BURST, LONG} and any(
        "max_step_tokens" in name for name in found["tried"]
    )
    kept = read_profile(Path(found["profile"]))
    assert kept.options == {"max_step_tokens": found["new"]["max_step_tokens"]}, (
        "what the user has named is not the profile's"
    )
    assert out.read_text() == Path(found["profile"]).read_text()
    opened = open_model(EngineConfig.of(model=str(tiny), device="cpu", dtype="float32", spec="off"))
    assert opened.config.max_step_tokens == found["new"]["max_step_tokens"] and kept.subject == opened.subject


def test_without_a_gain_nothing_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "LEAST_GAIN", 100.0)
    out = tmp_path / "shared.toml"
    command = ["tune", "--model", str(tiny), *FLAGS, "--prompts", prompts(tmp_path), "--max-step-tokens", "64"]
    assert main([*command, "--max-seqs", "2", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "the old settings are kept" in said.out and "is not written" in said.err
    assert not out.exists() and not (tmp_path / "profiles").exists()


@pytest.mark.parametrize("new", [{"max_step_tokens": 32}, {TILES: True}])
def test_what_is_written_at_the_end(
    new: dict[str, Any], tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cache cannot be written to: --out is written nevertheless. Tiles alone are no profile."""
    (tmp_path / "profiles").write_text("no folder")
    tiles, out = tmp_path / "tiles.json", tmp_path / "shared.toml"
    config = EngineConfig.of(model=str(tiny), device="cpu", spec="off")
    found = SimpleNamespace(tables=SimpleNamespace(path=tiles, save=lambda: tiles.write_text("{}")))
    gain = search.Compared({ONE: Sample([2.0], [1.0])})
    outcome = search.Outcome({}, new, gain)
    args = Namespace(out=str(out), json=True)
    status = tune._finish(args, config, open_model(config), cast(Engines, found), outcome, search.Budget(1.0))
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["profile"] is None
    has_tiles = TILES in new
    assert (status, out.exists(), tiles.exists()) == (0 if has_tiles else 1, not has_tiles, has_tiles)
    assert ("shared.toml is not written" if has_tiles else ".toml cannot be written (") in said.err.replace("\n", "")


def test_engines_share_their_weights_and_differ_in_their_plans(tiny: Path) -> None:
    opened = open_model(EngineConfig.of(model=str(tiny), device="cpu", dtype="float32", max_seqs=4, spec="off"))
    engines = Engines(opened, ["abc", "defg"], 8)
    old, new = {"max_step_tokens": 64}, {"max_step_tokens": 32, "threads": 1}
    assert engines.speed(old, ONE).tok_s > 0 and engines.speed(new, LONG).tok_s > 0
    one, other = (engines._engine(tuple(sorted(options.items()))) for options in (old, new))
    assert one.runner.model is other.runner.model and (one.plan.max_step_tokens, other.plan.max_step_tokens) == (64, 32)
    assert not one.plan.prefix_cache
    engines.speed({"max_step_tokens": 128}, ONE)
    assert len(engines._loaded) == 2, "of three engines the one that was used last but one is dropped"
    with pytest.raises(UserError, match="below max_seqs"):
        engines.speed({"max_step_tokens": 2}, ONE)


def test_loads_fit_the_context() -> None:
    plan = replace(fake_plan(max_seqs=3, max_step_tokens=512), max_model_len=200)
    loads = make_loads([[1] * 500, [2, 3]], plan, 16)
    assert len(loads[BURST].prompts) == 6 and loads[SEVERAL].streams == 4 and len(loads[LONG].prompts) == 1
    assert all(len(ids) <= 200 - 16 for load in loads.values() for ids in load.prompts)
    assert len(loads[LONG].prompts[0]) == 200 - 16 - 64


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--minutes", "0"], "--minutes is 0.0"),
        (["--output-len", "1"], "--output-len is 1"),
        (["--prompts", "nowhere.txt"], "which is not a file"),
        (["--kv-formats", "fp4"], "--kv-formats has 'fp4'"),
        (["--kv-formats", "fp8"], "save memory, not time"),
        (["--out", "/nowhere/p.toml"], "give a file in a folder that exists"),
    ],
)
def test_mistakes_are_one_sentence(
    tiny: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["tune", "--model", str(tiny), *FLAGS, *flags]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "device, taken, runs", [("cuda", [9, 3, 2.9], 3), ("cuda", [9, 7, 5, 3, 1], 4), ("cpu", [9], 1)]
)
def test_an_engine_is_warm_when_its_runs_take_the_same_time(device: str, taken: list[float], runs: int) -> None:
    engines, seconds = Engines.__new__(Engines), iter(taken)
    engines.plan = fake_plan(device=device)
    made = list[float]()

    def run(engine: object, load: object) -> search.Run:
        made.append(next(seconds))
        return search.Run(1.0, made[-1])

    engines._run = run  # type: ignore[method-assign, assignment]
    engines._warm_up(cast(Any, None), cast(Any, None))
    assert len(made) == runs
