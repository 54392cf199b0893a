"""A profile is written, picked up, beaten by what the user names, ignored elsewhere, and refused if it is wrong."""

from __future__ import annotations

import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkdraft import LLM
from sparkdraft.cli.main import main, parser
from sparkdraft.cli.options import engine_options
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.engine import backend, profile
from sparkdraft.engine.backend import load_backend
from sparkdraft.engine.load import open_model
from sparkdraft.engine.profile import Profile, Subject, pick_up, read_profile
from sparkdraft.plan.hardware import Hardware
from sparkdraft.server.config import merge
from sparkdraft.server.engine_client import EngineClient

CPU = Hardware("cpu", "0xd0c", 2, 1 << 33)
SUBJECT = Subject.of(CPU, "org/model", {"hidden_size": 8}, (1, 2), "a-drafter")
OPTIONS = {"max_step_tokens": 256, "max_seqs": 8, "threads": 1, "spec_depths": "0,3,7"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(profile, "folder", lambda: tmp_path / "profiles")
    return tmp_path


def written(subject: Subject = SUBJECT, **changes: Any) -> Path:
    conditions = {"dtype": "auto", "weights": "auto", "graphs": True}
    Profile(subject, OPTIONS | changes, "2026-11-17", "4.0% faster, noise 1.0%", conditions).write(subject.path)
    return subject.path


def picked(subject: Subject = SUBJECT, **given: Any) -> tuple[EngineConfig, str]:
    config, notes = pick_up(EngineConfig.of(**given), subject)
    return config, "; ".join(f"{each.name}: {each.reason}" for each in notes)


def test_what_is_written_is_read_again() -> None:
    path = written()
    found = read_profile(path)
    assert (found.subject, found.options, found.date) == (SUBJECT, OPTIONS, "2026-11-17")
    assert path.name == f"org-model-{SUBJECT.digest}@cpu-0xd0c-2-cores.toml"
    assert read_profile(path).text() == path.read_text()


def test_an_end_while_it_is_written_leaves_the_old_one() -> None:
    """The disk is full after a few bytes."""
    path = written()
    before = path.read_text()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limit[1]))
    try:
        with pytest.raises(OSError):
            written(max_step_tokens=512)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_text() == before and list(path.parent.iterdir()) == [path]


def test_it_is_picked_up_and_named_with_its_date() -> None:
    assert picked() == (EngineConfig(), "")
    path = written()
    config, said = picked()
    assert {name: getattr(config, name) for name in OPTIONS} == OPTIONS
    assert f"profile {path.name} from 2026-11-17: max_step_tokens 256" in said and "--no-profile ignores it" in said
    assert picked(profile="none") == (EngineConfig(profile="none"), "")


def test_what_the_user_names_beats_it_even_if_it_is_the_default() -> None:
    written()
    config, said = picked(max_step_tokens=1024, spec_depths="auto", threads=0)
    assert (config.max_step_tokens, config.spec_depths, config.threads, config.max_seqs) == (1024, "auto", 0, 8)
    assert "max_step_tokens is 1024 as you say" in said and "spec_depths is auto as you say" in said


def test_flags_and_the_environment_beat_it_in_generate_and_serve() -> None:
    written()
    args = parser().parse_args(["generate", "--prompt", "x", "--max-step-tokens", "512", "--threads", "0"])
    config, _ = picked(**engine_options(args))
    assert (config.max_step_tokens, config.threads, config.max_seqs) == (512, 0, 8)
    served = merge({"max_step_tokens": 512}, None, {"SPARKDRAFT_MAX_SEQS": "0"}).engine
    config, _ = pick_up(EngineConfig.of(**EngineClient(served).options), SUBJECT)  # as the engine's process gets it
    assert (config.max_step_tokens, config.max_seqs, config.threads) == (512, 0, 1)
    for command in (["generate", "--prompt", "x", "--no-profile"], ["bench", "offline"], ["demo"]):
        assert engine_options(parser().parse_args(command))["profile"] == "none", command
    assert merge({}, None, {"SPARKDRAFT_PROFILE": "none"}).engine.profile == "none"
    assert vars(parser().parse_args(["serve", "--no-profile"]))["profile"] == "none"


def test_settings_that_do_not_fit_what_the_user_names_are_left_out() -> None:
    written()
    config, said = picked(max_seqs=300)
    assert config.max_step_tokens == 0 and "max_step_tokens is left out, 256 is below max_seqs (300)" in said
    config, said = picked(replace(SUBJECT, drafter=""))
    assert config.spec_depths == "auto" and config.max_step_tokens == 256
    assert "spec_depths is left out, it was measured with a-drafter" in said
    config, said = picked(max_step_tokens=4)
    assert (config.max_step_tokens, config.max_seqs) == (
        4,
        0,
    ) and "max_seqs is left out, 8 is above max_step_tokens (4)" in said


