"""Watches a Gemma 4 assistant inside the engine, pass by pass, and computes the same passes with transformers.

The oracle is transformers' assistant, called with embeddings, a position and keys and values that end with the last
committed row. (transformers' own loop of drafting is no oracle: after a rejected draft it keeps stale rows.) Keys and
values come from transformers' target, or are read out of the engine's cache, whatever its format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkdraft import LLM
from sparkdraft.cache.formats.dense import DenseLayer
from sparkdraft.cache.formats.turboquant import CaptureLayer, CodedLayerKV
from sparkdraft.cache.windows import WindowLayer
from sparkdraft.drafters.assistant import Assistant
from sparkdraft.drafters.base import Anchors, Pick, Score
from sparkdraft.kernels.reference.turboquant import is_uncoded
from sparkdraft.kernels.turboquant.store import planes
from sparkdraft.kernels.turboquant.vectors import Encoded
from sparkdraft.models.common.layers import LayerKV
from tests.models.tiny import oracle

SOURCES = {"sliding_attention": 4, "full_attention": 5}  # layers of the tiny target, the last of each type
SharedKV = dict[str, tuple[Tensor, Tensor]]  # by the layers' type: keys and values, [1, heads, rows, head_dim]


@dataclass
class Draft:
    """One draft of one sequence."""

    ids: list[int]  # committed, the anchor last
    hidden: Tensor  # [hidden]: the target's, of the row before the anchor
    kv: SharedKV  # as the cache holds them
    fed: list[int] = field(default_factory=list)  # the id that each pass read
    logits: list[Tensor] = field(default_factory=list)  # of each pass


class Watch:
    """Everything that the engine's assistant drafts from now on, in `drafts`."""

    def __init__(self, llm: LLM) -> None:
        proposer = llm.engine.drafting.proposer
        assert proposer and isinstance(proposer.drafter, Assistant)
        self.proposer, self.drafter, self.kv = proposer, proposer.drafter, llm.engine.runner.kv
        self.drafts: list[Draft] = []
        self._propose = self.drafter.propose
        self.drafter.propose = self.propose  # type: ignore[method-assign]

    def propose(self, anchors: Anchors, depth: int, pick: Pick) -> Tensor:
        new: list[Draft] = []
        for row, work in enumerate(self.proposer._works):
            ids = work.request.ids(0, work.start + 1)
            assert anchors.hidden is not None
            assert len(ids) == int(anchors.length[row]) and ids[-1] == int(anchors.ids[row])
            new.append(
                Draft(ids, anchors.hidden[row, 0].clone(), self._cached(list(work.request.blocks), len(ids) - 1))
            )

        def watching(score: Score, each: int, drafted: int = 0, ids: Tensor | None = None) -> Tensor:
            def seen(likeliest: bool) -> Tensor:
                fed = self.drafter.ids[: len(new)].tolist()
                out = score(likeliest)
                for draft, token, row in zip(new, fed, out, strict=True):
                    draft.fed.append(token)
                    draft.logits.append(row.clone())
                return out

            return pick(seen, each, drafted, ids)

        found = self._propose(anchors, depth, watching)
        self.drafts += new
        return found

    def _cached(self, blocks: list[int], rows: int) -> SharedKV:
        parts = {kind: self.kv.layers[number] for kind, number in SOURCES.items()}
        return {kind: _read(part, blocks, rows) for kind, part in parts.items()}  # type: ignore[arg-type]


def _read(part: LayerKV, blocks: list[int], rows: int) -> tuple[Tensor, Tensor]:
    """What a row at the last of these positions reads. Rows whose page is lost are unlike any others."""
    positions = torch.arange(rows)
    if isinstance(part, CaptureLayer):
        part = part.exact
    if isinstance(part, WindowLayer):
        size, page_of = part.lookup.group.block_size, part.lookup.group.page_of
        pages = page_of[torch.tensor(blocks)[positions // size]].long()
        assert isinstance(part.inner, DenseLayer)
        both = [cache[pages.clamp(min=0), :, positions % size].float() for cache in (part.inner.k, part.inner.v)]
        lost = (pages < 0).view(-1, 1, 1)
        k, v = (x.masked_fill(lost, 1e6) for x in both)
    elif isinstance(part, CodedLayerKV):
        k, v = _decoded(part, torch.tensor(blocks), positions)
    else:
        assert isinstance(part, DenseLayer)
        size = part.k.shape[2]
        place = torch.tensor(blocks)[positions // size], slice(None), positions % size
        k, v = (cache[place].float() for cache in (part.k, part.v))
    return k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)


def _decoded(part: CodedLayerKV, blocks: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    layer = part.store
    size = layer.layout.block_size
    block, offset = blocks[positions // size], positions % size
    stored = [
        Encoded(tuple(p[block, :, offset] for p in each.planes), each.scale[block, :, offset]) for each in planes(layer)
    ]
    k, v = layer.keys.decode(stored[0]), layer.values.decode(stored[1])
    if layer.pages is not None and layer.page_of is not None:
        uncoded = is_uncoded(positions[-1:].unsqueeze(1), positions, layer.first, layer.recent)[0]
        pages = layer.page_of[block].long()
        assert (pages[uncoded] >= 0).all(), "a row that is read uncoded has lost its page"
        turned = layer.pages[pages.clamp(min=0), :, :, offset].float()  # [rows, 2, heads, dim]
        exact = layer.keys.rotation.inverse(turned)
        k, v = (x.where(~uncoded.view(-1, 1, 1), exact[:, i]) for i, x in enumerate((k, v)))
    return k, v


@torch.inference_mode()
def expected(draft: Draft, assistant: Path, target: Path, cached: bool, position: int = 0) -> list[Tensor]:
    """The logits of each pass by transformers, from the target's hidden state and K/V by transformers too, unless they
    are those of the engine's cache. position: added to the anchor's, to see that it matters."""
    body, model = oracle(target).model.language_model, _assistant(assistant)
    out = body(input_ids=torch.tensor([draft.ids[:-1]]), use_cache=False, return_shared_kv_states=True)
    hidden, kv = out.last_hidden_state[:, -1:], {kind: out.shared_kv_states[kind] for kind in SOURCES}
    if cached:
        hidden, kv = draft.hidden.view(1, 1, -1), draft.kv
    found, place = [], torch.tensor([[len(draft.ids) - 1 + position]])
    for token in draft.fed:
        embedded = torch.cat((body.embed_tokens(torch.tensor([[token]])), hidden), -1)
        step = model(inputs_embeds=embedded, position_ids=place, shared_kv_states=kv)
        hidden = step.last_hidden_state
        found.append(step.logits[0, 0])
    return found


def difference(draft: Draft, wanted: list[Tensor]) -> float:
    """The largest over all passes."""
    return max(float((logits - theirs).abs().max()) for logits, theirs in zip(draft.logits, wanted, strict=True))


@cache
def _assistant(folder: Path) -> Any:
    import transformers

    return transformers.Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
