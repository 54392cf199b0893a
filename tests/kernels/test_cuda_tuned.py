"""Tuned tiles as files: which of them wins, what a damaged one says, and that a built package holds them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.core import UserError
from sparkdraft.kernels.cuda.attention import paged
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.cuda.runtime.gpu import Gpu

ROOT = Path(__file__).parent.parent.parent
HOPPER, SPARK = Gpu(9, 0, 132), Gpu(12, 1, 48)
CACHES = (tuned.measured, tuned.tables, few_tokens._launch, paged._launch)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SPARKDRAFT_CACHE", str(tmp_path))
    for cached in CACHES:
        cached.cache_clear()
    yield tmp_path
    for cached in CACHES:
        cached.cache_clear()


def launched(gpu: Gpu, out: int, in_: int, form: str = "16bit") -> few_tokens.Tile:
    return few_tokens._launch((out, in_), form, 16, 2, 1, gpu).tile


def test_a_users_own_file_comes_before_the_packages() -> None:
    packaged = launched(HOPPER, 6144, 4096)
    assert packaged == few_tokens.Tile(64, 128, 4, 5) and launched(SPARK, 6144, 4096) != few_tokens.Tile(32, 64, 2, 4)
    for gpu in (HOPPER, SPARK):
        tuned.save(tuned.user_file(gpu), {("few_rows", "16bit"): {(6144, 4096): [32, 64, 2, 4]}})
    for cached in CACHES:
        cached.cache_clear()
    for gpu in (HOPPER, SPARK):
        assert launched(gpu, 6144, 4096) == few_tokens.Tile(32, 64, 2, 4)
        assert (6144, 4096) in tuned.measured(gpu)["few_rows", "16bit"]
    assert launched(HOPPER, 4096, 4096) == few_tokens.Tile(64, 128, 4, 8), "the package's other shapes stay"
    assert launched(HOPPER, 6144, 4096, "fp8") != few_tokens.Tile(32, 64, 2, 4), "a tile is of one format"


def test_a_gpu_without_a_file_has_guesses_that_fit_it() -> None:
    assert not tuned.measured(SPARK) and tuned.measured(HOPPER)
    assert paged._choose_tile(4, 128, 2, SPARK)[0] == paged.Tile(16, 64, 4, 3)
    assert paged._choose_tile(4, 128, 2, HOPPER)[0] == paged.Tile(16, 64, 4, 4)
    assert paged._choose_tile(4, 128, 2, Gpu(10, 0, 148))[0] == paged.Tile(16, 64, 4, 4), "as roomy as Hopper"
    assert not tuned.measured(Gpu(10, 0, 148))


def test_saving_keeps_what_a_file_has(own_cache: Path) -> None:
    path = own_cache / "deep" / "own.json"
    tuned.save(path, {("few_rows", "16bit"): {(1, 2): [16, 64, 4, 3]}})
    tuned.save(path, {("few_rows", "16bit"): {(3, 4): [32, 64, 4, 3]}, ("few_rows", "fp8"): {(1, 2): [64, 64, 4, 3]}})
    content = json.loads(path.read_text())
    assert content["few_rows"] == {
        "16bit": {"1x2": [16, 64, 4, 3], "3x4": [32, 64, 4, 3]},
        "fp8": {"1x2": [64, 64, 4, 3]},
    }
    assert '"1x2": [16, 64, 4, 3]' in path.read_text(), "a tile is one line"


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"few_rows": []}',
        '{"few_row": {"16bit": {"1x2": [1, 2, 3, 4]}}}',
        '{"few_rows": {"16bit": {"1x2": [1, 2, 3]}}}',
        '{"few_rows": {"16bit": {"1x2": [1, 2, 3, 0]}}}',
        '{"few_rows": {"16bit": {"1x2": [1, 2, 3, 4, 5, 6, 7]}}}',
        '{"wide_rows": {"16bit": {"1x2": [1, 2, 3, 4, 5]}}}',
        '{"few_rows": {"16bit": {"1x2": [1, 2, 3, true]}}}',
        '{"few_rows": {"16bit": {"wide": [1, 2, 3, 4]}}}',
        '{"attention_decode": {"16bit": {"64": [1, 2, 3, 4]}}}',
    ],
)
def test_a_damaged_file_is_named(own_cache: Path, content: str) -> None:
    path = tuned.user_file(HOPPER)
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(UserError, match=r"sm_90\.json holds no tiles of kernels .* remove it"):
        tuned.measured(HOPPER)


def test_the_package_ships_its_tiles() -> None:
    found = [each.name for each in files(tuned.__name__).iterdir() if each.name.endswith(".json")]
    assert {"fits_99kb.json", "fits_227kb.json", "sm_90.json"} <= set(found)
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["sparkdraft"]
    assert all(any(fnmatch(f"kernels/cuda/runtime/tuned/{name}", pattern) for pattern in patterns) for name in found)
