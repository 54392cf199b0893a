"""The cache of matrices that `--weights` quantises: a second load reads it and has the same bits; what is half-written,
damaged or of another checkpoint is never used; a disk that cannot be written to is said and changes nothing."""

from __future__ import annotations

import gc
import os
import shutil
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparkdraft.cli.main import main
from sparkdraft.kernels import reference
from sparkdraft.llm import LLM
from sparkdraft.weights import loader as loaders
from sparkdraft.weights import quantised_cache
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.loader import Loader
from sparkdraft.weights.quant.quantise import QUANTISERS
from sparkdraft.weights.quant.stored import Coded
from sparkdraft.weights.quantised_cache import DATA, INDEX, WRITING, QuantisedCache, open_cache
from tests.models.tiny import write_tiny

FORMATS = tuple(QUANTISERS)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense layers and layers with experts."""
    return write_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_moe", shards="1GB")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARKDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quantised"


def read(tiny: Path, form: str = "int4") -> tuple[list[Tensor], list[str]]:
    """The numbers of all matrices of a model that was built, and what the user is told."""
    llm = LLM(
        str(tiny), device="cpu", dtype="float32", weights=form, spec="off", max_seqs=1, max_step_tokens=32, threads=1
    )
    found: list[Tensor] = []
    for matrix in (m for layer in llm.engine.runner.model.layers for m in layer.matrices):
        experts = [matrix.expert(i) for i in range(matrix.count)] if hasattr(matrix, "count") else [matrix]
        found += [each.linear(torch.eye(each.tiles.shape[1])) for each in experts]
    return found, [f"{each.name}: {each.reason}" for each in llm.fallbacks()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 8 and all(map(torch.equal, a, b))


def refuse(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    def quantise(weight: Tensor) -> Coded:
        raise AssertionError("quantised again")

    monkeypatch.setitem(loaders.QUANTISERS, form, (quantise, QUANTISERS[form][1]))


@pytest.mark.parametrize("form", FORMATS)
def test_a_second_load_has_the_same_bits_and_quantises_nothing(
    form: str, tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, told = read(tiny, form)
    (entry,) = quantised_cache.entries()
    assert entry.checkpoint == str(tiny) and entry.format == form and entry.path.parent == cache and not told
    refuse(monkeypatch, form)
    second, told = read(tiny, form)
    assert same(first, second) and not told


def test_each_part_of_a_matrix_comes_back_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"some state")
    made = {name: quantiser(torch.randn(48, 96)) for name, (quantiser, _) in QUANTISERS.items()}
    made["offsets"] = Coded(
        "int8",
        torch.randint(256, (3, 64), dtype=torch.uint8),
        32,
        torch.rand(3, 2, dtype=torch.bfloat16),
        torch.rand(3, 2),
    )
    written = open_cache(tmp_path, "int4", "cpu")
    assert written and written._map is None
    for name, matrix in made.items():
        written.write(name, matrix)
    written.finish()
    found = open_cache(tmp_path, "int4", "cpu")
    assert found and found._map is not None
    for name, matrix in made.items():
        back = found.read(name, matrix.shape)
        assert back and (back.levels, back.group) == (matrix.levels, matrix.group)
        for part in ("codes", "scale", "offset", "row_scale"):
            was, now = getattr(matrix, part), getattr(back, part)
            assert (was is None) == (now is None)
            if was is not None:
                assert was.dtype == now.dtype and torch.equal(was.float(), now.float()) and was.shape == now.shape
    assert open_cache(tmp_path, "auto", "cpu") is None and open_cache(tmp_path / "none", "int4", "cpu") is None


def test_a_load_that_stops_leaves_nothing_that_is_read(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantiser, multiple = QUANTISERS["int4"]
    done: list[Coded] = []

    def stop(weight: Tensor) -> Coded:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(quantiser(weight))
        return done[-1]

    monkeypatch.setitem(loaders.QUANTISERS, "int4", (stop, multiple))
    with pytest.raises(KeyboardInterrupt):
        read(tiny)
    assert list(cache.glob("*")) == [] and quantised_cache.entries() == []


def test_what_a_killed_process_left_is_not_read_and_is_removed_in_time(tiny: Path, cache: Path) -> None:
    first, _ = read(tiny)
    (whole,) = cache.glob("*")
    left, fresh = cache / f"{WRITING}left", cache / f"{WRITING}fresh"
    whole.rename(left)
    (left / INDEX).unlink()
    fresh.mkdir()
    long_ago = time.time() - 2 * quantised_cache.ABANDONED
    for path in (*left.glob("*"), left):
        os.utime(path, (long_ago, long_ago))
    again, told = read(tiny)
    assert same(first, again) and not told
    assert not left.exists() and fresh.exists() and len(quantised_cache.entries()) == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: flip(path / DATA), "do not agree with their checksum"),
        (lambda path: os.truncate(path / DATA, 1000), "its index or the size of its data is wrong"),
        (lambda path: (path / INDEX).write_text("{"), "its index or the size of its data is wrong"),
        (
            lambda path: (path / INDEX).write_text((path / INDEX).read_text().replace("q_proj#1", "q_proj#7")),
            "it has no model.layers",
        ),
    ],
)
def test_damage_is_seen_and_said(damage: Callable[[Path], None], words: str, tiny: Path, cache: Path) -> None:
    first, _ = read(tiny)
    (whole,) = cache.glob("*")
    damage(whole)
    second, told = read(tiny)
    assert same(first, second) and len(told) == 1 and words in told[0], told
    read(tiny)  # writes it again, if the one before did not
    third, told = read(tiny)
    assert same(first, third) and not told and len(quantised_cache.entries()) == 1


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_another_state_of_the_file_is_another_cache_and_replaces_it(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(tiny)
    (first,) = cache.glob("*")
    (file,) = tiny.glob("*.safetensors")
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    read(tiny)
    (second,) = cache.glob("*")
    assert first != second
    read(tiny, "fp8")
    assert len(list(cache.glob("*"))) == 2  # of two formats
    monkeypatch.setattr(quantised_cache, "_code_version", lambda: "newer")
    read(tiny)
    assert len(list(cache.glob("*"))) == 2 and second not in set(cache.glob("*"))


def test_what_belongs_to_a_checkpoint_that_is_gone_is_removed(tiny: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny, tmp_path / "copy")
    read(copy)
    read(tiny, "fp8")
    assert len(quantised_cache.entries()) == 2
    shutil.rmtree(copy)
    read(tiny)
    assert [(each.checkpoint, each.format) for each in quantised_cache.entries()] == [
        (str(tiny), "fp8"),
        (str(tiny), "int4"),
    ]


def keep_one(checkpoint: Path) -> QuantisedCache:
    """A cache of one small matrix."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    if not (file := checkpoint / "model.safetensors").exists():
        file.write_bytes(b"some state")
    cache = open_cache(checkpoint, "fp8", "cpu")
    assert cache
    cache.write(cache.key("a"), QUANTISERS["fp8"][0](torch.randn(4, 32)))
    cache.finish()
    return cache


