"""Centres of keys: the mean over a text, rotated over the context, and worth subtracting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.cache.formats.turboquant import SKIPPED, key_centres
from sparkdraft.kernels import reference
from sparkdraft.llm import LLM
from sparkdraft.models.common.blocks import Step
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

    centres = key_centres(forward, [9] * 64, kv, 16, CPU)
    first = kv.k[0].transpose(0, 1).flatten(1, 2)  # [kv_heads, positions, head_dim]; later layers see the position too
    torch.testing.assert_close(centres[0], first.mean(1), rtol=1e-4, atol=1e-5)
    assert len(centres) == config.num_layers and all(c.shape == first[:, 0].shape for c in centres.values())
    with pytest.raises(AssertionError, match="too few"):
        key_centres(forward, [9] * SKIPPED, kv, 16, CPU)


def test_only_a_coded_cache_is_centred_and_only_if_asked(tmp_path: Path) -> None:
    folder = str(write_tiny(tmp_path, "qwen3"))
    options = {"dtype": "float32", "device": "cpu", "kv": "turboquant"}
    layers = [LLM(folder, **options, tq_centre=centre).engine.runner.kv.layers for centre in (True, False)]
    assert all(layer.store.centre is not None and layer.store.centre.abs().max() > 0 for layer in layers[0])
    assert all(layer.store.centre is None for layer in layers[1])
