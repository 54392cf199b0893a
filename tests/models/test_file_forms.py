"""One model in the forms that files have: experts singly or fused, nested or text only, packed, older keys."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparkdraft import LLM
from sparkdraft.models.registry import read_config
from sparkdraft.text.tokenizer import Tokenizer
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.linear import DenseLinear
from sparkdraft.weights.quant.fp4 import Mxfp4Experts
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab
from tests.models.harness import Harness
from tests.models.tiny import byte_tokenizer, oracle_logits, write_tiny

PROMPT = list(range(40, 70))
Tensors = dict[str, Tensor]


def tensors_of(folder: Path) -> Tensors:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            found |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    return found


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def logits(folder: Path) -> Tensor:
    return Harness(folder).run({"a": PROMPT})[0]["a"]


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}


def fused(tensors: Tensors) -> Tensors:
    """The experts of each layer in one tensor, gate before up."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for place in sorted({name.split(".experts.")[0] for name in tensors.keys() - found.keys()}):
        each = f"{place}.experts."
        parts = {
            part: torch.stack([tensors[f"{each}{e}.{part}_proj.weight"] for e in range(8)])
            for part in ("gate", "up", "down")
        }
        found[f"{each}gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
        found[f"{each}down_proj"] = parts["down"]
    return found


def single(tensors: Tensors) -> Tensors:
    """The other way round."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            for e, matrix in enumerate(tensor):
                for part, half in zip(("gate", "up"), matrix.chunk(2), strict=True):
                    found[f"{name.removesuffix('gate_up_proj')}{e}.{part}_proj.weight"] = half
        elif name.endswith(".experts.down_proj"):
            for e, matrix in enumerate(tensor):
                found[f"{name.removesuffix('down_proj')}{e}.down_proj.weight"] = matrix
        else:
            found[name] = tensor
    return found


FORMS = [("qwen3_moe", fused), ("gemma4-experts", single), ("qwen3_5_moe", fused)]


@pytest.mark.parametrize(("variant", "form"), FORMS)
def test_fused_and_single_experts_are_the_same(
    variant: str, form: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    folder = write_tiny(tmp_path / "a", variant)
    other = form(tensors_of(folder))
    assert other.keys() != tensors_of(folder).keys()
    assert torch.equal(logits(write(tmp_path / "b", other, config_of(folder))), logits(folder))


@pytest.mark.parametrize("variant", ["gemma3-nested", "gemma4", "gemma4-experts", "qwen3_5_moe"])
@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_a_text_only_file_is_the_same(variant: str, prefix: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a", variant)
    (long,) = (name.removesuffix("embed_tokens.weight") for name in tensors_of(folder) if "embed_tokens" in name)
    own = {name: t for name, t in tensors_of(folder).items() if name.startswith((long, "lm_head."))}
    text = renamed(own, long, prefix)
    alone = write(tmp_path / "b", text, config_of(folder)["text_config"])
    assert torch.equal(logits(alone), logits(folder))
    assert not Harness(alone).loader.fallbacks and len(Harness(folder).loader.fallbacks) == 1


def test_a_drafter_in_the_file_is_left(tmp_path: Path) -> None:
    """The target ignores the tensors of the head in its file; drafters/find.py decides who drafts with them."""
    folder = write_tiny(tmp_path / "a", "qwen3_next")
    mtp = {"mtp.fc.weight": torch.zeros(64, 128), "mtp.norm.weight": torch.zeros(64)}
    other = write(tmp_path / "b", tensors_of(folder) | mtp, config_of(folder))
    assert torch.equal(logits(other), logits(folder))
    assert not Harness(other).loader.fallbacks


def test_the_number_of_experts_has_two_names(tmp_path: Path) -> None:
    config = config_of(write_tiny(tmp_path, "qwen3_moe"))
    old = {"num_experts": config["num_local_experts"], **config}
    del old["num_local_experts"]
    assert read_config(old) == read_config(config)


def test_gemma_4s_larger_heads_have_two_places(tmp_path: Path) -> None:
    config = config_of(write_tiny(tmp_path, "gemma4"))
    text = {k: v for k, v in config["text_config"].items() if k != "per_layer_config"}
    published = {**config, "text_config": {**text, "global_head_dim": 64, "num_global_key_value_heads": 1}}
    assert read_config(published) == read_config(config)


def test_old_keys_of_rotations_mean_the_same(tmp_path: Path) -> None:
    """gpt-oss's published file has rope_scaling; a reader of rope_parameters alone would lose YaRN without a word."""
    config = config_of(write_tiny(tmp_path / "a", "gpt_oss"))
    new = config.pop("rope_parameters")
    theta = new.pop("rope_theta")
    rope = read_config({**config, "rope_scaling": new, "rope_theta": theta}).attention[0].rope
    assert rope.theta == 150000.0 and rope.scaling is not None and rope.scaling["truncate"] is False
    text = config_of(write_tiny(tmp_path / "b", "gemma3"))
    ropes = text.pop("rope_parameters")
    old = {"rope_theta": ropes["full_attention"]["rope_theta"], "rope_local_base_freq": 1e4}
    scaling = {"factor": 8.0, "rope_type": "linear"}
    again = read_config({**text, **old, "rope_scaling": scaling})
    for a, b in zip(again.attention, read_config({**text, "rope_parameters": ropes}).attention, strict=True):
        assert a.rope.theta == b.rope.theta and a.window == b.window
        assert (a.rope.scaling or {}).get("factor") == (b.rope.scaling or {}).get("factor")


def packed(
    matrix: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # of this shape: what a file holds, and means
    experts, out, width = matrix.shape
    scales = torch.randint(121, 126, (experts, out, width // 32), dtype=torch.uint8)
    blocks = torch.randint(0, 256, (experts, out, width // 32, 16), dtype=torch.uint8)
    values = Mxfp4Experts().read("x", blocks, scales).dequantize()
    return blocks, scales, values


def test_mxfp4_experts_are_the_floats_that_they_mean(tmp_path: Path) -> None:
    """transformers reads the floats: rows of gate and up alternate in both, and the packed ones lie the other way."""
    torch.manual_seed(5)
    folder = write_tiny(tmp_path / "a", "gpt_oss")
    tensors, config = tensors_of(folder), config_of(folder)
    as_floats, as_codes = dict(tensors), dict(tensors)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "experts.down_proj"))]:
        blocks, scales, values = packed(tensors[name].transpose(1, 2))
        del as_codes[name]
        as_codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        as_floats[name] = values.transpose(1, 2)
    said = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    codes = write(tmp_path / "codes", as_codes, config | said)
    floats = write(tmp_path / "floats", as_floats, config)
    assert torch.equal(logits(codes), logits(floats))
    torch.testing.assert_close(logits(codes), oracle_logits(floats, PROMPT), atol=1e-4, rtol=1e-4)


def test_what_is_not_loaded_is_said_once(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "gemma4")
    seen = sum("vision" in name for name in tensors_of(folder))
    llm = LLM(str(folder), device="cpu", dtype="float32")
    said = [f for f in llm.fallbacks() if "not loaded" in f.name]
    assert [(f.name, f.reason, f.is_choice) for f in said] == [
        (f"{seen} tensors of the vision tower are not loaded", "only text is read", True)
    ]
    assert seen and "vision tower" in llm.plan.describe(llm.fallbacks())


def test_a_drafters_matrix_that_could_not_be_quantised_is_said(tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "target", "qwen3")
    shape = body("ff", hidden_size=96, num_attention_heads=6, num_key_value_heads=2, head_dim=32, intermediate_size=48)
    config = zlab(shape, num_target_layers=3, inner={"target_layer_ids": [0, 1]})
    drafter = write_drafter(tmp_path / "drafter", config, random_tensors(shape))
    llm = LLM(str(target), device="cpu", dtype="quantised", spec="3", drafter=str(drafter))
    said = [f for f in llm.fallbacks() if f.name.startswith("in the drafter, a float32 matrix")]
    assert said and all("width 48 is no multiple of 32" in f.reason for f in said)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 5376**0.5), (torch.bfloat16, 73.5)])