def test_a_checkpoint_that_may_come_back_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was named from another folder, and one on a disk that is not mounted."""
    monkeypatch.chdir(tmp_path)
    keep_one(Path("near"))
    keep_one(tmp_path / "disk" / "far")
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    keep_one(tmp_path / "other")
    kept = [str(tmp_path / name) for name in ("disk/far", "near", "other")]
    assert sorted(each.checkpoint for each in quantised_cache.entries()) == kept


def test_a_disk_is_not_filled(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(quantised_cache.shutil, "disk_usage", lambda path: usage._replace(free=10**9))
    problem = keep_one(tmp_path / "model").problem
    assert problem and "1.0 GB are free, and 1.1 GB are needed" in problem[1] and "SPARKDRAFT_CACHE" in problem[1]
    assert not list(cache.glob("*"))


def test_a_cache_that_can_not_be_written_is_said_and_changes_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = read(tiny)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("SPARKDRAFT_CACHE", str(tmp_path / "file"))
    second, told = read(tiny)
    assert same(first, second) and len(told) == 1
    assert told[0].startswith("quantised weights are not kept for the next load: ") and "SPARKDRAFT_CACHE" in told[0]


def test_one_matrix_at_a_time_is_in_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The floats that are quantised, and the codes that are written, are gone when the next matrix is asked for."""
    quantiser, multiple = QUANTISERS["int4"]
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watched(weight: Tensor) -> Coded:
        gc.collect()
        alive.append(sum(each() is not None for each in made))
        coded = quantiser(weight)
        made.append(weakref.ref(coded.codes))
        return coded

    monkeypatch.setitem(loaders.QUANTISERS, "int4", (watched, multiple))
    cache = open_cache(tiny, "int4", "cpu")
    with torch.inference_mode():
        load = Loader(
            open_checkpoint(str(tiny)), torch.device("cpu"), torch.float32, reference, weights="int4", cache=cache
        )
        for layer in range(3):
            load.linear({f"model.layers.{layer}.self_attn.o_proj": 64}, 128)
    assert alive == [0, 0, 0]


def test_it_can_be_left_out(tiny: Path, cache: Path) -> None:
    LLM(
        str(tiny), device="cpu", dtype="float32", weights="fp8", weights_cache=False, spec="off", max_seqs=1,
        max_step_tokens=32, threads=1,
    )  # fmt: skip
    assert not cache.exists()


def test_the_command_says_where_it_lies_and_clears_it(
    tiny: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models"]) == 0
    assert f"are kept in {cache}: none yet" in capsys.readouterr().out
    read(tiny, "fp8")
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert str(cache) in out and f"{tiny} as fp8, 0 MB" in out and "--clear-quantised" in out
    assert main(["models", "--clear-quantised"]) == 0
    assert f"from {cache}" in capsys.readouterr().out and not cache.exists()
