"""What the GPU kernels say of themselves, for GPUs that are not here."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sparkdraft.kernels.cuda import few_rows
from sparkdraft.kernels.cuda.facts import attention_tiles, launches, matrix_tiles

HOPPER, SPARK = few_rows.Gpu(132, 227 << 10, True), few_rows.Gpu(48, 99 << 10, False)
KNOWN = {(6144, 4096), (4096, 12288)}


def test_tiles_that_were_measured_here_are_told_from_those_chosen_by_rule() -> None:
    assert matrix_tiles(KNOWN, 2, HOPPER, (9, 0)).value == "measured on sm_90"
    some = matrix_tiles(KNOWN | {(100, 200)}, 2, HOPPER, (9, 0))
    assert some.value == "measured for 2 of 3 shapes" and "100 x 200" in some.reason
    for found in (matrix_tiles(KNOWN, 4, HOPPER, (9, 0)), matrix_tiles(KNOWN, 2, SPARK, (12, 1))):
        assert found.value == "chosen by rule" and "were measured on sm_" in found.reason
    assert not attention_tiles((9, 0)).reason and "sm_121" in attention_tiles((12, 1)).reason


def test_launches_that_do_not_overlap_say_why() -> None:
    found = launches(torch.device("cpu"), (8, 6))
    assert found.value == "one after the other" and "sm_86" in found.reason
