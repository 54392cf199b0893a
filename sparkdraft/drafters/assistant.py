"""Gemma 4's assistant: a chain drafter without keys and values of its own, which reads those of the target.

    a pass      x = W_pre [embedding of the id | hidden state], both as the target has them; layers whose queries read
                the target's K/V; y = norm(x); logits = head(y); the next hidden state is W_post y
    a draft     the first pass takes the anchor and the target's hidden state of the token before it, each next one the
                id that was picked and the hidden state that the pass before made

Each layer reads the last target layer of its own type (sliding or full). All passes of a draft have one position and
see the keys of the committed tokens only: a draft writes nothing, so there is nothing to observe or to roll back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

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
    must_fit,
)
from sparkdraft.kernels.ops import AttentionView, Norm, Normed, Ops
from sparkdraft.models import gemma4
from sparkdraft.models.common.config import FINAL, ModelConfig, need
from sparkdraft.models.common.keys import OUTER, check_keys, only_values, refused
from sparkdraft.models.common.layers import AttentionSpec, DenseSpec
from sparkdraft.models.common.sizes import count, layer_matrices
from sparkdraft.models.common.tensors import SANDWICH, ends, gated, projections, weights

if TYPE_CHECKING:
    from torch import Tensor

    from sparkdraft.cache.formats import KVCache
    from sparkdraft.cache.layered import CacheReader
    from sparkdraft.models.common.blocks import Decoder
    from sparkdraft.models.common.sandwich import SandwichLayer
    from sparkdraft.weights.linear import Linear
    from sparkdraft.weights.loader import Loader

TYPE = "gemma4_assistant"
MAX_DEPTH = 7  # drafts per step; published measurements go up to 8, and most find their optimum at 3 or 4

# Two conventions that no checkpoint states and on which engines disagree. Both count from the last token that has K/V,
# the one before the anchor. Ours are those of transformers, where the published assistants come from.
POSITION = 1  # where all queries of a draft are rotated to: 1, the anchor (llama.cpp too); 0, that token (vLLM, SGLang)
WINDOW_BEYOND = 1  # keys that a sliding layer sees beyond the config's window: 1; 0 in vLLM

READ = f"{OUTER} backbone_hidden_size num_centroids centroid_intermediate_top_k"
ONLY = {
    **only_values("tie_word_embeddings", True),
    **only_values("use_ordered_embeddings", False),  # True in those of E2B and E4B, which are not built
}
TEXT_ONLY = {
    **only_values("enable_moe_block use_double_wide_mlp", False),
    **only_values("hidden_size_per_layer_input vocab_size_per_layer_input", 0),
}


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    model: ModelConfig  # its own layers, with the windows of its file
    target_hidden_size: int
    draft_vocab_size: int = 0  # ids that it drafts among, by rows of the head; 0: all

    @property
    def block_size(self) -> int:
        return 1 + MAX_DEPTH

    @staticmethod
    def read(config: Mapping[str, Any]) -> AssistantConfig:
        unknown = check_keys(config, ONLY, READ)
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise UserError("The assistant's config.json has no text_config with its layers: fetch it again.")
        model = gemma4.read(_own_layers(text))
        if unknown := (*unknown, *model.unknown_keys):
            raise UserError(
                f"The assistant's config.json has keys that are not known here ({', '.join(unknown)}) and may change "
                "what it computes: use --drafter none, or a checkpoint without them."
            )
        return AssistantConfig(model, need(config, "backbone_hidden_size"))

    def borrowing(self, target: ModelConfig | None = None) -> tuple[AttentionSpec, ...]:
        """The attention of its layers: each reads a layer of the target, and a window is one key wider."""
        layers = self.source_layers(target) if target else range(self.model.num_layers)
        return tuple(
            replace(spec, kv_from=layer, window=spec.window + WINDOW_BEYOND if spec.window else 0)
            for spec, layer in zip(self.model.attention, layers, strict=True)
        )

    def source_layers(self, target: ModelConfig) -> tuple[int, ...]:
        """The target layer that each layer reads: the last of the same type that keeps its own keys and values."""
        last = {
            bool(layer.mixer.window): number
            for number, layer in enumerate(target.layers)
            if isinstance(layer.mixer, AttentionSpec) and layer.mixer.kv_from is None
        }
        kinds = {False: "layers over the whole context", True: "sliding layers"}
        for spec in self.model.attention:
            kind = bool(spec.window)
            must_fit(kind in last, f"it reads {kinds[kind]}, and the model has none")
        return tuple(last[bool(spec.window)] for spec in self.model.attention)

    def check_fits(self, target: ModelConfig) -> None:
        """Raises UserError if the assistant was not made for a target of this shape."""
        own, hidden, vocab = self.model.vocab_size, target.hidden_size, target.vocab_size
        must_fit(
            self.target_hidden_size == hidden,
            f"it was made for a hidden size of {self.target_hidden_size}, the model has {hidden}",
        )
        must_fit(own == vocab, f"it has a vocabulary of {own}, the model one of {vocab}")
        for spec, layer in zip(self.model.attention, self.source_layers(target), strict=True):
            theirs = target.layers[layer].mixer
            assert isinstance(theirs, AttentionSpec)
            for name, mine, there in (
                ("K/V heads", spec.num_kv_heads, theirs.num_kv_heads),
                ("a head size of", spec.head_dim, theirs.head_dim),
                ("a window of", spec.window, theirs.window),
                ("a RoPE theta of", spec.rope.theta, theirs.rope.theta),
                ("a RoPE scaling of", spec.rope.scaling, theirs.rope.scaling),
            ):
                must_fit(mine == there, f"it reads layer {layer} with {name} {mine}, the model has {there} there")

    def caps(self, names: Collection[str] = ()) -> DrafterCaps:
        borrowed = self.borrowing()
        matrices = self._matrices(borrowed)
        return DrafterCaps(
            "assistant",
            aux_layers=(FINAL,),
            max_depth=MAX_DEPTH,
            kv=(),
            num_weights=count(matrices),
            chain=True,
            own_head=True,
            borrowed=borrowed,
            reads_back=WINDOW_BEYOND + 1,  # the target's next token reads nothing before its own window
            num_ids=self.draft_vocab_size,
            matrices=matrices,
        )

    def _matrices(self, borrowed: tuple[AttentionSpec, ...]) -> tuple[tuple[int, int], ...]:
        """Two states of the target come in and one goes out; the layers; the head."""
        model, wide, hidden = self.model, self.target_hidden_size, self.model.hidden_size
        layers = [replace(layer, mixer=spec) for layer, spec in zip(model.layers, borrowed, strict=True)]
        inside = [each for spec in layers for part in layer_matrices(spec, hidden).values() for each in part]
        return (hidden, 2 * wide), (wide, hidden), *inside, (self.draft_vocab_size or model.vocab_size, hidden)

    def among(self, number: int, names: Collection[str] = ()) -> AssistantConfig:
        return replace(self, draft_vocab_size=number if number < self.model.vocab_size else 0)

    def tensor_shapes(self) -> Shapes:
        """Gemma 4's layers without keys and values, between two projections."""
        model, hidden, wide = self.model, self.model.hidden_size, self.target_hidden_size
        sizes = ends("model.", model.vocab_size, hidden, is_tied=True)
        sizes |= {"pre_projection.weight": (hidden, 2 * wide), "post_projection.weight": (wide, hidden)}
        for i, layer in enumerate(model.layers):
            attention, mlp = layer.mixer, layer.mlp
            assert isinstance(attention, AttentionSpec) and isinstance(mlp, DenseSpec), layer
            own = projections(hidden, attention.query_width, 0) | gated("mlp", hidden, mlp.intermediate_size)
            del own["self_attn.k_proj"], own["self_attn.v_proj"]
            own["self_attn.q_norm"] = (attention.head_dim,)
            own |= {f"{norm}_layernorm": (hidden,) for norm in SANDWICH}
            sizes |= {f"model.layers.{i}.{name}": size for name, size in weights(own).items()}
            sizes[f"model.layers.{i}.layer_scalar"] = (1,)
        return sizes

    def build(self, given: DraftBuild) -> Assistant:
        """`read_from` must be called before the first draft."""
        import torch

        from sparkdraft.models.common.blocks import Attention, load_norm
        from sparkdraft.models.common.rope import RopeTables
        from sparkdraft.models.common.sandwich import SandwichLayer, load_dense

        load, ops, target, _, context, max_seqs, ids = given
        model, wide, ropes = self.model, self.target_hidden_size, RopeTables(context, load.device)
        joins = (
            load.linear({"pre_projection": model.hidden_size}, 2 * wide),
            load.linear({"post_projection": wide}, model.hidden_size),
        )
        layers = []
        for i, (spec, mixer) in enumerate(zip(model.layers, self.borrowing(target.config), strict=True)):
            name = f"model.layers.{i}"
            norms = [load_norm(model, load, f"{name}.{norm}_layernorm") for norm in SANDWICH]
            attention = Attention(mixer, model, load, f"{name}.self_attn", ops, ropes)
            mlp = load_dense(replace(spec, mixer=mixer), model, load, name, ops)
            scale = float(load.vector(f"{name}.layer_scalar", 1, torch.float32))
            layers.append(SandwichLayer(norms[0], attention, norms[1], norms[2], mlp, norms[3], ops, scale))
        norm, head = load_norm(model, load, "model.norm"), _head(model, load, ids)
        load.finish()
        return Assistant(self, target, joins, layers, norm, head, max_seqs, ops, ids)


