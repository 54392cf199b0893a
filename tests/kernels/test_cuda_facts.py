"""What the GPU kernels say of themselves, for GPUs that are not here."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sparkdraft.kernels.cuda.facts import attention_tiles, launches, matrix_tiles
from sparkdraft.kernels.cuda.gpu import Gpu

HOPPER, SPARK = Gpu(9, 0, 132), Gpu(12, 1, 48)
KNOWN = {("16bit", (6144, 4096)), ("16bit", (4096, 12288))}


def test_tiles_that_were_measured_here_are_told_from_those_chosen_by_rule() -> None:
    assert matrix_tiles(KNOWN, HOPPER).value == "measured on sm_90"
    some = matrix_tiles(KNOWN | {("16bit", (100, 200))}, HOPPER)
    assert some.value == "measured for 2 of 3 shapes" and "100 x 200" in some.reason
    mixed = matrix_tiles(KNOWN | {("fp8", (6144, 4096))}, HOPPER)
    assert mixed.value == "measured for 2 of 3 shapes" and "6144 x 4096 (fp8)" in mixed.reason
    wide = {("32bit", shape) for _, shape in KNOWN}
    for found in (matrix_tiles(wide, HOPPER), matrix_tiles(KNOWN, SPARK)):
        assert found.value == "chosen by rule" and "were measured on sm_" in found.reason
    assert not attention_tiles(HOPPER).reason and "sm_121" in attention_tiles(SPARK).reason


def test_launches_that_do_not_overlap_say_why() -> None:
    found = launches(torch.device("cpu"), Gpu(8, 6, 84))
    assert found.value == "one after the other" and "sm_86" in found.reason
