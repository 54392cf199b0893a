"""What the GPU kernels say of themselves, for GPUs that are not here; and that it is what their launches look up."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sparkdraft.core import Fact
from sparkdraft.kernels.cuda.attention import paged
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.moe import experts, routing
from sparkdraft.kernels.cuda.recurrent import delta_chunks, delta_steps
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.cuda.runtime.facts import launches, tile_keys, tiles
from sparkdraft.kernels.cuda.runtime.gpu import Gpu
from sparkdraft.kernels.cuda.runtime.tuned import Key
from sparkdraft.kernels.ops import (
    SILU,
    AttentionParams,
    AttentionView,
    ExpertShapes,
    KernelShapes,
    Norm,
    Normed,
    Routing,
    all_tiles,
)
from sparkdraft.weights import planes
from sparkdraft.weights.linear import DenseExperts, DenseLinear, StackedLinear, WeightTiles
from sparkdraft.weights.plane_layout import PlaneLayout

HOPPER, SPARK = Gpu(9, 0, 132), Gpu(12, 1, 48)
KNOWN = {Key("few_rows", "16bit", (6144, 4096)), Key("few_rows", "16bit", (4096, 12288))}
COUNT, TOP_K, HIDDEN, INTER, MOST = 16, 3, 64, 32, 400


def said(name: str, keys: object, gpu: Gpu) -> Fact:
    found = tiles(name, keys, gpu)
    assert found
    return found


def asked(**given: object) -> KernelShapes:
    none = {"matrices": (), "experts": (), "recurrent": frozenset(), "itemsize": 2, "most_rows": MOST}
    return KernelShapes(**(none | {"head_dims": frozenset(), "coded_dims": frozenset()} | given))


def test_tiles_that_were_measured_here_are_told_from_those_chosen_by_rule() -> None:
    assert said("matrix tiles", KNOWN, HOPPER) == Fact("matrix tiles", "measured on sm_90")
    some = said("matrix tiles", KNOWN | {Key("few_rows", "fp8", (6144, 4096))}, HOPPER)
    assert some.value == "2 of 3 measured on sm_90, the others chosen by rule"
    assert some.reason == "not measured: few_rows 6144 x 4096 (fp8)"
    for keys, gpu in ((KNOWN, SPARK), ({Key("few_rows", "32bit", (6144, 4096))}, HOPPER)):
        found = said("matrix tiles", keys, gpu)
        assert found.value == "chosen by rule" and f"was measured on {gpu.name}" in found.reason
    assert tiles("expert tiles", [], HOPPER) is None, "a model without experts is told nothing of them"


@pytest.mark.parametrize(("head_dim", "itemsize"), [(512, 2), (128, 4), (64, 4)])
def test_attention_that_nobody_measured_is_not_said_to_be_measured(head_dim: int, itemsize: int) -> None:
    """Other head dims of the same GPU were."""
    found = said("attention tiles", paged.tile_keys(head_dim, itemsize), HOPPER)
    assert found.value == "chosen to fit its shared memory"
    assert f"attention_decode {head_dim} ({8 * itemsize}bit)" in found.reason and "sm_90" in found.reason
    mixed = tile_keys(asked(head_dims=frozenset({128, 512})))["attention tiles"]
    assert said("attention tiles", mixed, HOPPER).value.startswith("2 of 4 measured on sm_90")
    assert not said("attention tiles", paged.tile_keys(128, 2), HOPPER).reason
    assert "sm_121" in said("attention tiles", paged.tile_keys(128, 2), SPARK).reason


def meta_experts(count: int, out: int, in_: int, dtype: torch.dtype = torch.bfloat16) -> DenseExperts:
    return DenseExperts(torch.empty(count, out, in_, dtype=dtype, device="meta"))


def test_experts_are_told_by_every_size_of_block_that_their_launches_have() -> None:
    known = ExpertShapes(meta_experts(128, 1536, 2048), meta_experts(128, 2048, 768), 8)
    assert said("expert tiles", tile_keys(asked(experts=[known], most_rows=8192))["expert tiles"], HOPPER) == Fact(
        "expert tiles", "measured on sm_90"
    )
    some = ExpertShapes(meta_experts(32, 5760, 2880), meta_experts(32, 2880, 2880), 4)
    found = said("expert tiles", tile_keys(asked(experts=[some], most_rows=8192))["expert tiles"], HOPPER)
    assert found.value == "9 of 11 measured on sm_90, the others chosen by rule"
    assert "experts_gate_up 5760 x 2880 x 32 (16bit)" in found.reason
    wide = ExpertShapes(meta_experts(128, 1536, 2048, torch.float32), meta_experts(128, 2048, 768, torch.float32), 8)
    assert said("expert tiles", tile_keys(asked(experts=[wide]))["expert tiles"], HOPPER).value == "chosen by rule"


def test_a_stacked_matrix_is_told_by_its_parts() -> None:
    parts = [DenseLinear(torch.zeros(out, 64)) for out in (96, 32)]
    assert [each.shape for each in all_tiles([StackedLinear(parts), parts[0]])] == [(96, 64), (32, 64), (96, 64)]


def test_launches_that_do_not_overlap_say_why() -> None:
    found = launches(torch.device("cpu"), Gpu(8, 6, 84))
    assert found.value == "one after the other" and "sm_86" in found.reason


# ---- the same keys


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> set[Key]:
    """What launches look up; no kernel runs."""
    found: set[Key] = set()
    original = tuned.find

    def find(gpu: Gpu, key: Key) -> object:
        found.add(key)
        return original(gpu, key)

    monkeypatch.setattr(tuned, "find", find)
    monkeypatch.setattr(few_tokens, "run_kernel", lambda *_, **__: None)
    for module in (paged, routing):
        monkeypatch.setattr(module, "run", lambda *_, **__: None)
    monkeypatch.setattr(experts, "rms_norm", lambda x, *_: x)
    cached = [few_tokens._launch, few_tokens._wide_launch, experts._launch, paged._launch]
    for each in [*cached, delta_steps.choose_tile, delta_chunks.choose_tiles]:
        each.cache_clear()
    return found


def test_attention_looks_up_what_is_told(looked_up: set[Key]) -> None:
    for rows in (1, 3, 200):
        counts = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([rows], dtype=torch.int32)
        view = AttentionView(*counts, torch.zeros(1, 20, dtype=torch.int32), rows, 320)
        k = torch.zeros(20, 2, 16, 96, dtype=torch.float16)
        paged.paged_attention(torch.zeros(rows, 4, 96, dtype=k.dtype), k, k, view, AttentionParams(1.0))
    assert looked_up == tile_keys(asked(head_dims=frozenset({96})))["attention tiles"]


def test_matrices_look_up_what_is_told(looked_up: set[Key]) -> None:
    layout = PlaneLayout("int4", 4, 256, 64, 128, "f16", "")
    made = planes.empty(layout, 96, torch.device("cpu"), row_scale=False)
    coded = WeightTiles(made.codes, layout, made.scale, lines=96)
    floats = WeightTiles(torch.zeros(48, 256, dtype=torch.float16))
    for rows in range(1, 257):
        x = torch.zeros(rows, 256, dtype=torch.float16)
        if rows <= few_tokens.MOST_TOKENS:
            few_tokens.linear(x, floats)
            few_tokens.linear(x, coded)
        else:
            few_tokens.wide_linear(x, coded, torch.zeros(rows, 96, dtype=x.dtype))
    assert looked_up == tile_keys(asked(matrices=[coded, floats]))["matrix tiles"]


@pytest.mark.parametrize("count", [COUNT, 4 * COUNT])
def test_experts_look_up_what_is_told(count: int, looked_up: set[Key]) -> None:
    """Of few experts none are taken one by one; of many a few rows are."""
    gate_up = DenseExperts(torch.zeros(count, 2 * INTER, HIDDEN, dtype=torch.float16))
    down = DenseExperts(torch.zeros(count, HIDDEN, INTER, dtype=torch.float16))
    norm = Norm(torch.ones(HIDDEN, dtype=torch.float16), 1e-6)
    for rows in range(1, MOST + 1):
        normed = Normed(torch.zeros(rows, HIDDEN, dtype=torch.float16), norm)
        ids = torch.zeros(rows, TOP_K, dtype=torch.int32)
        experts.norm_experts(normed, Routing(ids, torch.zeros(rows, TOP_K)), gate_up, down, SILU)
    told = tile_keys(asked(experts=[ExpertShapes(gate_up, down, TOP_K)]))
    assert looked_up == told["expert tiles"]


def test_recurrent_layers_look_up_what_is_told(looked_up: set[Key]) -> None:
    delta_steps.choose_tile(128, 64, HOPPER)
    delta_chunks.choose_tiles(32, 128, 64, 2, HOPPER)
    assert looked_up == tile_keys(asked(recurrent=frozenset({(32, 128, 64)})))["recurrent tiles"]
