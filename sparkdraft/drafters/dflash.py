"""The DFlash drafter: a few layers that fill in a block of masks, given the target's hidden states of the text so far.

A committed row reaches the drafter only as keys and values, projected for all layers at once from the target's taps
(`observe`). Queries come from the draft block alone, so one pass drafts the whole block (`propose`). Embedding and head
are the target's unless the checkpoint has its own. The engine decides when to draft, and what becomes of the drafts.

    a block    | anchor | mask | mask | ... |    'width' rows from the anchor's position on; masks become the drafts
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.core import UserError
from sparkdraft.drafters.dflash_caps import caps_of
from sparkdraft.drafters.dflash_config import DFlashConfig
from sparkdraft.drafters.draft_head import rows_of_head
from sparkdraft.drafters.drafter import Anchors, CommittedRows, DraftBytes, Pick
from sparkdraft.kernels.ops import AttentionView, Norm, Normed, Ops
from sparkdraft.models.common.blocks import Attention, Decoder, DecoderLayer, GatedMLP, Step, following, load_norm
from sparkdraft.models.common.kv import LayerKV
from sparkdraft.models.common.rope import RopeTables
from sparkdraft.weights.linear import Linear
from sparkdraft.weights.loader import Loader
from sparkdraft.weights.quant.stored import Stored

ENTRY = "fc.weight"  # in every DFlash checkpoint; what precedes it in its name is the prefix of all names
UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")  # used by training only


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The rows of one pass: one draft block per sequence. A row sees the observed context and the rows of its block."""

    token_ids: Tensor  # int32 [seqs * width]: anchor, mask, mask, ...
    positions: Tensor  # int32 [seqs * width]
    slots: Tensor  # int32 [seqs * width]: where the block's own K/V go; overwritten by the next observe
    view: AttentionView  # its context_len includes the block itself
    draft_rows: Tensor  # int32 [seqs * depth]: the rows whose ids are wanted, 1 .. depth of each block


class BlockAttention(Attention):
    """A layer's attention, which also takes context rows that are keys and values alone."""

    def keep(self, kv_part: Tensor, positions: Tensor, kv: LayerKV, slots: Tensor) -> None:
        """Write context rows. kv_part: [rows, 2 * kv_heads * head_dim], keys first; its contents are undefined
        afterwards."""
        kv.write(kv_part, self.rope_args(positions, num_heads=0), slots)


@dataclass(frozen=True, slots=True)
class Ends:
    """The tables before and after the layers: embedding, norm and head."""

    embedding: Stored
    scale: float  # of the embedding's rows
    mask_row: Tensor | None  # [hidden], stands in for the mask id's row of the embedding
    norm: Norm
    head: Linear
    ids: Tensor | None  # int64 [draft vocabulary]: the target's id of each row of the head; None: the same ids


