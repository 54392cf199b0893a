"""The MTP head of Qwen3-Next, Qwen3.5 and Qwen3.6: one more decoder layer, which predicts the id after the next.

    row p     x = fc(norm(embedding of id p + 1) beside norm(hidden state of row p)), one layer with K/V of its own,
              norm, the target's head: the id at p + 2
    drafts    the first from the last committed row and the anchor; each next one from the head's own last state, after
              its norm, and the id that was picked; one position further

The target's hidden states are those after its final norm. The head is a chain drafter (drafters/drafter.py): one
pass per draft, always the same layer. Committed rows need no more than their K/V.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.core import UserError
from sparkdraft.drafters.draft_head import rows_of_head
from sparkdraft.drafters.drafter import Anchors, CommittedRows, DraftBytes, Pick
from sparkdraft.drafters.mtp_config import MAX_DEPTH, MtpConfig, caps_of
from sparkdraft.kernels.ops import AttentionView, Norm, Normed, Ops
from sparkdraft.models.common.blocks import Attention, Decoder, DecoderLayer, GatedMLP, Step, load_norm
from sparkdraft.models.common.experts import load_experts
from sparkdraft.models.common.layers import ExpertsSpec
from sparkdraft.models.common.rope import RopeTables
from sparkdraft.weights.linear import ExpertLinear, Linear
from sparkdraft.weights.loader import Loader
from sparkdraft.weights.quant.stored import Stored


class MtpHead:
    def __init__(
        self,
        config: MtpConfig,
        join: Join,
        attention: Attention,
        layer: DecoderLayer,  # with this attention
        context_kv: Linear,  # [2 * kv_heads * head_dim, hidden]: keys, then values; committed rows go through it alone
        norm: Norm,
        head: Linear,
        kv: DenseKV,
        max_seqs: int,
        ops: Ops,
        vocabulary: Tensor | None = None,  # int64: the id of each row of the head; None: the same ids
    ) -> None:
        self.caps, self.config, self.kv, self.ops = caps_of(config), config, kv, ops
        self.join, self.attention, self.layer, self.context_kv = join, attention, layer, context_kv
        self.norm, self.head, self.vocabulary = norm, head, vocabulary
        # What a pass reads and leaves for the next, always in the same place, so that a pass can be recorded.
        device, dtype = norm.gain.device, kv.k[0].dtype
        self._ids, self._length = (torch.zeros(max_seqs, dtype=torch.int32, device=device) for _ in range(2))
        self._hidden = torch.zeros(max_seqs, 1, config.model.hidden_size, dtype=dtype, device=device)
        self._starts = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)

    def observe(self, rows: CommittedRows) -> None:
        assert rows.next_ids is not None
        joined = Normed(self.join(rows.next_ids, rows.hidden), self.layer.input_norm)
        keys_values = self.ops.norm_linear(joined, self.context_kv)
        self.kv.layers[0].write(keys_values, self.attention.rope_args(rows.positions, num_heads=0), rows.slots)

    def propose(self, anchors: Anchors, depth: int, pick: Pick) -> Tensor:
        assert anchors.hidden is not None
        seqs, drafts = len(anchors.ids), []
        self._ids[:seqs] = anchors.ids
        self._length[:seqs] = (anchors.length - 1).where(anchors.length > 1, -depth)  # empty in every pass
        self._hidden[:seqs] = anchors.hidden
        for number in range(depth):
            score = partial(self._score, anchors, seqs)
            drafts.append(pick(score, each=1, drafted=number, ids=self.vocabulary))
            self._ids[:seqs] = drafts[-1][:, 0]
            self._length[:seqs] += 1
        return torch.cat(drafts, 1)

    def reach(self, depth: int) -> int:
        return depth - 1  # the first pass is over the row before the anchor

    @property
    def matrices(self) -> list[Linear]:
        inside = [m for m in self.layer.matrices if isinstance(m, Linear)]
        return [self.join.fc, self.context_kv, *inside, self.head]

    def reads(self, depth: int) -> DraftBytes:
        """Of experts, those that one row reaches."""
        spec, own = self.config.layer.mlp, self.join.fc.nbytes
        share = spec.top_k / spec.num_experts if isinstance(spec, ExpertsSpec) else 1
        parts = [part.nbytes * share if isinstance(part, ExpertLinear) else part.nbytes for part in self.layer.matrices]
        a_pass = own + int(sum(parts)) + self.head.nbytes
        return DraftBytes(depth * a_pass, own + self.context_kv.nbytes, depth * self.kv.bytes_per_token)

    def _score(self, anchors: Anchors, seqs: int, likeliest: bool) -> Tensor:
        """One pass, over one row of each sequence; the row's state replaces the one that it began with."""
        ops, ids, hidden = self.ops, self._ids[:seqs], self._hidden[:seqs]
        _, positions, slots, context = ops.make_rows(self._length[:seqs], anchors.tables, ids, 1, anchors.block_size, 0)
        view = AttentionView(self._starts[: seqs + 1], context, anchors.tables, 1, anchors.max_context)
        step = Step(ids, positions, slots, view, self.kv.layers)
        joined = Normed(self.join(ids, hidden), self.layer.input_norm)
        normed = self.layer.add_to(joined, step, self.kv.layers[0], self.norm)
        ops.store_aux(ops.rms_norm(normed.x, *self.norm), hidden, 0, positions)
        out: Tensor = (ops.norm_argmax if likeliest else ops.norm_logits)(normed, self.head)
        return out


