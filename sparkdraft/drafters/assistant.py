"""Gemma 4's assistant: a chain drafter without keys and values of its own, which reads those of the target.

    a pass      x = W_pre [embedding of the id | hidden state], both as the target has them; layers whose queries read
                the target's K/V; y = norm(x); logits = head(y); the next hidden state is W_post y
    a draft     the first pass takes the anchor and the target's hidden state of the row before it, each next one the
                id that was picked and the hidden state that the pass before made

All passes of a draft stand at one position and see the same keys, those of the committed rows: nothing of a draft is
ever written. So there is nothing to observe, to roll back or to find again with a prefix. Which position that is, and
how far a sliding layer sees, are constants of assistant_config.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from sparkdraft.cache.formats import KVCache
from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.cache.layered import CacheReader
from sparkdraft.core import UserError
from sparkdraft.drafters.assistant_config import POSITION, AssistantConfig, borrowing, caps_of, source_layers
from sparkdraft.drafters.drafter import Anchors, CommittedRows, DraftBytes, Pick
from sparkdraft.kernels.ops import AttentionView, Norm, Normed, Ops
from sparkdraft.models.common.blocks import Attention, Decoder, Step, following, load_norm
from sparkdraft.models.common.rope import RopeTables
from sparkdraft.models.common.sandwich import SandwichLayer, load_dense
from sparkdraft.weights.linear import Linear
from sparkdraft.weights.loader import Loader
from sparkdraft.weights.quant.stored import take_rows


class Head(Protocol):
    @property
    def matrix(self) -> Linear:
        """That every row is multiplied with."""

    @property
    def nbytes(self) -> int:
        """That one row reads."""

    def logits(self, normed: Normed) -> Tensor:  # float32 [rows, vocabulary]
        ...

    def likeliest(self, normed: Normed) -> Tensor:  # int64 [rows]: the logits' argmax
        ...


@dataclass(frozen=True, slots=True)
class PlainHead:
    matrix: Linear
    ops: Ops

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def logits(self, normed: Normed) -> Tensor:
        out = self.ops.norm_logits(normed, self.matrix)
        return out

    def likeliest(self, normed: Normed) -> Tensor:
        out = self.ops.norm_argmax(normed, self.matrix)
        return out


@dataclass(frozen=True, slots=True)
class OrderedHead:
    """Ids are divided into clusters of equal size. A row scores the clusters, and then the ids of the best few alone;
    all other ids have no chance. Rows of the table are kept as floats: few of them are read, by number."""

    matrix: Linear  # [clusters, hidden]: centroids
    rows: Tensor  # [clusters, ids of a cluster, hidden]
    ids: Tensor  # int64 [clusters, ids of a cluster]
    top: int
    ops: Ops

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + self.top * self.rows[0].nbytes

    def logits(self, normed: Normed) -> Tensor:
        scores, ids = self._scores(normed)
        out = scores.new_full((len(scores), self.ids.numel()), float("-inf"))
        return out.scatter_(1, ids, scores)

    def likeliest(self, normed: Normed) -> Tensor:
        scores, ids = self._scores(normed)
        return ids.gather(1, scores.argmax(1, keepdim=True)).squeeze(1)

    def _scores(self, normed: Normed) -> tuple[Tensor, Tensor]:  # float32, int64: [rows, top * ids of a cluster]
        y = self.ops.rms_norm(normed.x, *normed.norm)
        best = self.ops.linear(y, self.matrix).topk(self.top, dim=1).indices  # [rows, top]
        scores = torch.matmul(self.rows[best], y[:, None, :, None])  # [rows, top, ids of a cluster, 1]
        return scores.flatten(1).float(), self.ids[best].flatten(1)


class Assistant:
    def __init__(
        self,
        draft: AssistantConfig,
        target: Decoder,
        joins: tuple[Linear, Linear],  # W_pre [hidden, 2 * target's], W_post [target's, hidden]
        layers: list[SandwichLayer],
        norm: Norm,
        head: Head,
        max_seqs: int,
        ops: Ops,
        vocabulary: Tensor | None = None,  # int64: the id of each row of the head; None: the same ids
    ) -> None:
        self.caps, self.draft, self.target, self.ops = caps_of(draft), draft, target, ops
        self.before, self.after = joins
        self.layers, self.norm, self.head, self.vocabulary = layers, norm, head, vocabulary
        self.reader: CacheReader | None = None
        device = norm.gain.device

        def integers(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        # What a pass reads and leaves for the next, always in the same place, so that a pass can be recorded.
        self.ids, self.positions, self.context = (integers(max_seqs) for _ in range(3))
        self.nowhere = integers(max_seqs) - 1  # slots: nothing is stored
        self.starts = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)
        # of each row the target's embedding of its id, and a hidden state
        self.joined = torch.zeros(max_seqs, 2, draft.target_hidden_size, dtype=target.dtype, device=device)

    def read_from(self, kv: KVCache) -> None:
        self.reader = CacheReader(kv, source_layers(self.draft, self.target.config))

    def observe(self, rows: CommittedRows) -> None:
        """Nothing is kept of committed rows."""

    def propose(self, anchors: Anchors, depth: int, pick: Pick) -> Tensor:
        assert anchors.hidden is not None
        seqs, drafts = len(anchors.ids), []
        rows = (anchors.length - 1).clamp(min=0)  # that have K/V; none in an empty lane
        last = rows - 1 if anchors.positions is None else anchors.positions - 1
        self.ids[:seqs], self.context[:seqs] = anchors.ids, rows
        self.positions[:seqs] = (last + POSITION).clamp(min=0)
        self.joined[:seqs, 1:] = anchors.hidden
        for number in range(depth):
            score = partial(self._score, anchors, seqs)
            drafts.append(pick(score, each=1, drafted=number, ids=self.vocabulary))
            self.ids[:seqs] = drafts[-1][:, 0]
        return torch.cat(drafts, 1)

    def reach(self, depth: int) -> int:
        return 0

    @property
    def matrices(self) -> list[Linear]:
        inside = [m for layer in self.layers for m in layer.matrices if isinstance(m, Linear)]
        return [self.before, self.after, *inside, self.head.matrix]

    def reads(self, depth: int) -> DraftBytes:
        assert self.reader
        matrices = [self.before, self.after, *(matrix for layer in self.layers for matrix in layer.matrices)]
        a_pass = sum(matrix.nbytes for matrix in matrices) + self.head.nbytes
        return DraftBytes(depth * a_pass, 0, depth * self.reader.bytes_per_token)

    # ---- the parts

    def _score(self, anchors: Anchors, seqs: int, likeliest: bool) -> Tensor:
        ops, reader, ids, positions = self.ops, self.reader, self.ids[:seqs], self.positions[:seqs]
        assert reader
        view = AttentionView(self.starts[: seqs + 1], self.context[:seqs], anchors.tables, 1, anchors.max_context)
        reader.begin(view)
        joined = self.joined[:seqs]
        ops.store_aux(self.target.embed(ids), joined, 0, positions)
        normed = Normed(ops.linear(joined.view(seqs, -1), self.before), self.layers[0].input_norm)
        step = Step(ids, positions, self.nowhere[:seqs], view, reader.layers)
        for (layer, then), kv in zip(following(self.layers, self.norm), reader.layers, strict=True):
            normed = layer.add_to(normed, step, kv, then)
        normed = Normed(normed.x, self.norm)  # without what was prepared of it: two read it
        ops.store_aux(ops.norm_linear(normed, self.after), joined, 1, positions)
        return self.head.likeliest(normed) if likeliest else self.head.logits(normed)


def build(
    draft: AssistantConfig,
    load: Loader,
    ops: Ops,
    target: Decoder,
    kv: DenseKV,
    context: int,
    max_seqs: int,
    ids: Tensor | None = None,
) -> Assistant:
    """kv: has no layers. ids: the only ones to be drafted. `read_from` must be called before the first draft."""
    model, wide, ropes = draft.model, draft.target_hidden_size, RopeTables(context, load.device)
    joins = (
        load.linear({"pre_projection": model.hidden_size}, 2 * wide),
        load.linear({"post_projection": wide}, model.hidden_size),
    )
    layers = []
    for i, (spec, mixer) in enumerate(zip(model.layers, borrowing(draft, target.config), strict=True)):
        name = f"model.layers.{i}"
        norms = [
            load_norm(model, load, f"{name}.{norm}_layernorm")
            for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        ]
        attention = Attention(mixer, model, load, f"{name}.self_attn", ops, ropes)
        mlp = load_dense(replace(spec, mixer=mixer), model, load, name, ops)
        scale = float(load.vector(f"{name}.layer_scalar", 1, torch.float32))
        layers.append(SandwichLayer(norms[0], attention, norms[1], norms[2], mlp, norms[3], ops, scale))
    norm, head = load_norm(model, load, "model.norm"), _head(draft, load, ops, ids)
    load.finish()
    return Assistant(draft, target, joins, layers, norm, head, max_seqs, ops, ids)


def _head(draft: AssistantConfig, load: Loader, ops: Ops, ids: Tensor | None) -> Head:
    """The table is the head alone: embeddings are the target's. A copy of it may be in the file as lm_head."""
    model, clusters = draft.model, draft.num_clusters
    if not clusters:
        table = load.embedding("model.embed_tokens", model.vocab_size, model.hidden_size)
        if ids is None:
            return PlainHead(load.tied_head(table, as_stored=False), ops)
        load.ignore(["lm_head.weight"])
        return PlainHead(load.head_of(take_rows(table, ids)), ops)
    assert ids is None, "refused when it was found"
    load.ignore(["lm_head.weight"])
    name = "masked_embedding.token_ordering"
    order = load.integers(name, model.vocab_size).long()
    if not torch.equal(order.sort().values, torch.arange(model.vocab_size, device=order.device)):
        raise UserError(f"{load.source.path}: {name} does not hold every id once; the file is damaged")
    centroids = load.float_linear("masked_embedding.centroids", clusters, model.hidden_size)
    rows = load.floats("model.embed_tokens.weight", (model.vocab_size, model.hidden_size))[order]
    by_cluster = order.view(clusters, -1)
    return OrderedHead(centroids, rows.view(*by_cluster.shape, -1), by_cluster, draft.top_clusters, ops)