class DFlash:
    def __init__(
        self,
        draft: DFlashConfig,
        fc: Linear,  # [hidden, taps * target hidden]
        hidden_norm: Norm,
        context_kv: Linear,  # [layers * 2 * kv_heads * head_dim, hidden]: k and v of layer 0, then of layer 1, ...
        layers: list[DecoderLayer],
        attention: list[BlockAttention],  # of these layers; context rows go to these only, and pass no norm
        ends: Ends,
        kv: DenseKV,
        max_seqs: int,
        ops: Ops,
    ) -> None:
        self.caps, self.draft = caps_of(draft), draft
        self.fc, self.hidden_norm, self.context_kv = fc, hidden_norm, context_kv
        self.layers, self.attention, self.ends, self.kv, self.ops = layers, attention, ends, kv, ops
        device = hidden_norm.gain.device
        # Per depth, for the largest number of blocks: where each block begins, and which rows are wanted. They are made
        # here because a pass that is recorded on a CPU cannot compute them; fewer blocks use the beginning of each.
        depths, seqs = range(1, draft.block_size), torch.arange(max_seqs + 1, dtype=torch.int32, device=device)
        self._starts = {depth: seqs * self.width(depth) for depth in depths}
        self._wanted = {
            depth: (starts[:-1].unsqueeze(1) + torch.arange(1, depth + 1, dtype=torch.int32, device=device)).flatten()
            for depth, starts in self._starts.items()
        }

    def width(self, depth: int) -> int:
        """Rows of a block that drafts 'depth' ids: the smallest of B/8, B/4, B/2 and B, the trained size, that holds
        depth + 1 rows.

        Masks see each other, so a narrower block drafts a little worse: with a quarter of 16 rows the first draft is
        accepted in 0.4 % fewer cases, and with an eighth in 1.4 % fewer, for a quarter and an eighth of the layers'
        cost.
        """
        return next(w for w in (self.draft.block_size >> n for n in (3, 2, 1, 0)) if depth < w)

    reach = width

    @property
    def matrices(self) -> list[Linear]:
        inside = [m for layer in self.layers for m in layer.matrices if isinstance(m, Linear)]
        return [self.fc, self.context_kv, *inside, self.ends.head]

    def reads(self, depth: int) -> DraftBytes:
        """The bytes of one pass, which are the same at any depth."""
        matrices = [matrix for layer in self.layers for matrix in layer.matrices]
        propose = sum(m.nbytes for m in [*matrices, self.ends.head])
        return DraftBytes(propose, self.fc.nbytes + self.context_kv.nbytes, self.kv.bytes_per_token)

    def observe(self, rows: CommittedRows) -> None:
        features = self.ops.linear(rows.hidden.view(rows.hidden.shape[0], -1), self.fc)  # [rows, hidden]
        context = self.ops.norm_linear(Normed(features, self.hidden_norm), self.context_kv)
        width = context.shape[1] // len(self.layers)  # K and V of one layer
        for i, (attention, kv) in enumerate(zip(self.attention, self.kv.layers, strict=True)):
            attention.keep(context[:, i * width : (i + 1) * width], rows.positions, kv, rows.slots)

    def propose(self, anchors: Anchors, depth: int, pick: Pick) -> Tensor:
        def score(likeliest: bool) -> Tensor:
            block = self.block(anchors, depth)
            return self.likeliest(block) if likeliest else self.logits(block)

        return pick(score, depth, ids=self.ends.ids)

    def block(self, anchors: Anchors, depth: int) -> DraftBlock:
        seqs, width = anchors.tables.shape[0], self.width(depth)
        ids, positions, slots, context = self.ops.make_rows(
            anchors.length,
            anchors.tables,
            anchors.ids,
            width,
            anchors.block_size,
            self.draft.mask_token_id,
            anchors.positions,
        )
        starts, wanted = self._starts[depth][: seqs + 1], self._wanted[depth][: seqs * depth]
        view = AttentionView(starts, context, anchors.tables, width, anchors.max_context)
        return DraftBlock(ids, positions, slots, view, wanted)

    def logits(self, block: DraftBlock) -> Tensor:  # float32 [seqs * depth, draft vocabulary]
        multiplier, softcap = self.draft.output_multiplier, self.draft.softcap or 0.0
        if multiplier == 1:
            capped = self.ops.norm_logits(self._through_layers(block), self.ends.head, softcap)
            return capped
        logits = self.ops.norm_logits(self._through_layers(block), self.ends.head) * multiplier
        return torch.tanh(logits / softcap) * softcap if softcap else logits

    def likeliest(self, block: DraftBlock) -> Tensor:  # int64 [seqs * depth]: the logits' argmax
        if self.draft.output_multiplier <= 0:  # a softcap keeps the order, and so does a positive multiplier
            return self.logits(block).argmax(-1)
        columns = self.ops.norm_argmax(self._through_layers(block), self.ends.head)
        return columns

    # ---- the parts

    def _through_layers(self, block: DraftBlock) -> Normed:  # [draft rows, hidden]
        normed = Normed(self._embed(block.token_ids), self.layers[0].input_norm)
        step = Step(block.token_ids, block.positions, block.slots, block.view, self.kv.layers)
        for (layer, then), kv in zip(following(self.layers, self.ends.norm), step.kv, strict=True):
            normed = layer.add_to(normed, step, kv, then)
        return Normed(self.ops.embed(block.draft_rows, normed.x), self.ends.norm)  # a gather

    def _embed(self, ids: Tensor) -> Tensor:  # int32 [rows] -> [rows, hidden]
        x: Tensor = self.ops.embed(ids, self.ends.embedding, self.ends.scale)
        if self.ends.mask_row is not None:
            x = torch.where((ids == self.draft.mask_token_id).unsqueeze(1), self.ends.mask_row * self.ends.scale, x)
        return x


