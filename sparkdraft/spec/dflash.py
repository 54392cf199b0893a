"""The DFlash drafter: a few layers that fill in a block of masks from what the target's hidden states say of the text.

A committed row reaches the drafter only as keys and values, projected for all layers at once from the target's taps
(`observe`); queries come from the block alone, so one pass drafts the whole block (`propose`). Embedding and head are
the target's unless the checkpoint has its own; when to draft, and what becomes of it, is the engine's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from sparkdraft.cache.formats import LayerKV, Turn
from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.core import UserError
from sparkdraft.kernels.norm import Norm, Normed
from sparkdraft.models.blocks import Attention, Decoder, DecoderLayer, Step, following, load_norm
from sparkdraft.models.rope import rope_table
from sparkdraft.spec.config import DraftConfig
from sparkdraft.spec.drafter import DraftBlock, DrafterCaps
from sparkdraft.weights.linear import Linear
from sparkdraft.weights.loader import Loader
from sparkdraft.weights.quant.group import GroupQuant
from sparkdraft.weights.quant.stored import take_rows

ENTRY = "fc.weight"  # every DFlash checkpoint has one; what stands before it stands before every name
UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")  # training's own


def caps_of(draft: DraftConfig) -> DrafterCaps:
    """All that the engine must know before the weights are read: above all the shape of the drafter's K/V."""
    model = draft.model
    shape = (model.num_layers, model.num_kv_heads, model.head_dim)
    return DrafterCaps("dflash", draft.taps, draft.block_size, draft.mask_token_id, *shape, model.max_position)


class BlockAttention(Attention):
    """A layer's attention as the drafter was trained: rows of a block may see each other, and a window may end."""

    def __init__(self, draft: DraftConfig, layer: int, load: Loader, name: str, ops: ModuleType) -> None:
        super().__init__(draft.model, load, name, ops, qk_norm=True)
        self.window, self.causal = draft.layers[layer]

    def keep(self, kv_part: Tensor, positions: Tensor, rope: Tensor, kv: LayerKV, slots: Tensor) -> None:
        """Write context rows: kv_part [rows, 2 * kv_heads * head_dim], the keys first; nothing is left of it."""
        turn = Turn(positions, rope, 0, self.num_kv_heads, None, self.k_norm, self.eps)
        kv.write(kv_part, turn, slots)


class DraftLayer(DecoderLayer):
    """Block rows pass through it as through any layer; context rows reach only its attention, and pass neither norm."""

    attention: BlockAttention


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a block enters and leaves the layers."""

    embedding: Tensor | GroupQuant
    mask_row: Tensor | None  # [hidden], stands in for the mask id's row of the embedding
    norm: Norm
    head: Linear
    d2t: Tensor | None  # int64 [draft vocabulary]: target id minus draft id


class DFlash:
    def __init__(
        self,
        draft: DraftConfig,
        fc: Linear,  # [hidden, taps * target hidden]
        hidden_norm: Norm,
        context_kv: Linear,  # [layers * 2 * kv_heads * head_dim, hidden]: k and v of layer 0, of layer 1, ...
        layers: list[DraftLayer],
        ends: Ends,
        rope: Tensor,  # float32 [positions, head_dim]
        kv: DenseKV,
        ops: ModuleType,
    ) -> None:
        self.caps, self.draft = caps_of(draft), draft
        self.fc, self.hidden_norm, self.context_kv = fc, hidden_norm, context_kv
        self.layers, self.ends, self.rope, self.kv, self.ops = layers, ends, rope, kv, ops

    @property
    def nbytes(self) -> int:
        """Bytes of weights that one draft reads, the head included and `observe` left out."""
        matrices = [m for x in self.layers for m in (x.attention.qkv, x.attention.o, x.mlp.gate_up, x.mlp.down)]
        return sum(m.nbytes for m in [*matrices, self.ends.head])

    def observe(self, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        features = self.fc.linear(taps.view(taps.shape[0], -1))  # [rows, hidden]
        context = self.ops.norm_linear(Normed(features, self.hidden_norm), self.context_kv)
        width = 2 * self.caps.num_kv_heads * self.caps.head_dim
        for i, (layer, kv) in enumerate(zip(self.layers, self.kv.layers, strict=True)):
            layer.attention.keep(context[:, i * width : (i + 1) * width], positions, self.rope, kv, slots)

    def propose(self, block: DraftBlock) -> Tensor:
        logits: Tensor = self.ops.norm_logits(self._through_layers(block), self.ends.head)
        return self._scaled(logits)

    def likeliest(self, block: DraftBlock) -> Tensor:
        if self.draft.output_multiplier <= 0:  # a softcap keeps the order, and so does a multiplier above 0
            return self.propose(block).argmax(-1)
        ids: Tensor = self.ops.norm_argmax(self._through_layers(block), self.ends.head)
        return ids

    def to_target(self, ids: Tensor) -> Tensor:
        d2t = self.ends.d2t
        return ids if d2t is None else ids + d2t[ids.long()].to(ids.dtype)

    # ---- the parts

    def _through_layers(self, block: DraftBlock) -> Normed:  # [draft rows, hidden]
        normed = Normed(self._embed(block.token_ids), self.layers[0].input_norm)
        step = Step(block.token_ids, block.positions, block.slots, block.view, self.kv.layers)
        for (layer, then), kv in zip(following(self.layers, self.ends.norm), step.kv, strict=True):
            normed = layer.add_to(normed, self.rope, step, kv, then)
        return Normed(self.ops.embed(block.draft_rows, normed.x), self.ends.norm)  # a gather

    # ---- what few checkpoints ask for: plain torch, so none of it may run where nothing is asked

    def _embed(self, ids: Tensor) -> Tensor:  # int32 [rows] -> [rows, hidden]
        x: Tensor = self.ops.embed(ids, self.ends.embedding)
        if self.ends.mask_row is not None:
            x = torch.where((ids == self.caps.mask_id).unsqueeze(1), self.ends.mask_row, x)
        scale = self.draft.input_embedding_scale
        return x if scale == 1 else x * scale

    def _scaled(self, logits: Tensor) -> Tensor:
        multiplier, softcap = self.draft.output_multiplier, self.draft.softcap
        if multiplier != 1:
            logits = logits * multiplier
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def build(draft: DraftConfig, load: Loader, ops: ModuleType, target: Decoder, context: int, kv: DenseKV) -> DFlash:
    """The drafter of a checkpoint, its K/V in 'kv' (shaped as `caps_of` says); 'context' is the target's."""
    prefix, model = _prefix(load), draft.model
    fc = load.linear({f"{prefix}fc": model.hidden_size}, len(draft.taps) * draft.target_hidden_size)
    hidden_norm = load_norm(model, load, f"{prefix}hidden_norm")
    layers = []
    for i in range(model.num_layers):
        name = f"{prefix}layers.{i}"
        attention = BlockAttention(draft, i, load, f"{name}.self_attn", ops)
        layers.append(DraftLayer(model, load, name, attention, ops))
    kv_width = model.num_kv_heads * model.head_dim
    names = [f"{prefix}layers.{i}.self_attn.{part}_proj" for i in range(model.num_layers) for part in "kv"]
    context_kv = load.linear(dict.fromkeys(names, kv_width), model.hidden_size, model.attention_bias)
    ends = _ends(draft, load, prefix, target)
    # A block may stick out of the context by its masks, whose rows are never used but do look up their position.
    rope = rope_table(model, context + draft.block_size).to(load.device)
    load.finish()
    return DFlash(draft, fc, hidden_norm, context_kv, layers, ends, rope, kv, ops)


