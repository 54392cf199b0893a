"""Centres of keys: the mean over a text, rotated over the context, and worth subtracting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.cache.formats.turboquant import SKIPPED, key_centres, mean_turn
from sparkdraft.core import SamplingParams
from sparkdraft.kernels import reference
from sparkdraft.llm import LLM
from sparkdraft.models.common.blocks import Step
from sparkdraft.models.common.layers import RopeSpec
from sparkdraft.models.common.rope import rope_table
from tests.models.tiny import write_tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_a_centre_is_the_mean_key_of_all_positions(tmp_path: Path, variant: str) -> None:
    """In a text that repeats one id the keys before rotation are equal, so the rotated ones average to the centre."""
    llm = LLM(str(write_tiny(tmp_path, variant)), dtype="float32", device="cpu", spec="off", max_model_len=64)
    model, config = llm.engine.runner.model, llm.model_config
    kv = DenseKV(config.attention, 4, 16, torch.float32, CPU, reference)

    def forward(*step: Any) -> torch.Tensor:
        return model.forward(Step(*step))

    centres = key_centres(forward, [9] * 64, kv, 16, 64, CPU)
    first = kv.k[0].transpose(0, 1).flatten(1, 2)  # [kv_heads, positions, head_dim]; later layers see the position too
    torch.testing.assert_close(centres[0], first.mean(1), rtol=1e-4, atol=1e-5)
    assert len(centres) == config.num_layers and all(c.shape == first[:, 0].shape for c in centres.values())
    with pytest.raises(AssertionError, match="too few"):
        key_centres(forward, [9] * SKIPPED, kv, 16, 64, CPU)


@pytest.mark.parametrize("theta", [1.0, 10_000.0, 1e6])
@pytest.mark.parametrize("positions", [1, 2, 1000, 40_960])
def test_the_mean_of_a_rope_table_follows_from_its_first_rows(theta: float, positions: int) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    for spec in (RopeSpec(64, theta), RopeSpec(64, theta, scaling) if theta > 1 else RopeSpec(64, theta)):
        table = rope_table(spec, max(positions, 2))
        torch.testing.assert_close(
            mean_turn(table[:2], positions), table[:positions].double().mean(0), rtol=0, atol=2e-4
        )


def test_no_centre_and_no_text_depends_on_the_context_that_is_served(tmp_path: Path) -> None:
    folder = str(write_tiny(tmp_path, "qwen3"))
    options = {"dtype": "float32", "device": "cpu", "kv": "turboquant", "spec": "off", "tq_ring_capacity": 16}
    engines = [LLM(folder, **options, max_model_len=context) for context in (64, 128)]
    parts = [[layer.store.centre for layer in llm.engine.runner.kv.layers] for llm in engines]
    assert all(torch.equal(*pair) for pair in zip(*parts, strict=True))
    texts = [llm.generate([[*range(1, 30)]], SamplingParams(30, ignore_eos=True))[0] for llm in engines]
    assert texts[0].completions[0].ids == texts[1].completions[0].ids


def test_only_a_coded_cache_is_centred_and_only_if_asked(tmp_path: Path) -> None:
    folder = str(write_tiny(tmp_path, "qwen3"))
    options = {"dtype": "float32", "device": "cpu", "kv": "turboquant"}
    layers = [LLM(folder, **options, tq_centre=centre).engine.runner.kv.layers for centre in (True, False)]
    assert all(layer.store.centre is not None and layer.store.centre.abs().max() > 0 for layer in layers[0])
    assert all(layer.store.centre is None for layer in layers[1])