def test_the_scale_of_embeddings_is_a_number_of_the_weights_type(
    dtype: torch.dtype, scale: float, tmp_path: Path
) -> None:
    """As in transformers, which a tiny model with a scale of 8 would not show."""
    folder = write_tiny(tmp_path, "gemma4")
    model = Harness(folder, dtype=dtype, change=lambda config: replace(config, embedding_scale=5376**0.5)).model
    assert model.config.embedding_scale == pytest.approx(scale, rel=1e-7)


def test_ends_of_text_are_found_in_a_text_config(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_tiny(tmp_path, "gemma4")))
    assert "eos_token_id" not in checkpoint.config and checkpoint.config["text_config"]["eos_token_id"] == 2
    assert Tokenizer.of(checkpoint).eos_ids >= {2}


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_may_be_under_the_text_models_name(tied: bool, tmp_path: Path) -> None:
    """As older files that see as well have it; where embeddings are tied it is not needed."""
    folder = write_tiny(tmp_path / "one", "gemma3", tie_word_embeddings=tied)
    tensors = tensors_of(folder)
    head = tensors.pop("lm_head.weight", tensors[next(name for name in tensors if "embed_tokens" in name)])
    other = write(tmp_path / "other", tensors | {"language_model.lm_head.weight": head.clone()}, config_of(folder))
    assert torch.equal(logits(other), logits(folder))


