"""Coded weights through all matmuls of a GPU, against what `Coded` says they mean: every format, ragged ends.

On a GPU, or small shapes under TRITON_INTERPRET=1, where codes are taken apart by Triton; the PTX that takes them apart
on a GPU is worked through here one instruction at a time, for every word. The last part compiles launches of published
models for sm_90 and sm_121 and reads the tensor core instruction, shared memory and spills from the result.
"""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.kernels import cuda, reference
from sparkdraft.kernels.cuda.linear import dequantise, few_tokens, planes
from sparkdraft.kernels.cuda.moe import experts
from sparkdraft.kernels.ops import Activation, Norm, Normed, Routing
from sparkdraft.models.gpt_oss import build
from sparkdraft.models.registry import read_config
from sparkdraft.operate.bench.random_model import RandomCheckpoint
from sparkdraft.operate.bench.shapes import TARGET_FILES
from sparkdraft.weights.linear import CannotKeep, DenseExperts, DenseLinear, StackedLinear, WeightTiles
from sparkdraft.weights.loader import Loader
from sparkdraft.weights.plane_layout import STRIP, PlaneLayout, layout_of
from sparkdraft.weights.planes import pack
from sparkdraft.weights.quant.stored import LEVELS, Coded, GroupQuant
from tests.kernels.ahead_of_time import (
    GPUS,
    LIMIT,
    captured_launches,
    check_order,
    compile_launch,
    empty,
    spilled_bytes,
)
from tests.kernels.test_cuda_experts import random_routing
from tests.kernels.test_cuda_few_tokens import (
    EPS,
    KINDS,
    Problem,
    assert_close,
    check_padding,
    check_prepared,
    check_rows_alone,
    exact_norm,
    strided,
)
from tests.kernels.triton_device import DEVICE, DTYPES, INTERPRET, compiled, gpu, randn
from tests.weights.formats_of_codes import FORMATS, fitting, random_coded

pytestmark = pytest.mark.usefixtures("poisoned_empty")

CLAMPED = Activation("clamped_swiglu", 1.5)
SHAPES = [(20, 384)] + [(48, 128), (500, 2880), (2880, 4096), (1000, 12288)] * (not INTERPRET)
CASES = [(name, out, in_) for out, in_ in SHAPES for name in fitting(in_)]


def kept(name: str, out: int, in_: int, bias: Tensor | None = None) -> tuple[planes.PlaneLinear, Tensor]:
    """A matrix in planes, and what it means in float64."""
    part = random_coded(name, out, in_, DEVICE)
    return planes.PlaneLinear(pack([part], torch.device(DEVICE)), bias), part.dequantize().double()


# Few rows


@gpu
@pytest.mark.parametrize("name, out, in_", CASES)
def test_few_tokens(name: str, out: int, in_: int) -> None:
    for dtype in DTYPES[: 1 if INTERPRET else None]:
        bias = randn(out, dtype=dtype)
        matrix, weight = kept(name, out, in_, bias)
        x = strided(7, in_, dtype)
        if not INTERPRET:
            assert_close(matrix.linear(x), x.double() @ weight.t() + bias.double(), dtype)
            normed = Normed(x, Norm(randn(in_, dtype=dtype), EPS))
            expected = exact_norm(normed) @ weight.t() + bias.double()
            assert_close(cuda.norm_linear(normed, matrix), expected, dtype)
        residual, then = randn(7, out, dtype=dtype), Norm(randn(out, dtype=dtype), EPS)
        expected = residual.double() + x.double() @ weight.t() + bias.double()
        left = cuda.add_linear(residual, x, matrix, then)
        assert_close(residual, expected, dtype)
        check_prepared(left)


@gpu
@pytest.mark.parametrize("name", ["mxfp4", "int4 in groups of 128"] if INTERPRET else FORMATS)
def test_gate_and_argmax(name: str) -> None:
    inter, in_, dtype = 13, 256, DTYPES[0]
    normed = Normed(randn(5, in_, dtype=dtype), Norm(randn(in_, dtype=dtype), EPS))
    matrix, weight = kept(name, 2 * inter, in_)
    both = exact_norm(normed) @ weight.t()
    expected = reference.gated(both.float(), CLAMPED).double()
    assert_close(cuda.norm_gated(normed, matrix, CLAMPED), expected, dtype, factors=2)
    logits = cuda.norm_logits(normed, matrix)
    assert_close(logits.to(dtype), both, dtype)
    assert cuda.norm_argmax(normed, matrix).tolist() == logits.argmax(1).tolist()


