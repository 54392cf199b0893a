"""A config.json alone, from wherever it is, with nothing else of its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkdraft.core import UserError
from sparkdraft.weights.checkpoint import read_config_json

CONFIG = {"model_type": "qwen3", "hidden_size": 64}


def test_a_folder_and_the_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    assert read_config_json(str(tmp_path)) == read_config_json(str(path)) == CONFIG


def test_of_a_hub_id_one_file_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    fetched = []

    def download(repo: str, file: str) -> str:
        fetched.append((repo, file))
        (tmp_path / file).write_text(json.dumps(CONFIG), encoding="utf-8")
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert read_config_json("org/name") == CONFIG
    assert fetched == [("org/name", "config.json")]


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args: str) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(UserError, match="org/name is neither a folder here nor in the local hub cache"):
        read_config_json("org/name")


@pytest.mark.parametrize(("text", "words"), [("{", "cannot be read as JSON"), ("[1]", "holds no JSON object")])
def test_damaged_files(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=words):
        read_config_json(str(tmp_path))


def test_what_is_nowhere(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Unknown model 'nowhere'"):
        read_config_json("nowhere")
    with pytest.raises(UserError, match="There is no file or folder"):
        read_config_json(str(tmp_path / "empty" / "config.json"))
    with pytest.raises(UserError, match="There is no file or folder"):
        read_config_json(str(tmp_path))
