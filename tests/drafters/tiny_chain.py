"""A chain drafter for the tiny targets, built like an MTP head. The package does not know it: tests register it.

    row p     x = A norm(embedding of id p + 1) + B norm(hidden state of row p), one decoder layer, norm, target's head
    drafts    the first from the last committed row and the anchor; each next one from the drafter's own last state and
              the id that was picked

It is fitted, not trained: A and B are the least squares from (id p + 1, hidden state p) to the target's next hidden
state over given texts, and the layer behind them is random and adds little. With fewer rows than numbers to fit, the
first drafts within those texts are right, later ones often wrong. A hidden state that is paired with another id than
the one that follows it fits nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.core import UserError
from sparkdraft.drafters.base import (
    Anchors,
    CommittedRows,
    DraftBuild,
    DraftBytes,
    DrafterCaps,
    DrafterKind,
    Pick,
    Shapes,
)
from sparkdraft.kernels.ops import AttentionView, Normed, Ops
from sparkdraft.models.common.blocks import Attention, Decoder, DecoderLayer, GatedMLP, Step, load_norm
from sparkdraft.models.common.config import FINAL, ModelConfig, dense_config
from sparkdraft.models.common.rope import RopeTables
from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.weights.linear import Linear
from sparkdraft.weights.loader import Loader
from tests.drafters.tiny_drafter import body, random_tensors
from tests.models.tiny import oracle

NAME, MAX_DEPTH = "TinyChainDraftModel", 4


@dataclass(frozen=True, slots=True)
class TinyChainConfig:
    model: ModelConfig
    block_size: int = 1 + MAX_DEPTH
    draft_vocab_size: int = 0

    def check_fits(self, target: ModelConfig) -> None:
        if self.model.hidden_size != target.hidden_size:
            raise UserError(f"it has hidden size {self.model.hidden_size}, the model {target.hidden_size}")

    def caps(self, names: Collection[str] = ()) -> DrafterCaps:
        weights = model_sizes(self.model).active
        return DrafterCaps("tiny-chain", (FINAL,), MAX_DEPTH, self.model.attention, weights, chain=True)

    def among(self, number: int, names: Collection[str] = ()) -> TinyChainConfig:
        raise UserError("it drafts among all ids")

    def tensor_shapes(self) -> Shapes:
        raise NotImplementedError

    def build(self, given: DraftBuild) -> TinyChain:
        return TinyChain(self, *given[:-1])


class TinyChain:
    def __init__(
        self,
        draft: TinyChainConfig,
        load: Loader,
        ops: Ops,
        target: Decoder,
        kv: DenseKV,
        context: int,
        seqs: int,
    ) -> None:
        config = draft.model
        self.caps, self.kv, self.ops, self.target = draft.caps(), kv, ops, target
        size = config.hidden_size
        self.embed_norm, self.hidden_norm = (load_norm(config, load, f"{name}_norm") for name in ("embed", "hidden"))
        self.from_embedding, self.from_hidden = (load.linear({name: size}, size) for name in ("fc_embed", "fc_hidden"))
        spec, ropes = config.layers[0], RopeTables(context + MAX_DEPTH, load.device)
        self.attention = Attention(spec.mixer, config, load, "layers.0.self_attn", ops, ropes)
        norms = [load_norm(config, load, f"layers.0.{name}_layernorm") for name in ("input", "post_attention")]
        mlp = GatedMLP(spec.mlp, config, load, "layers.0.mlp", ops)
        self.layer = DecoderLayer(norms[0], self.attention, norms[1], mlp)
        self.norm = load_norm(config, load, "norm")
        load.finish()
        device = load.device
        # What a pass reads and leaves for the next, always in the same place, so that a pass can be recorded.
        self.ids, self.length = (torch.zeros(seqs, dtype=torch.int32, device=device) for _ in range(2))
        self.hidden = torch.zeros(seqs, 1, size, dtype=load.dtype, device=device)
        self.starts = torch.arange(seqs + 1, dtype=torch.int32, device=device)

    def observe(self, rows: CommittedRows) -> None:
        assert rows.next_ids is not None
        attention = self.attention
        qkv = self.ops.norm_linear(self._join(rows.next_ids, rows.hidden), attention.qkv)
        rope_args = attention.rope_args(rows.positions, attention.spec.num_heads)
        self.kv.layers[0].write(qkv, rope_args, rows.slots)

    def propose(self, anchors: Anchors, depth: int, pick: Pick) -> Tensor:
        assert anchors.hidden is not None
        seqs, drafts = len(anchors.ids), []
        self.ids[:seqs] = anchors.ids
        self.length[:seqs] = (anchors.length - 1).where(anchors.length > 1, -depth)  # empty in every pass
        self.hidden[:seqs] = anchors.hidden
        for number in range(depth):
            drafts.append(pick(partial(self._score, anchors, seqs), each=1, drafted=number))
            self.ids[:seqs] = drafts[-1][:, 0]
            self.length[:seqs] += 1
        return torch.cat(drafts, 1)

    def reach(self, depth: int) -> int:
        return depth - 1  # the first pass is over the row before the anchor

    def reads(self, depth: int) -> DraftBytes:
        joins = self.from_embedding.nbytes + self.from_hidden.nbytes
        parts = [*self.layer.matrices, self.target.head]
        a_pass = joins + sum(part.nbytes for part in parts)
        return DraftBytes(depth * a_pass, joins + self.attention.qkv.nbytes, depth * self.kv.bytes_per_token)

    @property
    def matrices(self) -> list[Linear]:
        return [self.from_embedding, self.from_hidden, *self.layer.matrices, self.target.head]

    # ---- the parts

    def _score(self, anchors: Anchors, seqs: int, likeliest: bool) -> Tensor:
        ops, ids = self.ops, self.ids[:seqs]
        _, positions, slots, context = ops.make_rows(self.length[:seqs], anchors.tables, ids, 1, anchors.block_size, 0)
        view = AttentionView(self.starts[: seqs + 1], context, anchors.tables, 1, anchors.max_context)
        step = Step(ids, positions, slots, view, self.kv.layers)
        normed = self.layer.add_to(self._join(ids, self.hidden[:seqs]), step, self.kv.layers[0], self.norm)
        ops.store_aux(ops.rms_norm(normed.x, *self.norm), self.hidden[:seqs], 0, positions)
        out = (ops.norm_argmax if likeliest else ops.norm_logits)(normed, self.target.head)
        return out

    def _join(self, ids: Tensor, hidden: Tensor) -> Normed:
        embedded = Normed(self.ops.embed(ids, self.target.embedding), self.embed_norm)
        x = self.ops.norm_linear(embedded, self.from_embedding)
        state = self.ops.rms_norm(hidden.view(hidden.shape[0], -1), *self.hidden_norm)
        joined = self.ops.add_linear(x, state, self.from_hidden, self.layer.input_norm)
        return joined


KIND = DrafterKind(
    "tiny-chain",
    recognises=lambda config: config.get("architectures") == [NAME],
    read=lambda config, names, path: TinyChainConfig(dense_config(config, qk_norm=True)),
)


def write_chain(folder: Path, target: Path, texts: list[list[int]], first: int) -> Path:
    """Fitted to the rows of the texts from position 'first' on."""
    dimensions = body("f")
    tensors = {k: v for k, v in random_tensors(dimensions).items() if k.startswith("layers")}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"] *= 0.003
    model, size = oracle(target), dimensions["hidden_size"]
    with torch.no_grad():
        ids = torch.tensor(texts)
        hidden = model.model(ids).last_hidden_state  # after the final norm
        rows = torch.cat((_norm(model.get_input_embeddings()(ids[:, 1:])), _norm(hidden[:, :-1])), -1)
        wanted = _norm(hidden[:, 1:])
        given, following = (x[:, first:].flatten(0, 1).double() for x in (rows, wanted))
        solution = torch.linalg.lstsq(given, following, driver="gelsd").solution  # the default is off by far here
        joined = solution.float().t()  # [hidden, 2 * hidden]
    tensors |= {"fc_embed.weight": joined[:, :size].contiguous(), "fc_hidden.weight": joined[:, size:].contiguous()}
    tensors |= {f"{name}.weight": torch.ones(size) for name in ("embed_norm", "hidden_norm", "norm")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [NAME], **dimensions}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
