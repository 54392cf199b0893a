"""Checkpoints written as folders: another program reads the same model from them, and half a folder is never left."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparkdraft.cli.main import main
from sparkdraft.core import UserError
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.quant.stored import as_float
from sparkdraft.weights.safetensors import INDEX, write_checkpoint
from tests.models.tiny import write_tiny

LETTERS = [*"abcdefgh", "<s>", "</s>"]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": LETTERS,
    "tokenizer.ggml.token_type": [1] * 8 + [3, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 8,
    "tokenizer.ggml.eos_token_id": 9,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}


def test_a_gguf_file_becomes_a_folder_with_the_same_numbers(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    from gguf import GGMLQuantizationType as Kind
    from gguf.quants import quantize

    matrix = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    tensors: dict[str, Any] = {
        "token_embd.weight": np.ones((10, 64), np.float32),
        "output_norm.weight": np.ones(64, np.float32),
        "blk.0.attn_q.weight": (quantize(matrix, Kind.Q4_1), Kind.Q4_1),
        "blk.0.attn_norm.weight": np.full(64, 0.5, np.float32),
    }
    settings = {**TOKENIZER, "llama.vocab_size": 10}
    settings["tokenizer.ggml.merges"] = ["a b"]
    settings["tokenizer.ggml.tokens"] = [*LETTERS[:7], "ab", *LETTERS[8:]]
    source = open_checkpoint(str(write_gguf(tmp_path / "t.gguf", settings=settings, tensors=tensors)))
    write_checkpoint(source, tmp_path / "out", "float32")
    found = open_checkpoint(str(tmp_path / "out"))
    assert sorted(found.names()) == sorted(source.names()) and found.chat_template == source.chat_template
    for name in source.names():
        written = found.read(name)
        assert isinstance(written, torch.Tensor) and torch.equal(written, as_float(source.read(name))), name
    assert {k: found.config[k] for k in source.config} == source.config and found.config["dtype"] == "float32"
    assert found.tokenizer_json().encode("abcab").ids == source.tokenizer_json().encode("abcab").ids == [7, 2, 7]
    assert found.special == source.special and found.generation["eos_token_id"] == [9]
    assert not list(tmp_path.glob(".out*"))


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_tiny(tmp_path / "tiny", "llama")
    source = open_checkpoint(str(folder))
    write_checkpoint(source, tmp_path / "out", "bfloat16", shard_bytes=100_000)
    assert (tmp_path / "out" / INDEX).is_file() and len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    mine, other = (
        AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16").float() for path in (folder, tmp_path / "out")
    )
    ids = torch.arange(3, 40)[None]
    assert torch.equal(mine(ids).logits, other(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("hello", add_special_tokens=False) == source.tokenizer_json().encode("hello").ids


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_all_files_have_the_mode_of_the_umask(umask: int, mode: int, tmp_path: Path) -> None:
    source = open_checkpoint(str(write_tiny(tmp_path / "tiny", "llama")))
    before = os.umask(umask)
    try:
        write_checkpoint(source, tmp_path / "out", "bfloat16", shard_bytes=100_000)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {mode}


def test_what_cannot_be_written_is_said_and_leaves_nothing(tmp_path: Path, capsys: Any) -> None:
    source = open_checkpoint(str(write_tiny(tmp_path / "tiny", "llama")))
    with pytest.raises(UserError, match="float32 or bfloat16"):
        write_checkpoint(source, tmp_path / "out", "int4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(UserError, match="not an empty folder"):
        write_checkpoint(source, tmp_path / "full", "float32")
    (tmp_path / "empty").mkdir()
    command = ["export", "safetensors", "--model", str(tmp_path / "tiny"), "--out", str(tmp_path / "empty")]
    assert main(command) == 0 and "float32" in capsys.readouterr().out
    assert json.loads((tmp_path / "empty" / "config.json").read_text())["dtype"] == "float32"

    class Broken(type(source)):  # type: ignore[misc]
        def read(self, name: str) -> Any:
            raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="make room"):
        write_checkpoint(Broken(source.path), tmp_path / "out", "float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full", "tiny"]
