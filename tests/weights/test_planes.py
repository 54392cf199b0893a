"""Matrices in planes: turned back they are what they were packed from, in every format and with ragged ends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparkdraft.weights import planes
from sparkdraft.weights.linear import CannotKeep
from sparkdraft.weights.plane_layout import SIZES, layout_of
from sparkdraft.weights.planes import empty, fill, pack, plan_layout
from sparkdraft.weights.quant.stored import Coded
from tests.weights.formats_of_codes import FORMATS, fitting, random_coded

CPU = torch.device("cpu")
CASES = [(name, out, width) for width in (32, 128, 384, 640, 2880) for name in fitting(width) for out in (1, 37)]


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name, out, width", CASES)
def test_what_is_packed_is_found_again(name: str, out: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes, "PIECE", 5 * width)  # pieces of five rows
    part = random_coded(name, out, width)
    made = pack([part], CPU)
    back = made.coded()
    assert made.shape == part.shape == back.shape
    assert torch.equal(back.dequantize(), part.dequantize()), "every weight to the bit"
    assert same(back.codes, part.codes) and same(back.offset, part.offset)
    if part.group < width:
        assert same(back.scale, part.scale) and same(back.row_scale, part.row_scale) and back.group == part.group
    ids = torch.tensor([out - 1, 0, out // 2])
    assert torch.equal(made.take(ids).coded().dequantize(), part.dequantize()[ids])


def test_a_tall_matrix_of_a_published_head() -> None:
    part = random_coded("mxfp4", 201088, 32)
    assert torch.equal(pack([part], CPU).coded().dequantize(), part.dequantize())


@pytest.mark.parametrize("name", FORMATS)
def test_parts_are_stacked_with_their_own_scales(name: str) -> None:
    parts = [random_coded(name, out, 256) for out in (3, 70, 16)]
    made = pack(parts, CPU)
    assert torch.equal(made.coded().dequantize(), torch.cat([part.dequantize() for part in parts]))
    room = empty(made.layout, 100, CPU, made.row_scale is not None)
    fill(room, parts, first=11)
    assert torch.equal(room.part(11, 100).coded().dequantize(), made.coded().dequantize())
    assert torch.equal(room.part(16, 100).coded().dequantize(), made.coded().dequantize()[5:])
    assert room.part(16, 100).codes.data_ptr() == room.codes[1].data_ptr(), "without a copy"


def test_a_part_without_a_row_scale_beside_one_with_it() -> None:
    one = random_coded("int4 in groups of 128", 5, 256)
    other = Coded(one.levels, one.codes, one.group, one.scale, None, torch.rand(5) + 0.5)
    made = pack([one, other], CPU)
    assert torch.equal(made.coded().dequantize(), torch.cat([one.dequantize(), other.dequantize()]))


def test_bytes_are_those_of_the_file_and_a_little_filling() -> None:
    for name, per_weight in (("mxfp4", 17 / 32), ("nvfp4", 9 / 16), ("int4 in groups of 128", 66 / 128)):
        for width in (2048, 4096, 12288) + (2880,) * (name == "mxfp4"):
            made = pack([random_coded(name, 10, width)], CPU)  # a strip of 16 rows
            rows = 0 if made.row_scale is None else made.row_scale.nbytes
            assert made.nbytes - rows == 16 * made.layout.row_bytes
            assert per_weight <= made.layout.row_bytes / width <= 1.03 * per_weight + 4 / width


def test_every_scale_of_e4m3_is_kept() -> None:
    """Zero, the smallest numbers, which have fewer bits, and the largest."""
    scale = torch.arange(127, dtype=torch.uint8).repeat(2, 1)
    codes = torch.randint(256, (2, 127 * 8), dtype=torch.uint8)
    part = Coded("e2m1", codes, 16, scale.view(torch.float8_e4m3fn), None, torch.rand(2) + 0.5)
    back = pack([part], CPU).coded()
    assert same(back.scale, part.scale) and torch.equal(back.dequantize(), part.dequantize())
    assert torch.equal(back.codes[:, 8:], part.codes[:, 8:]), "of a scale of 0 the codes are 0 too"


def test_planes_follow_groups_and_width() -> None:
    assert layout_of("e2m1", 4, 2880, 32, "e8m0").plane == 32 and layout_of("e2m1", 4, 2880, 32, "e8m0").tiles == 23
    assert layout_of("e2m1", 4, 704, 32, "e8m0").plane == 16, "else a twelfth would be filling"
    assert layout_of("e2m1", 4, 4096, 16, "e5m3").plane == 16
    assert layout_of("int4", 4, 4096, 128, "f16").plane == 64
    assert layout_of("int4", 4, 4096, 32, "f16").plane == 16, "a tile's scales are one word"
    assert layout_of("e4m3", 8, 4096).plane == 64 and layout_of("int8", 8, 2880, 32, "f16").plane == 32
    assert layout_of("e2m1", 4, 4096, 32, "e8m0").name == "e2m1_e8m0_32"
    for kind in SIZES:
        assert layout_of("int4", 4, 77 * 16, 16, kind).groups >= 77


def test_what_has_no_form_says_why() -> None:
    good = random_coded("int4 in groups of 128", 4, 256)
    with pytest.raises(CannotKeep, match="groups of 8 columns"):
        plan_layout([Coded("int4", good.codes, 8, torch.ones(4, 32))])
    with pytest.raises(CannotKeep, match=r"parts of different formats .*e2m1_e8m0_32 and int4_f16_128"):
        plan_layout([good, random_coded("mxfp4", 4, 256)])
    huge = random_coded("mxfp4", 4, 256)
    huge.scale[1, 1] = 145  # type: ignore[index]
    with pytest.raises(CannotKeep, match=r"scales above 2 \*\* 17"):
        pack([huge], CPU)
    nan = random_coded("fp8 per row", 4, 256)
    nan.codes[2, 2] = 0xFF
    with pytest.raises(CannotKeep, match="not a number"):
        pack([nan], CPU)
    nan = random_coded("nvfp4", 4, 256)
    nan.scale.view(torch.uint8)[2, 2] = 0x7F  # type: ignore[union-attr]
    with pytest.raises(CannotKeep, match="scales that are negative or not a number"):
        pack([nan], CPU)
