"""GGUF files against llama.cpp's own reader and transformers, and damaged in every way that a download can be."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.kernels import reference
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.gguf import GgufCheckpoint, GgufFile
from sparkdraft.weights.loader import Loader
from sparkdraft.weights.quant.gguf_blocks import read_blocks
from sparkdraft.weights.quant.stored import Coded, GroupQuant, as_float
from tests.fakes.counting import lines_run

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> GgufCheckpoint:
    return GgufCheckpoint(smollm2_path)


def test_header_is_quick(smollm2_path: Path) -> None:
    assert lines_run(lambda: GgufFile(smollm2_path)) < 1_000_000  # it holds 98,000 strings


def test_metadata_is_what_llama_cpp_reads(smollm2: GgufCheckpoint, smollm2_reader: GGUFReader) -> None:
    meta = smollm2.file.meta
    assert set(meta) == {key for key in smollm2_reader.fields if not key.startswith("GGUF.")}
    for key, value in meta.items():
        if len(smollm2_reader.fields[key].data) < 1000:
            assert value == smollm2_reader.fields[key].contents(), key
    field = smollm2_reader.fields["tokenizer.ggml.tokens"]
    for index in [*range(0, 49152, 997), 49151]:
        assert meta["tokenizer.ggml.tokens"][index] == bytes(field.parts[field.data[index]]).decode()


def test_config(smollm2: GgufCheckpoint) -> None:
    config = smollm2.config
    assert config["model_type"] == "llama" and config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]) == (
        576,
        1536,
        30,
    )
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert (config["vocab_size"], config["max_position_embeddings"], config["rope_theta"]) == (
        49152,
        8192,
        1e5,
    )
    assert config["tie_word_embeddings"] and config["rms_norm_eps"] == pytest.approx(1e-5)
    assert config["rope_scaling"] is None and not config["attention_bias"]
    assert smollm2.special == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert smollm2.generation == {"eos_token_id": [2], "temperature": 0.2, "top_p": 0.9} and "<|im_start|>" in (
        smollm2.chat_template or ""
    )


def test_names_are_those_of_transformers(smollm2: GgufCheckpoint) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**smollm2.config))
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}  # leaves out the tied head
    assert {name: tuple(smollm2.read(name).shape) for name in smollm2.names()} == shapes


@pytest.mark.parametrize("layer", [0, 1, 14, 29])
def test_tensors_are_what_llama_cpp_reads(smollm2: GgufCheckpoint, smollm2_reader: GGUFReader, layer: int) -> None:
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    undo = LlamaTensorProcessor(smollm2.config)
    stored = {tensor.name: tensor for tensor in smollm2_reader.tensors}
    names = [name for name in smollm2.names() if f".layers.{layer}." in name]
    assert len(names) == 9
    for name in names + (["model.embed_tokens.weight", "model.norm.weight"] if layer == 0 else []):
        inner = smollm2._names[name]
        expected = undo.process(dequantize(stored[inner].data, stored[inner].tensor_type), inner).weights
        assert np.array_equal(as_float(smollm2.read(name)).numpy(), expected), name


def test_integers_stay_in_the_file(smollm2: GgufCheckpoint) -> None:
    value = smollm2.read("model.layers.0.mlp.up_proj.weight")
    assert isinstance(value, GroupQuant) and value.bits == 4 and value.q.stride() == (18 * 20, 20, 1)
    again = smollm2.read("model.layers.0.mlp.up_proj.weight")
    assert isinstance(again, GroupQuant) and again.q.data_ptr() == value.q.data_ptr()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_types(tmp_path: Path, write_gguf: Write, kind: str) -> None:
    weight = np.random.default_rng(0).normal(size=(96, 64)).astype(np.float32)
    raw = quantize(weight, Kind[kind])
    path = write_gguf(tmp_path / "t.gguf", tensors={"blk.0.ffn_up.weight": (raw, Kind[kind])})
    value = GgufCheckpoint(path).read("model.layers.0.mlp.up_proj.weight")
    assert isinstance(value, GroupQuant) == (kind in ("Q4_0", "Q4_1", "Q8_0"))
    assert isinstance(value, Coded) == kind.startswith("Q5")
    assert np.array_equal(as_float(value).numpy(), dequantize(raw, Kind[kind]))
    if kind in ("F32", "F16", "BF16"):
        assert isinstance(value, Tensor) and str(value.dtype).endswith(
            {"F": "float"}.get(kind[0], "bfloat") + kind[-2:]
        )


# Bytes of a block of 256 weights, and where its float16 numbers are.
K_QUANTS = {"Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,)), "IQ4_XS": (136, (0,))}


def k_quant(kind: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random bytes, but with scales that are numbers of a weight's size."""
    rng, (size, halves) = np.random.default_rng(seed), K_QUANTS[kind]
    raw = rng.integers(0, 256, size=(rows, blocks, size), dtype=np.uint8)
    for at in halves:
        d = (rng.normal(size=(rows, blocks)) * 1e-3).astype(np.float16)
        raw[..., at : at + 2] = d.view(np.uint8).reshape(rows, blocks, 2)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", [*K_QUANTS, "IQ4_NL"])