def build(
    draft: DFlashConfig,
    load: Loader,
    ops: Ops,
    target: Decoder,
    kv: DenseKV,
    context: int,
    max_seqs: int,
    ids: Tensor | None = None,
) -> DFlash:
    """Build the drafter of a checkpoint. kv: its K/V, with layers and heads as in its config. context: the target's.
    ids: as many as the config says; None: those of the file."""
    prefix, model = _prefix(load), draft.model
    fc = load.linear({f"{prefix}fc": model.hidden_size}, len(draft.taps) * draft.target_hidden_size)
    hidden_norm = load_norm(model, load, f"{prefix}hidden_norm")
    # A block may reach past the context's end by its masks. Their rows are never used but do look up their position.
    ropes = RopeTables(context + draft.block_size, load.device)
    layers, attention = [], []
    for i, layer in enumerate(model.layers):
        name = f"{prefix}layers.{i}"
        attention.append(BlockAttention(layer.mixer, model, load, f"{name}.self_attn", ops, ropes))
        norms = [load_norm(model, load, f"{name}.{norm}_layernorm") for norm in ("input", "post_attention")]
        mlp = GatedMLP(layer.mlp, model, load, f"{name}.mlp", ops)
        layers.append(DecoderLayer(norms[0], attention[-1], norms[1], mlp))
    spec = model.attention[0]  # layers differ in their windows alone
    names = [f"{prefix}layers.{i}.self_attn.{part}_proj" for i in range(model.num_layers) for part in "kv"]
    context_kv = load.linear(dict.fromkeys(names, spec.kv_width), model.hidden_size, spec.bias)
    ends = _ends(draft, load, prefix, target, ids)
    load.finish()
    return DFlash(draft, fc, hidden_norm, context_kv, layers, attention, ends, kv, max_seqs, ops)


def _prefix(load: Loader) -> str:
    found = [n for n in load.source.names() if n == ENTRY or n.endswith(f".{ENTRY}")]
    if len(found) != 1:
        raise UserError(f"{load.source.path}: tensor {ENTRY} is missing; the file is incomplete or holds no drafter")
    return found[0].removesuffix(ENTRY)


def _ends(draft: DFlashConfig, load: Loader, prefix: str, target: Decoder, ids: Tensor | None) -> Ends:
    """The checkpoint's own tables where it has them, else the target's. Of the target's head only the drafted rows are
    taken. ids: asked for in place of the file's."""
    names, model = frozenset(load.source.names()), draft.model

    def own(name: str) -> str | None:  # tables and maps may be outside the prefix
        return next((n for n in (prefix + name, name) if n in names), None)

    embedding, head = target.embedding, target.head
    if table := own("embed_tokens.weight"):
        embedding = load.embedding(table.removesuffix(".weight"), model.vocab_size, model.hidden_size)
    if matrix := own("lm_head.weight"):
        assert ids is None, "refused when it was found"
        head = load.linear({matrix.removesuffix(".weight"): draft.draft_vocab_size}, model.hidden_size)
        ids = _target_ids(draft, load, own("d2t"))
    elif draft.draft_vocab_size < model.vocab_size:
        ids = _target_ids(draft, load, own("d2t")) if ids is None else ids
        assert ids is not None
        head = rows_of_head(load, target, ids)
    mask = own("mask_embedding") or own("mask_embedding.weight")
    if mask is None and any(load.source.path.glob("mask_embedding.*")):
        raise UserError(
            f"{load.source.path} keeps its mask_embedding in a file that is not read: add that row to the safetensors, "
            "under the name 'mask_embedding'."
        )
    mask_row = load.vector(mask, model.hidden_size) if mask else None
    scale = target.config.embedding_scale if draft.input_embedding_scale is None else draft.input_embedding_scale
    load.ignore(n for x in (*UNUSED, "d2t") for n in (prefix + x, x))
    return Ends(embedding, scale, mask_row, load_norm(model, load, f"{prefix}norm"), head, ids)


def _target_ids(draft: DFlashConfig, load: Loader, name: str | None) -> Tensor | None:
    """int64 [draft vocabulary], computed from offsets (target id minus draft id); None if the vocabularies are the
    same."""
    count, vocab = draft.draft_vocab_size, draft.model.vocab_size
    if count == vocab:
        return None
    if name is None:
        raise UserError(f"{load.source.path}: tensor d2t is missing; a head of {count} ids among {vocab} needs it")
    offsets = load.integers(name, count).long()
    ids = offsets + torch.arange(count, device=offsets.device)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise UserError(f"{load.source.path}: {name} points outside the vocabulary of {vocab}; the file is damaged")
    return ids
