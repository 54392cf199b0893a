"""Planes: unpacking gives what was packed, and the plan counts the bytes that they take, in every format, in files as
the tools write them, in every type of GGUF, and in whole models by their config alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sparkdraft.kernels.cuda.linear.planes import as_coded
from sparkdraft.models.common.config import uniform_config
from sparkdraft.models.common.keys import unread_names
from sparkdraft.models.registry import read_config
from sparkdraft.operate.bench.random_model import FORMS as RANDOM_FORMS
from sparkdraft.operate.bench.random_model import RandomCheckpoint
from sparkdraft.plan.weight_formats import (
    CODES,
    WeightFormats,
    bytes_by_format,
    kept,
    quantised_at_load,
    stated,
    stored_bytes,
)
from sparkdraft.weights import planes
from sparkdraft.weights.checkpoint import open_checkpoint, read_config_json
from sparkdraft.weights.linear import CannotKeep
from sparkdraft.weights.plane_layout import SIZES, CodeForm, StoredBytes, StoredMatrix, count_stored, layout_of
from sparkdraft.weights.planes import empty, fill, form_of, pack, plan_layout
from sparkdraft.weights.quant.gguf_blocks import BLOCKS, FORMS, Q4_1, Q4_K, Q5_1, Q5_K, Q6_K, read_blocks
from sparkdraft.weights.quant.quantise import QUANTISERS
from sparkdraft.weights.quant.stored import Coded, Permuted, Stored
from sparkdraft.weights.safetensors import SafetensorsCheckpoint
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


FOLDERS = sorted(path.parent for path in (Path(__file__).parent / "published").glob("*/expected.json"))
WIDTHS = (32, 128, 384, 640, 2880)
HALVES = {Q4_1: (0, 2), Q5_1: (0, 2), Q4_K: (0, 2), Q5_K: (0, 2), Q6_K: (208,)}  # where blocks have float16 numbers
MODEL = uniform_config("qwen3", 2, 384, 64, 6, 2, 640, 96, 1024, tie_embeddings=False, qk_norm=True)


def planes_of(part: Stored) -> int | None:
    """Bytes of its planes; None: it has none."""
    try:
        coded = as_coded(part)
        return pack([coded], CPU).nbytes if isinstance(coded, Coded) else None
    except CannotKeep:
        return None


@pytest.mark.parametrize("width", WIDTHS)
def test_every_format_of_codes(width: int) -> None:
    for name in fitting(width):
        part = random_coded(name, 5, width)
        assert form_of(part).nbytes(5, width) == pack([part], CPU).nbytes, name
        table = sum(t.nbytes for t in (part.codes, part.scale, part.offset, part.row_scale) if t is not None)
        assert form_of(part).table_bytes(5, width) == table, name


def test_a_group_that_kernels_do_not_read_is_floats() -> None:
    form = CodeForm("int4", 4, 24, "f16")
    assert form.nbytes(8, 48) is None and "groups of 24" in str(form.layout(48))
    assert count_stored([StoredMatrix("a.weight", 8, 48, form)]) == StoredBytes(0, 8 * 48)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_files_as_the_tools_write_them(folder: Path) -> None:
    """Matrix by matrix, without reading codes."""
    checkpoint = open_checkpoint(str(folder))
    total = floats = 0
    for name in checkpoint.names():
        part = checkpoint.read(name)
        planes = planes_of(part)
        one = count_stored([checkpoint._stored(name)])  # type: ignore[attr-defined]
        assert one.quantised == (planes or 0), name
        total, floats = total + (planes or 0), floats + one.floats
    assert checkpoint.stored_bytes() == StoredBytes(total, floats)
    decoded = [name for name in checkpoint.names() if isinstance(checkpoint.read(name), Permuted)]
    assert total > 0 and len(decoded) == (6 if "desc-act" in folder.name else 0)
    assert all(count_stored([checkpoint._stored(name)]).floats for name in decoded)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", FORMS)
def test_every_type_of_gguf(kind: int) -> None:
    elements, size = BLOCKS[kind]
    blocks, rows = 512 // elements, 3
    raw = np.random.default_rng(0).integers(0, 256, size=(rows, blocks, size), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        raw[..., at + 1] = 0x10 + raw[..., at + 1] % 8  # the upper byte of a float16: a small number
    part = read_blocks(torch.from_numpy(raw).flatten(), kind, rows)
    assert part is not None
    assert FORMS[kind].nbytes(rows, 512) == planes_of(part)


def test_the_embedded_model(smollm2_path: Path) -> None:
    """Its embedding is a table of codes, and its head the same matrix in planes."""
    checkpoint = open_checkpoint("smollm2")
    names = [name for name in checkpoint.names() if ".layers.7." in name and name.endswith("_proj.weight")]
    infos = checkpoint.file.tensors  # type: ignore[attr-defined]
    narrow = FORMS[Q4_1]._replace(offset="f16")
    for name in names:  # offsets that are halves in the whole matrix take less: that cannot be known before it is read
        part, info = checkpoint.read(name), infos[checkpoint._names[name]]  # type: ignore[attr-defined]
        assert info.kind == Q4_1
        assert planes_of(part) in (FORMS[Q4_1].nbytes(*part.shape), narrow.nbytes(*part.shape)), name
    table = checkpoint.read("model.embed_tokens.weight")
    coded = as_coded(table)
    assert isinstance(coded, Coded)
    held = sum(t.nbytes for t in (coded.codes, coded.scale, coded.offset) if t is not None)
    info = infos["token_embd.weight"]
    tied = count_stored([StoredMatrix(info.name, *table.shape, FORMS[info.kind])], tied=True)
    assert tied == StoredBytes(held + FORMS[info.kind].nbytes(*table.shape), 0)  # type: ignore[operator]
    assert len(names) == 7


@pytest.mark.parametrize("form", RANDOM_FORMS)
def test_whole_models_by_their_config(form: str) -> None:
    checkpoint = RandomCheckpoint(MODEL, "cpu", form)
    parts = [checkpoint.read(name) for name in checkpoint.names()]
    total = sum(pack([part], CPU).nbytes for part in parts if isinstance(part, Coded))
    assert checkpoint.stored_bytes().quantised == total > 0
    assert bytes_by_format(MODEL, WeightFormats.parse(form))[form] == total


@pytest.mark.parametrize("weights", QUANTISERS)
def test_what_is_quantised_at_load(weights: str) -> None:
    checkpoint, total = RandomCheckpoint(MODEL, "cpu"), 0
    for name in checkpoint.names():
        part = checkpoint.read(name)
        if ".layers." in name and name.endswith("_proj.weight"):
            assert isinstance(part, torch.Tensor)
            total += pack([QUANTISERS[weights][0](part)], CPU).nbytes
    assert quantised_at_load(MODEL, weights).quantised == total > 0


def test_names_of_formats_mean_what_a_quantiser_writes() -> None:
    made: dict[str, Any] = {
        name: form_of(quantiser(torch.randn(4, 256))) for name, (quantiser, _) in QUANTISERS.items()
    }
    assert made["int4"] == CODES["int4-g32"] and made["nvfp4"] == CODES["nvfp4"]
    assert made["fp8"].nbytes(4, 256) == CODES["fp8"].nbytes(4, 256)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_config_alone_says_what_its_file_takes(folder: Path) -> None:
    """Blocks of 48, and a matrix of desc_act that has one group, only a tiny checkpoint has."""
    checkpoint, raw = open_checkpoint(str(folder)), read_config_json(str(folder))
    model = read_config({k: v for k, v in raw.items() if k != "quantization_config"})
    found = stated(raw, model.num_layers)
    assert found is not None
    planned, file = stored_bytes(model, kept(found)), checkpoint.stored_bytes()
    if folder.name == "gptq-desc-act":
        assert planned.quantised == 0 and planned.floats > file.floats
    elif folder.name != "compressed-tensors-fp8_block":
        assert planned.quantised == file.quantised


def test_what_is_not_loaded_is_not_counted(tmp_path: Path) -> None:
    """A vision tower, a head that nobody drafts with, and the copy of a tied head."""
    tensors = {"model.embed_tokens.weight": torch.zeros(10, 4), "model.norm.weight": torch.zeros(4)}
    others = {"model.visual.blocks.0.weight": torch.zeros(50, 4), "lm_head.weight": torch.zeros(10, 4)}
    others["mtp.fc.weight"] = torch.zeros(8, 4)
    sizes = {}
    for name, held in (("text", tensors), ("all", tensors | others)):
        (tmp_path / name).mkdir()
        save_file(held, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"tie_word_embeddings": true}')
        sizes[name] = SafetensorsCheckpoint(tmp_path / name).stored_bytes(unread_names(drafts=False))
    assert sizes["all"] == sizes["text"]
