"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdraft.core import UserError
from sparkdraft.operate.forecast.machine import find_machine
from sparkdraft.util.paths import user_path
from sparkdraft.weights.checkpoint import read_config_json


def test_home_is_found_and_a_user_whom_nobody_knows_is_a_missing_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/x") == Path("/home/me/x") and user_path("a/~") == Path("a/~")
    assert user_path("~nobody-has-this-name/x") == Path("~nobody-has-this-name/x")


@pytest.mark.parametrize("read", [find_machine, read_config_json])
def test_such_a_path_is_refused_with_a_sentence(read: object) -> None:
    with pytest.raises(UserError):
        read("~nobody-has-this-name/x")  # type: ignore[operator]
