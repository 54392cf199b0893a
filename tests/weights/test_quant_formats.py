"""Each format of quantised weights to the byte: the worked examples of its tools, and what must not be read for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.quant.compressed_tensors import Int8, PackQuantized
from sparkdraft.weights.quant.fp4 import Mxfp4Experts, Mxfp4Packed, Nvfp4ModelOpt, Nvfp4Packed
from sparkdraft.weights.quant.fp8 import Fp8
from sparkdraft.weights.quant.gptq import QWeight
from sparkdraft.weights.quant.stated import NOTHING, Said, Stated
from sparkdraft.weights.quant.stored import Coded, Permuted, Quantised, QuantisedExperts
from tests.fakes.counting import lines_run
from tests.weights.test_safetensors import folder

E4M3 = torch.float8_e4m3fn
E2M1_BYTES = bytes.fromhex("10325476a9cbed0f")
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0]


def raw(text: bytes | str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text) if isinstance(text, str) else text), dtype=torch.uint8)


def words(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32)


def int4_said(**more: Any) -> Said:
    return Said(**{"by": "test", "symmetric": False, **more})


# ---- the worked examples


def test_fp8() -> None:
    codes = raw("38b87e01").view(E4M3).unsqueeze(0)
    for scale in (torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]], dtype=torch.bfloat16)):
        assert Fp8().read("x", codes, scale).dequantize().tolist() == [[0.5, -0.5, 224.0, 2.0**-10]]


@pytest.mark.parametrize("kind", [Nvfp4ModelOpt, Nvfp4Packed])
def test_nvfp4_of_both_tools(kind: type[Nvfp4ModelOpt] | type[Nvfp4Packed]) -> None:
    """The scale of the tensor multiplies in one and divides in the other."""
    block = raw("7e").view(E4M3).view(1, 1)
    whole = torch.tensor(2.2321428e-05) if kind is Nvfp4ModelOpt else torch.tensor([44800.0])
    read = kind().read("x", raw(E2M1_BYTES).unsqueeze(0), block, whole)
    expected = torch.tensor([E2M1]) * 0.01
    torch.testing.assert_close(read.dequantize(), expected, rtol=1e-6, atol=0)
    assert torch.equal(read.dequantize(torch.bfloat16), expected.bfloat16())


def test_mxfp4() -> None:
    codes = torch.cat((raw("1032547698badcfe"), raw("1032547698badcfe"))).unsqueeze(0)
    expected = [0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3]
    expected = [*expected, *(-value for value in expected)] * 2
    assert Mxfp4Packed().read("x", codes, raw("7e").view(1, 1)).dequantize().tolist() == [expected]


@pytest.mark.parametrize(("zeros", "less_one"), [(0x33333333, False), (0x22222222, True)])
def test_gptq_of_both_versions(zeros: int, less_one: bool) -> None:
    """Codes 0 to 7 along the input, zero point 3."""
    qweight = words(0x76543210).view(1, 1).expand(1, 8).contiguous()
    scales = torch.arange(1, 9).half().view(1, 8)
    read = QWeight().read("x", qweight, scales, words(zeros).view(1, 1), said=int4_said(zero_less_one=less_one))
    expected = (torch.arange(8.0) - 3) * torch.arange(1, 9.0).unsqueeze(1)
    assert isinstance(read, Coded) and torch.equal(read.dequantize(), expected)


def test_awq() -> None:
    """The same codes along the output."""
    qweight = words(0x75316420).view(1, 1).expand(8, 1).contiguous()
    scales = torch.arange(1, 9).half().view(1, 8)
    read = QWeight().read("x", qweight, scales, words(0x33333333).view(1, 1), said=int4_said())
    expected = ((torch.arange(8.0) - 3) * torch.arange(1, 9.0)).unsqueeze(1).expand(8, 8)
    assert torch.equal(read.dequantize(), expected)


def test_pack_quantized() -> None:
    scale, shape = torch.tensor([[0.5]], dtype=torch.bfloat16), torch.tensor([1, 8])
    read = PackQuantized().read("x", words(0xFEA98710).view(1, 1), scale, shape)
    assert read.dequantize().tolist() == [[q / 2 for q in (-8, -7, -1, 0, 1, 2, 6, 7)]]
    zero = words(0x9).view(1, 1)  # one output: the rest of the word is nothing
    read = PackQuantized().read("x", words(0xFEA98710).view(1, 1), scale, shape, zero)
    assert read.dequantize().tolist() == [[(q - 1) / 2 for q in (-8, -7, -1, 0, 1, 2, 6, 7)]]


# ---- whole matrices, against the definition, one weight at a time


def by_definition(codes: Tensor, zeros: Tensor, scale: Tensor, group: Tensor) -> Tensor:
    """codes [out, in], zeros and scale [out, groups], group [in]."""
    return torch.stack(
        [
            torch.stack([(c - zeros[o, group[k]]) * scale[o, group[k]].float() for k, c in enumerate(row)])
            for o, row in enumerate(codes)
        ]
    )


def pack_words(values: Tensor, bits: int = 4) -> Tensor:
    """[rows, n] to int32 [rows, n * bits / 32], lowest bits first."""
    each = 32 // bits
    out = torch.zeros(len(values), values.shape[1] // each, dtype=torch.int64)
    for k in range(values.shape[1]):
        out[:, k // each] |= values[:, k].long() << bits * (k % each)
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


class Example:
    """A random asymmetric matrix [24, 64] in groups of 16, and what each tool would write."""

    def __init__(self, bits: int = 4, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.bits, top = bits, 1 << bits
        self.codes = torch.randint(0, top, (24, 64), generator=g)
        self.zeros = torch.randint(top // 4, 3 * top // 4, (24, 4), generator=g)
        self.scale = (torch.rand(24, 4, generator=g) + 0.01).half() * 0.01
        self.scale[::3] *= -1  # AutoRound's may be negative
        self.neighbours = torch.arange(64) // 16

    def expected(self, group: Tensor | None = None) -> Tensor:
        return by_definition(self.codes, self.zeros, self.scale, self.neighbours if group is None else group)

    def gptq(self, less: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        qweight = pack_words(self.codes, self.bits).t().contiguous()  # [in / 8, out]
        return qweight, self.scale.t().contiguous(), pack_words(self.zeros.t() - less, self.bits)

    def awq(self) -> tuple[Tensor, Tensor, Tensor]:
        at = [8 * c + i for c in range(3) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
        return pack_words(self.codes.t()[:, at]), self.scale.t().contiguous(), pack_words(self.zeros.t()[:, at])

    def packed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        zeros = pack_words(self.zeros.t(), self.bits).t().contiguous()  # [out / 8, groups]
        return pack_words(self.codes, self.bits), self.scale, torch.tensor([24, 64]), zeros


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_in_words(bits: int) -> None:
    e = Example(bits)
    for less in (0, 1):
        read = QWeight().read("x", *e.gptq(less), said=int4_said(zero_less_one=bool(less)))
        assert torch.equal(read.dequantize(), e.expected()), less
    if bits == 4:
        assert torch.equal(QWeight().read("x", *e.awq(), said=int4_said()).dequantize(), e.expected())
    assert torch.equal(PackQuantized().read("x", *e.packed()).dequantize(), e.expected())


@pytest.mark.parametrize("less", [0, 1])
def test_a_zero_point_that_is_off_by_one_is_seen(less: int) -> None:
    """A tool has written files whose label says the other convention."""
    e = Example()
    e.codes = (e.zeros[:, e.neighbours] + torch.randint(-3, 4, e.codes.shape)).clamp(0, 15)  # weights around zero
    read = QWeight().read("x", *e.gptq(less), said=int4_said(zero_less_one=bool(less)))
    assert torch.equal(read.dequantize(), e.expected())
    with pytest.raises(UserError, match=r"x has zero points that the config \(test\) mislabels: .* by the other"):
        QWeight().read("x", *e.gptq(less), said=int4_said(zero_less_one=not less))
    with pytest.raises(UserError, match="no config says whether they are stored less one"):
        QWeight().read("x", *e.gptq(less))


@pytest.mark.parametrize("stored", [7, 8])
def test_symmetric_files_have_no_zero_points(stored: int) -> None:
    e = Example()
    qweight, scales, _ = e.gptq()
    e.zeros.fill_(8)
    for said in (Said(symmetric=True), Said()):
        read = QWeight().read("x", qweight, scales, pack_words(torch.full((4, 24), stored)), said=said)
        assert isinstance(read, Coded) and read.offset is None and torch.equal(read.dequantize(), e.expected())
    with pytest.raises(UserError, match=r"zero points of its own, though the config .* says that it is symmetric"):
        QWeight().read("x", *Example().gptq(), said=Said(symmetric=True))


def test_inputs_that_were_sorted_before_they_were_grouped() -> None:
    e, g = Example(), torch.Generator().manual_seed(1)
    group = e.neighbours[torch.randperm(64, generator=g)]
    said = int4_said(zero_less_one=False)
    for read in (
        QWeight().read("x", *e.gptq(), group.int(), said=said),
        PackQuantized().read("x", *e.packed(), group.int()),
    ):
        assert isinstance(read, Permuted) and read.shape == (24, 64)
        assert torch.equal(read.dequantize(), e.expected(group))
        rows = torch.tensor([5, 0, 5])
        assert torch.equal(read.take(rows).dequantize(), e.expected(group)[rows])
        assert not torch.equal(read.dequantize(), e.expected()), "the order matters"
    trivial = QWeight().read("x", *e.gptq(), e.neighbours.int(), said=said)
    assert isinstance(trivial, Coded) and torch.equal(trivial.dequantize(), e.expected())
    with pytest.raises(UserError, match="g_idx whose groups do not have 16 inputs each"):
        QWeight().read("x", *e.gptq(), torch.zeros(64).int(), said=said)
    with pytest.raises(UserError, match="a g_idx of"):
        QWeight().read("x", *e.gptq(), torch.zeros(63).int(), said=said)


def fp8_codes(out: int, width: int) -> Tensor:
    return (torch.randn(out, width, generator=torch.Generator().manual_seed(0)) * 100).to(E4M3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_scales_of_rows_and_of_ragged_blocks(dtype: torch.dtype) -> None:
    codes = fp8_codes(130, 192)
    rows, blocks = (torch.rand(shape) / 1000 + 1e-4 for shape in ((130, 1), (2, 2)))
    rows, blocks = rows.to(dtype), blocks.to(dtype)
    for scale in (rows, rows.flatten()):
        assert torch.equal(Fp8().read("x", codes, scale).dequantize(), codes.float() * rows.float())
    spread = blocks.float().repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :192]
    read = Fp8().read("x", codes, blocks)
    assert isinstance(read, Coded) and torch.equal(read.dequantize(), codes.float() * spread)
    other = torch.rand(3, 2) / 1000
    read = Fp8().read("x", codes, other, said=Said(block=(64, 96)))
    spread = other.repeat_interleave(64, 0)[:130].repeat_interleave(96, 1)
    assert torch.equal(read.dequantize(), codes.float() * spread)


def test_fp8_with_exponents_for_scales() -> None:
    codes, scale = fp8_codes(4, 64), torch.tensor([[120, 118]] * 4, dtype=torch.uint8)
    spread = torch.tensor([2.0**-7] * 32 + [2.0**-9] * 32)
    assert torch.equal(Fp8().read("x", codes, scale).dequantize(), codes.float() * spread)


def test_int8_by_row_and_by_group() -> None:
    torch.manual_seed(0)
    codes = torch.randint(-128, 128, (6, 96), dtype=torch.int8)
    rows, groups = torch.rand(6, 1).bfloat16(), torch.rand(6, 3)
    assert torch.equal(Int8().read("x", codes, rows).dequantize(), codes.float() * rows.float())
    assert torch.equal(Int8().read("x", codes, torch.tensor(0.5)).dequantize(), codes.float() * 0.5)
    spread = groups.repeat_interleave(32, 1)
    assert torch.equal(Int8().read("x", codes, groups).dequantize(), codes.float() * spread)
    zeros = torch.randint(-9, 9, (6, 1), dtype=torch.int8)
    read = Int8().read("x", codes, rows, zeros)
    assert torch.equal(read.dequantize(), (codes.float() - zeros.float()) * rows.float())
    read = Int8().read("x", codes, rows, torch.zeros_like(zeros))
    assert isinstance(read, Coded) and read.offset is None
    zeros = torch.randint(-9, 9, (6, 3), dtype=torch.int8)
    meant = (codes.double() - zeros.repeat_interleave(32, 1)) * spread
    torch.testing.assert_close(Int8().read("x", codes, groups, zeros).dequantize(), meant.float(), rtol=1e-6, atol=2e-5)


def test_experts_that_are_stored_together() -> None:
    codes = torch.stack([fp8_codes(4, 32), fp8_codes(4, 32).flip(0)])
    for scale in (torch.tensor([0.25, 0.5]), torch.tensor(0.5), torch.rand(2, 4, 1)):
        read = Fp8().read("x", codes, scale)
        each = [scale[e] if scale.dim() else scale for e in range(2)]
        assert isinstance(read, QuantisedExperts)
        assert torch.equal(read.dequantize(), torch.stack([codes[e].float() * each[e] for e in range(2)]))
    with pytest.raises(UserError, match=r"x holds 2 experts and a tensor beside it has shape \(3,\)"):
        Fp8().read("x", codes, torch.rand(3))


# ---- whole folders

Tensors = dict[str, Tensor]
NVFP4 = {
    "a.weight": torch.randint(0, 256, (4, 16), dtype=torch.uint8),
    "a.weight_scale": (torch.rand(4, 2) * 100 + 10).to(E4M3),
    "a.weight_scale_2": torch.tensor(1e-5),
}
PACKED = {
    "a.weight_packed": NVFP4["a.weight"],
    "a.weight_scale": NVFP4["a.weight_scale"],
    "a.weight_global_scale": torch.tensor([1e5]),
}
MODELOPT = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}}
FP8 = {"a.weight": fp8_codes(4, 32), "a.weight_scale": torch.rand(4, 1) / 1000 + 1e-4}


def gptq_folder(**said: Any) -> tuple[Tensors, dict[str, Any]]:
    e = Example()
    e.codes = (e.zeros[:, e.neighbours] + torch.randint(-3, 4, e.codes.shape)).clamp(0, 15)
    parts = dict(zip(("a.qweight", "a.scales", "a.qzeros"), e.gptq(1), strict=True))
    known = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}
    return parts, {"quantization_config": {**known, **said}}


def opened(path: Path, tensors: Tensors, config: dict[str, Any], **files: Any) -> Any:
    return open_checkpoint(str(folder(path, {"model.safetensors": tensors}, config=config, **files)))


def read(path: Path, tensors: Tensors, config: dict[str, Any], **files: Any) -> Quantised:
    model = opened(path, tensors, config, **files)
    assert model.names() == ["a.weight"]
    matrix: Quantised = model.read("a.weight")
    return matrix


def test_what_is_known_and_not_needed_is_not_left_over(tmp_path: Path) -> None:
    names = ("a.input_scale", "layers.0.self_attn.k_proj.k_scale", "layers.0.self_attn.v_scale")
    more = {name: torch.tensor(1.0) for name in names}
    assert isinstance(read(tmp_path / "m", NVFP4 | more, MODELOPT), Coded)
    more = {"b.input_scale": torch.tensor(1.0), "b.weight": torch.rand(4, 4)}
    model = opened(tmp_path / "n", NVFP4 | more, MODELOPT)
    assert "b.input_scale" in model.names(), "a matrix of floats has no use for one"


@pytest.mark.parametrize("name", ["a.pre_quant_scale", "a.svdquant_lora_a", "a.input_rotation"])
def test_what_changes_the_meaning_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=rf"has the tensor {name}: .* which is not read"):
        opened(tmp_path / "m", NVFP4 | {name: torch.rand(32)}, MODELOPT)


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}}


def ignoring(config: dict[str, Any], key: str, *names: str) -> dict[str, Any]:
    return {"quantization_config": {**config["quantization_config"], key: list(names)}}


FP8_SAID = compressed(num_bits=8, type="float", strategy="channel", symmetric=True)
CONTRADICTIONS: list[tuple[Tensors, Mapping[str, Any], str]] = [
    (NVFP4, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, "says 8 bits"),
    (NVFP4, {"quantization_config": {**MODELOPT["quantization_config"], "group_size": 32}}, "says groups of 32"),
    (NVFP4, ignoring(MODELOPT, "exclude_modules", "lm_head", "a*"), "says that it is not quantised"),
    (PACKED, compressed(num_bits=4, type="int", strategy="tensor_group", group_size=16), "says integers"),
    (PACKED, compressed(num_bits=4, type="float", strategy="tensor_group", group_size=32), "says groups of 32"),
    (FP8, compressed(num_bits=4, type="float", strategy="channel"), "says 4 bits"),
    (FP8, compressed(num_bits=8, type="int", strategy="channel"), "says integers"),
    (FP8, ignoring(FP8_SAID, "ignore", "re:a.*"), "says that it is not quantised"),
    (FP8, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "says 4 bits"),
    (gptq_folder()[0], gptq_folder(group_size=32)[1], "says groups of 32"),
    (gptq_folder()[0], gptq_folder(bits=8)[1], "says 8 bits"),
    (gptq_folder()[0], gptq_folder(sym=True)[1], "says that it is symmetric"),
    (gptq_folder()[0], gptq_folder(dynamic={"-:a": {}})[1], "says that it is not quantised"),
    (gptq_folder()[0], gptq_folder(checkpoint_format="gptq_v2")[1], "mislabels"),
]


@pytest.mark.parametrize(("tensors", "config", "says"), CONTRADICTIONS, ids=[c[2] for c in CONTRADICTIONS])
def test_a_config_that_contradicts_the_tensors(
    tmp_path: Path, tensors: Tensors, config: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=rf"a\.weight .*config.json.*{says}"):
        read(tmp_path / "m", tensors, config)


def test_a_config_that_agrees(tmp_path: Path) -> None:
    good: list[tuple[Tensors, dict[str, Any]]] = [
        (NVFP4, MODELOPT),
        (NVFP4, {"text_config": MODELOPT}),
        (NVFP4, ignoring(MODELOPT, "exclude_modules", "lm_head")),
        (PACKED, compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16)),
        (FP8, FP8_SAID),
        (FP8, ignoring(FP8_SAID, "ignore", "lm_head", "re:.*b")),
        (FP8, {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}}),
        gptq_folder(),
        gptq_folder(dynamic={"+:b": {"bits": 8}}),
        gptq_folder(group_size=8, dynamic={"+:a": {"group_size": 16}}),
    ]
    for number, (tensors, config) in enumerate(good):
        assert isinstance(read(tmp_path / str(number), tensors, config), Coded), config


def test_files_beside_config_json(tmp_path: Path) -> None:
    said = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    assert isinstance(read(tmp_path / "a", NVFP4, {}, hf_quant_config=said), Coded)
    assert isinstance(read(tmp_path / "b", NVFP4, MODELOPT, hf_quant_config=said), Coded)
    with pytest.raises(UserError, match="says groups of 32"):
        read(tmp_path / "c", NVFP4, {}, hf_quant_config={"quantization": {"quant_algo": "NVFP4", "group_size": 32}})
    with pytest.raises(UserError, match=r"config\.json says quant_algo 'NVFP4' and hf_quant_config\.json says 'FP8'"):
        opened(tmp_path / "d", NVFP4, MODELOPT, hf_quant_config={"quantization": {"quant_algo": "FP8"}})
    parts, config = gptq_folder()
    alone = {k: v for k, v in config["quantization_config"].items() if k != "quant_method"}
    assert isinstance(read(tmp_path / "e", parts, {}, quantize_config=alone), Coded)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes"}, r"quantised \(bitsandbytes\) in a way that is not read; .*NVFP4.* are"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format marlin-24"),
    ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}}, "rotates the inputs"),
    ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}, "quant_algo NVFP4_SVD"),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo W4A16_AWQ"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv of AWQ"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
    ({"quant_method": "auto-round", "packing_format": "auto_round:nvfp4_e5m3"}, "packing_format auto_round:nvfp4_e5m3"),
]


@pytest.mark.parametrize(("said", "says"), REFUSED, ids=[r[1] for r in REFUSED])
def test_other_quantisations_are_refused(tmp_path: Path, said: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        opened(tmp_path / "m", {"a": torch.rand(2)}, {"quantization_config": said})


def test_a_scale_in_the_wrong_direction_is_seen(tmp_path: Path) -> None:
    """Whoever wrote the file meant a divisor where its name says that it multiplies, or the other way round."""
    inverted = {
        "modelopt": NVFP4 | {"a.weight_scale_2": 1 / NVFP4["a.weight_scale_2"]},
        "packed": PACKED | {"a.weight_global_scale": 1 / PACKED["a.weight_global_scale"]},
        "fp8": FP8 | {"a.weight_scale": 1 / FP8["a.weight_scale"]},
    }
    for name, tensors in inverted.items():
        with pytest.raises(UserError, match=r"a\.weight would hold weights of up to \d.*: its scales are inverted"):
            read(tmp_path / name, tensors, {})


BAD: list[tuple[Tensors, str]] = [
    (NVFP4 | {"a.weight_scale": NVFP4["a.weight_scale"].view(torch.uint8).t().contiguous().view(E4M3)}, r"\(2, 4\)"),
    (NVFP4 | {"a.weight_scale_2": torch.tensor(0.0)}, "one positive number"),
    (NVFP4 | {"a.weight_scale_2": torch.tensor(float("nan"))}, "one positive number"),
    (NVFP4 | {"a.weight_scale": torch.full((4, 2), float("nan")).to(E4M3)}, "block scales that are no numbers"),
    ({k: v for k, v in NVFP4.items() if k != "a.weight_scale_2"}, r"no tensor a\.weight_scale_2"),
    (FP8 | {"a.weight": torch.full((4, 32), float("nan")).to(E4M3)}, "weights that are no numbers"),
    (FP8 | {"a.weight_scale": torch.rand(32, 1)}, "one per row"),
    (FP8 | {"a.weight_scale": torch.full((4, 1), float("inf"))}, "scales that are no finite numbers"),
    (FP8 | {"a.weight_scale_inv": torch.rand(4, 1)}, "both a weight_scale and a weight_scale_inv"),
    ({"a.weight": FP8["a.weight"]}, r"no tensor a\.weight_scale"),
    (gptq_folder()[0] | {"a.scales": torch.rand(24, 4).half()}, "neither GPTQ's nor AWQ's"),
    (gptq_folder()[0] | {"a.qzeros": torch.zeros(4, 2, dtype=torch.int32)}, "neither GPTQ's nor AWQ's"),
]


@pytest.mark.parametrize(("tensors", "says"), BAD, ids=[b[1] for b in BAD])
def test_damaged_matrices(tmp_path: Path, tensors: Tensors, says: str) -> None:
    model = opened(tmp_path / "m", tensors, {})
    with pytest.raises(UserError, match=says) as error:
        model.read("a.weight")
    assert "a.weight" in str(error.value) and str(error.value).count("\n") == 0


def test_one_matrix_that_is_there_in_two_formats(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds a\.weight twice, once as a\.qweight"):
        opened(tmp_path / "m", NVFP4 | gptq_folder()[0], {})


def meant(code: int, scale: int) -> float:
    """By the definition of E2M1: sign, two bits of exponent with a bias of 1, one of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = math.ldexp(1 + mantissa / 2, exponent - 1) if exponent else mantissa / 2
    return math.ldexp(-size if sign else size, scale - 127)