@pytest.mark.parametrize("variant", ["qwen3-tied", "gemma3"])
def test_a_tied_head_is_held_once(variant: str, tmp_path: Path) -> None:
    model = Harness(write_tiny(tmp_path, variant)).model
    assert isinstance(model.embedding, Tensor) and isinstance(model.head, DenseLinear)
    assert model.head.weight.data_ptr() == model.embedding.data_ptr()


@pytest.mark.parametrize("variant", ["gemma3", "gemma4-experts", "qwen3", "gpt_oss"])
def test_no_matmul_bypasses_the_operators(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for few rows give a row the same bits in any company; a matrix's own matmul need not."""
    harness = Harness(write_tiny(tmp_path, variant))
    callers: set[str] = set()
    linear = DenseLinear.linear

    def watched(self: DenseLinear, x: Tensor) -> Tensor:
        callers.add(sys._getframe(1).f_globals["__name__"])
        return linear(self, x)

    monkeypatch.setattr(DenseLinear, "linear", watched)
    harness.run({"a": PROMPT})
    assert callers <= {"sparkdraft.kernels.reference", "sparkdraft.weights.linear"} and callers


@pytest.mark.parametrize("head", ["own", "copy", "none"])
@pytest.mark.parametrize(
    ("variant", "inner", "outer"),
    [("qwen3_5", True, False), ("qwen3_5", True, True), ("llama", None, True), ("gemma3", None, None)],
)
def test_the_file_decides_whether_the_head_is_the_embedding(
    variant: str, inner: bool | None, outer: bool | None, head: str, tmp_path: Path
) -> None:
    """A head in the file that is not the embedding is used, whatever the config says, as in transformers."""
    right = write_tiny(tmp_path / "right", variant)
    tensors, settings = tensors_of(right), config_of(right)
    table = tensors[next(name for name in tensors if name.endswith("embed_tokens.weight"))]
    tensors.pop("lm_head.weight", None)
    if head != "none":
        tensors["lm_head.weight"] = table.flip(0).contiguous() if head == "own" else table.clone()
    for place, tied in ((settings, outer), (settings.get("text_config", {}), inner)):
        place.pop("tie_word_embeddings", None)
        place |= {} if tied is None else {"tie_word_embeddings": tied}
    folder, ids = write(tmp_path / "wrong", tensors, settings), list(range(40, 60))
    ours = Harness(folder).run({"a": ids})[0]["a"]
    torch.testing.assert_close(ours, oracle_logits(folder, ids), atol=1e-3, rtol=1e-3)
    assert read_config(open_checkpoint(str(folder)).config).tie_embeddings is (head != "own")
