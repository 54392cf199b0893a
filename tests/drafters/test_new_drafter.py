"""A new drafter is one file: this one defines a toy drafter, registers it, and drafts with it through the real engine.

The drafter is a table of bigrams: the logits after an id are a row of the table. It reads no hidden state that matters
and keeps no K/V. Nothing else in the package or the tests knows it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sparkdraft import LLM, SamplingParams
from sparkdraft.core import UserError
from sparkdraft.drafters.base import (
    REGISTERED,
    Anchors,
    CommittedRows,
    DraftBuild,
    DraftBytes,
    DrafterCaps,
    DrafterKind,
    Pick,
    Shapes,
    must_fit,
    register,
)
from sparkdraft.models.common.config import FINAL, ModelConfig
from sparkdraft.weights.linear import Linear

MAX_DEPTH, LENGTH = 3, 24
PROMPTS = [[5, 9, 17, 33, 5, 9, 17], [40, 41, 42, 43]]


@dataclass(frozen=True, slots=True)
class BigramConfig:
    vocab_size: int
    block_size: int = 1 + MAX_DEPTH
    draft_vocab_size: int = 0

    def check_fits(self, target: ModelConfig) -> None:
        must_fit(self.vocab_size == target.vocab_size, f"it has {self.vocab_size} ids, the model {target.vocab_size}")

    def caps(self, names: Collection[str] = ()) -> DrafterCaps:
        numbers = self.vocab_size * self.vocab_size
        return DrafterCaps("bigram", (FINAL,), MAX_DEPTH, (), numbers, chain=True, own_head=True)

    def among(self, number: int, names: Collection[str] = ()) -> BigramConfig:
        return replace(self, draft_vocab_size=number)

    def tensor_shapes(self) -> Shapes:
        return {"table": (self.vocab_size, self.vocab_size)}

    def build(self, given: DraftBuild) -> Bigram:
        table = given.load.floats("table", (self.vocab_size, self.vocab_size))
        made = Bigram(self, table, given.max_seqs)
        given.load.finish()
        return made


class Bigram:
    def __init__(self, config: BigramConfig, table: Tensor, max_seqs: int) -> None:
        self.caps, self.table = config.caps(), table
        self.ids = torch.zeros(max_seqs, dtype=torch.int32, device=table.device)

    def observe(self, rows: CommittedRows) -> None:
        """It keeps nothing."""

    def propose(self, anchors: Anchors, depth: int, pick: Pick) -> Tensor:
        seqs, drafts = len(anchors.ids), []
        self.ids[:seqs] = anchors.ids
        for number in range(depth):
            drafts.append(pick(partial(self._score, seqs), each=1, drafted=number))
            self.ids[:seqs] = drafts[-1][:, 0]
        return torch.cat(drafts, 1)

    def reach(self, depth: int) -> int:
        return 0

    def reads(self, depth: int) -> DraftBytes:
        return DraftBytes(depth * self.table[0].nbytes, 0, 0)

    @property
    def matrices(self) -> list[Linear]:
        return []

    def _score(self, seqs: int, likeliest: bool) -> Tensor:
        logits = self.table[self.ids[:seqs].long()].float()
        return logits.argmax(-1) if likeliest else logits


KIND = DrafterKind(
    "bigram",
    recognises=lambda config: config.get("model_type") == "bigram_drafter",
    read=lambda config, names, path: BigramConfig(config["vocab_size"]),
)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    register(KIND)
    yield
    del REGISTERED[KIND.name]


def load(tiny_qwen3: Path, **options: Any) -> LLM:
    return LLM(str(tiny_qwen3), dtype="float32", ngram=False, threads=1, max_seqs=2, **options)


def write_bigrams(folder: Path, vocab_size: int, texts: list[list[int]]) -> Path:
    table = torch.zeros(vocab_size, vocab_size)
    for text in texts:
        for before, after in pairwise(text):
            table[before, after] += 1
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "bigram_drafter", "vocab_size": vocab_size}))
    save_file({"table": table}, folder / "model.safetensors")
    return folder


def test_it_drafts_by_name_from_a_folder(tiny_qwen3: Path, tmp_path: Path) -> None:
    params = SamplingParams(LENGTH, ignore_eos=True)
    plain = load(tiny_qwen3, drafter="none")
    expected = [result.completions[0].ids for result in plain.generate(PROMPTS, params)]
    texts = [prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)]
    vocab_size = plain.model_config.vocab_size
    llm = load(tiny_qwen3, drafter=str(write_bigrams(tmp_path / "bigram", vocab_size, texts)), spec=str(MAX_DEPTH))
    assert [result.completions[0].ids for result in llm.generate(PROMPTS, params)] == expected
    drafted, accepted = llm.engine.drafting.so_far().sources["bigram"]
    assert 0 < accepted < drafted
    with pytest.raises(UserError, match="does not fit the model: it has 7 ids"):
        load(tiny_qwen3, drafter=str(write_bigrams(tmp_path / "small", 7, [])))
