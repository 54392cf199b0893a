"""The loader: each matrix in its own format, every tensor in its place, and parts of a file that others read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sparkdraft.core import Fallback, UserError
from sparkdraft.kernels import native, reference
from sparkdraft.kernels.ops import Ops
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.linear import DenseLinear, StackedLinear, keep_float_experts, keep_floats
from sparkdraft.weights.loader import Loader
from sparkdraft.weights.quant import formats
from sparkdraft.weights.quant.base import Size, Unread, WeightFormat
from sparkdraft.weights.quant.compressed_tensors import Int8
from sparkdraft.weights.quant.stated import NOTHING, Said
from sparkdraft.weights.quant.stored import GroupQuant, Stored, as_float, take_rows
from tests.kernels.integers import group_linear

CPU, FLOAT = torch.device("cpu"), torch.float32
needs_native = pytest.mark.skipif(native.unavailable_reason() is not None, reason="no C++ compiler")


@dataclass(frozen=True)
class Nibbles:
    """A second format, of these tests alone: two 4-bit codes per byte, one scale per row."""

    codes: Tensor  # uint8 [out, in / 2]
    scale: Tensor  # float32 [out]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1).float() - 8
        return (codes * self.scale.unsqueeze(1)).to(dtype)

    def take(self, ids: Tensor) -> Nibbles:
        return Nibbles(self.codes[ids], self.scale[ids])


class NibbleFormat(WeightFormat):
    name = "nibbles"
    methods = ("nibbles",)

    def find(self, tensor: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        if not tensor.endswith(".weight_packed") or dtypes[tensor] != "U8":
            return None
        stem = tensor.removesuffix("_packed")
        return stem, (tensor, f"{stem}_scale")

    def read_matrix(self, what: str, tensors: Sequence[Tensor], said: Said) -> Nibbles:
        return Nibbles(*tensors)

    def size(self, *tensors: Unread, said: Said = NOTHING) -> Size:
        out, half = tensors[0].shape
        return Size(out, 2 * half, None)


@pytest.fixture
def two_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "FORMATS", (Int8(), NibbleFormat()))


def loader(path: Path, tensors: dict[str, Tensor], ops: Ops = reference, config: str = "{}") -> Loader:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config)
    save_file(tensors, path / "model.safetensors")
    return Loader(open_checkpoint(str(path)), CPU, FLOAT, ops)


def int8(out: int, width: int, name: str) -> dict[str, Tensor]:
    group = GroupQuant.from_float(torch.randn(out, width))
    return {f"{name}.weight": group.q.flatten(1), f"{name}.weight_scale": group.scale}


def nibbles(out: int, width: int, name: str) -> dict[str, Tensor]:
    codes = torch.randint(0, 256, (out, width // 2), dtype=torch.uint8)
    return {f"{name}.weight_packed": codes, f"{name}.weight_scale": torch.rand(out)}


ROWS = {"q": 8, "k": 4, "v": 4}


def mixed() -> dict[str, Tensor]:
    return int8(8, 64, "q") | {"k.weight": torch.randn(4, 64, dtype=torch.bfloat16)} | nibbles(4, 64, "v")


@pytest.mark.parametrize("ops", [reference, pytest.param(native, marks=needs_native)], ids=["reference", "native"])
@pytest.mark.usefixtures("two_formats")
def test_one_stacked_matrix_of_three_formats(tmp_path: Path, ops: Ops) -> None:
    torch.manual_seed(0)  # how far rounding goes is a matter of luck
    load = loader(tmp_path / "m", mixed(), ops, '{"quantization_config": {"quant_method": "nibbles"}}')
    parts = [as_float(load.source.read(f"{name}.weight")) for name in ROWS]
    x, matrix = torch.randn(3, 64), load.linear(ROWS, 64)
    load.finish()
    exact = ops is reference
    torch.testing.assert_close(matrix.linear(x), x @ torch.cat(parts).t(), rtol=1e-5, atol=1e-4 if exact else 0.5)
    assert isinstance(matrix.rows(), Tensor) == exact and (matrix.tiles is not None) == exact
    assert [note.name for note in load.fallbacks] == ([] if exact else ["1 quantised matrix is rounded to 8 bits"])


def test_parts_of_floats_are_copied_to_their_place_and_made_nowhere_else() -> None:
    """Of several types, one of them turned around."""
    parts = [torch.randn(n, 6, dtype=torch.float16) for n in (3, 1)] + [torch.randn(6, 2).t()]
    made: list[int] = []

    def floats(part: Stored) -> Tensor:
        made.append(part.shape[0])
        return as_float(part, torch.float32)

    assert torch.equal(keep_floats(parts, None, floats).rows(), torch.cat([part.float() for part in parts]))
    experts = keep_float_experts([parts, parts[::-1]], None, floats)
    assert torch.equal(experts.expert(1).rows(), torch.cat([part.float() for part in parts[::-1]]))
    assert made == [0, 2, 0, 2, 2], "no rows, for the type and the device alone, and what lies turned around"


@needs_native
def test_four_and_eight_bits_in_one_matrix_stay_what_they_are() -> None:
    four = GroupQuant(4, torch.randint(0, 256, (8, 2, 16), dtype=torch.uint8), torch.rand(8, 2).half(), None)
    eight = GroupQuant.from_float(torch.randn(4, 64))
    kept = native.keep_matrix([four, eight], None, as_float)
    assert isinstance(kept, StackedLinear) and [part.nbytes for part in kept.parts] != [kept.parts[0].nbytes] * 2
    x = torch.randn(2, 64)
    expected = [group_linear(x, g.q, g.scale, g.offset) for g in (four, eight)]
    torch.testing.assert_close(kept.linear(x), torch.cat(expected, 1), rtol=2e-5, atol=2e-5)


@needs_native
def test_what_kernels_have_no_form_for_is_kept_as_floats_with_a_note(tmp_path: Path) -> None:
    weight, bias = torch.randn(8, 40), torch.randn(8)
    load = loader(tmp_path / "m", {"a.weight": weight, "a.bias": bias}, native)
    kept = load.linear({"a": 8}, 40, bias=True)
    reason = "a: width 40 is no multiple of 32, kept in float32"
    assert isinstance(kept, native.FloatLinear) and load.fallbacks == [
        Fallback("a float32 matrix among quantised ones", reason)
    ]
    torch.testing.assert_close(kept.linear(torch.eye(40)), weight.t() + bias)
    assert kept.rows() is kept.weight and torch.equal(kept.rows(torch.tensor([3, 1])), weight[[3, 1]])


@needs_native
def test_experts_that_kernels_have_no_form_for_are_kept_as_floats_with_a_note(tmp_path: Path) -> None:
    weights = torch.randn(2, 8, 40)
    single = {f"mlp.experts.{e}.up_proj.weight": weights[e].clone() for e in range(2)}
    for tensors, name in ((single, "mlp.experts"), ({"mlp.experts.up_proj": weights}, "mlp.experts.up_proj")):
        load = loader(tmp_path / name, tensors, native)
        kept = load.experts("mlp.experts", {"up_proj": 8}, 40, 2, "up_proj")
        reason = f"{name}: width 40 is no multiple of 32, kept in float32"
        assert load.fallbacks == [Fallback("a float32 matrix among quantised ones", reason)]
        assert kept.count == 2 and kept.nbytes == weights.nbytes
        torch.testing.assert_close(kept.expert(1).linear(torch.eye(40)), weights[1].t())


@needs_native
def test_a_router_stays_as_precise_as_its_file(tmp_path: Path) -> None:
    weight, x = torch.randn(8, 64), torch.randn(5, 64)
    load = loader(tmp_path / "m", {"gate.weight": weight}, native)
    torch.testing.assert_close(load.float_linear("gate", 8, 64).linear(x), x @ weight.t(), rtol=1e-5, atol=1e-5)
    assert not load.fallbacks


@pytest.mark.usefixtures("two_formats")
def test_a_matrix_that_is_there_twice_is_refused_by_name(tmp_path: Path) -> None:
    tensors = nibbles(4, 64, "v") | {"v.weight": torch.randn(4, 64)}
    with pytest.raises(UserError, match=r"holds v\.weight twice, once as v\.weight_packed"):
        loader(tmp_path / "m", tensors)


def test_tensors_of_a_format_that_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"v\.weight is missing"):
        loader(tmp_path / "packed", {"v.weight_codes": torch.zeros(4, 64).char()}).linear({"v": 4}, 64)
    for dtype in (torch.uint8, torch.float8_e5m2, torch.int32):
        load = loader(tmp_path / "bytes", {"v.weight": torch.zeros(4, 64).to(dtype), "v.weight_scale": torch.rand(4)})
        with pytest.raises(UserError, match=r"v\.weight is stored as \w+, and the tensors beside it make no format"):
            load.linear({"v": 4}, 64)


def test_tensors_that_belong_to_nobody_are_named(tmp_path: Path) -> None:
    load = loader(tmp_path / "m", int8(8, 64, "a") | {"a.weight_what": torch.zeros(8, 2, dtype=torch.int8)})
    load.linear({"a": 8}, 64)
    with pytest.raises(UserError, match=r"1 tensors belong to no part of the model: a\.weight_what"):
        load.finish()


def test_a_prefix_may_belong_to_somebody_else(tmp_path: Path) -> None:
    """A target's file may hold a drafter: each reads its own part, and together they account for all of it."""
    tensors = {"a.weight": torch.randn(8, 64), "mtp.fc.weight": torch.randn(8, 64), "mtp.norm.weight": torch.randn(8)}
    target = loader(tmp_path / "m", tensors)
    target.linear({"a": 8}, 64)
    with pytest.raises(
        UserError, match=r"2 tensors belong to no part of the model: mtp\.fc\.weight, mtp\.norm\.weight"
    ):
        target.finish()
    target.leave("mtp.")
    target.finish()
    drafter = Loader(target.source, CPU, FLOAT, reference, under="mtp.")
    drafter.linear({"mtp.fc": 8}, 64)
    with pytest.raises(UserError, match=r"1 tensors belong to no part of the model: mtp\.norm\.weight"):
        drafter.finish()
    drafter.vector("mtp.norm.weight", 8)
    drafter.finish()
    with pytest.raises(UserError, match=r"a\.weight is missing"):
        drafter.linear({"a": 8}, 64)


