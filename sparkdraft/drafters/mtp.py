"""The MTP head of Qwen3-Next, Qwen3.5 and Qwen3.6: one more decoder layer, which predicts the id after the next.

    position p    x = fc(norm(embedding of id p + 1) beside norm(hidden state of p)), one layer with K/V of its own,
                  norm, the target's head: the id at p + 2
    drafts        the first from the last committed token and the anchor; each next one from the head's own last state,
                  after its norm, and the id that was picked; one position further

The hidden states are those after the target's final norm. It is a chain drafter: one pass per draft, always the same
layer. A head is in the target's own file, and its dimensions follow from the target's config.json. Its layer has full
attention; the names of its tensors say which tables are its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdraft.core import UserError
from sparkdraft.drafters.base import (
    Anchors,
    CommittedRows,
    DraftBuild,
    DraftBytes,
    DrafterCaps,
    DrafterKind,
    InTarget,
    Pick,
    Shapes,
    must_fit,
)
from sparkdraft.drafters.vocabulary import rows_of_head
from sparkdraft.kernels.ops import AttentionView, Norm, Normed, Ops
from sparkdraft.models.common.config import FINAL, ModelConfig
from sparkdraft.models.common.layers import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec
from sparkdraft.models.common.sizes import layer_matrices, model_sizes
from sparkdraft.models.common.tensors import experts, gated, projections, weights
from sparkdraft.models.registry import read_config
from sparkdraft.util.fields import listed

if TYPE_CHECKING:
    from torch import Tensor

    from sparkdraft.cache.formats.dense import DenseKV
    from sparkdraft.models.common.blocks import Attention, DecoderLayer
    from sparkdraft.weights.linear import Linear
    from sparkdraft.weights.quant.stored import Stored

MTP = "mtp"  # what a user calls it, and statistics too
PREFIXES = ("mtp.", "model.mtp.")  # of its tensors; the second in files of a text model alone
HEADS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # model types whose head has these tensors
MAX_DEPTH = 6  # drafts per step: the deepest that is reported to pay (drafters/pairs.json)
EXPERTS = "mlp.experts"


@dataclass(frozen=True, slots=True)
class MtpConfig:
    model: ModelConfig  # the target's ends around the head's one layer
    prefix: str = PREFIXES[0]
    own_embedding: bool = False  # otherwise the target's, as is the next
    own_head: bool = False
    in_target: bool = True  # whether its tensors are in the file of the target that it drafts for
    draft_vocab_size: int = 0  # ids that it drafts among, by rows of the head; 0: all

    @property
    def layer(self) -> LayerSpec:
        return self.model.layers[0]

    @property
    def attention(self) -> AttentionSpec:
        return self.model.attention[0]

    @property
    def block_size(self) -> int:
        return 1 + MAX_DEPTH

    @staticmethod
    def of(target: ModelConfig, names: Collection[str] = (), in_target: bool = True) -> MtpConfig:
        """names: of the file's tensors, if they are known. Raises UserError."""
        if target.model_type.removesuffix("_text") not in HEADS or not target.attention:
            raise UserError(
                f"A {target.model_type} model has no MTP head that is read: of model types, {', '.join(HEADS)} have "
                "one; leave --drafter out."
            )
        experts = next((layer.mlp for layer in target.layers if isinstance(layer.mlp, ExpertsSpec)), None)
        model = replace(target, layers=(LayerSpec(target.attention[0], experts or target.layers[0].mlp),))
        prefix = next((p for p in PREFIXES if f"{p}fc.weight" in names), PREFIXES[0])
        own_embedding, own_head = (f"{prefix}{table}.weight" in names for table in ("embed_tokens", "lm_head"))
        return MtpConfig(model, prefix, own_embedding, own_head, in_target)

    def check_fits(self, target: ModelConfig) -> None:
        has, wants = ((each.hidden_size, each.vocab_size) for each in (self.model, target))
        sizes = f"it has hidden size {has[0]} and {has[1]} ids, the model {wants[0]} and {wants[1]}"
        must_fit(has == wants, sizes)

    def check_names(self, names: Collection[str], path: Path) -> None:
        """Raises UserError where tensors of the head are missing. The loader checks their shapes."""
        without, names = "use the model's original file, or --drafter none", frozenset(names)
        if not has_head(names):
            raise UserError(f"{path} has no MTP head (no tensors {PREFIXES[0]}*): {without}.")
        layers = {name.split("layers.")[1].split(".")[0] for name in names if name.startswith(f"{self.prefix}layers.")}
        if len(layers) > 1:
            raise UserError(
                f"The MTP head in {path} has {len(layers)} layers, and heads of one layer are read: {without}."
            )
        missing = [name for name in self.tensor_shapes() if not _has(name, names)]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(f"The MTP head in {path} is incomplete, {missing[0]} is missing{more}: {without}.")

    def caps(self, names: Collection[str] = ()) -> DrafterCaps:
        sizes, hidden = model_sizes(self.model), self.model.hidden_size
        (layer,) = sizes.layers
        vocab, number = self.model.vocab_size, self.draft_vocab_size
        own_head = self.own_head or bool(number)
        rows, table = (number or vocab) * hidden * own_head, self.own_embedding * vocab * hidden
        joined = 2 * hidden * hidden
        again = hidden * layer.kv  # keys and values a second time, as one matrix: committed tokens need no more
        own = joined + layer.held + again + rows + table
        # Keys and values a second time are in no file, and rows of a head are made at load; a whole one is in the file
        stored = joined + layer.held + table + self.own_head * vocab * hidden
        return DrafterCaps(
            name=MTP,
            aux_layers=(FINAL,),
            max_depth=MAX_DEPTH,
            kv=(self.attention,),
            num_weights=own,
            chain=True,
            own_head=own_head,
            num_read=joined + layer.active + rows,
            num_in_target=stored if self.in_target else 0,
            num_ids=number,
            matrices=self._matrices(own_head),
        )

    def _matrices(self, own_head: bool) -> tuple[tuple[int, int], ...]:
        """Matrices to quantise at load: not the router, nor queries, keys and values that are picked by row."""
        hidden, groups = self.model.hidden_size, layer_matrices(self.layer, self.model.hidden_size)
        made, out = groups["attention"]
        inside = [each for name in ("mlp", "experts") for each in groups.get(name, ())]
        rows = ((self.draft_vocab_size or self.model.vocab_size, hidden),) if own_head else ()
        attention = (out,) if self.attention.gated else (made, out)
        return (hidden, 2 * hidden), *attention, *inside, (2 * self.attention.kv_width, hidden), *rows

    def tensor_shapes(self) -> Shapes:
        """As published files have them: experts in one tensor."""
        model, attention, mlp, hidden = self.model, self.attention, self.layer.mlp, self.model.hidden_size
        sizes: Shapes = {"fc": (hidden, 2 * hidden)}
        sizes |= dict.fromkeys(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), (hidden,))
        layer: Shapes = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
        layer |= projections(hidden, attention.query_width, attention.kv_width)
        layer["self_attn.q_proj"] = (2 * attention.query_width, hidden)  # with gates
        layer |= {f"self_attn.{part}_norm": (attention.head_dim,) for part in "qk"}
        fused: Shapes = {}
        if isinstance(mlp, DenseSpec):
            layer |= gated("mlp", hidden, mlp.intermediate_size)
        else:
            count, inter = mlp.num_experts, mlp.intermediate_size
            layer |= {"mlp.gate": (count, hidden), "mlp.shared_expert_gate": (1, hidden)}
            layer |= gated("mlp.shared_expert", hidden, mlp.shared_size)
            fused = experts(EXPERTS, count, hidden, inter)
        tables = {"embed_tokens": self.own_embedding, "lm_head": self.own_head}
        sizes |= {name: (model.vocab_size, hidden) for name, is_own in tables.items() if is_own}
        named = weights(sizes) | {f"layers.0.{name}": size for name, size in (weights(layer) | fused).items()}
        return {f"{self.prefix}{name}": size for name, size in named.items()}

    def among(self, number: int, names: Collection[str] = ()) -> MtpConfig:
        return replace(self, draft_vocab_size=number if number < self.model.vocab_size else 0)

    def build(self, given: DraftBuild) -> MtpHead:
        from sparkdraft.models.common.blocks import Attention, DecoderLayer, GatedMLP, load_norm
        from sparkdraft.models.common.experts import load_experts
        from sparkdraft.models.common.rope import RopeTables

        load, ops, target, kv, context, max_seqs, ids = given
        load.ignore(name for name in load.source.names() if not name.startswith(self.prefix))  # the target's
        model, prefix, layer = self.model, self.prefix, f"{self.prefix}layers.0"
        hidden, spec = model.hidden_size, self.attention
        embedding, own = target.embedding, None
        with _explained():
            if self.own_embedding:
                embedding = load.embedding(f"{prefix}embed_tokens", model.vocab_size, hidden)
            if self.own_head:
                own = load.linear({f"{prefix}lm_head": model.vocab_size}, hidden, as_stored=ids is not None)
            head = (own or target.head) if ids is None else rows_of_head(load, target, ids, own)
            of_ids = load_norm(model, load, f"{prefix}pre_fc_norm_embedding")
            of_hidden = load_norm(model, load, f"{prefix}pre_fc_norm_hidden")
            join = Join(load.linear({f"{prefix}fc": hidden}, 2 * hidden), embedding, of_ids, of_hidden, ops)
            ropes = RopeTables(context + MAX_DEPTH, load.device)  # drafts may reach past the context's end
            attention = Attention(spec, model, load, f"{layer}.self_attn", ops, ropes)
            mlp = load_experts if isinstance(self.layer.mlp, ExpertsSpec) else GatedMLP
            decoder = DecoderLayer(
                load_norm(model, load, f"{layer}.input_layernorm"),
                attention,
                load_norm(model, load, f"{layer}.post_attention_layernorm"),
                mlp(self.layer.mlp, model, load, f"{layer}.mlp", ops),
            )
            rows = {f"{layer}.self_attn.{part}_proj": spec.kv_width for part in "kv"}
            context_kv, norm = load.linear(rows, hidden), load_norm(model, load, f"{prefix}norm")
            load.finish()
        return MtpHead(self, join, attention, decoder, context_kv, norm, head, kv, max_seqs, ops, ids)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"The model's MTP head cannot be used, --drafter none goes without: {error}") from error


