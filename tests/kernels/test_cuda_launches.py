"""How many launches a layer makes where one row is decoded: each costs 2 to 3 us beside its bytes, so none may come
unseen.

Models of published shapes, cut to a few layers, run on tensors without memory; launches are noted instead of made.
Torch's operators are counted too: on a GPU each is a launch at least.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.cache.layered import LayeredKV
from sparkdraft.cache.states import RecurrentStates, StateSizes, recurrent_layers
from sparkdraft.engine.sampler import EditTables
from sparkdraft.engine.slots import Ran, Slots, StepKind
from sparkdraft.kernels import cuda
from sparkdraft.kernels.ops import AttentionView, PackedRows
from sparkdraft.models.common.blocks import Step
from sparkdraft.models.common.tensors import file_tensor_shapes
from sparkdraft.models.registry import architecture, read_config
from sparkdraft.operate.bench.shapes import TARGET_FILES
from sparkdraft.weights.loader import Loader
from tests.kernels.ahead_of_time import GPUS, captured_launches, empty
from tests.kernels.triton_device import INTERPRET
from tests.kernels.watching import watching

pytestmark = pytest.mark.skipif(INTERPRET, reason="launches are counted as they are compiled")

META, LAYERS, MOST = torch.device("meta"), 4, 16
ATTENTION = ["_linear", "_rope_write", "_attend", "_linear"]  # qkv, rotation and cache, attention, o
EXPERTS = ["_route_few", "_gate_up", "_row_down"]
DENSE = ["_gated", "_linear"]
RECURRENT = ["_linear", "_causal_conv", "_delta_rule", "_gated_norm", "_linear"]
GATED = ["_linear", "_rope_write", "_attend", "_join", "_sigmoid_gate", "_linear"]  # 60 parts of 256 columns on an H200
PER_LAYER = {  # of every layer but the first, which also prepares the embedding for its norm
    "qwen3-30b-a3b": [ATTENTION + EXPERTS] * 3,
    "gpt-oss-20b": [ATTENTION + EXPERTS] * 3,
    "qwen3.5-27b": [RECURRENT + DENSE, RECURRENT + DENSE, GATED + DENSE],
}


class MetaCheckpoint:
    """Tensors without memory. Experts of gpt-oss are floats: codes take the same launches."""

    path = Path("no weights")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.shapes = file_tensor_shapes(config)
        for name in [name for name in self.shapes if name.endswith("_blocks")]:
            *experts, rows, groups, half = self.shapes.pop(name)
            self.shapes[name.removesuffix("_blocks")] = (*experts, 2 * half * groups, rows)
            del self.shapes[name.removesuffix("_blocks") + "_scales"]

    def names(self) -> list[str]:
        return list(self.shapes)

    def read(self, name: str) -> Tensor:
        return empty(*self.shapes[name])


def short(name: str) -> dict[str, Any]:
    """Its config.json, of a few layers."""
    config = dict(TARGET_FILES[name])
    inner = dict(config.get("text_config", config))
    inner["num_hidden_layers"] = LAYERS
    if "layer_types" in inner:
        inner["layer_types"] = inner["layer_types"][:LAYERS]
    return {**config, "text_config": inner} if "text_config" in config else inner


def launches_by_layer(name: str, rows: int, monkeypatch: pytest.MonkeyPatch, capability: int) -> list[list[str]]:
    """What each layer launches where so many rows of one sequence are decoded, up to 32768 positions."""
    files = short(name)
    config = read_config(files)
    model = architecture(config.model_type).build(
        config, Loader(MetaCheckpoint(files), META, torch.bfloat16, cuda), cuda, 32768
    )
    dense, states = DenseKV(config.cached_attention, 64, 16, torch.bfloat16, META, cuda), None
    if recurrent := recurrent_layers(config):
        states = RecurrentStates(recurrent, StateSizes(2, 2, MOST, 64, 16), torch.bfloat16, META, cuda)
    kv = LayeredKV([layer.mixer for layer in config.layers], dense, {}, states, cuda)
    ids, starts, contexts, tables = (
        empty(*shape, dtype=torch.int32) for shape in ((rows,), (2,), (1,), (1, 2048))
    )  # fmt: skip
    step = Step(ids, ids, ids, AttentionView(starts, contexts, tables, rows, 32768), kv.layers)
    found: list[list[str]] = []

    def run() -> None:
        with watching(model, "cuda") as watch:
            model.forward(step)
        found.extend([kernel for kernel, _ in watch.of(layer)] for layer in range(LAYERS))

    captured_launches(monkeypatch, capability, run)
    return found


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("name", PER_LAYER)
def test_launches_of_a_layer(name: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *rest = launches_by_layer(name, 1, monkeypatch, capability)
    apart = [[kernel for kernel in layer if capability == 90 or kernel != "_join"] for layer in PER_LAYER[name]]
    assert rest == apart, "fewer are welcome here, more must be worth their time"
    once = ["_prepare"] + ["torch.zeros"] * first.count("torch.zeros")  # counters, of a process
    assert sorted(first) == sorted(rest[0] + once)


def test_an_operator_of_torch_in_a_layer_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as other:
        other.setattr(cuda, "rope_write", lambda qkv, *_: qkv.mul_(2))
        assert launches_by_layer("qwen3-30b-a3b", 1, monkeypatch, 90)[1][1] == "torch.mul"


SAMPLE = ["_sampled_rows", "_edit", "_largest_of_groups", "_draw_of_part", "_draw_of_row", "torch.int"]
COUNT = ["torch.gt", "torch.where", "_count_ids"]
ACCEPT = ["_accept_drafts", "torch.long", "torch.add", "torch.isnan", "torch.masked_fill"]


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("depth", [0, 3])
def test_launches_of_what_follows_the_model(depth: int, draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling, editing and counting are eight launches more than the argmax of greedy rows, at any depth."""
    seqs, vocab = 4, 151936
    rows, plan = seqs * (1 + depth), SimpleNamespace(max_seqs=8, max_model_len=512, block_size=16, max_step_tokens=64)

    def ints(*shape: int) -> Tensor:
        return empty(*shape, dtype=torch.int32)

    logits, likeliest = empty(rows, vocab, dtype=torch.float32), ints(rows).long()
    model = SimpleNamespace(ops=cuda, layers=[], logits=lambda residual: logits, likeliest=lambda residual: likeliest)
    runner: Any = SimpleNamespace(plan=plan, model=model, aux_hidden=empty(64, 5, 16))
    edits = EditTables(8, vocab, frozenset(), META)
    assert edits.tables
    slots = Slots(runner, None, 4, META, edits)
    packed = PackedRows(*(ints(rows) for _ in range(4)), ints(seqs), ints(seqs + 1), ints(seqs, 1 + depth))
    ran = Ran(empty(rows, 16), None, ints(rows), rows=packed, kept=ints(seqs))
    ran = ran._replace(drafts=ints(seqs, depth)) if depth else ran
    found: list[str] = []

    def run() -> None:
        with watching(model, "cuda") as watch:
            slots.finish(StepKind(seqs, depth, rows, draws), ran)
        found.extend(each.kernel for each in watch.ran)

    captured_launches(monkeypatch, 90, run)
    accept = [ACCEPT[0], *COUNT, *ACCEPT[1:]] if draws else ACCEPT
    assert found == (SAMPLE if draws else ["torch.int"]) + accept, "fewer are welcome here"
