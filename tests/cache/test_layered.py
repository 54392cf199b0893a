"""A cache of several kinds of layers: each has the part that it needs, and a page is a copy of a slot."""

from __future__ import annotations

import torch

from sparkdraft.cache.formats.dense import BorrowedLayer, DenseKV, DenseLayer
from sparkdraft.cache.layered import LayeredKV
from sparkdraft.cache.states import Copy, RecurrentStates, StateLayer, StateSizes
from sparkdraft.cache.windows import StepRoom, WindowGroup, WindowLayer
from sparkdraft.kernels import reference
from sparkdraft.kernels.ops import AttentionView
from sparkdraft.models.common.layers import AttentionSpec, RecurrentSpec, RopeSpec

CPU = torch.device("cpu")
FULL, SLIDES = (AttentionSpec(4, 2, 16, RopeSpec(16), 0.25, window) for window in (0, 32))
BORROWS = AttentionSpec(4, 2, 16, RopeSpec(16), 0.25, kv_from=3)
RECURRENT = RecurrentSpec(2, 4, 8, 8, conv_width=4)
SIZES = StateSizes(slots=3, pages=2, most_rows=16, blocks=10, block_size=16)


def states(layers: int = 2) -> RecurrentStates:
    made = RecurrentStates([RECURRENT] * layers, SIZES, torch.float32, CPU, reference)
    for part in (made.state, made.inputs, made.saved_state, made.saved_inputs):
        part.normal_()
    return made


def test_each_layer_has_its_own_kind_of_part() -> None:
    own, room = states(), StepRoom(rows=40, seqs=3, blocks=10)
    full = DenseKV([FULL, FULL], 10, 16, torch.float32, CPU, reference)
    group = WindowGroup([SLIDES], 5, 10, 16, room, torch.float32, CPU, reference)
    kv = LayeredKV([RECURRENT, FULL, SLIDES, FULL, BORROWS, RECURRENT], full, {32: group}, own, reference)
    kinds = [StateLayer, DenseLayer, WindowLayer, DenseLayer, BorrowedLayer, StateLayer]
    assert [type(part) for part in kv.layers] == kinds
    assert [kv.layers[0], kv.layers[5]] == own.layers and kv.layers[1] is full.layers[0]
    assert isinstance(kv.layers[4], BorrowedLayer) and kv.layers[4].owner is kv.layers[3]
    assert kv.bytes_read(40) == 2 * 40 * 2 * 2 * 16 * 4 + 32 * 2 * 2 * 16 * 4 + int(own.bytes_per_step)


def test_a_step_finds_the_slot_of_who_writes_there() -> None:
    own = states()
    own.send([(7, 2), (4, 0)])
    tables = torch.tensor([[1, 7], [4, 9], [7, 7]], dtype=torch.int32)
    starts, contexts = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3, 3], [18, 1, 0]))
    own.begin(AttentionView(starts, contexts, tables, 2, 18))
    assert own.slots.tolist() == [2, 0, -1] and own.layers[1].slots.tolist() == [2, 0, -1]


def test_a_page_is_a_copy_of_a_slot_and_back() -> None:
    own = states()
    before = own.state[:, 1].clone(), own.inputs[:, 1].clone()
    own.copy(Copy(slot=1, page=0, border=48, saves=True))
    own.state[:, 1] = 0
    own.base[:] = 7
    own.copy(Copy(slot=2, page=0, border=48, saves=False))
    assert torch.equal(own.state[:, 2], before[0]) and own.base_of(2) == 48 and own.base_of(1) == 7
    places = [p % own.inputs.shape[2] for p in (45, 46, 47)]
    assert torch.equal(own.inputs[:, 2][:, places], before[1][:, places])
    others = [p for p in range(own.inputs.shape[2]) if p not in places]
    assert not torch.equal(own.inputs[:, 2][:, others], before[1][:, others])


def test_layers_that_stand_at_different_places_have_no_border() -> None:
    own = states()
    own.base[:] = 32
    assert own.base_of(0) == 32
    own.base[1, 0, 3] = 48
    assert own.base_of(0) is None