def _prefix(load: Loader) -> str:
    found = [n for n in load.source.names() if n == ENTRY or n.endswith(f".{ENTRY}")]
    if len(found) != 1:
        raise UserError(f"{load.source.path}: tensor {ENTRY} is missing; the file is incomplete or holds no drafter")
    return found[0].removesuffix(ENTRY)


def _ends(draft: DraftConfig, load: Loader, prefix: str, target: Decoder) -> Ends:
    """The checkpoint's own tables where it has them, else the target's; of its head only the rows that are drafted."""
    names, model = frozenset(load.source.names()), draft.model

    def own(name: str) -> str | None:  # tables and maps may stand outside the prefix
        return next((n for n in (prefix + name, name) if n in names), None)

    embedding, head, d2t = target.embedding, target.head, None
    if table := own("embed_tokens.weight"):
        embedding = load.embedding(table.removesuffix(".weight"), model.vocab_size, model.hidden_size)
    if matrix := own("lm_head.weight"):
        head = load.linear({matrix.removesuffix(".weight"): draft.draft_vocab_size}, model.hidden_size)
        d2t = _offsets(draft, load, own("d2t"))
    elif draft.draft_vocab_size < model.vocab_size:
        d2t = _offsets(draft, load, own("d2t"))
        assert d2t is not None
        head = _some_rows(load, target, d2t + torch.arange(len(d2t), device=d2t.device))
    mask = own("mask_embedding") or own("mask_embedding.weight")
    if mask is None and any(load.source.path.glob("mask_embedding.*")):
        raise UserError(
            f"{load.source.path} keeps its mask_embedding in a file that is not read: add that row to the safetensors, "
            "under the name 'mask_embedding'."
        )
    mask_row = load.vector(mask, model.hidden_size) if mask else None
    load.ignore(n for x in (*UNUSED, "d2t") for n in (prefix + x, x))
    return Ends(embedding, mask_row, load_norm(model, load, f"{prefix}norm"), head, d2t)


def _some_rows(load: Loader, target: Decoder, ids: Tensor) -> Linear:
    """A head over these ids alone: the target's own rows of them, so that the checkpoint need not hold any."""
    rows = target.head.rows(ids)
    if rows is None and target.config.tie_embeddings:
        rows = take_rows(target.embedding, ids)
    if rows is None:
        raise UserError(
            f"{load.source.path} drafts among {len(ids)} ids without a head of its own; rows of this target's head can "
            "not be taken out of its format: export the drafter with lm_head.weight"
        )
    return load.tied_head(rows)


def _offsets(draft: DraftConfig, load: Loader, name: str | None) -> Tensor | None:
    count, vocab = draft.draft_vocab_size, draft.model.vocab_size
    if count == vocab:
        return None
    if name is None:
        raise UserError(f"{load.source.path}: tensor d2t is missing; a head of {count} ids among {vocab} needs it")
    offsets = load.integers(name, count).long()
    ids = offsets + torch.arange(count, device=offsets.device)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise UserError(f"{load.source.path}: {name} points outside the vocabulary of {vocab}; the file is damaged")
    return offsets