def test_rows_of_a_matrix() -> None:
    weight, ids = torch.randn(8, 64), torch.tensor([5, 0, 5])
    dense = DenseLinear(weight)
    assert dense.rows() is weight and torch.equal(dense.rows(ids), weight[ids])
    assert StackedLinear([dense, dense]).rows(ids) is None, "no form holds rows of several formats"
    group = GroupQuant.from_float(weight)
    taken = take_rows(group, ids)
    assert isinstance(taken, GroupQuant) and torch.equal(taken.dequantize(), group.dequantize()[ids])


def test_biases_of_zeros_that_a_tool_has_added_are_left(tmp_path: Path) -> None:
    empty = loader(tmp_path / "a", int8(8, 64, "a") | {"a.bias": torch.zeros(8)})
    empty.linear({"a": 8}, 64)
    empty.finish()
    for number, tensors in enumerate(
        (int8(8, 64, "a") | {"a.bias": torch.ones(8)}, {"a.weight": torch.rand(8, 64), "a.bias": torch.zeros(8)})
    ):
        load = loader(tmp_path / str(number), tensors)
        load.linear({"a": 8}, 64)
        with pytest.raises(UserError, match=r"1 tensors belong to no part of the model: a\.bias"):
            load.finish()


@needs_native
def test_a_quantised_embedding_that_is_rounded_again_is_said(tmp_path: Path) -> None:
    codes, scale = torch.randint(0, 256, (16, 32), dtype=torch.uint8), torch.full((16, 2), 120, dtype=torch.uint8)
    load = loader(tmp_path / "a", {"e.weight_packed": codes, "e.weight_scale": scale}, native)
    load.embedding("e", 16, 64)
    load.finish()
    assert [note.name for note in load.fallbacks] == ["1 quantised matrix is rounded to 8 bits"]
    exact = loader(tmp_path / "b", int8(16, 64, "e"), native)
    exact.embedding("e", 16, 64)
    exact.finish()
    assert not exact.fallbacks


@pytest.mark.parametrize("kernels", ["reference", "cuda"])
def test_all_floats_if_asked_whatever_the_kernels_could_keep(kernels: str, smollm2_path: Path) -> None:
    """A target in training: the loss reads its embedding and its head, and many rows are faster over floats."""
    if kernels == "cuda":
        pytest.importorskip("triton")
    ops, found = import_module(f"sparkdraft.kernels.{kernels}"), {}
    for all_floats in (False, True):
        loader = Loader(open_checkpoint("smollm2"), CPU, torch.bfloat16, ops, all_floats=all_floats)
        table = loader.embedding("model.embed_tokens", 49152, 576)
        found[all_floats] = table, loader.tied_head(table), loader.linear({"model.layers.0.mlp.down_proj": 576}, 1536)
    table, head, matrix = found[True]
    assert isinstance(table, Tensor) and isinstance(head, DenseLinear) and isinstance(matrix, DenseLinear)
    assert isinstance(found[False][2], DenseLinear) == (kernels == "reference"), "else this would show nothing"
