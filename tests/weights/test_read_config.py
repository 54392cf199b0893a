"""A config.json alone, from wherever it is, with nothing else of its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants as hf
import pytest
from huggingface_hub import hf_hub_download

from sparkdraft.core import UserError
from sparkdraft.weights.checkpoint import read_config_json
from tests.fakes.hub import FakeHub
from tests.fakes.web import serving

PART = {"org/part": {"tokenizer.json": b"{}", "config.json": b"{}"}}
CONFIG = {"model_type": "qwen3", "hidden_size": 64}


def test_a_folder_and_the_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    assert read_config_json(str(tmp_path)) == read_config_json(str(path)) == CONFIG


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    found = json.dumps(CONFIG).encode()
    quantised = json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}).encode()
    plain = {"config.json": found, "model.safetensors": b"x" * 5000, "README.md": b"# hello"}
    web = FakeHub({"org/plain": plain, "org/coded": plain | {"hf_quant_config.json": quantised}, "org/gguf": {}} | PART)
    monkeypatch.setattr(hf, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with serving(web.app()) as url:
        monkeypatch.setattr(hf, "ENDPOINT", url)
        monkeypatch.setattr(hf, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        yield web


def test_of_a_hub_id_only_what_describes_it_is_fetched(
    web: FakeHub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert read_config_json("org/plain") == CONFIG
    assert web.asked == {"config.json": 1}
    coded = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    assert read_config_json("org/coded") == CONFIG | {"quantization_config": coded}
    assert web.asked == {"config.json": 2, "hf_quant_config.json": 1}
    with pytest.raises(UserError, match=r"The hub model org/gguf has no config\.json"):
        read_config_json("org/gguf")
    with pytest.raises(UserError, match="The hub has no model org/nothing that you may read"):
        read_config_json("org/nothing")
    hf_hub_download("org/part", "tokenizer.json")
    monkeypatch.setattr(hf, "ENDPOINT", "http://127.0.0.1:9")
    assert read_config_json("org/plain") == CONFIG
    with pytest.raises(UserError, match="org/name is neither a folder here nor in the local hub cache"):
        read_config_json("org/name")
    with pytest.raises(UserError, match=r"org/part has no config\.json, or the hub cannot be reached"):
        read_config_json("org/part")
    assert capfd.readouterr() == ("", "")


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
