"""A step's integers: the place of each row, padding, and copies to a device that is behind."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
import torch

from sparkdraft.engine.runner import Rows, StepInputs

CPU = torch.device("cpu")


def test_room_that_is_left_belongs_to_nobody_and_writes_nowhere() -> None:
    inputs = StepInputs(max_step_tokens=16, max_seqs=4, max_blocks=3, block_size=4, device=CPU)
    full = Rows(list(range(100, 108)), 0, array("i", [7, 8]), 0, 8)
    inputs.fill([full, full])  # what an earlier step has left behind
    parts = [Rows([1, 2, 3, 4, 5], 2, array("i", [5, 6]), 4, 5), Rows([9], 3, array("i", [2]), 0, 1)]
    assert inputs.fill(parts, seqs=4, rows=12) == 2
    view = inputs.view(4, 12, 12)
    assert view.query_start.tolist() == [0, 5, 6, 6, 6] and view.context_len.tolist() == [7, 4, 0, 0]
    assert inputs.slots[:12].tolist() == [22, 23, 24, 25, 26, 11] + [-1] * 6
    assert inputs.positions[:12].tolist() == [2, 3, 4, 5, 6, 3] + [0] * 6
    assert inputs.token_ids[:12].tolist() == [1, 2, 3, 4, 5, 9] + [0] * 6
    assert inputs.logit_rows[:4].tolist() == [4, 5, 0, 0]
    assert view.block_tables[:2, 0].tolist() == [5, 2]


def test_a_batch_that_fills_its_room_is_left_as_it_is() -> None:
    inputs = StepInputs(max_step_tokens=8, max_seqs=2, max_blocks=1, block_size=8, device=CPU)
    assert inputs.fill([Rows([1, 2], 0, array("i", [0]), 0, 2), Rows([3], 5, array("i", [1]), 0, 1)], 2, 3) == 3
    assert inputs.query_start.tolist() == [0, 2, 3] and inputs.slots[:3].tolist() == [0, 1, 13]
    assert inputs.logit_rows[:3].tolist() == [0, 1, 2]


class LateDevice:
    """A device whose copies wait in a queue, as behind a GPU's kernels, and run when the host waits for one."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.num_done = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> LateCopy:
        self.queue.append(lambda: target.copy_(source))
        return LateCopy(self, len(self.queue))

    def catch_up(self, count: int) -> None:
        while self.num_done < count:
            self.queue[self.num_done]()
            self.num_done += 1


class LateCopy:
    def __init__(self, device: LateDevice, number: int) -> None:
        self.device, self.number = device, number

    def synchronize(self) -> None:
        self.device.catch_up(self.number)


@pytest.mark.parametrize("chunks", [2, 3, 4, 7])
def test_chunks_that_reach_the_device_late_are_still_each_their_own(chunks: int) -> None:
    """Prompt chunks sample nothing, so the host does not wait for them; each must still arrive as it was written."""
    late, seen = LateDevice(), []
    inputs = StepInputs(max_step_tokens=4, max_seqs=1, max_blocks=8, block_size=4, device=CPU, copy=late.copy)
    for chunk in range(chunks):
        ids = [10 * chunk + i for i in range(4)]
        inputs.fill([Rows(ids, 4 * chunk, array("i", range(chunk + 1)), 0, 0)])
        late.queue.append(lambda: seen.append((inputs.token_ids.tolist(), inputs.slots.tolist())))  # the step's kernels
    assert late.num_done < len(late.queue), "the host was never made to wait for the last step"
    late.catch_up(len(late.queue))
    assert seen == [([10 * c + i for i in range(4)], [4 * c + i for i in range(4)]) for c in range(chunks)]
