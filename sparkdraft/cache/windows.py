"""Layers with a sliding window: their keys and values are in pages of a pool of their own, as many as the window needs.

A token of such a layer sees the last 'window' positions, so pages of earlier blocks can serve other requests.
`RecentRows` (cache/pages.py) decides which blocks have a page, and the map from blocks to pages is on the device. A
step begins by looking up the pages of its tokens and tables once; after that these layers run like all others.

    blocks of a request    | ........ no page any more ........ | window | to be written |
    pages held             |                                    |  held  |     held      |

The plan counts pages for the requests that run at once: one whole context in the full layers comes first, then pages
for as many requests as there is room for. A prompt chunk needs pages for all its tokens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparkdraft.cache.formats import KeptLayer
from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.cache.groups import send_map
from sparkdraft.cache.pages import pages_of_a_request
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import AttentionSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sparkdraft.kernels.ops import AttentionParams, AttentionView, Ops, RopeArgs
    from sparkdraft.models.common.layers import LayerKV

USUAL_CONTEXT = 8192  # tokens assumed per request when memory is divided between full layers and windows
LARGEST_SHARE = 0.75  # of the room for K/V: a context that nobody asked for and that takes more gets half of it
SPARE_SHARE = 4  # one part in this many is added to the pages that requests need, for prefixes to be found again
# tokens of a prompt chunk for which pages are reserved beside those of requests; longer chunks are cut to fit
CHUNK_ROWS = 2048


@dataclass(frozen=True, slots=True)
class WindowPlan:
    window: int
    pages: int
    page_bytes: int

    @property
    def nbytes(self) -> int:
        return (self.pages + 1) * self.page_bytes  # with one page of zeros, which takes the place of missing pages


def window_layers(model: ModelConfig, context: int) -> dict[int, list[AttentionSpec]]:
    """The layers that keep pages, per window. A window that spans the context makes a full layer."""
    found: dict[int, list[AttentionSpec]] = {}
    for spec in model.cached_attention:
        if 0 < spec.window < context:
            found.setdefault(spec.window, []).append(spec)
    return found


def plan_windows(
    layers: dict[int, list[AttentionSpec]],  # per window
    block_size: int,
    context: int,
    max_seqs: int,
    max_step_tokens: int,
    most_ahead: int,
    itemsize: int,
    room: int,  # bytes for all K/V
    full_block_bytes: int,
    most_blocks: int,  # upper limit: each block has at most one page
    asked: int,  # tokens that the full layers must hold; 0: nobody asked for a number
) -> tuple[tuple[WindowPlan, ...], int]:
    """The pages, and how many requests they are enough for."""
    if not layers:
        return (), max_seqs
    need = {window: pages_of_a_request(block_size, 0, window, most_ahead) for window in layers}
    page = {window: sum(2 * s.kv_width for s in specs) * block_size * itemsize for window, specs in layers.items()}
    chunk = -(-min(max_step_tokens, CHUNK_ROWS) // block_size)
    spare = 1 + 1 / SPARE_SHARE
    left = room - chunk * sum(page.values())
    first, usual = (-(-tokens // block_size) * full_block_bytes for tokens in (asked or context, USUAL_CONTEXT))
    if not asked and first > LARGEST_SHARE * left:
        first = max(left, 0) // 2

    def fits(requests: int) -> bool:
        pages = sum(requests * spare * need[window] * page[window] for window in layers)
        return pages + max(first, requests * min(usual, first)) <= left

    if not fits(1):  # little memory: one request at a time, whose prompt comes in smaller chunks
        chunk = min(chunk, *need.values())
    requests = next((n for n in range(max_seqs, 1, -1) if fits(n)), 1)
    plans = [
        WindowPlan(window, min(int(requests * spare * need[window]) + chunk, most_blocks), page[window])
        for window in layers
    ]
    return tuple(plans), requests


# ---- the tensors


@dataclass(frozen=True, slots=True)
class StepRoom:
    """The largest step, which sizes the buffers of looked-up pages."""

    rows: int
    seqs: int
    blocks: int  # per sequence


class WindowGroup:
    """The layers with one and the same window."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],  # of the layers that own keys and values
        num_pages: int,
        num_blocks: int,
        block_size: int,
        room: StepRoom,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        same_bits_up_to: int = 0,
    ) -> None:
        import torch

        self.ops, self.block_size = ops, block_size
        # One extra page of zeros takes the place of missing pages: a tile may reach beyond the window, and the masked
        # values there must be finite and must not be another request's.
        self.missing = num_pages
        self.kv = DenseKV(specs, num_pages + 1, block_size, dtype, device, ops, same_bits_up_to)
        for tensor in (*self.kv.k, *self.kv.v):
            tensor[self.missing].zero_()
        self.page_of = torch.full((num_blocks,), -1, dtype=torch.int32, device=device)  # per block; -1: it has no page
        self.room = room
        self.lookup = PageLookup(self, room.rows)

    def layer(self, inner: LayerKV) -> WindowLayer:
        assert isinstance(inner, KeptLayer), "a layer that borrows its keys has no pages"
        return WindowLayer(self.lookup, inner)

    def send(self, changes: list[tuple[int, int]]) -> None:
        """(block, its page or -1) of blocks that got or lost a page, before the next step."""
        send_map(self.page_of, changes)


class PageLookup:
    """The pages of a window's layers under the slots and blocks of a view, at fixed addresses for captured steps."""

    def __init__(self, group: WindowGroup, most_rows: int) -> None:
        from sparkdraft.kernels.ops import AttentionView

        self.group, self._slots = group, group.page_of.new_zeros(most_rows)
        self._tables = group.page_of.new_zeros(group.room.seqs, group.room.blocks)
        self.slots, self.view = self._slots, AttentionView(self._slots, self._slots, self._tables, 0, 0)

    def begin(self, slots: Tensor, view: AttentionView) -> None:
        group, tables = self.group, self._tables[: view.block_tables.shape[0]]
        self.slots = self._slots[: slots.shape[0]]
        group.ops.find_pages(
            group.page_of, slots, view.block_tables, group.block_size, self.slots, tables, group.missing
        )
        self.view = replace(view, block_tables=tables)


@dataclass(frozen=True, slots=True)
class WindowLayer:
    lookup: PageLookup
    inner: LayerKV

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        self.inner.write(qkv, rope_args, self.lookup.slots)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        return self.inner.attend(q, self.lookup.view, params)