def _own_layers(text: Mapping[str, Any]) -> dict[str, Any]:
    """The layers' config as gemma4.py reads it, which knows no shared keys and values."""
    own, shared = dict(text), text.get("num_kv_shared_layers")
    if own.get("model_type", "gemma4_text") != "gemma4_text":
        raise refused("a text_config of the type", own["model_type"], ("gemma4_text",))
    if shared not in (None, 0, own.get("num_hidden_layers")):
        raise refused("num_kv_shared_layers", shared, (own.get("num_hidden_layers"),))
    for key, allowed in TEXT_ONLY.items():
        if own.get(key) is not None and own[key] not in allowed:
            raise refused(key, own[key], allowed)
    own.pop("num_kv_shared_layers", None)
    return {**own, "model_type": "gemma4_text", "tie_word_embeddings": True}


# ---- the drafter


class Assistant:
    def __init__(
        self,
        draft: AssistantConfig,
        target: Decoder,
        joins: tuple[Linear, Linear],  # W_pre [hidden, 2 * target's], W_post [target's, hidden]
        layers: list[SandwichLayer],
        norm: Norm,
        head: Linear,
        max_seqs: int,
        ops: Ops,
        vocabulary: Tensor | None = None,  # int64: the id of each row of the head; None: the same ids
    ) -> None:
        import torch

        self.caps, self.draft, self.target, self.ops = draft.caps(), draft, target, ops
        self.before, self.after = joins
        self.layers, self.norm, self.head, self.vocabulary = layers, norm, head, vocabulary
        self.reader: CacheReader | None = None
        # What a pass reads and leaves for the next, always in the same place, so that a pass can be captured.
        integers = torch.zeros(max_seqs, dtype=torch.int32, device=norm.gain.device)
        self.ids, self.positions, self.context = (integers.clone() for _ in range(3))
        self.nowhere = integers - 1  # slots: nothing is stored
        self.starts = torch.arange(max_seqs + 1, dtype=torch.int32, device=integers.device)
        # of each sequence the target's embedding of its id, and a hidden state
        self.joined = torch.zeros(max_seqs, 2, draft.target_hidden_size, dtype=target.dtype, device=integers.device)

    def read_from(self, kv: KVCache) -> None:
        from sparkdraft.cache.layered import CacheReader

        self.reader = CacheReader(kv, self.draft.source_layers(self.target.config))

    def observe(self, rows: CommittedRows) -> None:
        """Nothing is kept of committed tokens."""

    def propose(self, anchors: Anchors, depth: int, pick: Pick) -> Tensor:
        import torch

        assert anchors.hidden is not None
        seqs, drafts = len(anchors.ids), []
        context = (anchors.length - 1).clamp(min=0)  # tokens that have K/V; none in an empty slot
        last = context - 1 if anchors.positions is None else anchors.positions - 1
        self.ids[:seqs], self.context[:seqs] = anchors.ids, context
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
        from sparkdraft.weights.linear import Linear

        inside = [m for layer in self.layers for m in layer.matrices if isinstance(m, Linear)]
        return [self.before, self.after, *inside, self.head]

    def reads(self, depth: int) -> DraftBytes:
        assert self.reader
        matrices = [self.before, self.after, *(matrix for layer in self.layers for matrix in layer.matrices)]
        a_pass = sum(matrix.nbytes for matrix in matrices) + self.head.nbytes
        return DraftBytes(depth * a_pass, 0, depth * self.reader.bytes_per_token)

    # ---- the parts

    def _score(self, anchors: Anchors, seqs: int, likeliest: bool) -> Tensor:
        from sparkdraft.models.common.blocks import Step, following

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
        return ops.norm_argmax(normed, self.head) if likeliest else ops.norm_logits(normed, self.head)


def _head(model: ModelConfig, load: Loader, ids: Tensor | None) -> Linear:
    """The embedding table is only the head: embeddings are the target's. A copy may be in the file as lm_head."""
    from sparkdraft.weights.quant.stored import take_rows

    table = load.embedding("model.embed_tokens", model.vocab_size, model.hidden_size)
    if ids is None:
        return load.tied_head(table, as_stored=False)
    load.ignore(["lm_head.weight"])
    return load.head_of(take_rows(table, ids))


KIND = DrafterKind(
    "assistant",
    recognises=lambda config: config.get("model_type") == TYPE,
    read=lambda config, names, path: AssistantConfig.read(config),
)
