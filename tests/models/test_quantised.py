"""Whole models from quantised files: the logits are those of the same numbers as floats, and drafts change no text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import dequantize
from torch import Tensor

from sparkdraft import LLM
from sparkdraft.core import UserError
from sparkdraft.kernels import native
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.quant.quantise import to_fp8, to_int4, to_nvfp4
from sparkdraft.weights.quant.stored import Coded, as_float
from tests.models.harness import Harness
from tests.models.test_file_forms import config_of, fused, logits, single, tensors_of, write
from tests.models.test_new_models_drafted import load, written
from tests.models.test_new_models_drafted import write as write_draft
from tests.models.tiny import write_tiny
from tests.weights.test_gguf import k_quant

PUBLISHED = Path(__file__).parent.parent / "weights/published"
Tensors = dict[str, Tensor]
needs_native = pytest.mark.skipif(native.unavailable_reason() is not None, reason="no C++ compiler")


def as_fp8(name: str, weight: Tensor) -> Tensors:
    coded = to_fp8(weight)
    assert coded.row_scale is not None
    return {name: coded.codes.view(torch.float8_e4m3fn), f"{name}_scale": coded.row_scale.unsqueeze(1)}


def as_modelopt(name: str, weight: Tensor) -> Tensors:
    coded = to_nvfp4(weight)
    assert coded.scale is not None and coded.row_scale is not None
    return {name: coded.codes, f"{name}_scale": coded.scale, f"{name}_scale_2": coded.row_scale[0].clone()}


def as_nvfp4(name: str, weight: Tensor) -> Tensors:
    coded = to_nvfp4(weight)
    assert coded.scale is not None and coded.row_scale is not None
    whole = 1 / coded.row_scale[:1]
    return {f"{name}_packed": coded.codes, f"{name}_scale": coded.scale, f"{name}_global_scale": whole}


def as_int4(name: str, weight: Tensor) -> Tensors:
    coded = to_int4(weight)
    assert coded.scale is not None
    words = coded.codes.contiguous().view(torch.int32)
    return {f"{name}_packed": words, f"{name}_scale": coded.scale, f"{name}_shape": torch.tensor(coded.shape)}


FORMS: dict[str, Callable[[str, Tensor], Tensors]] = {
    "fp8": as_fp8,
    "modelopt": as_modelopt,
    "nvfp4": as_nvfp4,
    "int4": as_int4,
}


def quantised(tensors: Tensors, form: Callable[[str, int], str]) -> Tensors:
    """form: of a matrix, by its name and number; "" leaves it."""
    found: Tensors = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        kind = form(name, number) if name.endswith("_proj.weight") else ""
        found |= FORMS[kind](name, tensor) if kind else {name: tensor}
    return found


def as_floats(folder: Path, to: Path) -> Path:
    """The same numbers in a file of floats."""
    source = open_checkpoint(str(folder))
    config = {k: v for k, v in source.config.items() if k != "quantization_config"}
    return write(to, {name: as_float(source.read(name)) for name in source.names()}, config)


def mixed(name: str, number: int) -> str:
    """Every matrix in another format, so that q, k, v and gate, up differ in theirs."""
    return [*FORMS, ""][number % (1 + len(FORMS))]


@pytest.mark.parametrize("folder", sorted(PUBLISHED.glob("*")), ids=lambda folder: folder.name)
def test_published_files_have_the_logits_of_their_numbers(folder: Path, tmp_path: Path) -> None:
    ids = list(range(16))
    floats = Harness(as_floats(folder, tmp_path / "floats")).run({"a": ids})[0]["a"]
    exact = Harness(folder).run({"a": ids})[0]["a"]
    torch.testing.assert_close(exact, floats, rtol=1e-3, atol=1e-3 * float(floats.std()))
    if native.unavailable_reason() is None:
        run = Harness(folder, "native")
        near = run.run({"a": ids})[0]["a"]
        assert float((near - floats).norm() / floats.norm()) < 0.03  # activations of 8 bits
        rounded = [note.name for note in run.loader.fallbacks]
        count = 4 if "fp8" in folder.name else 3 if "desc-act" in folder.name else 0  # down_proj has one group
        assert rounded == ([f"{count} quantised matrices are rounded to 8 bits"] if count else [])


@pytest.mark.parametrize("variant", ["qwen3", "qwen3_moe"])
def test_every_matrix_may_have_another_format(variant: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", variant)
    split = write(tmp_path / "split", single(tensors_of(source)), config_of(source))
    folder = write(tmp_path / "mixed", quantised(tensors_of(split), mixed), config_of(source))
    kinds = {type(open_checkpoint(str(folder)).read(n)).__name__ for n in open_checkpoint(str(folder)).names()}
    assert kinds == {"Coded", "Tensor"}
    floats = logits(as_floats(folder, tmp_path / "floats"))
    torch.testing.assert_close(logits(folder), floats, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(floats, logits(source), rtol=1e-3, atol=1e-3), "it is another model"


def test_experts_in_one_tensor_of_bytes(tmp_path: Path) -> None:
    """Qwen's way to store FP8 experts together, with a scale per block."""
    source = write_tiny(tmp_path / "source", "qwen3_moe")
    tensors = fused(single(tensors_of(source)))
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "experts.down_proj"))]:
        parts = [to_fp8(expert) for expert in tensors.pop(name)]
        tensors[name] = torch.stack([p.codes for p in parts]).view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.stack([row_scale(p) for p in parts]).unsqueeze(-1)
    folder = write(tmp_path / "codes", tensors, config_of(source))
    assert open_checkpoint(str(folder)).read("model.layers.0.mlp.experts.gate_up_proj").shape == (8, 64, 64)
    floats = logits(as_floats(folder, tmp_path / "floats"))
    torch.testing.assert_close(logits(folder), floats, rtol=1e-3, atol=1e-3)


