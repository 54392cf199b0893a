"""An architecture is one file: this one adds an architecture from outside and loads a folder of its type."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkdraft import LLM, SamplingParams
from sparkdraft.core import UserError
from sparkdraft.models import llama, registry
from sparkdraft.models.common.config import ModelConfig, dense_config
from tests.models.tiny import write_tiny

MODEL_TYPES = ("one_file", "one_file_text")


def read(config: Mapping[str, Any]) -> ModelConfig:
    """Llama's layers under another name for their width."""
    return dense_config({**config, "hidden_size": config["width"]}, qk_norm=False)


build = llama.build


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    registry.register(sys.modules[__name__])
    yield
    for each in MODEL_TYPES:
        del registry._known[each]


def test_a_folder_of_its_type_is_loaded(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama")
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "spec": "off", "kv_tokens": 128}
    prompt, params = [list(range(3, 30))], SamplingParams(12, temperature=0, ignore_eos=True)
    expected = LLM(str(folder), **options).generate(prompt, params)[0].completions[0].ids
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "one_file", "width": config.pop("hidden_size")}
    (folder / "config.json").write_text(json.dumps(config))
    assert LLM(str(folder), **options).generate(prompt, params)[0].completions[0].ids == expected


def test_types_are_known_once() -> None:
    assert {*MODEL_TYPES, "llama", "gpt_oss"} <= set(registry.model_types())
    with pytest.raises(UserError, match="one_file already"):
        registry.register(sys.modules[__name__])
    with pytest.raises(UserError, match=r"'other' is not supported; supported are .*one_file"):
        registry.architecture("other")
