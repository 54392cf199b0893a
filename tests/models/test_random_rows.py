"""Rows of one text, random weights and a mixture of experts: benchmarks stand on their reaching many experts."""

from __future__ import annotations

import pytest
import torch

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.kernels import reference as ops
from sparkdraft.kernels.ops import AttentionView
from sparkdraft.models.common.blocks import Step
from sparkdraft.models.common.experts import Experts
from sparkdraft.models.common.layers import ExpertsSpec
from sparkdraft.models.registry import architecture, read_config
from sparkdraft.operate.bench import random_model
from sparkdraft.operate.bench.random_model import FORMS, RandomCheckpoint
from sparkdraft.operate.bench.shapes import TARGET_FILES
from sparkdraft.weights.loader import Loader

SMALL = {
    "num_hidden_layers": 12, "hidden_size": 768, "moe_intermediate_size": 32, "num_attention_heads": 12,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 2048, "num_experts": 48, "num_experts_per_tok": 3,
}  # fmt: skip
PROMPT, DRAFTS = 128, 16


def reached(monkeypatch: pytest.MonkeyPatch, form: str = "") -> float:
    """Experts that a block of drafts reaches, over those that independent rows would reach."""
    device = torch.device("cpu")
    file = TARGET_FILES["qwen3-30b-a3b"] | SMALL
    config, count = read_config(file), PROMPT + DRAFTS
    found: list[int] = []
    route = Experts.route

    def counted(self, normed, step):  # type: ignore[no-untyped-def]
        routing = route(self, normed, step)
        found.append(len(routing.ids.unique()))
        return routing

    monkeypatch.setattr(Experts, "route", counted)
    load = Loader(RandomCheckpoint(file, "cpu", form), device, torch.float32, ops)
    model = architecture(config.model_type).build(config, load, ops, count)
    kv = DenseKV(config.attention, count // 16, 16, torch.float32, device, ops)
    ids = torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(0)).int()
    places, table = torch.arange(count).int(), torch.arange(count // 16).int()[None]
    for first, last in ((0, PROMPT), (PROMPT, count)):
        found.clear()
        starts, length = torch.tensor([0, last - first]).int(), torch.tensor([last]).int()
        view = AttentionView(starts, length, table, last - first, count)
        model.forward(Step(ids[first:last], places[first:last], places[first:last], view, kv.layers))
    mlp = config.layers[0].mlp
    assert isinstance(mlp, ExpertsSpec)
    return sum(found) / len(found) / mlp.reached(DRAFTS)


@pytest.mark.parametrize("form", ["", "int4", *(pytest.param(f, marks=pytest.mark.slow) for f in FORMS if f != "int4")])
def test_rows_of_one_text_reach_as_many_experts_as_independent_rows(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.9 < reached(monkeypatch, form) < 1.1


def test_int4_codes_whose_mean_is_not_0_would_make_rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_model, "_centred", lambda codes: codes)
    assert reached(monkeypatch, "int4") < 0.85


def test_small_embeddings_would_make_rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_model, "EMBEDDED", random_model.DEVIATION)
    assert reached(monkeypatch) < 0.5