def row_scale(coded: Coded) -> Tensor:
    assert coded.row_scale is not None
    return coded.row_scale


def test_a_quantised_head_beside_a_tied_embedding(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "qwen3-tied")
    tensors = tensors_of(source)
    head = torch.randn(320, 96) * 0.1
    own = write(tmp_path / "own", tensors | as_int4("lm_head.weight", head), config_of(source))
    untied = {**config_of(source), "tie_word_embeddings": False}
    meant = write(tmp_path / "meant", tensors | {"lm_head.weight": to_int4(head).dequantize()}, untied)
    assert torch.equal(logits(own), logits(meant)) and not torch.equal(logits(own), logits(source))
    table = tensors["model.embed_tokens.weight"]
    copy = write(tmp_path / "copy", tensors | {"lm_head.weight": table.clone()}, config_of(source))
    assert torch.equal(logits(copy), logits(source)), "a copy of the embedding is left"


def test_quantised_embeddings(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "qwen3-tied")
    tensors = tensors_of(source)
    table = tensors.pop("model.embed_tokens.weight")
    codes = write(tmp_path / "codes", tensors | as_int4("model.embed_tokens.weight", table), config_of(source))
    floats = as_floats(codes, tmp_path / "floats")
    assert torch.equal(logits(codes), logits(floats))
    head = {"lm_head.weight": torch.randn(320, 96) * 0.1}
    own = write(tmp_path / "own", tensors_of(codes) | head, config_of(source))
    untied = {**config_of(source), "tie_word_embeddings": False}
    assert torch.equal(logits(own), logits(write(tmp_path / "untied", tensors_of(codes) | head, untied)))


@needs_native
def test_drafts_change_no_text_of_a_quantised_model(tmp_path: Path) -> None:
    """NVFP4 on the CPU kernels, and INT4, FP8 and floats beside it; the drafter has its own format, which is none."""
    source = write_tiny(tmp_path / "source", "qwen3")
    for name, form in {"nvfp4": lambda name, number: "nvfp4", "mixed": mixed}.items():
        folder = write(tmp_path / name, quantised(tensors_of(source), form), config_of(source))
        expected = written(load(folder))
        drafted = load(folder, spec="5", drafter=str(write_draft(tmp_path / f"{name}-drafter", folder, "zlab")))
        assert written(drafted) == expected and written(drafted) == expected
        assert drafted.engine.drafting.so_far().num_spec_steps > 20
        assert drafted.engine.runner.unrecorded == []