def every_code() -> Coded:
    """Rows of one group, with the codes 0 to 15 twice; every scale whose largest weight is finite in float32."""
    scales = torch.arange(1, 252, dtype=torch.uint8).unsqueeze(1)
    pairs = torch.tensor([2 * j % 16 | (2 * j + 1) % 16 << 4 for j in range(16)], dtype=torch.uint8)
    return Mxfp4Experts().read_matrix("x", (pairs.expand(len(scales), 1, 16).contiguous(), scales), NOTHING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_exact(dtype: torch.dtype) -> None:
    matrix = every_code()
    assert matrix.shape == (251, 32)
    expected = [[meant(column % 16, int(scale)) for column in range(32)] for scale in matrix.scale]
    assert matrix.dequantize(dtype).double().tolist() == expected


def test_transformers_reads_the_same() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(3)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 2), dtype=torch.uint8)
    read = Mxfp4Experts().read("x", blocks, scales)
    assert isinstance(read, QuantisedExperts) and read.shape == (3, 10, 64)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # which turns the matrices round
    assert torch.equal(read.dequantize(), theirs.transpose(1, 2))


def test_chosen_rows_stay_packed() -> None:
    matrix, order = every_code(), torch.tensor([5, 0, 5, 250])
    taken = matrix.take(order)
    assert isinstance(taken, Coded) and taken.codes.dtype == torch.uint8
    assert torch.equal(taken.dequantize(), matrix.dequantize()[order])
    assert torch.equal(QuantisedExperts([matrix, matrix]).take(order).dequantize()[1], taken.dequantize())


