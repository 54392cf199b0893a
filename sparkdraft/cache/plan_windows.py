"""The number of pages for the layers of each sliding window: enough for the requests that run at once.

One whole context in the full layers comes first, then pages for as many requests as there is room for. A request holds
pages for its window and for what it is about to write, whatever its length (cache/windows.py); a prompt chunk needs
pages for all its rows at once. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdraft.cache.recent_rows import pages_of_a_request
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import AttentionSpec

USUAL_CONTEXT = 8192  # assumed tokens per request when memory is divided between full layers and windows
LARGEST_SHARE = 0.75  # of the room for K/V: a context that nobody asked for and that takes more gets half of it
SPARE_SHARE = 4  # one part in this many is added to the pages that requests need, for prefixes to be found again
# rows of a prompt chunk for which pages are reserved beside those of requests; longer chunks are cut to fit
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
    """The layers that keep pages instead of blocks, per window. A window that spans the context makes a full layer."""
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
    max_rows: int,
    most_ahead: int,
    itemsize: int,
    room: int,  # bytes for all K/V
    full_block_bytes: int,
    most_blocks: int,  # upper limit: each block has at most one page
    asked: int,  # tokens that the full layers must hold; 0: nobody asked for a number
) -> tuple[tuple[WindowPlan, ...], int]:
    """The pages, and how many requests they are enough for: as many as may run at once."""
    if not layers:
        return (), max_seqs
    need = {window: pages_of_a_request(block_size, 0, window, most_ahead) for window in layers}
    page = {window: sum(2 * s.kv_width for s in specs) * block_size * itemsize for window, specs in layers.items()}
    chunk = -(-min(max_rows, CHUNK_ROWS) // block_size)
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
