"""Names and paths as users type them: spellings that are one name, "did you mean", and home folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdraft.bridges.recipes import recipes
from sparkdraft.cli.main import main
from sparkdraft.core import UserError
from sparkdraft.operate.bench.shapes import drafters, shape, targets
from sparkdraft.operate.forecast.machine import find_machine, known_machines
from sparkdraft.util.names import alike, did_you_mean, spelled, user_path
from sparkdraft.weights.checkpoint import read_config_json


@pytest.mark.parametrize("name", ["gemma-4-31b", "gemma4-31b", "Gemma_4.31B", "GEMMA431B"])
def test_a_shape_may_be_spelled_in_several_ways(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--machine", "H-200", "--model", name, "--drafter", "Gemma-4-31B-DFlash"]) == 0
    assert "drafter's weights" in capsys.readouterr().out
    assert shape(name) == shape("gemma4-31b")


@pytest.mark.parametrize("known", [targets(), drafters(), known_machines(), list(recipes())])
def test_no_two_known_names_are_spelled_alike(known: list[str]) -> None:
    assert [spelled(name.upper().replace("-", "_"), known) for name in known] == list(known)


def test_what_is_no_spelling_of_a_name_is_none() -> None:
    assert spelled("gemma4-32b", targets()) is None and spelled("", targets()) is None
    assert find_machine("RTX 5090").name == "rtx-5090"


@pytest.mark.parametrize(
    ("given", "known", "question"),
    [
        ("qwen3-", targets(), "did you mean qwen3-0.6b, qwen3-4b, qwen3-8b or qwen3-30b-a3b?"),  # four of those
        ("gpt-oss", targets(), "did you mean gpt-oss-20b or gpt-oss-120b?"),
        ("gemma-4", targets(), "did you mean gemma4-31b or gemma4-26b-a4b?"),
        ("qwne3-8b", targets(), "did you mean qwen3-8b?"),
        ("hots", ["host", "name", "port"], "did you mean host?"),
        ("nosuch", targets(), ""),
        ("mistral-large", targets(), ""),
        ("--", ["--model", "--kv"], ""),
        ("", targets(), ""),
    ],
)
def test_names_that_begin_so_or_one_that_is_near_or_none(given: str, known: list[str], question: str) -> None:
    assert did_you_mean(given, known) == question


def test_a_prefix_of_a_family_does_not_make_names_alike() -> None:
    own = ["SPARKDRAFT_PORT", "SPARKDRAFT_DEVICE"]
    assert did_you_mean("SPARKDRAFT_FOO", own, "SPARKDRAFT_") == ""
    assert did_you_mean("SPARKDRAFT_PROT", own, "SPARKDRAFT_") == "did you mean SPARKDRAFT_PORT?"
    assert alike("SPARKDRAFT_DVICE", own, family="SPARKDRAFT_") == "SPARKDRAFT_DEVICE"


def test_no_command_offers_a_name_that_is_unlike(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKDRAFT_FOO", "1")
    for command in (
        "recipe show zzz",
        "plan --machine gb10 --model zzz",
        "plan --machine gb10 --model qwen3-8b --drafter zzz",
        "generate --prompt x --model zzz",
        "bench offline --shape zzz",
        "serve --zzz",
        "zzz",
        "serve",  # SPARKDRAFT_FOO
    ):
        try:
            status = main(command.split())
        except SystemExit as ended:
            status = int(ended.code or 0)
        said = capsys.readouterr().err
        assert status and ("zzz" in said or "SPARKDRAFT_FOO" in said) and "did you mean" not in said, said


def test_the_flags_of_a_verb_are_offered_by_their_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--co"])
    found = capsys.readouterr().err
    assert all(name in found for name in ("did you mean", "--concurrency", "--context", "--compare")), found


def test_one_place_suggests_names() -> None:
    from tests.test_imports import modules, source

    users = [name for name, path in modules().items() if "difflib" in source(path).anywhere]
    assert users == ["util.names"]


def test_home_is_found_and_a_user_whom_nobody_knows_is_a_missing_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/x") == Path("/home/me/x") and user_path("a/~") == Path("a/~")
    assert user_path("~nobody-has-this-name/x") == Path("~nobody-has-this-name/x")


@pytest.mark.parametrize("read", [find_machine, read_config_json])
def test_such_a_path_is_refused_with_a_sentence(read: object) -> None:
    with pytest.raises(UserError):
        read("~nobody-has-this-name/x")  # type: ignore[operator]