def test_depths_of_another_drafter_of_the_same_kind_are_left_out(tiny: Path) -> None:
    own = open_model(EngineConfig.of(model=str(tiny), device="cpu", drafter="none")).subject
    written(own, spec_depths="0,63")
    opened = open_model(EngineConfig.of(model=str(tiny), device="cpu", drafter="none"))
    assert opened.config.spec_depths == "auto" and "63 drafts are more than the" in opened.fallbacks[0].reason
    written()
    for deepest, kept in ((7, "0,3,7"), (6, "auto")):
        config, notes = pick_up(EngineConfig.of(), SUBJECT, deepest)
        assert config.spec_depths == kept
        assert ("7 drafts are more than the 6 that can be made" in notes[0].reason) == (kept == "auto")


def test_one_for_the_same_model_under_another_name_says_how_to_use_it() -> None:
    path, renamed = written(), replace(SUBJECT, model="org/renamed")
    config, said = picked(renamed)
    assert config == EngineConfig()
    assert said == (
        f"the profile {path.name} is ignored: it was written for org/model, and this is org/renamed: "
        f"--profile {path} uses it"
    )
    assert picked(renamed, profile=str(path))[0].max_step_tokens == 256


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"machine": "cpu 0xd0c, 64 cores"}, "it was measured on cpu 0xd0c, 2 cores, and this is cpu 0xd0c, 64 cores"),
        ({"digest": "123456789abc"}, "it was measured with org/model, and this is another version of it"),
        ({"digest": "123456789abc", "model": "org/other"}, "it was measured with org/model, and this is org/other"),
    ],
)
def test_it_is_ignored_on_another_machine_or_model_with_a_reason(other: dict[str, str], reason: str) -> None:
    path = written()
    elsewhere = replace(SUBJECT, **other)
    config, said = picked(elsewhere, profile=str(path))
    assert config.max_step_tokens == 0 and f"the profile {path.name} is ignored: {reason}" in said
    config, said = picked(elsewhere)  # not named, only found
    assert config == EngineConfig() and (reason in said) == (elsewhere.model == SUBJECT.model)


def test_it_is_ignored_with_other_weights() -> None:
    written()
    config, said = picked(weights="int4")
    assert config.max_step_tokens == 0 and "it was measured with weights auto, and weights is int4" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_step_tokens": 10**9}, "max_step_tokens is 1000000000, and it must be between 16 and 131072"),
        ({"max_seqs": 0}, "max_seqs is 0, and it must be between 1 and 4096"),
        ({"threads": True}, "threads is True, and it must be a whole number"),
        ({"max_step_tokens": "many"}, "max_step_tokens is 'many', and it must be a whole number"),
        ({"spec_depths": "3,0"}, "spec_depths is '3,0'"),
        ({"spec_depths": "0,99"}, "63 drafts are the most"),
        ({"kv": "fp4"}, "kv is fp4"),
        ({"memory_fraction": 1.0}, "it sets memory_fraction"),
    ],
)
def test_numbers_out_of_bounds_are_refused(change: dict[str, Any], words: str) -> None:
    written(**change)
    with pytest.raises(UserError, match=re.escape(words)) as error:
        picked()
    assert "--no-profile" in str(error.value)
    assert picked(profile="none")[0].max_step_tokens == 0


@pytest.mark.parametrize("text", ["max_step_tokens = ", "version = 1\n", 'version = 2\ndate = "x"\n'])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.toml").write_text(text)
    for name in ("p.toml", "nothing.toml"):
        with pytest.raises(UserError, match="the profile"):
            picked(profile=str(tmp_path / name))


def test_an_engine_runs_with_it_and_says_so(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(backend.WARM_UP_SECONDS, "cpu", 0.0)
    options: dict[str, Any] = {"model": str(tiny), "device": "cpu", "dtype": "float32", "spec": "off"}
    subject = open_model(EngineConfig.of(**options)).subject
    conditions = {"dtype": "float32", "weights": "auto", "graphs": True}
    Profile(subject, {"max_step_tokens": 48, "max_seqs": 3}, "2026-11-17", "", conditions).write(subject.path)
    llm = LLM(**options)
    assert (llm.plan.max_step_tokens, llm.plan.max_seqs) == (48, 3)
    assert llm.fallbacks()[0].name == f"profile {subject.path.name} from 2026-11-17"
    assert LLM(**options, max_seqs=5, profile=str(subject.path)).plan.max_seqs == 5
    served = load_backend(EngineConfig.of(**options).chosen(), lambda *_: None)
    assert (served.info.plan_facts["max_step_tokens"], served.info.plan_facts["max_seqs"]) == (48, 3)
    assert "from 2026-11-17" in served.info.fallbacks[0]["name"]
    flags = ["--model", str(tiny), "--device", "cpu", "--dtype", "float32", "--spec", "off", "--max-tokens", "1"]
    assert main(["generate", "--prompt", "a", *flags]) == 0
    assert f"profile {subject.path.name} from 2026-11-17: max_step_tokens 48" in capsys.readouterr().err.replace(
        "\n", ""
    )
    assert main(["generate", "--prompt", "a", *flags, "--no-profile"]) == 0
    assert "profile" not in capsys.readouterr().err