def test_only_uint8_blocks_are_a_matrix() -> None:
    kind, name = Mxfp4Experts(), "model.layers.0.mlp.experts.down_proj"
    assert kind.find(f"{name}_blocks", {f"{name}_blocks": "U8"}) == (name, (f"{name}_blocks", f"{name}_scales"))
    assert kind.find(f"{name}_blocks", {f"{name}_blocks": "BF16"}) is None
    assert kind.find(f"{name}_scales", {f"{name}_scales": "U8"}) is None
    assert kind.states({"quant_method": "mxfp4"}) and not kind.states({"quant_method": "fp8"})


EXPERTS = [
    f"model.layers.{layer}.mlp.experts.{expert}.{matrix}"
    for layer in range(20)
    for expert in range(300)
    for matrix in ("gate_proj", "up_proj", "down_proj")
]
WEIGHTS = {"num_bits": 4, "type": "int"}


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("compressed-tensors", {"config_groups": {"a": {"targets": EXPERTS, "weights": WEIGHTS}}}),
        ("modelopt", {"quantized_layers": {key: {"quant_algo": "NVFP4"} for key in EXPERTS}}),
        ("auto-round", {"bits": 8, "extra_config": {key: {"bits": 4} for key in EXPERTS}}),
    ],
)
def test_a_config_that_names_every_expert_is_read_in_a_moment(method: str, said: dict[str, Any]) -> None:
    found = set[int]()

    def read() -> None:
        stated = Stated({"quant_method": method, **said}, "config.json")
        found.update(stated.of(name).bits for name in EXPERTS)

    assert lines_run(read) < 100 * len(EXPERTS) and found == {4}  # as many as there are names, times a look at all


def test_auto_round_takes_the_name_then_its_longest_end_then_a_pattern() -> None:
    extra = {
        "down_proj": {"bits": 2},
        "mlp.down_proj": {"bits": 3},
        "model.layers.1.mlp.down_proj": {"bits": 5},
        r".*\.up_proj": {"bits": 8},
    }
    stated = Stated({"quant_method": "auto-round", "bits": 4, "extra_config": extra}, "config.json")
    names = (
        "layers.1.mlp.down_proj",
        "layers.2.mlp.down_proj",
        "layers.2.x.down_proj",
        "layers.2.up_proj",
        "layers.2.o",
    )
    assert [stated.of(f"model.{name}").bits for name in names] == [5, 3, 2, 8, 4]


def test_gptq_leaves_out_what_a_pattern_with_a_minus_names() -> None:
    dynamic = {r"-:.*\.gate$": {}, r"+:.*\.down_proj": {"bits": 8}}
    stated = Stated({"quant_method": "gptq", "bits": 4, "dynamic": dynamic}, "config.json")
    found = [stated.of(f"model.layers.0.mlp.{name}") for name in ("gate", "down_proj", "up_proj")]
    assert [(each.is_dense, each.bits) for each in found] == [(True, 4), (False, 8), (False, 4)]
