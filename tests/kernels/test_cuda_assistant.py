"""Passes of a Gemma 4 assistant on the Triton kernels: their logits are those of the reference."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sparkdraft import kernels
from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.drafters.assistant import AssistantConfig
from sparkdraft.drafters.base import Anchors, DraftBuild, Score
from sparkdraft.models.common.config import FINAL
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.loader import Loader
from tests.drafters.tiny_assistant import write_assistant
from tests.kernels.triton_device import DEVICE, gpu
from tests.models.harness import BLOCK, Harness
from tests.models.tiny import write_tiny

IDS = [[3 + (7 * i) % 200 for i in range(length)] for length in (21, 5)]  # longer and shorter than the window, 8
DEPTH = 2


def passes(target: Path, drafter: Path, kernel: str, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and likeliest columns of each pass, of two sequences and an empty one."""
    harness, ops = Harness(target, kernel, device), kernels.load(kernel)
    source = open_checkpoint(str(drafter))
    names = ("long", "short")
    _, aux_hidden = harness.run({name: ids[:-1] for name, ids in zip(names, IDS, strict=True)}, (FINAL,))
    ends = [len(IDS[0]) - 2, len(IDS[0]) + len(IDS[1]) - 3]
    hidden = torch.cat((aux_hidden[ends], torch.zeros_like(aux_hidden[:1]))).to(device)
    width = max(len(harness.tables[name]) for name in names)
    tables = [harness.tables[name] + [0] * (width - len(harness.tables[name])) for name in names] + [[0] * width]
    numbers = [[ids[-1] for ids in IDS] + [0], [len(ids) for ids in IDS] + [0]]
    token, length = (torch.tensor(x, dtype=torch.int32, device=device) for x in numbers)
    table = torch.tensor(tables, dtype=torch.int32, device=device)
    anchors = Anchors(token, length, table, BLOCK, 256, hidden=hidden)
    load = Loader(source, torch.device(device), torch.float32, ops)
    own = DenseKV((), 1, BLOCK, torch.float32, torch.device(device), ops)
    made = AssistantConfig.read(source.config).build(DraftBuild(load, ops, harness.model, own, 256, 4))
    made.read_from(harness.kv)
    logits: list[Tensor] = []
    columns: list[Tensor] = []

    def pick(score: Score, each: int, drafted: int = 0, ids: Tensor | None = None) -> Tensor:
        state = made.joined.clone()
        columns.append(score(True)[:2].cpu())
        made.joined.copy_(state)  # a pass leaves its state for the next
        found = score(False)
        logits.append(found[:2].float().cpu())
        return found.argmax(-1, keepdim=True)

    with torch.inference_mode():
        made.propose(anchors, DEPTH, pick)
    return logits, columns


@gpu
def test_passes_equal_the_reference(tmp_path: Path) -> None:
    target, drafter = write_tiny(tmp_path / "target", "gemma4"), write_assistant(tmp_path / "assistant")
    wanted, likeliest = passes(target, drafter, "reference", "cpu")
    found, columns = passes(target, drafter, "cuda", DEVICE)
    assert len(wanted) == DEPTH
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    for one, other, scores in zip(columns, likeliest, wanted, strict=True):
        assert torch.equal(one, other) and torch.equal(other, scores.argmax(-1))