class Join:
    """x = fc(norm(embedding) beside norm(hidden state)): where the head's layer begins."""

    def __init__(self, fc: Linear, embedding: Stored, norms: tuple[Norm, Norm], ops: Ops) -> None:
        """norms: of embeddings, and of hidden states."""
        self.fc, self.embedding, self.norms, self.ops = fc, embedding, norms, ops

    def __call__(self, ids: Tensor, hidden: Tensor) -> Tensor:  # int32 [rows], [rows, 1, hidden] -> [rows, hidden]
        ops, (of_ids, of_hidden) = self.ops, self.norms
        embedded = ops.rms_norm(ops.embed(ids, self.embedding), *of_ids)
        state = ops.rms_norm(hidden.view(hidden.shape[0], -1), *of_hidden)
        joined = ops.linear(ops.concat(embedded, state), self.fc)
        return joined


def build(
    config: MtpConfig,
    load: Loader,
    ops: Ops,
    target: Decoder,
    kv: DenseKV,
    context: int,
    max_seqs: int,
    ids: Tensor | None = None,
) -> MtpHead:
    """Build the head of a checkpoint, whose other tensors are the target's. kv: of one layer. context: the target's.
    ids: the only ones to be drafted."""
    load.ignore(name for name in load.source.names() if not name.startswith(config.prefix))
    try:
        head = _build(config, load, ops, target, kv, context, max_seqs, ids)
        load.finish()
    except UserError as error:
        raise UserError(f"The model's MTP head cannot be used, --drafter none goes without: {error}") from error
    return head


def _build(
    config: MtpConfig,
    load: Loader,
    ops: Ops,
    target: Decoder,
    kv: DenseKV,
    context: int,
    max_seqs: int,
    ids: Tensor | None,
) -> MtpHead:
    model, prefix, layer = config.model, config.prefix, f"{config.prefix}layers.0"
    hidden, spec = model.hidden_size, config.attention
    embedding, own = target.embedding, None
    if config.own_embedding:
        embedding = load.embedding(f"{prefix}embed_tokens", model.vocab_size, hidden)
    if config.own_head:
        own = load.linear({f"{prefix}lm_head": model.vocab_size}, hidden, as_stored=ids is not None)
    head = (own or target.head) if ids is None else rows_of_head(load, target, ids, own)
    of_ids, of_hidden = (load_norm(model, load, f"{prefix}pre_fc_norm_{part}") for part in ("embedding", "hidden"))
    join = Join(load.linear({f"{prefix}fc": hidden}, 2 * hidden), embedding, (of_ids, of_hidden), ops)
    ropes = RopeTables(context + MAX_DEPTH, load.device)  # drafts may reach past the context's end
    attention = Attention(spec, model, load, f"{layer}.self_attn", ops, ropes)
    mlp = load_experts if isinstance(config.layer.mlp, ExpertsSpec) else GatedMLP
    decoder = DecoderLayer(
        load_norm(model, load, f"{layer}.input_layernorm"),
        attention,
        load_norm(model, load, f"{layer}.post_attention_layernorm"),
        mlp(config.layer.mlp, model, load, f"{layer}.mlp", ops),
    )
    rows = {f"{layer}.self_attn.{part}_proj": spec.kv_width for part in "kv"}
    context_kv, norm = load.linear(rows, hidden), load_norm(model, load, f"{prefix}norm")
    return MtpHead(config, join, attention, decoder, context_kv, norm, head, kv, max_seqs, ops, ids)
