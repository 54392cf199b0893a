"""How many pages the layers of each sliding window get: enough for the requests that the full layers have room for.

A request holds pages for its window and for what it is about to write, however long it is (cache/windows.py); a prompt
chunk needs pages for all its rows at once. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdraft.cache.recent_rows import pages_of_a_request
from sparkdraft.models.config import ModelConfig
from sparkdraft.models.layers import AttentionSpec

USUAL_CONTEXT = 8192  # tokens of a request, where memory is divided between full layers and windows
SPARE_SHARE = 4  # of the pages that requests need, one part in this many is added for prefixes to be found again
CHUNK_ROWS = 2048  # of a prompt that pages are reserved for beside those of requests; longer chunks are cut to fit


@dataclass(frozen=True, slots=True)
class WindowPlan:
    window: int
    pages: int
    page_bytes: int

    @property
    def nbytes(self) -> int:
        return (self.pages + 1) * self.page_bytes  # and one of zeros, in the place of those that are missing


def window_layers(model: ModelConfig, context: int) -> dict[int, list[AttentionSpec]]:
    """The layers that keep pages instead of blocks, by window. One that spans the context is a full layer."""
    found: dict[int, list[AttentionSpec]] = {}
    for spec in model.cached_attention:
        if 0 < spec.window < context:
            found.setdefault(spec.window, []).append(spec)
    return found


def plan_windows(
    layers: dict[int, list[AttentionSpec]],  # by window
    block_size: int,
    context: int,
    max_seqs: int,
    max_rows: int,
    most_ahead: int,
    itemsize: int,
    room: int,  # bytes for all K/V
    full_block_bytes: int,
    most_blocks: int,  # that there may be: each has one page at most
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