@needs_native
def test_a_gguf_file_of_k_quants(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    """As llama.cpp mixes them: q and v of one stacked matrix in different types."""
    kinds = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "IQ4_XS", "ffn_gate": "Q5_K"}
    kinds |= {"ffn_up": "Q4_K", "ffn_down": "Q6_K"}
    tensors: dict[str, Any] = {
        f"blk.0.{name}.weight": (k_quant(kind, 256, 1, seed), Kind[kind])
        for seed, (name, kind) in enumerate(kinds.items())
    }
    rng = np.random.default_rng(0)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        tensors[f"{name}.weight"] = np.ones(256, np.float32)
    tensors |= {"token_embd.weight": rng.normal(size=(16, 256)).astype(np.float32)}
    shape = {"embedding_length": 256, "feed_forward_length": 256, "attention.head_count": 4, "block_count": 1}
    shape |= {"attention.head_count_kv": 4, "rope.dimension_count": 64}
    settings = {f"llama.{key}": value for key, value in shape.items()}
    path = write_gguf(tmp_path / "k.gguf", settings=settings, tensors=tensors)
    floats = {n: dequantize(*t) if isinstance(t, tuple) else t for n, t in tensors.items()}
    plain = write_gguf(tmp_path / "f.gguf", settings=settings, tensors=floats)
    runs = [Harness(path), Harness(path, "native"), Harness(plain, "native")]
    exact, ours, rounded = (each.run({"a": list(range(16))})[0]["a"] for each in runs)
    error, most = (float((each - exact).norm() / exact.norm()) for each in (ours, rounded))
    assert error < 0.06 and error < 1.2 * most, "rounded activations are all that it loses"
    assert not runs[1].loader.fallbacks


# ---- quantised at load


@pytest.mark.parametrize(("weights", "quantise"), [("fp8", to_fp8), ("int4", to_int4), ("nvfp4", to_nvfp4)])
def test_floats_are_quantised_at_load(weights: str, quantise: Callable[[Tensor], Coded], tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a", "qwen3")
    llm = LLM(str(folder), device="cpu", dtype="float32", spec="off", weights=weights, weights_cache=False)
    tensors = tensors_of(folder)
    changed = {n: quantise(t).dequantize() if n.endswith("_proj.weight") else t for n, t in tensors.items()}
    meant = LLM(str(write(tmp_path / "b", changed, config_of(folder))), device="cpu", dtype="float32", spec="off")
    ours, theirs = llm.engine.runner.model, meant.engine.runner.model
    for a, b in zip(ours.matrices, theirs.matrices, strict=True):
        assert torch.equal(a.rows(), b.rows())
    assert torch.equal(ours.head.rows(), tensors["lm_head.weight"]), "the head stays as it is"


def test_what_is_quantised_already_cannot_be_quantised(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "qwen3")
    folder = write(tmp_path / "b", quantised(tensors_of(source), lambda name, number: "nvfp4"), config_of(source))
    with pytest.raises(UserError, match=r"weights is int4, and .* has no matrix of floats that could be quantised"):
        LLM(str(folder), device="cpu", dtype="float32", weights="int4", weights_cache=False)
    with pytest.raises(UserError, match="weights is 'int3'; it must be one of auto, fp8, int4, nvfp4"):
        LLM(str(folder), weights="int3")


@needs_native
def test_the_user_is_told_what_is_rounded_and_what_is_not(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a", "qwen3")
    exact = LLM(str(folder), device="cpu", spec="off", weights="int4", weights_cache=False)
    assert not [f for f in exact.fallbacks() if "rounded" in f.name]
    sizes = [llm.engine.runner.model.nbytes(1) for llm in (exact, LLM(str(folder), device="cpu", spec="off"))]
    assert sizes[0] < 0.8 * sizes[1]
    llm = LLM(str(folder), device="cpu", spec="off", weights="fp8", weights_cache=False)
    (said,) = [f for f in llm.fallbacks() if "rounded" in f.name]
    assert said.name == "12 quantised matrices are rounded to 8 bits" and "e4m3" in said.reason
    assert said.name in llm.plan.describe(llm.fallbacks())


@pytest.mark.parametrize("seed", range(3))
def test_nvfp4_rounds_to_the_nearest_level(seed: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(8, 64) * 0.02
    weight[0] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 8)  # ties, and the scale is a power of two
    coded = to_nvfp4(weight)
    assert coded.scale is not None and coded.row_scale is not None
    step = (coded.scale.float() * coded.row_scale.unsqueeze(1)).repeat_interleave(16, 1)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = torch.cat((levels, -levels))
    nearest = (weight / step).unsqueeze(-1).sub(levels).abs().amin(-1)
    got = (weight / step - coded.dequantize() / step).abs()
    torch.testing.assert_close(got, nearest, rtol=1e-4, atol=1e-5)
    row = (coded.dequantize()[0] / step[0])[:8].round(decimals=3).tolist()
    assert row == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0], "ties go to the even code"


def test_zeros_stay_zeros() -> None:
    for quantise in (to_fp8, to_int4, to_nvfp4):
        weight = torch.zeros(4, 64)
        assert torch.equal(quantise(weight).dequantize(), weight)
        weight[1] = 0.5
        torch.testing.assert_close(quantise(weight).dequantize(), weight, rtol=0.07, atol=0)
