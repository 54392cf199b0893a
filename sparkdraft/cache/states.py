"""The states of all recurrent layers: a slot per request, and pages of states at block borders for prefixes.

kernels/reference/recurrent.py defines what a layer keeps. A step begins by looking up the slots of its sequences once,
in a map of blocks on the device: only one request writes into a block, so the block of a sequence's first row names its
slot. The slots are at a fixed address, so recorded and overlapped steps find them there.

A page is a copy of a slot without its records: the state, and the inputs of the convolution just before `base`. Pages
and slots are copied between steps, when cache/state_slots.py says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdraft.cache.state_slots import Copy
from sparkdraft.kernels.ops import FOLD, AttentionView, Ops, RecurrentState, input_ring, record_ring
from sparkdraft.models.common.layers import RecurrentSpec


@dataclass(frozen=True, slots=True)
class StateSizes:
    slots: int  # requests at once
    pages: int
    most_rows: int  # of one sequence in a step of which rows may be rejected
    blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class StateLayer:
    """One layer's part."""

    states: RecurrentStates
    memory: RecurrentState

    @property
    def slots(self) -> Tensor:
        return self.states.slots


class RecurrentStates:
    def __init__(
        self,
        specs: Sequence[RecurrentSpec],  # of the recurrent layers, which are all alike
        sizes: StateSizes,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
    ) -> None:
        spec, layers, slots = specs[0], len(specs), sizes.slots
        assert all(each == spec for each in specs), "recurrent layers of one model are alike"
        self.ops, self.block_size, self.conv_width = ops, sizes.block_size, spec.conv_width
        keys, values = (spec.num_key_heads, spec.key_dim), (spec.num_value_heads, spec.value_dim)
        matrix = (spec.num_value_heads, spec.key_dim, spec.value_dim)
        records, inputs = record_ring(sizes.most_rows), input_ring(sizes.most_rows, spec.conv_width)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(layers, *shape, dtype=dtype, device=device)

        # All layers together, so that one call copies a page. Nothing is cleared: at position 0 a state begins anew.
        self.state, self.base = empty(slots, *matrix), empty(slots, spec.num_value_heads, dtype=torch.int32)
        self.keys, self.updates = empty(slots, records, *keys), empty(slots, records, *values)
        self.decays = empty(slots, records, spec.num_value_heads)
        self.inputs = empty(slots, inputs, spec.conv_channels, dtype=dtype)
        self.saved_state = empty(sizes.pages, *matrix)
        self.saved_inputs = empty(sizes.pages, spec.conv_width - 1, spec.conv_channels, dtype=dtype)
        self.layers = [StateLayer(self, self._memory(layer, sizes.most_rows)) for layer in range(layers)]
        self.slot_of = torch.full((sizes.blocks,), -1, dtype=torch.int32, device=device)  # of who writes into a block
        self._slots = torch.full((slots,), -1, dtype=torch.int32, device=device)
        self.slots = self._slots

    def _memory(self, layer: int, most_rows: int) -> RecurrentState:
        parts = (self.state, self.base, self.keys, self.updates, self.decays, self.inputs)
        state, base, keys, updates, decays, inputs = (part[layer] for part in parts)
        return RecurrentState(state, base, keys, updates, decays, inputs, most_rows)

    @property
    def bytes_per_step(self) -> float:
        """What a plain step of one request moves on average: it reads the state and the records since `base`, writes
        its own record, and the state once in FOLD steps."""
        state, inputs = self.state[:, 0].nbytes, self.inputs[:, 0, 0].nbytes
        record = sum(part[:, 0, 0].nbytes for part in (self.keys, self.updates, self.decays))
        return state * (1 + 1 / FOLD) + record * (1 + (FOLD - 1) / 2) + inputs * self.conv_width

    def begin(self, view: AttentionView) -> None:
        """Look up the slots of this step's sequences."""
        self.slots = self._slots[: view.context_len.shape[0]]
        self.ops.find_states(self.slot_of, view, self.block_size, self.slots)

    def base_of(self, slot: int) -> int | None:
        """Where the state of a slot stands once all launched steps have run, which this waits for; None: at different
        places in different layers, which no finished step leaves."""
        found = self.base[:, slot].unique().tolist()
        return int(found[0]) if len(found) == 1 else None

    def send(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Update the device's map: (block, slot of the request that will write into it), before the next step."""
        if blocks:
            places, slots = torch.tensor(blocks, dtype=torch.int32).t().to(self.slot_of.device, non_blocking=True)
            self.slot_of[places.long()] = slots

    def copy(self, what: Copy) -> None:
        """Copy a slot's state, which stands at the border, to a page, or a page to a slot."""
        slot, page, border = what.slot, what.page, what.border
        if what.saves:
            self.saved_state[:, page] = self.state[:, slot]
        else:
            self.state[:, slot] = self.saved_state[:, page]
            self.base[:, slot] = border
        for i, position in enumerate(range(border - self.conv_width + 1, border)):
            place = position % self.inputs.shape[2]
            if what.saves:
                self.saved_inputs[:, page, i] = self.inputs[:, slot, place]
            else:
                self.inputs[:, slot, place] = self.saved_inputs[:, page, i]
