"""Targets and their published drafters: the table itself, how a model is found in it, and which drafter runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants as hf
import pytest

from sparkdraft import LLM, SamplingParams
from sparkdraft.cli.main import main
from sparkdraft.core import UserError
from sparkdraft.drafters import pairs
from sparkdraft.drafters.find import choose
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.registry import read_config
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab
from tests.fakes.hub import FakeHub
from tests.fakes.web import serving
from tests.models.tiny import SHAPE

DRAFTER = "z-lab/Tiny-DFlash"


def config(target: str, **changes: object) -> ModelConfig:
    """A model with the ends of a known target; its layers do not matter here."""
    known = next(t for t in pairs.targets() if t.name == target)
    base = read_config({"model_type": "llama", **SHAPE})
    shaped = replace(base, model_type=known.model_type, hidden_size=known.hidden, vocab_size=known.vocab)
    return replace(shaped, layers=base.layers[:1] * known.layers, **changes)  # type: ignore[arg-type]


# ---- the table


def test_the_table_is_whole() -> None:
    names = [target.name for target in pairs.targets()]
    repos = [d.repo for target in pairs.targets() for d in target.drafters if d.repo]
    assert len(set(names)) == len(names) and len(set(repos)) == len(repos) and len(names) > 15
    for target in pairs.targets():
        assert target.drafters and "/" in target.name
        for drafter in target.drafters:
            assert drafter.kind in pairs.KINDS and drafter.thinking in pairs.THINKING and drafter.block > 1
            assert bool(drafter.repo) == (drafter.kind != "mtp") and bool(drafter.tokens) == bool(drafter.source)
            assert all(0 <= layer < target.layers for layer in drafter.aux_layers) and sorted(
                drafter.aux_layers
            ) == list(drafter.aux_layers)
            assert all(1 < tokens <= drafter.block for tokens in drafter.tokens), "more than a block can bring"
            assert drafter.describe()


def test_readable_drafters_come_best_first() -> None:
    gemma = next(t for t in pairs.targets() if t.name == "google/gemma-4-31B-it")
    assert [d.repo for d in gemma.readable] == [
        "RedHatAI/gemma-4-31B-it-speculator.dflash",
        "z-lab/gemma-4-31B-it-DFlash",
        "google/gemma-4-31B-it-assistant",
    ]
    assert {d.kind for d in gemma.drafters} == {"dflash", "dflash2", "assistant"}


# ---- finding a model


@pytest.mark.parametrize(
    "name, target, doubt",
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", ""),
        ("someone/Qwen3-8B-AWQ", "Qwen/Qwen3-8B", "has the shape and the name of Qwen/Qwen3-8B"),
        ("/models/my-tune", "Qwen/Qwen3-8B", "has the shape of Qwen/Qwen3-8B"),
        ("unsloth/Qwen3.6-27B-GGUF:q4.gguf", "Qwen/Qwen3.6-27B", "the name of Qwen/Qwen3.6-27B"),
        ("/m/qwen3_coder_30b_a3b", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "the name of"),
        ("google/gemma-4-31b", "google/gemma-4-31B-it", "the name of"),
    ],
)
def test_a_model_is_found_by_name_and_shape(name: str, target: str, doubt: str) -> None:
    found = pairs.match(name, config(target))
    assert found and found.target.name == target and bool(found.doubt) == bool(doubt) and doubt in found.doubt


def test_a_text_model_alone_is_the_same() -> None:
    alone = config("google/gemma-4-31B-it", model_type="gemma4_text")
    assert pairs.match("google/gemma-4-31B-it", alone)


def test_a_name_alone_does_not_decide() -> None:
    assert pairs.match("Qwen/Qwen3-8B", config("Qwen/Qwen3-4B", hidden_size=1024)) is None
    assert pairs.match("Qwen/Qwen3-8B", config("Qwen/Qwen3-8B", model_type="llama")) is None


def test_a_shape_of_several_targets_is_not_guessed() -> None:
    shared = config("Qwen/Qwen3.5-27B")
    assert pairs.match("/models/mine", shared) is None
    assert [t.name for t in pairs.alike(shared)] == ["Qwen/Qwen3.5-27B", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.8-27B"]
    drafter, (note,), _ = choose("/models/mine", shared)
    assert drafter is None and "z-lab/Qwen3.5-27B-DFlash for Qwen/Qwen3.5-27B" in note.reason


def test_pairs_that_do_not_fit_are_refused_before_anything_is_fetched() -> None:
    pairs.check_pair("z-lab/Qwen3-8B-DFlash-b16", config("Qwen/Qwen3-8B"))
    pairs.check_pair("someone/unknown", config("Qwen/Qwen3-8B"))
    with pytest.raises(UserError, match="drafts for Qwen/Qwen3-8B, a qwen3 model with 36 layers of 4096"):
        pairs.check_pair("z-lab/Qwen3-8B-DFlash-b16", config("Qwen/Qwen3-4B"))
    with pytest.raises(UserError, match=r"is DFlash2, which is not read yet: use --drafter mtp"):
        pairs.check_pair("z-lab/Qwen3.8-27B-DFlash2", config("Qwen/Qwen3.8-27B"))
    with pytest.raises(UserError, match=r"use RedHatAI/gemma-4-31B-it-speculator\.dflash"):
        pairs.check_pair("RedHatAI/gemma-4-31B-it-speculator.dflash2", config("google/gemma-4-31B-it"))


# ---- a tiny model and its drafter, in the hub's cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of the hub, and a table in which the tiny model has a drafter."""
    drafter = pairs.KnownDrafter(
        DRAFTER, "dflash", "z-lab", 8, 2, (0, 2), 0, 0.01, "off", 512, (3.5,), "a test's figure"
    )
    target = pairs.KnownTarget(
        "someone/Tiny-Model", "qwen3", SHAPE["num_hidden_layers"], SHAPE["hidden_size"], SHAPE["vocab_size"], (drafter,)
    )
    monkeypatch.setattr(pairs, "targets", lambda: (target,))
    monkeypatch.setattr(hf, "HF_HUB_CACHE", str(tmp_path))
    yield tmp_path


