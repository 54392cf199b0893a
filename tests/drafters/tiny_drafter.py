"""Tiny random drafters in both dialects, and a harness that observes and proposes over hand-made batches.

The tensors are the same whatever the dialect, so that one oracle (z-lab's own package, `dflash`) serves for both: a
folder in z-lab's layout that means what the folder under test means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparkdraft import kernels
from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.drafters.base import CommittedRows, DraftBuild
from sparkdraft.drafters.dflash import DFlash, DFlashConfig, DraftBlock
from sparkdraft.drafters.find import open_drafter
from sparkdraft.kernels.ops import AttentionView
from sparkdraft.models.common.blocks import Decoder
from sparkdraft.weights.loader import Loader

BLOCK, CONTEXT, NUM_BLOCKS = 8, 256, 96
SHAPE: dict[str, Any] = {  # heads unlike the tiny target's (6 and 2 of 32)
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
MASK = 300
SLIDING, FULL = "sliding_attention", "full_attention"


def body(kinds: str = "ff", window: int | None = None, **changes: Any) -> dict[str, Any]:
    """The drafter's dimensions; 'kinds' has a letter a layer, f(ull) or s(liding)."""
    types = [SLIDING if kind == "s" else FULL for kind in kinds]
    rope = {"rope_theta": 20000.0, "rope_scaling": None}
    slide = {"layer_types": types, "sliding_window": window, "use_sliding_window": window is not None}
    return {**SHAPE, **rope, **slide, "num_hidden_layers": len(types), **changes}


def zlab(dimensions: Mapping[str, Any], block_size: int = 8, inner: Any = None, **top: Any) -> dict[str, Any]:
    settings = {"mask_token_id": MASK, "target_layer_ids": [0, 2], **(inner or {})}
    named = {"architectures": ["DFlashDraftModel"], "block_size": block_size, "num_target_layers": 3}
    return {**named, **dimensions, "dflash_config": settings, **top}


def speculators(dimensions: Mapping[str, Any], block_size: int = 8, **top: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "tiny"}},
        "aux_hidden_state_layer_ids": [1, 3],
        "block_size": block_size,
        "draft_vocab_size": dimensions["vocab_size"],
        "mask_token_id": MASK,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "transformer_layer_config": dict(dimensions),
        **top,
    }


def random_tensors(
    dimensions: Mapping[str, Any], aux_hidden: int = 2, prefix: str = "", seed: int = 5
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inter, head_dim = (dimensions[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    q, kv = dimensions["num_attention_heads"] * head_dim, dimensions["num_key_value_heads"] * head_dim
    shapes = {"fc": (hidden, aux_hidden * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    for i in range(dimensions["num_hidden_layers"]):
        attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        mlp = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}
        shapes |= {f"layers.{i}.self_attn.{n}": s for n, s in attention.items()}
        shapes |= {f"layers.{i}.self_attn.{n}": (head_dim,) for n in ("q_norm", "k_norm")}
        shapes |= {f"layers.{i}.mlp.{n}": s for n, s in mlp.items()}
        shapes |= {f"layers.{i}.{n}": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")}
    tensors = {}
    for name, shape in shapes.items():
        scale, mean = (0.3, 1.0) if "norm" in name else (2 * shape[-1] ** -0.5, 0.0)
        tensors[f"{prefix}{name}.weight"] = torch.randn(shape, generator=generator) * scale + mean
        if dimensions["attention_bias"] and name.endswith("_proj") and "self_attn" in name:
            tensors[f"{prefix}{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.5
    return tensors


def write_drafter(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


class DraftHarness:
    """A drafter over a target's model, with sequences of its own in one paged cache."""

    def __init__(
        self,
        target: Decoder,
        folder: Path,
        kernel: str = "reference",
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        weights: str = "auto",
        ids: list[int] | None = None,
    ) -> None:
        """weights, ids: as drafter_weights and the ids of draft_vocab."""
        self.device, ops = torch.device(device), kernels.load(kernel)
        source = open_drafter(str(folder))
        draft = DFlashConfig.read(source.config)
        draft.check_fits(target.config)
        draft = draft if ids is None else replace(draft, draft_vocab_size=len(ids))
        self.draft, self.caps = draft, draft.caps()
        self.kv = DenseKV(draft.model.attention, NUM_BLOCKS, BLOCK, dtype, self.device, ops)
        for cache in (*self.kv.k, *self.kv.v):
            cache.fill_(float("nan"))  # what was never written must never be read
        load = Loader(source, self.device, dtype, ops, weights=weights)
        chosen = None if ids is None else torch.tensor(ids, device=self.device)
        self.drafter: DFlash = draft.build(DraftBuild(load, ops, target, self.kv, CONTEXT, 8, chosen))
        self.lengths: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(2)).tolist()

    def slots(self, name: str, first: int, last: int) -> list[int]:
        table = self.tables.setdefault(name, [])
        while len(table) * BLOCK < last:
            table.append(self.free.pop())
        return [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(first, last)]

    @torch.inference_mode()
    def observe(self, chunks: Mapping[str, Tensor]) -> None:
        """The next rows [rows, aux_hidden, hidden] of each named sequence, in one batch."""
        positions: list[int] = []
        slots: list[int] = []
        for name, aux_hidden in chunks.items():
            first = self.lengths.setdefault(name, 0)
            last = self.lengths[name] = first + aux_hidden.shape[0]
            positions += range(first, last)
            slots += self.slots(name, first, last)
        aux_hidden = torch.cat(list(chunks.values())).to(self.device, self.kv.k[0].dtype)
        self.drafter.observe(CommittedRows(aux_hidden, self.int32(positions), self.int32(slots)))

    def block(self, anchors: Mapping[str, int], width: int, depth: int) -> DraftBlock:
        ids, positions, slots, contexts = [], [], [], []
        for name, anchor in anchors.items():
            first = self.lengths[name]
            ids += [anchor, *[self.draft.mask_token_id] * (width - 1)]
            positions += range(first, first + width)
            slots += self.slots(name, first, first + width)
            contexts.append(first + width)
        most = max(len(self.tables[n]) for n in anchors)
        tables = [self.tables[n] + [0] * (most - len(self.tables[n])) for n in anchors]
        starts = [i * width for i in range(len(anchors) + 1)]
        view = AttentionView(self.int32(starts), self.int32(contexts), self.int32(tables), width, max(contexts))
        rows = [start + i for start in starts[:-1] for i in range(1, depth + 1)]
        return DraftBlock(self.int32(ids), self.int32(positions), self.int32(slots), view, self.int32(rows))

    @torch.inference_mode()
    def propose(self, anchors: Mapping[str, int], width: int = 0, depth: int = 0) -> dict[str, Tensor]:
        """Logits of each named sequence's draft, [depth, vocabulary]; all of the drafter's block unless told."""
        width = width or self.draft.block_size
        depth = depth or width - 1
        block = self.block(anchors, width, depth)
        logits = self.drafter.logits(block).float().cpu()
        assert self.drafter.likeliest(block).tolist() == logits.argmax(-1).tolist()
        return {name: logits[i * depth : (i + 1) * depth] for i, name in enumerate(anchors)}

    def int32(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
