"""The search for tiles: what it takes by given times and, in Triton's interpreter, a run over real kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.kernels import cuda
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.moe import experts
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.cuda.runtime.gpu import Gpu, gpu_of
from sparkdraft.kernels.ops import SILU, Norm
from sparkdraft.models.common.blocks import GatedMLP
from sparkdraft.models.common.experts import Experts
from sparkdraft.models.common.layers import ExpertsSpec
from sparkdraft.operate.tune import tiles
from sparkdraft.operate.tune.tiles import TileSearch, expert_groups, families, find_tiles
from sparkdraft.weights.linear import DenseExperts, DenseLinear, StackedLinear
from tests.kernels.triton_device import DEVICE, DTYPES, gpu

HOPPER = Gpu(9, 0, 132)
SHAPE = (6144, 4096)
PACKAGED = [64, 128, 4, 5]
CACHES = (tuned.measured, tuned.tables)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def forget() -> None:
        for cached in CACHES:
            cached.cache_clear()
        tiles.forget()

    monkeypatch.setenv("SPARKDRAFT_CACHE", str(tmp_path))
    forget()
    yield
    forget()


def in_use(shape: tuple[int, int] = SHAPE) -> list[int]:
    return tiles.numbers(few_tokens._launch(shape, "16bit", 16, 2, 1, HOPPER).tile)


def test_the_best_tile_over_all_times_is_taken_and_used() -> None:
    times = {64: [1.0, 1.0], 32: [0.9, 1.3], 16: [1.2, 0.7]}
    said = list[str]()
    search = TileSearch(HOPPER, lambda: True, said.append)
    tried = [[32, 128, 4, 5], [128, 128, 8, 9], [16, 128, 4, 5], [32, 128, 4, 5]]

    def measure() -> list[float]:
        return times[in_use()[0]]  # 128 is not among them: a tile that fails

    assert in_use() == PACKAGED
    assert search.best(few_tokens.KERNEL, "16bit", SHAPE, tried, measure) == [16, 128, 4, 5] == in_use()
    assert search.in_use[few_tokens.KERNEL, "16bit"][SHAPE] == PACKAGED, "the tile in use is tried first"
    assert sum("failed" in line for line in said) == 1 and sum(" us" in line for line in said) == 3
    weighted = search.best(few_tokens.KERNEL, "16bit", SHAPE, tried, measure, weights=[10.0, 1.0])
    assert weighted == [32, 128, 4, 5]
    search.save(path := tuned.user_file(HOPPER))
    assert '"6144x4096": [32, 128, 4, 5]' in path.read_text()


def test_without_time_nothing_changes() -> None:
    search = TileSearch(HOPPER, lambda: False, lambda text: None)
    assert search.best(few_tokens.KERNEL, "16bit", SHAPE, [[16, 128, 4, 5]], lambda: [1.0]) is None
    assert in_use() == PACKAGED and not search.found


def test_a_tile_is_taken_out_again() -> None:
    unknown = (6144, 4160)
    rule = in_use(unknown)
    with tiles.using(HOPPER, few_tokens.KERNEL, "16bit", unknown, [16, 64, 4, 3]):
        assert in_use(unknown) == [16, 64, 4, 3]
    assert in_use(unknown) == rule and unknown not in tuned.tables(HOPPER)[few_tokens.KERNEL, "16bit"]


@pytest.mark.parametrize(("out", "in_"), [(960, 576), (128, 2048), (6144, 4096), (151936, 4096), (2880, 2880)])
def test_every_tile_that_is_tried_can_be_written_into_a_file(out: int, in_: int, tmp_path: Path) -> None:
    listed = {few_tokens.KERNEL: tiles.float_tiles(out, in_, HOPPER), few_tokens.WIDE: tiles.wide_tiles(128, 32)}
    for kernel, size in ((experts.GATE_UP, 16), (experts.DOWN, 64), *((few, 8) for few in experts.FEW)):
        listed[kernel] = tiles.expert_tiles(kernel, (out, in_, size), "16bit", HOPPER)
        listed[kernel] += tiles.expert_tiles(kernel, (out, in_, size), "int4", HOPPER, step=128)
    listed[few_tokens.KERNEL] += tiles.coded_tiles(out, in_, 128, "int4", HOPPER)
    for kernel, each in listed.items():
        for number, tile in enumerate(each):
            path = tmp_path / f"{kernel}-{number}.json"
            tuned.save(path, {(kernel, "16bit"): {(1, 2): tile}})
            assert tuned._laid_over(path)[kernel, "16bit"] == {(1, 2): tile}
    split = [tile for tile in tiles.float_tiles(out, in_, HOPPER, may_split=False) if len(tile) > 4 and tile[4] > 1]
    assert not split, "a gated pair and an argmax take no parts"


def toy(dtype: torch.dtype, device: str = "cpu") -> Any:
    """What the search sees of a model: two layers with an MLP, one with experts, and a head."""

    def floats(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 8).to(device, dtype)

    def mlp() -> GatedMLP:
        made = GatedMLP.__new__(GatedMLP)
        made.gate_up, made.down, made.activation = DenseLinear(floats(96, 32)), DenseLinear(floats(32, 48)), SILU
        return made

    spec = ExpertsSpec(num_experts=8, top_k=2, intermediate_size=16, activation=SILU, renormalise=True)
    gate_up, down = DenseExperts(floats(8, 32, 32)), DenseExperts(floats(8, 32, 16))
    routed = Experts(spec, DenseLinear(floats(8, 32)), gate_up, down, cuda)
    layers = [SimpleNamespace(mlp=each, matrices=each.matrices) for each in (mlp(), mlp(), routed)]
    stacked = StackedLinear([DenseLinear(floats(48, 32)), DenseLinear(floats(16, 32))])
    head = DenseLinear(floats(160, 32))
    matrices = [*(m for layer in layers for m in layer.matrices), stacked, head]
    norm = Norm(torch.ones(32, dtype=dtype, device=device), 1e-6)
    return SimpleNamespace(layers=layers, matrices=matrices, head=head, norm=norm, dtype=dtype)


def test_the_matrices_of_a_model_by_use() -> None:
    model = toy(torch.float16)
    found = {(family.kind, family.shape): len(family.members) for family in families(model)}
    assert found == {
        ("norm_gated", (96, 32)): 2,
        ("linear", (32, 48)): 2,
        ("linear", (8, 32)): 1,
        ("linear", (48, 32)): 1,
        ("linear", (16, 32)): 1,
        ("norm_argmax", (160, 32)): 1,
    }
    assert families(model)[0].shape == (96, 32) and [len(group) for group in expert_groups(model)] == [1]


@gpu
def test_a_search_over_real_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = DTYPES[1]
    model, here = toy(dtype, DEVICE), gpu_of(torch.device(DEVICE))
    monkeypatch.setattr(tiles, "float_tiles", lambda *shape: [[16, 16, 4, 2], [32, 16, 4, 2]])
    monkeypatch.setattr(tiles, "expert_tiles", lambda *shape: [[64, 32, 4, 2], [128, 32, 4, 2]])
    monkeypatch.setattr(tiles, "ROWS", {1: 1.0, 3: 1.0})
    monkeypatch.setattr(tiles, "EXPERT_ROWS", (3,))
    seen = list[str]()
    monkeypatch.setattr(
        tiles, "seconds", lambda launches, goal: [seen.append("run") or each() for each in launches] and 1.0
    )
    before = {key: dict(each) for key, each in tuned.tables(here).items()}
    assert find_tiles(model, lambda: True, seen.append, seen.append) is None, "equal times change nothing"
    assert len(seen) > 20 and any("norm_gated" in text for text in seen) and any("8 experts" in text for text in seen)

    def faster(launches: list[tiles.Launch], goal: float) -> float:
        launches[0]()
        tile = tuned.tables(here).get((few_tokens.KERNEL, "16bit"), {}).get((96, 32), [0])
        return 0.5 if tile[0] == 32 else 1.0

    monkeypatch.setattr(tiles, "seconds", faster)
    found = find_tiles(model, lambda: True, seen.append, seen.append)
    assert found and found.found == {(few_tokens.KERNEL, "16bit"): {(96, 32): [32, 16, 4, 2]}}
    after = {key: dict(each) for key, each in tuned.tables(here).items() if each}
    assert after == {key: each for key, each in before.items() if each}, "what was in use is in use"
    found.use(True)
    assert tuned.tables(here)[few_tokens.KERNEL, "16bit"][96, 32] == [32, 16, 4, 2]
    found.use(False)
    assert (96, 32) not in tuned.tables(here)[few_tokens.KERNEL, "16bit"]
    found.save()
    assert '"96x32": [32, 16, 4, 2]' in found.path.read_text()