def test_k_quants_are_coded_to_the_last_bit(tmp_path: Path, write_gguf: Write, kind: str) -> None:
    if kind == "IQ4_NL":
        raw = np.random.default_rng(0).integers(0, 256, size=(4, 8, 18), dtype=np.uint8)
        raw[..., 1] = 0x10  # of a float16's upper byte: small
        raw = raw.reshape(4, -1)
    else:
        raw = k_quant(kind, 5, 2)
    path = write_gguf(tmp_path / "t.gguf", tensors={"blk.0.ffn_down.weight": (raw, Kind[kind])})
    value = GgufCheckpoint(path).read("model.layers.0.mlp.down_proj.weight")
    assert isinstance(value, Coded) and value.bits == (8 if kind in ("Q5_K", "Q6_K") else 4)
    theirs = dequantize(raw, Kind[kind])
    ours = value.dequantize().numpy()
    if kind == "Q4_K":  # whose offset is a sum of two numbers
        assert value.scale is not None and np.abs(ours - theirs).max() < 1e-6 * float(value.scale.abs().max())
    else:
        assert theirs.std() > 0 and np.array_equal(ours, theirs)


def test_the_worked_example_of_q4_k() -> None:
    scales = bytes.fromhex("818283c44041c2c30112e3ff")
    head = np.array([0.5, 0.25], np.float16).tobytes()
    codes = bytes((7 * i + 3) % 256 for i in range(128))
    read = read_blocks(torch.tensor(list(head + scales + codes), dtype=torch.uint8), 12, 1)
    assert read is not None
    w = read.dequantize()[0]
    at = {0: 1.5, 1: 5.0, 32: -0.25, 64: 4.0, 128: 45.5, 255: 204.75}
    assert {k: float(w[k]) for k in at} == at


def test_scales_that_cannot_be_a_models_are_refused(tmp_path: Path, write_gguf: Write) -> None:
    for upper, says in ((0x7B, "would hold weights of up to"), (0x7C, "no finite numbers")):
        raw = k_quant("Q4_K", 4, 1)
        raw[:, 1] = upper  # d is 60,000, or no number
        path = write_gguf(tmp_path / "t.gguf", tensors={"blk.0.ffn_down.weight": (raw, Kind["Q4_K"])})
        with pytest.raises(UserError, match=rf"blk\.0\.ffn_down\.weight .*{says}"):
            GgufCheckpoint(path).read("model.layers.0.mlp.down_proj.weight")


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q4_1", "Q8_0", "Q5_0"])
def test_rows_as_transformers_loads_them(tmp_path: Path, write_gguf: Write, kind: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for name, rows in {"q": 64, "k": 32, "v": 32, "output": 64}.items():
        raw = quantize(rng.normal(size=(rows, 64)).astype(np.float32), Kind[kind])
        tensors[f"blk.0.attn_{name}.weight"] = (raw, Kind[kind])
        tensors[f"blk.0.attn_{name}.bias"] = rng.normal(size=rows).astype(np.float32)
    path = write_gguf(tmp_path / "t.gguf", tensors=tensors, settings={"llama.vocab_size": 8})
    ours = GgufCheckpoint(path)
    assert ours.config["attention_bias"]
    model = LlamaForCausalLM(LlamaConfig(**ours.config))
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    assert set(ours.names()) <= set(theirs)
    for name in ours.names():
        assert torch.equal(as_float(ours.read(name)), theirs[name]), name


def test_qwen3_rows_are_left_alone(tmp_path: Path, write_gguf: Write) -> None:
    weight = np.random.default_rng(0).normal(size=(128, 64)).astype(np.float32)
    tensors = {
        "blk.0.attn_q.weight": weight,
        "blk.0.attn_q_norm.weight": weight[0, :32].copy(),
        "output.weight": np.zeros((8, 64), np.float32),
    }
    extra: dict[str, Any] = {"qwen3.attention.key_length": 32, "qwen3.rope.scaling.type": "yarn"}
    extra |= {"qwen3.rope.scaling.factor": 4.0, "qwen3.rope.scaling.original_context_length": 32768}
    model = open_checkpoint(str(write_gguf(tmp_path / "t.gguf", "qwen3", extra, tensors)))
    assert np.array_equal(as_float(model.read("model.layers.0.self_attn.q_proj.weight")), weight)
    assert "model.layers.0.self_attn.q_norm.weight" in model.names()
    assert model.config["architectures"] == ["Qwen3ForCausalLM"] and model.config["head_dim"] == 32
    assert not model.config["tie_word_embeddings"]
    assert model.config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }


def test_llama3_rope_is_a_tensor(tmp_path: Path, write_gguf: Write) -> None:
    path = write_gguf(tmp_path / "t.gguf", tensors={"rope_freqs.weight": np.full(8, 2.0, np.float32)})
    model = GgufCheckpoint(path)
    assert model.config["rope_scaling"] is None
    assert torch.equal(as_float(model.read("rope_freqs")), torch.full((8,), 2.0))
    loader = Loader(model, torch.device("cpu"), torch.bfloat16, reference)
    found = loader.vector("rope_freqs", 8, torch.float32)
    assert found.dtype == torch.float32  # in the type of activations it would be rounded


@pytest.mark.parametrize(
    ("arch", "extra", "tensors", "message"),
    [
        ("gemma", {}, {}, r"gemma.*llama, qwen3"),
        ("llama", {"llama.expert_count": 8}, {}, "mixture of experts"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, {}, "longrope"),
        ("llama", {"llama.attention.head_count": [4, 4]}, {}, "head_count"),
        ("llama", {"split.count": 3}, {}, "split"),
        ("llama", {}, {"blk.0.ssm_a.weight": np.zeros(3, np.float32)}, "ssm_a"),
    ],
)
def test_what_is_not_read(tmp_path: Path, write_gguf: Write, arch: str, extra: Any, tensors: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        GgufCheckpoint(write_gguf(tmp_path / "t.gguf", arch, extra, tensors))


def test_missing_tensor(tmp_path: Path, write_gguf: Write) -> None:
    with pytest.raises(UserError, match=r"no tensor model\.norm\.weight"):
        GgufCheckpoint(write_gguf(tmp_path / "t.gguf")).read("model.norm.weight")


@pytest.mark.parametrize("length", [0, 3, 23, 24, 100, 5_000, 800_000, 1_700_000, 50_000_000, 98_362_000])
def test_truncated(tmp_path: Path, smollm2_path: Path, length: int) -> None:
    path = tmp_path / "short.gguf"
    with smollm2_path.open("rb") as source:
        path.write_bytes(source.read(length))
    with pytest.raises(UserError, match=r"short\.gguf.*fetch it again"):
        GgufCheckpoint(path)


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        (0, b"NOPE", "does not begin with GGUF"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "little-endian"),
        (8, struct.pack("<Q", 2**63), "promises"),
        (16, struct.pack("<Q", 2**40), "promises"),
        (24, struct.pack("<Q", 2**64 - 1), "goes on after"),
    ],
)
def test_absurd_header(tmp_path: Path, write_gguf: Write, at: int, data: bytes, message: str) -> None:
    path = write_gguf(tmp_path / "t.gguf")
    raw = bytearray(path.read_bytes())
    raw[at : at + len(data)] = data
    path.write_bytes(raw)
    with pytest.raises(UserError, match=message):
        GgufCheckpoint(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_a_clear_error_or_none(tmp_path: Path, write_gguf: Write, data: st.DataObject) -> None:
    path = tmp_path / "t.gguf"
    if not path.exists():
        tokens = ["<unk>", "a", "b", "ab"]
        extra = {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.model": "llama",
        }
        write_gguf(path, settings=extra, tensors={"blk.0.attn_q.weight": np.zeros((64, 64), np.float16)})
        (tmp_path / "good").write_bytes(path.read_bytes())
    raw = bytearray((tmp_path / "good").read_bytes())
    header = raw.index(b"attn_q") + 64
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, header))] = data.draw(st.sampled_from([0, 1, 2, 8, 9, 127, 255]))
    path.write_bytes(raw[: data.draw(st.integers(header, len(raw)))])
    try:
        model = GgufCheckpoint(path)
        for name in model.names():
            model.read(name)
    except UserError:
        pass
