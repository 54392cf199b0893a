"""How a request is sampled where it names nothing: the model's files, the table, a user's setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkdraft.config import describe_sampling, model_defaults, parse_sampling, sampling_in_effect, usable_defaults
from sparkdraft.core import UserError
from sparkdraft.llm import LLM
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.gguf import sampling_of
from tests.models.tiny import write_tiny

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "pad_token_id": 0}


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (QWEN3, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"eos_token_id": 2}, {}),
        ({"temperature": None, "top_k": -1, "min_p": 0.05}, {"top_k": 0, "min_p": 0.05}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
    ],
)
def test_generation_config(generation: dict[str, Any], expected: dict[str, float]) -> None:
    assert model_defaults(generation) == expected


@pytest.mark.parametrize(
    ("generation", "message"),
    [({"temperature": -1}, "temperature is -1.0"), ({"top_p": "high"}, "top_p 'high'; it must be a number")],
)
def test_a_file_with_a_wrong_value_is_refused(generation: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"generation_config.json .*{message}"):
        model_defaults(generation)


def test_the_server_leaves_a_wrong_value_out_and_says_so() -> None:
    generation = {"temperature": -1, "top_p": "high", "top_k": 20, "eos_token_id": 2}
    values, problems = usable_defaults(generation)
    assert values == {"top_k": 20} and problems.keys() == {"temperature", "top_p"}
    assert "top_p 'high'; it must be a number" in problems["top_p"]
    assert usable_defaults({"do_sample": False, "top_p": "high"}) == ({"temperature": 0.0}, {})


def test_what_a_user_sets() -> None:
    model = {"temperature": 0.6, "top_p": 0.95}
    assert sampling_in_effect("model", model) == model and sampling_in_effect("model", {}) == {"temperature": 1.0}
    assert sampling_in_effect("openai", model) == {"temperature": 1.0}
    assert sampling_in_effect("temperature=0.3, top_k=5", model) == {"temperature": 0.3, "top_p": 0.95, "top_k": 5}
    assert sampling_in_effect("openai,top_p=0.5", model) == {"temperature": 1.0, "top_p": 0.5}


@pytest.mark.parametrize(
    "setting", ["", "vllm", "temperature", "temperature=hot", "top_p=0", "max_tokens=5", "top_k=1,model"]
)
def test_a_setting_that_can_not_be_read(setting: str) -> None:
    with pytest.raises(UserError, match="sampling_defaults"):
        parse_sampling(setting)


def test_said_in_words() -> None:
    assert describe_sampling({"temperature": 0.2, "top_p": 0.9}) == "temperature 0.2, top_p 0.9"
    assert (
        describe_sampling({"temperature": 0.0, "top_p": 0.9, "repetition_penalty": 1.1})
        == "greedy, repetition_penalty 1.1"
    )


def test_gguf_files_say_it_themselves_or_are_in_the_table() -> None:
    template = {"tokenizer.chat_template": "x"}
    said = {"general.sampling.temp": 0.949999988079071, "general.sampling.top_k": 20}
    said |= {"general.sampling.penalty_repeat": 1.5, "general.basename": "smollm2"}
    assert sampling_of(said | template) == {"temperature": 0.95, "top_k": 20, "repetition_penalty": 1.5}
    assert sampling_of({"general.basename": "SmolLM2"} | template) == {"temperature": 0.2, "top_p": 0.9}
    assert sampling_of({"general.basename": "SmolLM2"}) == {}  # no chat model


def test_the_embedded_model_has_its_authors_values() -> None:
    generation = open_checkpoint("smollm2").generation
    assert model_defaults(generation) == {"temperature": 0.2, "top_p": 0.9} and generation["eos_token_id"] == [2]


def test_python_programs_can_ask_for_them(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "llama", "llama")
    (folder / "generation_config.json").write_text(json.dumps(QWEN3))
    llm = LLM(str(folder), device="cpu", dtype="float32", kv_tokens=256, spec="off")
    params = llm.default_params(max_tokens=7, top_k=3)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.95, 3, 7)
    assert {1, 2} <= llm.tokenizer.eos_ids and not any("default" in each.name for each in llm.fallbacks())


def test_a_wrong_value_does_not_keep_a_model_from_running(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "llama", "llama")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0}))
    llm = LLM(str(folder), device="cpu", dtype="float32", kv_tokens=256, spec="off")
    assert llm.default_params().temperature == 0.6 and llm.default_params().top_p == 1.0
    found = {each.name: each.reason for each in llm.fallbacks()}
    assert "top_p is 0.0; it must be" in found["the model's default top_p is not used"]
