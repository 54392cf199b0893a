"""The memory of recurrent layers: a slot per request, and pages of states from which prefixes continue. No torch.

A slot has the state of every recurrent layer, and the rings of records and of the convolution's inputs that let a step
be taken back (kernels/reference/recurrent.py). A page has the state, and the inputs just before it. Neither grows with
the context, so the more tokens a request has, the cheaper they are: a state of Qwen3.5-27B takes as much as the keys
and values of 2,300 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdraft.core import UserError
from sparkdraft.kernels.ops import FOLD
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import RecurrentSpec
from sparkdraft.models.common.sizes import input_count, record_count, state_count

STATE_ITEMSIZE = 4  # states and records are float32, whatever the activations are
PAGE_SHARE = 8  # pages take at most one part in this many of the room for all caches
MOST_PAGES = 4  # per request that may run
LEAST_PAGES = 2  # without any no prefix could be continued
SLOT_SHARE = 2  # slots of a number of requests that nobody asked for take at most one part in this many


@dataclass(frozen=True, slots=True)
class StatePlan:
    slots: int
    pages: int
    most_rows: int  # of one sequence in a step of which rows may be rejected
    slot_bytes: int
    page_bytes: int

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes + self.pages * self.page_bytes

    def describe(self) -> str:
        each = f"{self.slot_bytes / 2**20:.1f} MiB"
        return f"recurrent states of {self.slots} requests, {each} each, and {self.pages} of prefixes"


def recurrent_layers(model: ModelConfig) -> list[RecurrentSpec]:
    return [layer.mixer for layer in model.layers if isinstance(layer.mixer, RecurrentSpec)]


def state_bytes(layers: list[RecurrentSpec], most_rows: int, itemsize: int) -> tuple[int, int]:
    """Of a slot and of a page. itemsize: of the convolution's inputs."""
    states = sum(map(state_count, layers)) * STATE_ITEMSIZE
    records = sum(record_count(spec, most_rows) for spec in layers) * STATE_ITEMSIZE
    inputs = sum(input_count(spec, most_rows) for spec in layers) * itemsize
    before = sum((spec.conv_width - 1) * spec.conv_channels for spec in layers) * itemsize
    return states + records + inputs, states + before


def plan_states(
    model: ModelConfig,
    max_seqs: int,
    deepest: int,  # drafts of one request per step, at most
    itemsize: int,
    room: int,  # bytes for all caches
    has_prefixes: bool,
) -> StatePlan | None:
    """None for a model without recurrent layers. Raises UserError where more slots are asked for than fit. If not one
    fits, the weights are what is too large, so whoever adds everything up refuses."""
    layers = recurrent_layers(model)
    if not layers:
        return None
    most_rows = max(1 + deepest, FOLD)
    slot, page = state_bytes(layers, most_rows, itemsize)
    fit = max(room - 1, 0) // slot
    if fit and max_seqs > fit:
        raise UserError(
            f"the recurrent states of {max_seqs} requests take {max_seqs * slot / 2**30:.1f} GiB, and "
            f"{room / 2**30:.1f} GiB are left for all caches: ask for max_seqs {fit} or fewer"
        )
    pages = max(min(room // PAGE_SHARE // page, MOST_PAGES * max_seqs), LEAST_PAGES) if has_prefixes else 0
    return StatePlan(max_seqs, pages, most_rows, slot, page)


def fewer_requests(model: ModelConfig, max_seqs: int, deepest: int, itemsize: int, room: int) -> int:
    """How many requests run at once where nobody asked for a number: their states leave room for keys and values."""
    layers = recurrent_layers(model)
    if not layers:
        return max_seqs
    slot, _ = state_bytes(layers, max(1 + deepest, FOLD), itemsize)
    return max(min(max_seqs, room // SLOT_SHARE // slot), 1)
