"""DFlash drafters beside the architectures with experts, windows and sinks, in both dialects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.drafters.dflash import DFlash
from tests.drafters.tiny_drafter import body, random_tensors, speculators, write_drafter, zlab
from tests.models.tiny import TinyOf

VARIANTS = ["qwen3_moe", "gpt_oss", "gemma4", "gemma4-experts"]
PROMPTS = [[(31 * k + 7 * i * i + i) % 250 + 3 for i in range(5 + 11 * k)] for k in range(4)]
PARAMS = [SamplingParams(20, temperature=0.8 * (k % 2), seed=k, ignore_eos=True) for k in range(4)]


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tiny_of: TinyOf) -> Path:
    return tiny_of(request.param)


def write(path: Path, target: Path, dialect: str) -> Path:
    config = json.loads((target / "config.json").read_text())
    config = config.get("text_config", config)
    shape = body("sf", window=16, hidden_size=config["hidden_size"], vocab_size=config["vocab_size"])
    if dialect == "zlab":
        drafter: dict[str, Any] = zlab(shape, num_target_layers=config["num_hidden_layers"])
    else:
        drafter = speculators(shape)
    return write_drafter(path, drafter, random_tensors(shape))


def load(folder: Path, **options: Any) -> LLM:
    defaults = {"device": "cpu", "spec": "off", "kv_tokens": 2048, "ngram": False, "threads": 1}
    return LLM(str(folder), **(defaults | options))


def written(llm: LLM) -> list[list[int]]:
    return [completion.ids for result in llm.generate(PROMPTS, PARAMS) for completion in result.completions]


@pytest.mark.parametrize("dialect", ["zlab", "speculators"])
def test_drafts_change_no_text_and_all_steps_are_replayed(folder: Path, tmp_path: Path, dialect: str) -> None:
    expected = written(load(folder))
    drafted = load(folder, spec="5", drafter=str(write(tmp_path, folder, dialect)))
    assert written(drafted) == expected and written(drafted) == expected  # the second time from the prefix cache
    drafting = drafted.engine.drafting
    assert drafting.so_far().num_spec_steps > 20
    assert drafted.engine.runner.unrecorded == [] and drafting.proposer.unrecorded == []


def test_zlab_drafters_read_the_embedding_as_the_target_does_and_others_its_rows(folder: Path, tmp_path: Path) -> None:
    """z-lab's drafters of Gemma were trained on rows times the square root of the hidden size, speculators' on rows."""
    for dialect in ("zlab", "speculators"):
        llm = load(folder, dtype="float32", spec="5", drafter=str(write(tmp_path / dialect, folder, dialect)))
        drafter, model = llm.engine.drafting.proposer.drafter, llm.engine.runner.model
        assert isinstance(drafter, DFlash)
        ids = torch.tensor([3, 200], dtype=torch.int32)
        raw = model.ops.embed(ids, model.embedding)
        assert torch.equal(drafter._embed(ids), model.embed(ids) if dialect == "zlab" else raw)
        scaled = model.config.model_type.startswith("gemma")
        assert torch.equal(model.embed(ids), raw) != scaled