@gpu
@pytest.mark.parametrize("name", ["mxfp4"] if INTERPRET else FORMATS)
@pytest.mark.parametrize("kind", KINDS[2:4] if INTERPRET else KINDS)
def test_a_row_does_not_depend_on_its_neighbours(kind: str, name: str) -> None:
    dtype = DTYPES[0]
    out = 20 if INTERPRET else 130
    matrix, _ = kept(name, out, 128)
    check_rows_alone(kind, out, 128, dtype, [0, 11], matrix.tiles)


@gpu
@pytest.mark.parametrize("name", ["mxfp4", "int4 in groups of 128"] if INTERPRET else FORMATS)
@pytest.mark.parametrize("kind", KINDS[2:4] if INTERPRET else KINDS)
def test_a_row_does_not_depend_on_its_padding(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, out = DTYPES[1] if INTERPRET else torch.bfloat16, 40 if INTERPRET else 500
    matrix, _ = kept(name, out, 128)
    for rows in (1, 7):
        check_padding(kind, out, 128, dtype, rows, monkeypatch, matrix.tiles)


@gpu
@pytest.mark.parametrize("split", [2, 5])
def test_parts_of_in_are_added_in_order(split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Floats and codes, widths that parts divide and that they do not, down to a part that is empty; a second launch
    finds its counters at 0."""
    for name, out, in_ in (("", 48, 320), ("mxfp4", 37, 416), ("int4 in groups of 64", 48, 768)):
        dtype = DTYPES[0]
        weight = randn(out, in_) / in_**0.5
        matrix: planes.PlaneLinear | DenseLinear = DenseLinear(weight.to(dtype))
        exact = matrix.tiles.codes.double() if not name else None
        if name:
            matrix, exact = kept(name, out, in_)
        step = few_tokens.step_of(matrix.tiles) or 64
        tile = few_tokens.Tile(16, step, 4, 3, split)
        launch = few_tokens.Launch(tile, triton.cdiv(out, 16), 3)
        monkeypatch.setattr(few_tokens, "_launch", lambda *arguments, launch=launch: launch)
        x = randn(5, in_, dtype=dtype)
        first = few_tokens.linear(x, matrix.tiles)
        assert_close(first, x.double() @ exact.t(), dtype)
        assert torch.equal(few_tokens.linear(x, matrix.tiles), first)
        assert not few_tokens.counters(x.device).any()
        left = [few_tokens.add_linear(randn(n, out) * 0, x[:n], matrix.tiles, Norm(randn(out), EPS)) for n in (1, 5)]
        assert torch.equal(left[0].x, left[1].x[:1]) and torch.equal(left[0].squares, left[1].squares[:1])


# More rows


@gpu
@pytest.mark.parametrize("rows", [17, 70, 200])
def test_more_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["mxfp4", "int4 with offsets", "fp8 in blocks"]
    monkeypatch.setattr(planes, "MIDDLE", 100)  # the last are multiplied by slices
    monkeypatch.setattr(planes, "SCRATCH", 64 * 384 * 4)
    for name in names[rows % 3 :: 3] if INTERPRET else names:
        dtype = DTYPES[0]
        bias = randn(70, dtype=dtype)
        matrix, weight = kept(name, 70, 384, bias)
        x, residual = strided(rows, 384, dtype), randn(rows, 70, dtype=dtype)
        expected = x.double() @ weight.t() + bias.double()
        assert_close(matrix.linear(x), expected, dtype)
        wide = matrix.linear_float32(x)
        assert wide.dtype == torch.float32
        assert_close(wide.to(dtype), expected, dtype)
        total = residual.double() + expected
        matrix.add_to(residual, x)
        assert_close(residual, total, dtype)


@gpu
@pytest.mark.parametrize("name, out, in_", CASES)
def test_back_to_floats(name: str, out: int, in_: int) -> None:
    part = random_coded(name, out, in_, DEVICE)
    got = planes.to_floats(pack([part], torch.device(DEVICE)), torch.zeros(out, in_, device=DEVICE))
    torch.testing.assert_close(got, part.dequantize(), rtol=1e-6, atol=1e-7)


@gpu
def test_no_rows() -> None:
    matrix, _ = kept("mxfp4", 40, 64)
    nothing, residual = randn(0, 64), randn(0, 40)
    assert matrix.linear(nothing).shape == matrix.linear_float32(nothing).shape == (0, 40)
    matrix.add_to(residual, nothing)


# Experts


def floats_of(each: planes.PlaneExperts) -> DenseExperts:
    matrices = torch.stack([each.expert(number).rows().dequantize() for number in range(each.count)])
    return DenseExperts(matrices, None if each.bias is None else each.bias.float())


def random_experts(name: str, count: int, out: int, in_: int, dtype: torch.dtype, bias: bool) -> planes.PlaneExperts:
    parts = [[random_coded(name, out // 2, in_, DEVICE) for _ in range(2)] for _ in range(count)]
    own = randn(count, out, dtype=dtype) if bias else None
    made = planes.keep_experts(parts, own, lambda part: part.to(DEVICE, dtype))
    assert isinstance(made, planes.PlaneExperts) and made.nbytes < count * out * in_ * 2
    for number, expert in enumerate(parts):
        expected = torch.cat([part.dequantize() for part in expert])
        assert torch.equal(made.expert(number).rows().dequantize(), expected)
    return made


@gpu
@pytest.mark.parametrize("rows", [1, 5, 40] + [16, 100] * (not INTERPRET))
@pytest.mark.parametrize("name", ["mxfp4"] + ["nvfp4", "int4 in groups of 32"] * (not INTERPRET))
def test_experts(name: str, rows: int) -> None:
    dtype, hidden, inter = DTYPES[0], 96, 32
    gate_up = random_experts(name, 8, 2 * inter, hidden, dtype, bias=name == "mxfp4")
    down = random_experts(name, 8, hidden, inter, dtype, bias=name == "mxfp4")
    norm, then = Norm(torch.rand(hidden, device=DEVICE) + 0.5, EPS), Norm(randn(hidden, dtype=dtype), EPS)
    x, chosen = strided(rows, hidden, dtype), random_routing(rows, 8, 2)
    exact = reference.norm_experts(Normed(x.float(), norm), chosen, floats_of(gate_up), floats_of(down), CLAMPED)
    got = cuda.norm_experts(Normed(x, norm), chosen, gate_up, down, CLAMPED)
    assert_close(got, exact.double(), dtype, factors=2)
    total = x.double() + exact.double()
    left = cuda.add_experts(Normed(x, norm), chosen, gate_up, down, CLAMPED, then)
    assert_close(x, total, dtype, factors=2)
    if left.scaled is not None:
        check_prepared(left)


@gpu
def test_a_row_of_experts_does_not_depend_on_its_neighbours() -> None:
    dtype, hidden, inter = DTYPES[1], 96, 32
    gate_up = random_experts("mxfp4", 8, 2 * inter, hidden, dtype, True)
    down = random_experts("mxfp4", 8, hidden, inter, dtype, True)
    norm, then = (Norm(randn(hidden, dtype=dtype), EPS) for _ in range(2))
    x, chosen = randn(16, hidden, dtype=dtype), random_routing(16, 8, 2)

    def run(first: int, last: int) -> tuple[Tensor, ...]:
        part = Routing(chosen.ids[first:last].contiguous(), chosen.weights[first:last].contiguous())
        scaled, squares = few_tokens.prepare(Normed(x[first:last], norm))
        normed = Normed(x[first:last].clone(), norm, scaled, squares)
        left = cuda.add_experts(normed, part, gate_up, down, CLAMPED, then)
        return left.x, left.scaled, left.squares

    whole = run(0, 16)
    assert experts.one_by_one(1, 2, 8) and not experts.one_by_one(2, 2, 8)
    for first, last in ((9, 10), (3, 5)):
        for a, b in zip(run(first, last), whole, strict=True):
            assert torch.equal(a, b[first:last]), (first, last)


# How matrices are kept


def to_floats(part: Tensor | Coded | GroupQuant) -> Tensor:
    return (part if isinstance(part, Tensor) else part.dequantize()).to(DEVICE, DTYPES[0])


@gpu
def test_parts_of_one_format_are_one_matrix_and_others_stay_apart() -> None:
    dtype = DTYPES[0]
    parts = [random_coded("nvfp4", out, 128, DEVICE) for out in (48, 16, 16)]
    bias = randn(80, dtype=dtype)
    one = cuda.keep_matrix(parts, bias, to_floats)
    assert isinstance(one, planes.PlaneLinear) and one.tiles.bias is bias
    mixed = [parts[0], random_coded("mxfp4", 16, 128, DEVICE), randn(16, 128)]
    several = cuda.keep_matrix(mixed, bias, to_floats)
    assert isinstance(several, StackedLinear) and [p.tiles.format for p in several.parts] == [
        "e2m1_e5m3_16", "e2m1_e8m0_32", f"{8 * dtype.itemsize}bit",
    ]  # fmt: skip
    x = randn(5, 128, dtype=dtype)
    for matrix, stored in ((one, parts), (several, mixed)):
        weight = torch.cat(
            [to_floats(part).double() if isinstance(part, Tensor) else part.dequantize().double() for part in stored]
        )
        assert_close(matrix.linear(x), x.double() @ weight.t() + bias.double(), dtype)
        normed = Normed(x, Norm(torch.ones(128, device=DEVICE), EPS))
        assert_close(cuda.norm_linear(normed, matrix), exact_norm(normed) @ weight.t() + bias.double(), dtype)
    assert isinstance(cuda.keep_matrix([randn(8, 128)], None, to_floats), DenseLinear)


@gpu
def test_a_row_of_a_stacked_matrix_does_not_depend_on_its_neighbours() -> None:
    dtype = DTYPES[0]
    matrix = cuda.keep_matrix([random_coded("mxfp4", 48, 128, DEVICE), randn(16, 128)], None, to_floats)
    x, norm = randn(16, 128, dtype=dtype), Norm(torch.ones(128, device=DEVICE), EPS)
    whole = cuda.norm_linear(Normed(x, norm), matrix)
    for row in (0, 7, 15):
        assert torch.equal(cuda.norm_linear(Normed(x[row : row + 1], norm), matrix)[0], whole[row])


@gpu
def test_integers_of_gguf_files_stay_integers() -> None:
    torch.manual_seed(1)
    scale = torch.rand(40, 4).half() / 10
    q4 = torch.randint(256, (40, 4, 16), dtype=torch.uint8)
    eight = GroupQuant(8, torch.randint(-128, 128, (40, 4, 32), dtype=torch.int8), scale, None)
    for part, bits, offset in (
        (GroupQuant(4, q4, scale, scale * -8), 4, ""),
        (GroupQuant(4, q4, scale, torch.randn(40, 4).half()), 4, "f32"),
        (eight, 8, ""),
    ):
        matrix = cuda.keep_matrix([part], None, to_floats)
        assert isinstance(matrix, planes.PlaneLinear)
        assert (matrix.planes.layout.bits, matrix.planes.layout.offset) == (bits, offset)
        torch.testing.assert_close(matrix.rows().dequantize().cpu(), part.dequantize(), rtol=1e-6, atol=1e-6)


@gpu
def test_what_cannot_be_kept_says_why() -> None:
    class Strange:
        shape = (8, 128)

        def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(8, 128, dtype=dtype)

    with pytest.raises(CannotKeep, match="Strange has no form on a GPU"):
        cuda.keep_matrix([Strange()], None, to_floats)
    one, other = random_coded("mxfp4", 8, 128, DEVICE), random_coded("nvfp4", 8, 128, DEVICE)
    with pytest.raises(CannotKeep, match=r"experts have different formats .e2m1_e8m0_32 and e2m1_e5m3_16"):
        cuda.keep_experts([[one], [other]], None, to_floats)
    with pytest.raises(CannotKeep, match="some of its experts are floats"):
        cuda.keep_experts([[one], [randn(8, 128)]], None, to_floats)
    assert isinstance(cuda.keep_experts([[randn(8, 128)]], None, to_floats), DenseExperts)


def test_a_table_of_codes_gives_rows_of_the_models_type_and_makes_a_head() -> None:
    for part in (random_coded("int8 in groups of 32", 40, 128), GroupQuant.from_float(torch.randn(40, 128))):
        table = cuda.keep_table(part, lambda p: p.to(torch.float16))
        ids = torch.tensor([3, 39, 3], dtype=torch.int32)
        rows = cuda.embed(ids, table)
        assert rows.dtype == torch.float16 and torch.equal(rows, part.dequantize(torch.float16)[ids.long()])
        head = cuda.keep_matrix([table], None, lambda p: p.to(torch.float16))
        assert isinstance(head, planes.PlaneLinear)
        assert torch.equal(head.rows().dequantize(), part.dequantize())
    floats = torch.randn(4, 8)
    assert cuda.keep_table(floats, lambda p: p) is floats


def test_a_gpus_loader_keeps_published_experts_as_codes() -> None:
    """gpt-oss's own names and formats, in a small size; nothing is launched."""
    config = TARGET_FILES["gpt-oss-20b"] | {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
    config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2], "vocab_size": 100}
    load = Loader(RandomCheckpoint(config, "cpu"), torch.device("cpu"), torch.float32, cuda)
    model = build(read_config(config), load, cuda, 128)
    for layer in model.layers:
        router, gate_up, down = layer.matrices[-3:]
        assert isinstance(router, DenseLinear) and router.tiles.layout is None
        assert isinstance(gate_up, planes.PlaneExperts) and gate_up.count == 4 and gate_up.bias.shape == (4, 192)
        assert gate_up.tiles.format == down.tiles.format == "e2m1_e8m0_32"
    assert not load.fallbacks


# The PTX


def bf16(bits: Tensor) -> Tensor:  # int64 of 16 bits -> float64
    return bits.to(torch.int32).bitwise_left_shift(16).view(torch.float32).double()


def run_ptx(text: str, word: Tensor, scale: Tensor) -> Tensor:
    """What a decoder leaves in its low half, for words [n] in both halves (int64) and the bits of a scale."""
    registers = {"$1": word | (word << 16), "$2": scale | (scale << 16)}

    def value(name: str) -> Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        halves = []
        for shift in (0, 16):
            x, y, z = (bf16((each >> shift) & 0xFFFF) for each in (a, b, c))
            exact = x * y + z
            rounded = exact.float()  # exact, as is the next: else the test below would see it
            assert torch.equal(rounded.double(), exact), "a product has too many bits"
            halves.append(rounded.view(torch.int32).long().bitwise_and(0xFFFFFFFF) >> 16)
            assert torch.equal(bf16(halves[-1]), exact), "rounded"
        return halves[0] | (halves[1] << 16)

    def lop3(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
        assert int(table) == 0xEA
        return (a & b) | c

    def prmt(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        both, out = a | (b << 32), torch.zeros_like(c)
        for byte in range(4):
            select = (c >> (4 * byte)) & 15
            assert not (select & 8).any(), "a sign would be spread"
            out |= ((both >> (8 * select)) & 255) << (8 * byte)
        return out

    operations = {
        "lop3.b32": lop3, "mov.b32": lambda a: a, "not.b32": lambda a: ~a & 0xFFFFFFFF, "and.b32": lambda a, b: a & b,
        "or.b32": lambda a, b: a | b, "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF, "shr.u32": lambda a, b: a >> b,
        "mul.lo.u32": lambda a, b: (a * b) & 0xFFFFFFFF, "fma.rn.bf16x2": fma, "prmt.b32": prmt,
    }  # fmt: skip
    body = text.removeprefix("{ .reg .b32 a, b, c, d, z; ").removesuffix(" }")
    for line in body.split(";")[:-1]:
        name, rest = line.strip().split(" ", 1)
        target, *operands = [part.strip() for part in rest.split(",")]
        registers[target] = operations[name](*map(value, operands)).expand_as(word).clone()
    result = registers["$0"]
    assert torch.equal(result & 0xFFFF, result >> 16), "both halves hold the same word"
    return result & 0xFFFF


@pytest.mark.parametrize("levels", LEVELS)
def test_ptx_of_every_word(levels: str) -> None:
    """Words of a random matrix hold every code in every plane; each is decoded to its very level."""
    torch.manual_seed(0)
    bits, width = LEVELS[levels].bits, 4096
    codes = torch.randint(256, (8, width * bits // 8), dtype=torch.uint8)
    if levels == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 1
    part = Coded(levels, codes, width, None, None, torch.ones(8))
    made = pack([part], torch.device("cpu"))
    layout, exact = made.layout, part.dequantize().double()
    words = made.codes[0, :, :8].transpose(0, 1).long().bitwise_and(0xFFFF)
    by_plane = exact.view(8, layout.tiles, -1, layout.plane).unbind(2)
    for number, expected in enumerate(by_plane):
        for exponent, mantissa in ((0, 0), (-9, 0), (5, 0x60)) if levels == "e2m1" else ((0, 0),):
            scale = ((exponent + 110 + 127) << 7) | mantissa  # of bfloat16, times SCALED
            got = bf16(run_ptx(dequantise.PTX[levels][number], words.flatten(), torch.tensor(scale)))
            factor = 2.0**exponent * (1 + mantissa / 128) / 2**16 if levels == "e2m1" else 1.0
            assert torch.equal(got, expected.flatten() * factor), (number, exponent)


# Compiled ahead of time


NAMED = {  # format -> out, in and what runs on it: gpt-oss-20b, Qwen3-8B, qwen3-30b-a3b
    "mxfp4": [(5120, 2880, "norm_linear"), (2880, 4096, "add_linear")],
    "nvfp4": [(24576, 4096, "norm_gated"), (4096, 12288, "add_linear")],
    "int4": [(24576, 4096, "norm_gated"), (4096, 4096, "add_linear")],
    "int4 with offsets": [(6144, 4096, "norm_linear")],
    "fp8": [(24576, 4096, "norm_gated"), (151936, 4096, "norm_argmax")],
    "fp8 in blocks": [(5120, 2048, "norm_linear")],
    "int8": [(2048, 4096, "add_linear")],
    "iq4_nl": [(6144, 4096, "norm_linear")],
}
FORMS = {
    "mxfp4": ("e2m1", 4, 32, "e8m0", ""), "nvfp4": ("e2m1", 4, 16, "e5m3", ""), "int4": ("int4", 4, 128, "f16", ""),
    "int4 with offsets": ("int4", 4, 128, "f16", "f16"), "fp8": ("e4m3", 8, 0, "", ""),
    "fp8 in blocks": ("e4m3", 8, 128, "f32", ""), "int8": ("int8", 8, 32, "f16", ""),
    "iq4_nl": ("iq4_nl", 4, 32, "f16", ""),
}  # fmt: skip


def tiles_without_memory(name: str, out: int, in_: int) -> WeightTiles:
    levels, bits, group, scale, offset = FORMS[name]
    layout: PlaneLayout = layout_of(levels, bits, in_, group, scale, offset)
    strips = -(-out // STRIP)
    words = [
        empty(strips, layout.group_words(kind), STRIP, dtype=torch.int32) if kind else None for kind in (scale, offset)
    ]
    codes = empty(strips, layout.tiles, STRIP, layout.plane, dtype=torch.int16)
    row_scale = empty(out, dtype=torch.float32) if name in ("nvfp4", "fp8") else None
    return WeightTiles(codes, layout, *words, row_scale, lines=out)


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("name", FORMS)
def test_choices_fill_the_gpu_and_keep_to_one_instruction(
    name: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # tensors without memory want the real torch.empty
    target = GPUS[capability]
    for out, in_ in ((5120, 2880), (2304, 4096), (128, 2048), (48, 256), (201088, 2880)):  # that nobody has measured
        tiles = tiles_without_memory(name, out, in_ if name in ("mxfp4", "nvfp4") else -(-in_ // 128) * 128)
        launch = few_tokens._launch(tiles.shape, tiles.format, tiles.line_bits, 2, 1, target, few_tokens.step_of(tiles))
        split, programs = launch.tile.split, launch.programs
        assert programs * launch.tile.block_n >= out > (programs - 1) * launch.tile.block_n
        assert 1 <= split <= 8 and launch.stages >= 2 and launch.tile.warps == 2, launch
        assert split == 1 or programs * split <= 4 * target.sms
        assert split == 8 or (split + 1) * programs > 4 * target.sms or (split + 1) * 4 > in_ // tiles.layout.tile
        for kernel, size in (*((few, 8) for few in experts.FEW), (experts.GATE_UP, 16), (experts.DOWN, 64)):
            experts._launch(  # asserts that few rows run mma.sync
                kernel, tiles.shape, size, 32, tiles.format, tiles.line_bits, 2, target, few_tokens.step_of(tiles)
            )


def planes_step(name: str, kind: str, out: int, in_: int, rows: int = 16) -> None:
    """One function of few_tokens.py on coded weights, on tensors without memory."""
    tiles = tiles_without_memory(name, out, in_)
    problem = Problem(tiles, Norm(empty(in_), EPS), empty(in_, 64), Norm(empty(out), EPS), empty(16, out))
    if rows <= few_tokens.MOST_TOKENS:
        problem.run(kind, empty(16, in_)[:rows], slice(rows), written=False)
    else:
        few_tokens.wide_linear(empty(rows, in_), tiles, empty(rows, out))


def floats_step(name: str = "mxfp4") -> None:
    tiles = tiles_without_memory(name, 4096, 2880)
    planes.to_floats(
        planes.Planes(tiles.layout, 4096, tiles.codes, tiles.scale, tiles.offset, tiles.row_scale), empty(4096, 2880)
    )


class ExpertsWithoutMemory(planes.PlaneExperts):
    def __init__(self, name: str, count: int, out: int, in_: int, bias: bool) -> None:
        self.tiles, self.count = tiles_without_memory(name, count * out, in_), count
        self.bias = empty(count, out) if bias else None


EXPERTS = {  # format, experts, choices, hidden, inter, biases
    "gpt-oss-20b": ("mxfp4", 32, 4, 2880, 2880, True),
    "qwen3-30b-a3b": ("nvfp4", 128, 8, 2048, 768, False),
}


def coded_experts_step(name: str, rows: int) -> None:
    form, count, top_k, hidden, inter, bias = EXPERTS[name]
    normed = Normed(empty(rows, hidden), Norm(empty(hidden), EPS))
    chosen = Routing(empty(rows, top_k, dtype=torch.int32), empty(rows, top_k, dtype=torch.float32))
    gate_up = ExpertsWithoutMemory(form, count, 2 * inter, hidden, bias)
    down = ExpertsWithoutMemory(form, count, hidden, inter, bias)
    cuda.add_experts(normed, chosen, gate_up, down, Activation("clamped_swiglu", 7.0), normed.norm)


def check_compiled(capability: int, launch, few: bool) -> str:
    made, signature = compile_launch(capability, launch)
    check_order(launch.kernel, signature, made.asm["ptx"])
    ptx, shared = made.asm["ptx"], made.metadata.shared
    used = set(re.findall(r"wgmma\.mma_async\S+|mma\.sync\S+", ptx))
    spills = spilled_bytes(made)
    print(f"sm_{capability} {launch.kernel.__name__} {launch.options}: {shared} bytes, {used}, {spills} bytes spilled")
    assert shared <= LIMIT[capability] and len(used) == 1 and "bf16" in next(iter(used)), used
    assert not spills
    assert next(iter(used)).startswith("mma.sync") or not few, used
    return next(iter(used))


@compiled
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("name", NAMED)
def test_named_shapes_compile(name: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for out, in_, kind in NAMED[name]:
        for rows in (1, 16):
            launches = captured_launches(monkeypatch, capability, partial(planes_step, name, kind, out, in_, rows))
            matmuls = [launch for launch in launches if "LEVELS" in launch.options]
            assert len(matmuls) == 1 and matmuls[0].options["PACKED"]
            options = matmuls[0].options
            is_wgmma = capability == 90 and options["BLOCK_N"] >= 64 and options["num_warps"] % 4 == 0
            assert options["ROWS"] == (16 if is_wgmma else max(rows, 8))
            used = check_compiled(capability, matmuls[0], few=not is_wgmma)
            assert used.startswith("wgmma") == is_wgmma, "whatever the number of rows"


@compiled
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("rows", [32, 64, 256])
def test_more_rows_compile(rows: int, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, out, in_ in (("mxfp4", 5120, 2880), ("int4", 24576, 4096)):
        step = partial(planes_step, name, "linear", out, in_, rows)
        for launch in captured_launches(monkeypatch, capability, step):
            check_compiled(capability, launch, few=False)


@compiled
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_compile(name: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    few = set()
    for rows in (1, 16, 64, 512):
        for launch in captured_launches(monkeypatch, capability, partial(coded_experts_step, name, rows)):
            if "LEVELS" in launch.options:
                used = check_compiled(capability, launch, few=rows <= 16)
                few |= {used} if rows <= 16 else set()
    assert len(few) == 1, few
