"""Folders in the Hugging Face layout: written by the safetensors library or by ours, read by ours, then broken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sparkdraft.cli.main import main
from sparkdraft.core import UserError
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.quant.stored import Coded, as_float
from sparkdraft.weights.safetensors import INDEX, SafetensorsCheckpoint, SafetensorsFile, write_checkpoint
from tests.models.tiny import write_tiny

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int64,
]


def folder(path: Path, shards: dict[str, dict[str, Tensor]], index: bool = False, **files: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    for name, tensors in shards.items():
        save_file(tensors, path / name)
    if index:
        where = {name: file for file, tensors in shards.items() for name in tensors}
        (path / INDEX).write_text(json.dumps({"weight_map": where}))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def tensors(*names: str) -> dict[str, Tensor]:
    return {name: torch.randn(4, 8) for name in names}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_and_bytes_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    values = {
        "a": (torch.randn(3, 5) * 10).to(dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
        "b": torch.zeros(1),
    }
    model = open_checkpoint(str(folder(tmp_path / "m", {"model.safetensors": values})))
    assert set(model.names()) == set(values)
    for name, value in values.items():
        read = model.read(name)
        assert isinstance(read, Tensor) and read.dtype == value.dtype and read.shape == value.shape
        assert torch.equal(read.view(torch.uint8), value.view(torch.uint8)) or value.numel() == 0


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    file = SafetensorsFile(folder(tmp_path / "m", {"model.safetensors": tensors("a")}) / "model.safetensors")
    assert file.read("a").data_ptr() == file.read("a").data_ptr()


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"model.safetensors": {"a": torch.ones(4)}})
    value = open_checkpoint(str(path)).read("a")
    assert isinstance(value, Tensor)
    value.zero_()
    again = open_checkpoint(str(path)).read("a")
    assert isinstance(again, Tensor) and again.tolist() == [1.0] * 4


def test_shards(tmp_path: Path) -> None:
    shards = {"m-1.safetensors": tensors("a", "b"), "m-2.safetensors": tensors("c")}
    model = open_checkpoint(str(folder(tmp_path / "m", shards, index=True)))
    assert sorted(model.names()) == ["a", "b", "c"]
    value = model.read("c")
    assert isinstance(value, Tensor) and torch.equal(value, shards["m-2.safetensors"]["c"])
    with pytest.raises(UserError, match="no tensor d"):
        model.read("d")


def test_missing_shard(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"m-1.safetensors": tensors("a"), "m-2.safetensors": tensors("b")}, index=True)
    (path / "m-2.safetensors").unlink()
    with pytest.raises(UserError, match=r"m-2\.safetensors.*missing"):
        open_checkpoint(str(path))


def test_a_name_in_two_shards(tmp_path: Path) -> None:
    shards = {"m-1.safetensors": tensors("a", "b"), "m-2.safetensors": tensors("b")}
    with pytest.raises(UserError, match=r"tensor b is in both"):
        open_checkpoint(str(folder(tmp_path / "m", shards, index=True)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"a": "m-1.safetensors", "a": "m-1.safetensors"}}', "a is listed twice"),
        ('{"weight_map": {"z": "m-1.safetensors"}}', "z is in m-1"),
        ('{"weight_map": {"a": "../m-1.safetensors"}}', "not a file of its own folder"),
        ("{}", "no weight_map"),
        ("nonsense", "cannot be read as JSON"),
    ],
)
def test_bad_index(tmp_path: Path, text: str, message: str) -> None:
    path = folder(tmp_path / "m", {"m-1.safetensors": tensors("a")})
    (path / INDEX).write_text(text)
    with pytest.raises(UserError, match=message):
        open_checkpoint(str(path))


@pytest.mark.parametrize("length", [0, 4, 8, 40, 200, -1])
def test_truncated(tmp_path: Path, length: int) -> None:
    file = folder(tmp_path / "m", {"model.safetensors": tensors("a", "b")}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged.*fetch it again"):
        open_checkpoint(str(file.parent))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"shape": [2], "data_offsets": [0, 8]},
        [1, 2],
    ],
)
def test_lying_header(tmp_path: Path, entry: Any) -> None:
    path = folder(tmp_path / "m", {})
    header = json.dumps({"a": entry}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(UserError, match=r"model\.safetensors"):
        open_checkpoint(str(path))


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {})
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UserError, match=r"pickles only.*safetensors"):
        open_checkpoint(str(path))


def test_folders_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"pass one of them, such as .*x\.gguf"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(UserError, match=r"no \.safetensors file"):
        open_checkpoint(str(folder(tmp_path / "m", {})))
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        open_checkpoint(str(folder(tmp_path / "m", {"model.safetensors": tensors("a")}))).tokenizer_json()


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean smollm2"):
        open_checkpoint("smolm2")
    with pytest.raises(UserError, match="Known names are smollm2"):
        open_checkpoint("gpt5")
    with pytest.raises(UserError, match=r"no file or folder .*x\.gguf"):
        open_checkpoint(str(tmp_path / "x.gguf"))
    (tmp_path / "model.bin").write_bytes(b"1234567")
    with pytest.raises(UserError, match="not a GGUF file"):
        open_checkpoint(str(tmp_path / "model.bin"))


def test_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

    def offline(*args: Any, **kwargs: Any) -> str:
        raise LocalEntryNotFoundError("cannot find the snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UserError, match="org/name is neither a folder here nor in the local hub cache"):
        open_checkpoint("org/name")

    def gated(*args: Any, **kwargs: Any) -> str:
        import httpx

        raise GatedRepoError("403", response=httpx.Response(403, request=httpx.Request("GET", "http://localhost")))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", gated)
    with pytest.raises(UserError, match="licence"):
        open_checkpoint("org/name")


def test_hub_id_fetches_no_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def download(repo: str, **kwargs: Any) -> str:
        asked.update(kwargs)
        return str(folder(tmp_path / "m", {"model.safetensors": tensors("a")}))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint("org/name").names() == ["a"]
    assert set(asked["allow_patterns"]) == {"*.json", "*.safetensors", "*.jinja"}


def test_special_tokens_and_generation(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "chat_template": "T"}
    path = folder(
        tmp_path / "m",
        {"model.safetensors": tensors("a")},
        tokenizer_config=config,
        special_tokens_map={"pad_token": "<pad>", "eos_token": "ignored"},
        generation_config={"eos_token_id": [1, 2]},
    )
    model = SafetensorsCheckpoint(path)
    assert model.special == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert model.generation == {"eos_token_id": [1, 2]} and model.chat_template == "T"


def test_where_the_chat_template_lies(tmp_path: Path) -> None:
    shards = {"model.safetensors": tensors("a")}
    path = folder(tmp_path / "m", shards)
    assert SafetensorsCheckpoint(path).chat_template is None
    named = [{"name": "tool_use", "template": "X"}, {"name": "default", "template": "D"}]
    folder(path, shards, tokenizer_config={"chat_template": named})
    assert SafetensorsCheckpoint(path).chat_template == "D"
    folder(path, shards, chat_template={"chat_template": "J"})
    assert SafetensorsCheckpoint(path).chat_template == "J"
    (path / "chat_template.jinja").write_text("F")
    assert SafetensorsCheckpoint(path).chat_template == "F"


# ---- quantised folders

INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def quantised(weights: dict[str, Any], **stated: Any) -> dict[str, Any]:
    known = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    return {"quantization_config": {**known, "config_groups": {"group_0": {"weights": weights}}, **stated}}


def test_int8_groups_are_read_as_they_are(tmp_path: Path) -> None:
    values = {
        "a.weight": torch.randint(-127, 128, (4, 64), dtype=torch.int8),
        "a.weight_scale": torch.rand(4, 2).half(),
        "norm.weight": torch.rand(8),
    }
    model = open_checkpoint(str(folder(tmp_path / "m", {"model.safetensors": values}, config=quantised(INT8))))
    assert sorted(model.names()) == ["a.weight", "norm.weight"]
    read, norm = model.read("a.weight"), model.read("norm.weight")
    assert isinstance(read, Coded) and isinstance(norm, Tensor)
    assert read.shape == (4, 64) and torch.equal(read.codes.view(torch.int8), values["a.weight"])
    assert read.scale is not None and read.group == 32
    assert torch.equal(read.scale, values["a.weight_scale"]) and torch.equal(norm, values["norm.weight"])


def test_tensors_decide_how_a_matrix_is_read_whatever_the_config_says(tmp_path: Path) -> None:
    integers = {"a.weight": torch.zeros(4, 64, dtype=torch.int8), "a.weight_scale": torch.rand(4, 2).half()}
    others = {"b.weight": torch.rand(4, 64), "b.weight_scale": torch.rand(4, 2).half(), "ids": torch.zeros(3).char()}
    for number, config in enumerate(({}, quantised(INT8))):
        path = folder(tmp_path / str(number), {"model.safetensors": integers | others}, config=config)
        model = open_checkpoint(str(path))
        assert isinstance(model.read("a.weight"), Coded)
        assert isinstance(model.read("b.weight"), Tensor) and isinstance(model.read("ids"), Tensor)
        left = set(model.names()) - {"a.weight", "b.weight", "ids"}
        assert left == {"b.weight_scale"}, "scales of floats are left over, and whoever loads it says so"


@pytest.mark.parametrize(
    "damage",
    [
        {"a.weight_scale": torch.rand(3, 1).half()},
        {"a.weight_scale": torch.ones(4, 2, dtype=torch.int8)},
        {"a.weight": torch.zeros(4, 63, dtype=torch.int8)},
        {"a.weight": torch.zeros(64, dtype=torch.int8)},
    ],
)
def test_integers_and_scales_that_do_not_match(tmp_path: Path, damage: dict[str, Tensor]) -> None:
    values = {"a.weight": torch.zeros(4, 64, dtype=torch.int8), "a.weight_scale": torch.rand(4, 2).half()} | damage
    model = open_checkpoint(str(folder(tmp_path / "m", {"model.safetensors": values}, config=quantised(INT8))))
    with pytest.raises(UserError, match=r"a\.weight has shape .* export the checkpoint again"):
        model.read("a.weight")


def test_integers_without_scales(tmp_path: Path) -> None:
    values = {"a.weight": torch.zeros(4, 64, dtype=torch.int8)}
    model = open_checkpoint(str(folder(tmp_path / "m", {"model.safetensors": values}, config=quantised(INT8))))
    with pytest.raises(UserError, match=r"no tensor a\.weight_scale"):
        model.read("a.weight")


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