def is_target(config: Mapping[str, Any]) -> bool:
    """True if a config.json is that of a model that may hold a head, not of a drafter made for one."""
    kind = str(config.get("model_type", "")).removesuffix("_text")
    drafts = any("Draft" in name or "Specul" in name for name in listed(config, "architectures", str) or ())
    return kind in HEADS and not drafts and "dflash_config" not in config


def has_head(names: Collection[str]) -> bool:
    return any(name.startswith(PREFIXES) for name in names)


def _has(name: str, names: Collection[str]) -> bool:
    """Experts may be in one tensor, with '.weight' or without, or one by one; the loader checks that all are there."""
    if name in names:
        return True
    before, experts, part = name.partition(f"{EXPERTS}.")
    single = "gate" if part.startswith("gate") else "down"
    return bool(experts) and (f"{name}.weight" in names or f"{before}{experts}0.{single}_proj.weight" in names)


# ---- the drafter


class MtpHead:
    def __init__(
        self,
        config: MtpConfig,
        join: Join,
        attention: Attention,
        layer: DecoderLayer,  # with this attention
        context_kv: Linear,  # [2 * kv_heads * head_dim, hidden]: keys, then values, of committed tokens
        norm: Norm,
        head: Linear,
        kv: DenseKV,
        max_seqs: int,
        ops: Ops,
        vocabulary: Tensor | None = None,  # int64: the id of each row of the head; None: the same ids
    ) -> None:
        import torch

        self.caps, self.config, self.kv, self.ops = config.caps(), config, kv, ops
        self.join, self.attention, self.layer, self.context_kv = join, attention, layer, context_kv
        self.norm, self.head, self.vocabulary = norm, head, vocabulary
        # What a pass reads and leaves for the next, always in the same place, so that a pass can be captured.
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
        import torch

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
        return depth - 1  # the first pass is over the token before the anchor

    @property
    def matrices(self) -> list[Linear]:
        from sparkdraft.weights.linear import Linear

        inside = [m for m in self.layer.matrices if isinstance(m, Linear)]
        return [self.join.fc, self.context_kv, *inside, self.head]

    def reads(self, depth: int) -> DraftBytes:
        from sparkdraft.weights.linear import ExpertLinear

        spec, own = self.config.layer.mlp, self.join.fc.nbytes
        share = spec.top_k / spec.num_experts if isinstance(spec, ExpertsSpec) else 1
        parts = [part.nbytes * share if isinstance(part, ExpertLinear) else part.nbytes for part in self.layer.matrices]
        a_pass = own + int(sum(parts)) + self.head.nbytes
        return DraftBytes(depth * a_pass, own + self.context_kv.nbytes, depth * self.kv.bytes_per_token)

    def _score(self, anchors: Anchors, seqs: int, likeliest: bool) -> Tensor:
        """One pass, over one token of each sequence, whose state replaces the one that it began with."""
        from sparkdraft.models.common.blocks import Step

        ops, ids, hidden = self.ops, self._ids[:seqs], self._hidden[:seqs]
        _, positions, slots, context = ops.make_rows(self._length[:seqs], anchors.tables, ids, 1, anchors.block_size, 0)
        view = AttentionView(self._starts[: seqs + 1], context, anchors.tables, 1, anchors.max_context)
        step = Step(ids, positions, slots, view, self.kv.layers)
        joined = Normed(self.join(ids, hidden), self.layer.input_norm)
        normed = self.layer.add_to(joined, step, self.kv.layers[0], self.norm)
        ops.store_aux(ops.rms_norm(normed.x, *self.norm), hidden, 0, positions)
        return ops.norm_argmax(normed, self.head) if likeliest else ops.norm_logits(normed, self.head)


