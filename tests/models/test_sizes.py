"""The sums over layers against models that are counted tensor by tensor, and against published sizes."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod

import pytest

from sparkdraft.core import UserError
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import DenseSpec, ExpertsSpec, LayerSpec, RecurrentSpec
from sparkdraft.models.common.sizes import layer_sizes, model_sizes
from sparkdraft.models.common.tensors import file_tensor_shapes, tensor_shapes
from sparkdraft.operate.bench.shapes import DRAFTER_FILES, SHAPES, TARGET_FILES, drafter_shape, shape
from tests.operate.forecast.described import DESCRIBED, attention

PUBLISHED = {  # billions of parameters
    "qwen3-30b-a3b": 30.53, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83, "gemma4-31b": 30.70, "gemma4-26b-a4b": 25.23,
    "qwen3.5-27b": 26.90, "qwen3.5-35b-a3b": 34.66, "qwen3-coder-next": 79.67, "qwen3-coder-next-24": 40.15,
}  # fmt: skip
DRAFTERS = {  # GiB of the published files, in bfloat16
    "qwen3-30b-a3b-dflash": 0.88, "gpt-oss-20b-dflash": 1.46, "gpt-oss-120b-dflash": 1.46, "gemma4-31b-dflash": 2.86,
    "gemma4-26b-a4b-dflash": 0.80, "qwen3.5-27b-dflash": 3.96, "qwen3.5-35b-a3b-dflash": 0.72,
    "qwen3-coder-next-dflash": 0.88, "qwen3-coder-next-24-dflash": 0.88,
    "gemma4-31b-assistant": 0.87, "gemma4-26b-a4b-assistant": 0.78,
}  # fmt: skip


def numbers(name: str, size: tuple[int, ...]) -> int:
    """Weights that a tensor of a file stands for: a byte of MXFP4 is two, and their scales are none."""
    return prod(size) * (2 if name.endswith("_blocks") else 0 if name.endswith("_scales") else 1)


def test_matrices_are_counted_as_a_checkpoint_holds_them() -> None:
    for model in SHAPES.values():
        matrices = [size for size in tensor_shapes(model).values() if len(size) == 2]
        assert model_sizes(model).held == sum(rows * width for rows, width in matrices)


@pytest.mark.parametrize("name", TARGET_FILES)
def test_published_shapes_have_as_many_weights_as_published(name: str) -> None:
    tensors = file_tensor_shapes(TARGET_FILES[name])
    assert sum(numbers(*each) for each in tensors.items()) / 1e9 == pytest.approx(PUBLISHED[name], abs=0.005)
    is_matrix = {k: len(v) > 1 and not k.endswith("_bias") for k, v in tensors.items()}
    assert model_sizes(DESCRIBED[name]).held == sum(numbers(k, v) for k, v in tensors.items() if is_matrix[k])


@pytest.mark.parametrize("name", TARGET_FILES)
def test_published_shapes_are_read_by_their_own_architecture(name: str) -> None:
    read, described = shape(name), DESCRIBED[name]
    for rows in (1, 7, 300):
        assert model_sizes(read).read(rows) == pytest.approx(model_sizes(described).read(rows))
    assert model_sizes(read).kv == model_sizes(described).kv and read.max_position == described.max_position
    assert [spec.geometry for spec in read.attention] == [spec.geometry for spec in described.attention]
    assert not read.unknown_keys


@pytest.mark.parametrize("name", DRAFTER_FILES)
def test_published_drafters_fit_their_targets_and_weigh_what_is_published(name: str) -> None:
    draft = drafter_shape(name, shape(name.rsplit("-", 1)[0]))
    size = 2 * sum(prod(size) for size in draft.tensor_shapes().values())
    assert size / 2**30 == pytest.approx(DRAFTERS[name], abs=0.01)
    with pytest.raises(UserError, match="does not fit"):
        drafter_shape(name, SHAPES["qwen3-8b"])


def test_a_drafter_of_the_targets_own_layers_needs_dense_ones() -> None:
    for name in ("qwen3-30b-a3b", "gemma4-31b"):
        with pytest.raises(UserError, match="dense and all alike"):
            drafter_shape("dflash-5x", DESCRIBED[name])


def test_experts_that_rows_reach_are_counted_as_drawn() -> None:
    """Against rows that do choose at random."""
    spec, rng = ExpertsSpec(128, 8, 768), random.Random(1)
    for rows in (1, 4, 16, 64):
        drawn = [len({e for _ in range(rows) for e in rng.sample(range(128), 8)}) for _ in range(300)]
        assert spec.reached(rows) == pytest.approx(sum(drawn) / len(drawn), rel=0.02)
    assert spec.reached(1) == pytest.approx(8) and spec.reached(1e6) == 128


def test_a_step_reads_the_experts_that_its_rows_reach() -> None:
    """Gigabytes in bfloat16 at 1, 4, 8, 16 and 64 rows, summed by hand: 2.5 GB in any case, 9.4 MB per expert."""
    sizes = model_sizes(DESCRIBED["qwen3-30b-a3b"])
    read = [2 * sizes.read(rows) / 1e9 for rows in (1, 4, 8, 16, 64)]
    assert read == pytest.approx([6.1, 15.7, 25.8, 39.8, 59.5], abs=0.1)
    assert sizes.read(1) == pytest.approx(sizes.active) and sizes.read(1e6) == sizes.held - sizes.embedding
    dense = model_sizes(SHAPES["qwen3-8b"])
    assert dense.read(1) == dense.read(500) == dense.active
    shared = layer_sizes(LayerSpec(attention(8, 2, 64), ExpertsSpec(16, 2, 512, shared_size=256)), 1024)
    assert shared.read(1) == pytest.approx(shared.active)


def test_values_that_are_made_of_keys_have_no_weights_and_are_kept() -> None:
    specs = [LayerSpec(attention(8, 2, 64, values=values), DenseSpec(512)) for values in ("given", "keys")]
    given, made = (layer_sizes(spec, 256) for spec in specs)
    assert given.held - made.held == 256 * 2 * 64 and given.kv == made.kv


def test_qwen3_30b_a3b_has_30_billion_weights_and_uses_3() -> None:
    sizes = model_sizes(DESCRIBED["qwen3-30b-a3b"])
    assert round(sizes.held / 1e9, 2) == 30.53  # what a published folder holds, without its vectors
    assert 2.9e9 < sizes.active < 3.4e9


def test_a_layer_that_borrows_keys_adds_none() -> None:
    own, borrowed = (LayerSpec(attention(8, 2, 64, kv_from=i), DenseSpec(512)) for i in (None, 0))
    model = ModelConfig("toy", 256, 1000, 512, (own, borrowed))
    assert model_sizes(model).kv == 2 * 2 * 64 and len(model.cached_attention) == 1
    saved = layer_sizes(own, 256).held - layer_sizes(borrowed, 256).held
    assert saved == 2 * 256 * 2 * 64  # its k and v projections


def test_a_recurrent_layer_keeps_a_state_and_no_keys() -> None:
    """Qwen3.5-27B: 48 value heads of 128 x 128, and three rows of 10,240 channels before the convolution."""
    sizes = layer_sizes(LayerSpec(RecurrentSpec(16, 48, 128, 128, 4), DenseSpec(17408)), 5120)
    assert sizes.kv == sizes.queries == 0 and sizes.state == 48 * 128 * 128 + 3 * 10240


def test_operations_follow_what_is_active_and_what_is_seen() -> None:
    model = SHAPES["qwen3-8b"]
    sizes = model_sizes(model)
    assert sizes.operations(keys=0) == 2 * (sizes.active - 4096 * 151936)
    assert sizes.operations(keys=100) - sizes.operations(keys=0) == 4 * 36 * 32 * 128 * 100
    experts = replace(model.layers[0], mlp=ExpertsSpec(8, 2, 512, shared_size=256))
    one = layer_sizes(experts, 4096)
    assert one.held - one.active == 6 * 3 * 4096 * 512