def put(cache: Path, repo: str, dimensions: dict[str, object]) -> Path:
    """A drafter as the hub's library would have left it in the cache."""
    home = cache / f"models--{repo.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc123")
    return write_drafter(home / "snapshots" / "abc123", zlab(dimensions), random_tensors(dimensions))


def test_a_drafter_in_the_cache_is_used_and_said(tiny_qwen3: Path, cache: Path) -> None:
    put(cache, DRAFTER, body("ff"))
    llm = LLM(str(tiny_qwen3), dtype="float32", ngram=False)
    assert llm.engine.drafting.proposer
    (said,) = [f for f in llm.fallbacks() if "drafting with" in f.name]
    assert said.name == f"drafting with {DRAFTER}" and "3.5 tokens per step (a test's figure)" in said.reason
    assert "has the shape and the name of someone/Tiny-Model" in said.reason and "--drafter none" in said.reason
    (fact,) = [f for f in llm.facts() if f.name == "blocks of drafts"]
    assert fact.value.startswith("cut where their own confidence")
    prompt, params = [5, 6, 7, 8], SamplingParams(max_tokens=24, ignore_eos=True)
    drafted = llm.generate([prompt], replace(params, num_draft=3))[0]
    plain = LLM(str(tiny_qwen3), dtype="float32", ngram=False, drafter="none")
    assert not plain.fallbacks() and not plain.engine.drafting.proposer
    assert all(fact.name != "blocks of drafts" for fact in plain.facts())
    assert drafted.completions[0].ids == plain.generate([prompt], params)[0].completions[0].ids
    assert drafted.completions[0].speculation and drafted.completions[0].speculation["num_spec_steps"] > 0


def test_a_plan_counts_the_drafter_that_would_run(
    tiny_qwen3: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--machine", "cpu", "--model", str(tiny_qwen3), "--context", "64", "--json"]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["drafter"] is None and f"`sparkdraft pull {DRAFTER}`" in printed.err
    put(cache, DRAFTER, body("ff"))
    assert main(command) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out.splitlines()[-1])
    assert found["drafter"] == DRAFTER and "drafter's weights" in found["memory_gib"]
    assert f"drafting with {DRAFTER}: it is in the hub's cache" in " ".join(printed.err.split())
    assert main([*command, "--drafter", "none"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["drafter"] is None


def test_a_drafter_that_is_not_there_is_named(tiny_qwen3: Path, cache: Path) -> None:
    found = choose(str(tiny_qwen3), read_config(json.loads((tiny_qwen3 / "config.json").read_text())))
    (told,) = found.fallbacks
    assert found.drafter is None and told.name == "no drafter"
    assert f"`sparkdraft pull {DRAFTER}` fetches" in told.reason and "0.01 GiB" in told.reason


def test_a_drafter_that_does_not_fit_is_passed_over(tiny_qwen3: Path, cache: Path) -> None:
    put(cache, DRAFTER, body("ff", hidden_size=64, num_attention_heads=4))
    found = choose(str(tiny_qwen3), read_config(json.loads((tiny_qwen3 / "config.json").read_text())))
    assert found.drafter is None and "passed over" in found.fallbacks[0].name and "hidden" in found.fallbacks[0].reason


def test_models_lists_pairs(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(cache, DRAFTER, body("ff"))
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "someone/Tiny-Model\n" in out and f"{DRAFTER} (cached): DFlash, block 8, 0.01 GiB" in out
    assert "trained without thinking" in out


def test_pull_fetches_both(tiny_qwen3: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "made", zlab(body("ff")), random_tensors(body("ff")))
    repos = {
        name: {path.name: path.read_bytes() for path in files.iterdir() if path.is_file()}
        for name, files in (("someone/Tiny-Model", tiny_qwen3), (DRAFTER, folder))
    }
    with serving(FakeHub(repos).app()) as url:
        monkeypatch.setattr(hf, "ENDPOINT", url)
        monkeypatch.setattr(hf, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        assert main(["pull", "someone/Tiny-Model", "--with-drafter"]) == 0
        llm = LLM("someone/Tiny-Model", dtype="float32")
    assert llm.engine.drafting.proposer and [f.name for f in llm.fallbacks()] == [f"drafting with {DRAFTER}"]


def test_pull_says_where_no_drafter_is_known(cache: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "targets", tuple)
    config_json = {"config.json": (tiny_qwen3 / "config.json").read_bytes(), "model.safetensors": b"x" * 2000}
    web = FakeHub({"someone/odd": config_json})
    with serving(web.app()) as url:
        monkeypatch.setattr(hf, "ENDPOINT", url)
        monkeypatch.setattr(hf, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        assert main(["pull", "someone/odd", "--with-drafter"]) == 1
    assert web.asked["model.safetensors"] == 0, "nothing large is fetched first"
