"""A whole drafter of quantised weights and few ids through the GPU's kernels, against the definition's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparkdraft.weights.quant.quantise import QUANTISERS
from tests.drafters.tiny_drafter import DraftHarness, body, random_tensors, write_drafter, zlab
from tests.kernels.triton_device import DEVICE, assert_close, gpu
from tests.models.harness import Harness
from tests.models.tiny import write_tiny

IDS = [*range(3, 120, 2), 300]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("quantised")
    drafter = write_drafter(root / "drafter", zlab(body("f")), random_tensors(body("f")))
    return write_tiny(root / "target", "llama"), drafter


@gpu
@pytest.mark.parametrize("ids", [None, IDS], ids=["all ids", "some ids"])
@pytest.mark.parametrize("form", QUANTISERS)
def test_drafts_are_those_of_the_definition(form: str, ids: list[int] | None, folders: tuple[Path, Path]) -> None:
    target, drafter = folders
    aux_hidden = torch.randn(21, 2, 96, generator=torch.Generator().manual_seed(3))
    found = []
    for kernel, device in (("reference", "cpu"), ("cuda", DEVICE)):
        model = Harness(target, "reference" if DEVICE == "cpu" else kernel, device).model
        drafts = DraftHarness(model, drafter, kernel, device, torch.float32, form, ids)
        drafts.observe({"a": aux_hidden[:9], "b": aux_hidden[9:]})
        found.append(drafts.propose({"a": 7, "b": 11}, width=4))
    for name, logits in found[0].items():
        assert logits.shape == (3, len(IDS) if ids else 320)
        assert_close(found[1][name], logits, torch.float32)
