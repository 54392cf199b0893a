"""The number of pages for the layers of each sliding window: enough for the requests that the full layers have room
for.

A request holds pages for its window and for what it is about to write, whatever its length (cache/windows.py); a prompt
chunk needs pages for all its rows at once. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdraft.cache.recent_rows import pages_of_a_request
from sparkdraft.models.config import ModelConfig
from sparkdraft.models.layers import AttentionSpec

USUAL_CONTEXT = 8192  # assumed tokens per request when memory is divided between full layers and windows
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
) -> tuple[WindowPlan, ...]:
    need = {window: pages_of_a_request(block_size, 0, window, most_ahead) for window in layers}
    page = {window: sum(2 * s.kv_width for s in specs) * block_size * itemsize for window, specs in layers.items()}
    chunk = -(-min(max_rows, CHUNK_ROWS) // block_size)
    spare = 1 + 1 / SPARE_SHARE
    request = sum(spare * need[w] * page[w] for w in layers)
    request += -(-min(context, USUAL_CONTEXT) // block_size) * full_block_bytes
    left = room - chunk * sum(page.values())
    if left < request:  # little memory: one request at a time, whose prompt comes in smaller chunks
        chunk, left = min(chunk, min(need.values(), default=0)), 0
    requests = max(min(int(left // max(request, 1)), max_seqs), 1)
    return tuple(
        WindowPlan(window, min(int(requests * spare * need[window]) + chunk, most_blocks), page[window])
        for window in layers
    )