@dataclass(frozen=True, slots=True)
class Join:
    """x = fc(norm(embedding) beside norm(hidden state)): where the head's layer begins."""

    fc: Linear
    embedding: Stored
    of_ids: Norm
    of_hidden: Norm
    ops: Ops

    def __call__(self, ids: Tensor, hidden: Tensor) -> Tensor:  # int32 [rows], [rows, 1, hidden] -> [rows, hidden]
        embedded = self.ops.rms_norm(self.ops.embed(ids, self.embedding), *self.of_ids)
        state = self.ops.rms_norm(hidden.view(hidden.shape[0], -1), *self.of_hidden)
        return self.ops.linear(self.ops.concat(embedded, state), self.fc)


# ---- how it is found


def read(config: Mapping[str, Any], names: Collection[str], path: Path) -> MtpConfig:
    """The head in another file of the target, such as the original of a fine-tune that lost its own."""
    head = MtpConfig.of(read_config(config), names, in_target=False)
    if names:
        head.check_names(names, path)
    return head


def read_in_target(target: ModelConfig, names: Collection[str], path: Path) -> MtpConfig:
    head = MtpConfig.of(target, names)
    head.check_names(names, path)
    return head


KIND = DrafterKind(
    MTP,
    recognises=is_target,
    read=read,
    in_target=InTarget("MTP head", HEADS, has_head, read_in_target),
    shapes={MTP: partial(MtpConfig.of, in_target=False)},
)
