"""DFlash: a few layers that fill in a block of masks in one pass, given the target's hidden states of the text so far.

A committed token reaches the drafter only as keys and values, projected for all layers at once from the target's
hidden states (`observe`). Queries come from the draft block alone, so one pass drafts the whole block (`propose`).
Embedding and head are the target's unless the checkpoint has its own.

    a block    | anchor | mask | mask | ... |    'width' positions from the anchor on; masks become the drafts

Checkpoints are published in two formats. z-lab keeps the drafter's dimensions at the top of config.json and the rest in
`dflash_config`; speculators keeps them in `transformer_layer_config` and counts the target's layers from the embedding,
so one higher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
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
    SeenContext,
    Shapes,
    must_fit,
)
from sparkdraft.drafters.vocabulary import rows_of_head
from sparkdraft.kernels.ops import AttentionView, Norm, Normed, Ops
from sparkdraft.models.common.config import ModelConfig, dense_config, softcap_of
from sparkdraft.models.common.layers import AttentionSpec, DenseSpec, LayerSpec
from sparkdraft.models.common.sizes import count, layer_matrices
from sparkdraft.models.common.tensors import layer_shapes
from sparkdraft.util.fields import MAX_LAYERS, flag, listed, mapping, real, whole, wrong

if TYPE_CHECKING:
    from torch import Tensor

    from sparkdraft.cache.formats.dense import DenseKV
    from sparkdraft.models.common.blocks import Attention, Decoder, DecoderLayer
    from sparkdraft.weights.linear import Linear
    from sparkdraft.weights.loader import Loader
    from sparkdraft.weights.quant.stored import Stored

Config = Mapping[str, Any]
OWN = "The drafter's config.json"
WINDOW_KEY, SINK_KEY = "draft_window_size", "draft_sink_size"  # of dflash_config
NUM_AUX_LAYERS = 5  # of the drafters that are made here
Mask = tuple[int, bool]  # of a layer: its window (0: none), and whether it is causal within a block

# Keys that stand for another algorithm or a computation that we do not have, and its name.
FOREIGN = {
    "conv_kernel_size": "dflash2",
    "selector_rank": "dflash2",
    "markov_rank": "dspark",
    "enable_confidence_head": "dspark",
    "sample_from_anchor": "dspark (sample_from_anchor)",
    "gru_hidden_dim": "domino",
    "attention_sink_bias": "dflash with attention sinks",
    "pure_draft_prefix_len": "dflash with a pure draft prefix",
    "shift_label": "dflash with shifted labels",
}
# Keys that must have one of the given values if they are present.
ONLY = {
    "projector_type": (None, "", "dflash"),
    "attention_value_scale": (None, 1, 1.0),
    "use_aux_hidden_state": (None, True),
    "is_neox_style": (None, True),
    "hidden_act": (None, "silu"),
}


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    model: ModelConfig  # the drafter's own layers, windows and causality included; vocab_size is that of the target
    aux_layers: tuple[int, ...]  # target blocks, from 0; the residual after each is read, in this order
    block_size: int  # the anchor counts
    mask_token_id: int
    draft_vocab_size: int  # of an output head of its own, where the checkpoint has one
    target_hidden_size: int
    num_target_layers: int | None = None  # where the config says
    input_embedding_scale: float | None = 1.0  # None: the target's own, for rows that its first layer reads scaled
    output_multiplier: float = 1.0
    softcap: float | None = None
    sees: SeenContext | None = None  # of the context; None: all of it

    @staticmethod
    def read(config: Config) -> DFlashConfig:
        """Read a config.json in either format. Raises UserError."""
        dialect = _read_zlab
        if "speculators_model_type" in config or "speculators_config" in config:
            dialect = _read_speculators
        return dialect(config)

    def check_fits(self, target: ModelConfig) -> None:
        vocab, layers = target.vocab_size, target.num_layers
        beyond = [layer for layer in self.aux_layers if layer >= layers]
        for own in (self.model.hidden_size, self.target_hidden_size):
            must_fit(own == target.hidden_size, f"it has hidden size {own}, the model {target.hidden_size}")
        must_fit(
            self.model.vocab_size == vocab, f"it has a vocabulary of {self.model.vocab_size}, the model one of {vocab}"
        )
        must_fit(self.draft_vocab_size <= vocab, f"it drafts among {self.draft_vocab_size} ids, the model has {vocab}")
        must_fit(not beyond, f"it reads layer {max(beyond, default=0)}, the model has {layers} layers, counted from 0")
        made_for = self.num_target_layers
        must_fit(made_for in (None, layers), f"it was made for a model of {made_for} layers, this one has {layers}")
        mask = self.mask_token_id
        must_fit(0 <= mask < vocab, f"its mask id {mask} is outside the model's vocabulary of {vocab}")

    def caps(self, names: Collection[str] = ()) -> DrafterCaps:
        """names: of the tensors in its file, which may bring an embedding and a head of its own."""
        vocab, hidden, number = self.model.vocab_size, self.model.hidden_size, self.draft_vocab_size
        own_head = number < vocab or has_table(names, "lm_head.weight")  # of its file, or rows of the target's
        embedding = vocab * hidden if has_table(names, "embed_tokens.weight") else 0
        matrices = (*self._matrices(), *(((number, hidden),) if own_head else ()))
        return DrafterCaps(
            "dflash",
            self.aux_layers,
            self.block_size - 1,
            self.model.attention,
            count(matrices) + embedding,
            own_head=own_head,
            num_read=count(matrices),
            num_ids=number if number < vocab else 0,
            matrices=matrices,
            sees=self.sees,
        )

    def _matrices(self) -> tuple[tuple[int, int], ...]:
        """The input projection, the layers' own, and keys and values of all layers a second time, as one."""
        model, hidden = self.model, self.model.hidden_size
        inside = [each for spec in model.layers for part in layer_matrices(spec, hidden).values() for each in part]
        keys_values = sum(2 * spec.kv_width for spec in model.attention)
        return (hidden, len(self.aux_layers) * self.target_hidden_size), *inside, (keys_values, hidden)

    def among(self, number: int, names: Collection[str] = ()) -> DFlashConfig:
        if has_table(names, "lm_head.weight"):
            raise UserError(
                "draft_vocab leaves out rows of the head that a drafter reads, and this drafter brings a head of its "
                f"own, of {self.draft_vocab_size} ids: leave draft_vocab out"
            )
        return replace(self, draft_vocab_size=min(number, self.model.vocab_size))

    def tensor_shapes(self) -> Shapes:
        hidden = self.model.hidden_size
        sizes: Shapes = {
            "fc.weight": (hidden, len(self.aux_layers) * self.target_hidden_size),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        return sizes | layer_shapes(self.model, "")

    def build(self, given: DraftBuild) -> DFlash:
        from sparkdraft.models.common.blocks import Attention, DecoderLayer, GatedMLP, load_norm
        from sparkdraft.models.common.rope import RopeTables

        load, ops, target, kv, context, max_seqs, ids = given
        prefix, model = _prefix(load), self.model
        fc = load.linear({f"{prefix}fc": model.hidden_size}, len(self.aux_layers) * self.target_hidden_size)
        hidden_norm = load_norm(model, load, f"{prefix}hidden_norm")
        # The masks of a block may reach past the context's end. Nothing uses them there, but they look up a position.
        ropes = RopeTables(context + self.block_size, load.device)
        layers, attention = [], []
        for i, layer in enumerate(model.layers):
            name = f"{prefix}layers.{i}"
            attention.append(Attention(layer.mixer, model, load, f"{name}.self_attn", ops, ropes))
            norms = [load_norm(model, load, f"{name}.{norm}_layernorm") for norm in ("input", "post_attention")]
            mlp = GatedMLP(layer.mlp, model, load, f"{name}.mlp", ops)
            layers.append(DecoderLayer(norms[0], attention[-1], norms[1], mlp))
        spec = model.attention[0]  # layers differ in their windows alone
        names = [f"{prefix}layers.{i}.self_attn.{part}_proj" for i in range(model.num_layers) for part in "kv"]
        context_kv = load.linear(dict.fromkeys(names, spec.kv_width), model.hidden_size, spec.bias)
        ends = _ends(self, load, prefix, target, ids)
        load.finish()
        return DFlash(self, fc, hidden_norm, context_kv, layers, attention, ends, kv, max_seqs, ops)


def spread_aux_layers(num_layers: int, count: int = NUM_AUX_LAYERS) -> tuple[int, ...]:
    """Layers from the second to the third from the end, as in z-lab's drafters; the last layers of a tiny target."""
    if count == 1:
        return (num_layers // 2,)
    first, last = min(1, num_layers - 1), max(num_layers - 3, 0)
    if last - first < count - 1:
        return tuple(range(max(num_layers - count, 0), num_layers))
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


# ---- the two formats


def _read_zlab(config: Config) -> DFlashConfig:
    architectures = listed(config, "architectures", str, OWN) or []
    if architectures and "DFlashDraftModel" not in architectures:
        raise _not_built(architectures[0])
    if "dflash_config" not in config and not architectures:
        raise _not_built(str(config.get("model_type", "unknown")))
    inner = mapping(config, "dflash_config", OWN)
    both = {**config, **inner}  # a key may be in either place; the inner one wins, as in z-lab's own code
    _refuse_foreign(both)
    model = _masked(dense_config(_one_rope(config), qk_norm=True), partial(_zlab_masks, config, inner))
    target_layers = whole(config, "num_target_layers", where=OWN)
    if both.get("target_layer_ids") is None:
        if not target_layers:
            raise UserError("The drafter's config names neither target_layer_ids nor num_target_layers; one is needed")
        both["target_layer_ids"] = spread_aux_layers(target_layers, model.num_layers)
    return DFlashConfig(
        model=model,
        aux_layers=_ids(both, "target_layer_ids"),
        block_size=whole(both, "block_size", 2, OWN) or 16,
        mask_token_id=_required(both, "mask_token_id"),
        draft_vocab_size=whole(both, "draft_vocab_size", where=OWN) or model.vocab_size,
        target_hidden_size=whole(both, "target_hidden_size", where=OWN) or model.hidden_size,
        num_target_layers=target_layers,
        input_embedding_scale=real(both, "input_embedding_scale", -math.inf, where=OWN),
        output_multiplier=1.0 if (said := real(both, "output_multiplier", -math.inf, where=OWN)) is None else said,
        softcap=softcap_of(both) or None,
        sees=_seen_context(both),
    )


def _read_speculators(config: Config) -> DFlashConfig:
    stated = mapping(config, "speculators_config", OWN)
    algorithm = str(config.get("speculators_model_type") or stated.get("algorithm"))
    if algorithm != "dflash":
        raise _not_built(algorithm)
    body = config.get("transformer_layer_config")
    if not isinstance(body, Mapping):
        raise UserError(
            "config.json has no 'transformer_layer_config': a speculators drafter keeps its dimensions there"
        )
    _refuse_foreign({**body, **config})
    causal = not flag(config, "sliding_window_non_causal", where=OWN)  # full layers always see the whole block

    def masks(num_layers: int) -> list[Mask]:
        return [(window, causal and slides) for window, slides in _windows(body, num_layers)]

    model = _masked(dense_config(_one_rope({"model_type": "qwen3", **body}), qk_norm=True), masks)
    aux_layers = _ids(config, "aux_hidden_state_layer_ids")
    if 0 in aux_layers:
        raise UserError("The drafter reads the embedding (aux_hidden_state_layer_ids has 0), which is not built yet")
    return DFlashConfig(
        model=model,
        aux_layers=tuple(layer - 1 for layer in aux_layers),  # in this format, 1 is the output of layer 0
        block_size=whole(config, "block_size", 2, OWN) or 8,
        mask_token_id=_required(config, "mask_token_id"),
        draft_vocab_size=whole(config, "draft_vocab_size", where=OWN) or model.vocab_size,
        target_hidden_size=whole(config, "target_hidden_size", where=OWN) or model.hidden_size,
        sees=_seen_context(body),
    )


def _masked(model: ModelConfig, masks: Callable[[int], list[Mask]]) -> ModelConfig:
    """The model with each layer's window and causality."""
    specs = [
        replace(spec, window=window, causal=causal)
        for spec, (window, causal) in zip(model.attention, masks(model.num_layers), strict=True)
    ]
    return replace(model, layers=tuple(LayerSpec(s, layer.mlp) for s, layer in zip(specs, model.layers, strict=True)))


def _zlab_masks(config: Config, inner: Config, num_layers: int) -> list[Mask]:
    """The config decides whether a block is causal, else dflash_config, else the layer's type."""
    of_block = flag(inner, "causal", where=OWN) if inner.get("causal") is not None else None
    said = flag(config, "is_causal", where=OWN) if config.get("is_causal") is not None else of_block
    if flag(inner, "use_swa", where=OWN):
        return [(_required(inner, "swa_window_size"), bool(said))] * num_layers
    return [(window, slides if said is None else said) for window, slides in _windows(config, num_layers)]


def _windows(config: Config, num_layers: int) -> list[tuple[int, bool]]:
    """(window, is a sliding layer) of each layer, with transformers' defaults for Qwen3."""
    window = whole(config, "sliding_window", 0, OWN) or 0 if flag(config, "use_sliding_window", True, OWN) else 0
    kinds = listed(config, "layer_types", str, OWN)
    if kinds is None:
        first = whole(config, "max_window_layers", 0, OWN) or 0 if window else num_layers
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != num_layers:
        known = f"{num_layers} of full_attention or sliding_attention"
        raise UserError(f"The drafter's layer_types are {', '.join(map(str, kinds))}; they must be {known}")
    return [(window, True) if kind == "sliding_attention" else (0, False) for kind in kinds]


# ---- the parts


def _seen_context(config: Config) -> SeenContext | None:
    """From keys of our own, which other programs ignore: they show the drafter the whole context."""
    if not config.get(WINDOW_KEY):
        return None
    return SeenContext(whole(config, SINK_KEY, 0, OWN) or 0, _required(config, WINDOW_KEY, 1))


def _one_rope(config: Config) -> Config:
    """Take the rotations of the sliding layers for all, as speculators does."""
    rope = mapping(config, "rope_parameters", OWN)
    return {**config, "rope_parameters": rope["sliding_attention"]} if "sliding_attention" in rope else config


def _refuse_foreign(config: Config) -> None:
    for key, kind in FOREIGN.items():
        if config.get(key):
            raise _not_built(kind)
    if any(key.startswith("lilicorr") for key in config):
        raise _not_built("lilicorr")
    for key, allowed in ONLY.items():
        if config.get(key) not in allowed:
            raise _not_built(f"dflash with {key} {config[key]}")


def _not_built(kind: str) -> UserError:
    return UserError(f"Drafters of the kind '{kind}' are not supported yet: use DFlash, of z-lab or of speculators.")


def _required(config: Config, key: str, low: int = 0) -> int:
    value = whole(config, key, low, OWN)
    if value is None:
        raise UserError(f"{OWN} has no {key}, which is a whole number: fetch it again.")
    return value


def _ids(config: Config, key: str) -> tuple[int, ...]:
    ids = tuple(listed(config, key, int, OWN) or ())
    if not ids or not all(0 <= each <= MAX_LAYERS for each in ids) or len(set(ids)) < len(ids):
        raise wrong(key, list(ids), f"a list of distinct layer numbers up to {MAX_LAYERS:,}", OWN)
    return ids


def has_table(names: Collection[str], name: str) -> bool:
    """True if a file has the table, with a prefix or without. Training's copy of the target's head has another name."""
    return any(each == name or each.endswith(f".{name}") for each in names)


# ---- the drafter

ENTRY = "fc.weight"  # in every DFlash checkpoint; what precedes it in its name is the prefix of all names
UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")  # used by training only


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The tokens of one pass: a draft block per sequence. A token sees the observed context and its own block."""

    token_ids: Tensor  # int32 [seqs * width]: anchor, mask, mask, ...
    positions: Tensor  # int32 [seqs * width]
    slots: Tensor  # int32 [seqs * width]: where the block's own K/V go; overwritten by the next observe
    view: AttentionView  # its context_len includes the block itself
    draft_rows: Tensor  # int32 [seqs * depth]: the tokens whose ids are wanted, 1 .. depth of each block


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
        fc: Linear,  # [hidden, aux_layers * target hidden]
        hidden_norm: Norm,
        context_kv: Linear,  # [layers * 2 * kv_heads * head_dim, hidden]: k and v of layer 0, then of layer 1, ...
        layers: list[DecoderLayer],
        attention: list[Attention],  # of these layers; committed tokens pass these only, and no norm
        ends: Ends,
        kv: DenseKV,
        max_seqs: int,
        ops: Ops,
    ) -> None:
        import torch

        self.caps, self.draft = draft.caps(), draft
        self.fc, self.hidden_norm, self.context_kv = fc, hidden_norm, context_kv
        self.layers, self.attention, self.ends, self.kv, self.ops = layers, attention, ends, kv, ops
        device = hidden_norm.gain.device
        # Per depth, for the largest number of blocks: where each block begins, and which tokens are wanted. A compiled
        # step cannot compute them; fewer blocks use the beginning of each.
        depths, seqs = range(1, draft.block_size), torch.arange(max_seqs + 1, dtype=torch.int32, device=device)
        self._starts = {depth: seqs * self.width(depth) for depth in depths}
        self._wanted = {
            depth: (starts[:-1].unsqueeze(1) + torch.arange(1, depth + 1, dtype=torch.int32, device=device)).flatten()
            for depth, starts in self._starts.items()
        }

    def width(self, depth: int) -> int:
        """Tokens of a block that drafts 'depth' ids: the smallest of B/8, B/4, B/2 and B, the trained size, that holds
        depth + 1.

        Masks see each other, so a narrower block drafts a little worse: with a quarter of 16 tokens the first draft is
        accepted in 0.4 % fewer cases, with an eighth in 1.4 % fewer.
        """
        return next(w for w in (self.draft.block_size >> n for n in (3, 2, 1, 0)) if depth < w)

    reach = width

    @property
    def matrices(self) -> list[Linear]:
        from sparkdraft.weights.linear import Linear

        inside = [m for layer in self.layers for m in layer.matrices if isinstance(m, Linear)]
        return [self.fc, self.context_kv, *inside, self.ends.head]

    def reads(self, depth: int) -> DraftBytes:
        matrices = [matrix for layer in self.layers for matrix in layer.matrices]
        propose = sum(m.nbytes for m in [*matrices, self.ends.head])
        return DraftBytes(propose, self.fc.nbytes + self.context_kv.nbytes, self.kv.bytes_per_token)

    def observe(self, rows: CommittedRows) -> None:
        features = self.ops.linear(rows.hidden.view(rows.hidden.shape[0], -1), self.fc)  # [rows, hidden]
        context = self.ops.norm_linear(Normed(features, self.hidden_norm), self.context_kv)
        width = context.shape[1] // len(self.layers)  # K and V of one layer
        for i, (attention, kv) in enumerate(zip(self.attention, self.kv.layers, strict=True)):
            keys_values = context[:, i * width : (i + 1) * width]  # contents are undefined after the write
            kv.write(keys_values, attention.rope_args(rows.positions, num_heads=0), rows.slots)

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
            return self.ops.norm_logits(self._through_layers(block), self.ends.head, softcap)
        logits = self.ops.norm_logits(self._through_layers(block), self.ends.head) * multiplier
        return (logits / softcap).tanh() * softcap if softcap else logits

    def likeliest(self, block: DraftBlock) -> Tensor:  # int64 [seqs * depth]: the logits' argmax
        if self.draft.output_multiplier <= 0:  # a softcap keeps the order, and so does a positive multiplier
            return self.logits(block).argmax(-1)
        return self.ops.norm_argmax(self._through_layers(block), self.ends.head)

    # ---- the parts

    def _through_layers(self, block: DraftBlock) -> Normed:  # [draft rows, hidden]
        from sparkdraft.models.common.blocks import Step, following

        normed = Normed(self._embed(block.token_ids), self.layers[0].input_norm)
        step = Step(block.token_ids, block.positions, block.slots, block.view, self.kv.layers)
        for (layer, then), kv in zip(following(self.layers, self.ends.norm), step.kv, strict=True):
            normed = layer.add_to(normed, step, kv, then)
        return Normed(self.ops.embed(block.draft_rows, normed.x), self.ends.norm)  # a gather

    def _embed(self, ids: Tensor) -> Tensor:  # int32 [rows] -> [rows, hidden]
        x = self.ops.embed(ids, self.ends.embedding, self.ends.scale)
        if self.ends.mask_row is not None:
            is_mask = (ids == self.draft.mask_token_id).unsqueeze(1)
            x = (self.ends.mask_row * self.ends.scale).where(is_mask, x)
        return x


def _prefix(load: Loader) -> str:
    found = [n for n in load.source.names() if n == ENTRY or n.endswith(f".{ENTRY}")]
    if len(found) != 1:
        raise UserError(f"{load.source.path}: tensor {ENTRY} is missing; the file is incomplete or holds no drafter")
    return found[0].removesuffix(ENTRY)


def _ends(draft: DFlashConfig, load: Loader, prefix: str, target: Decoder, ids: Tensor | None) -> Ends:
    """The checkpoint's own tables, else the target's: of its head only drafted rows. ids: in place of the file's."""
    from sparkdraft.models.common.blocks import load_norm

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
    """int64 [draft vocabulary], from the file's offsets (target id minus draft id); None: the vocabularies agree."""
    count, vocab = draft.draft_vocab_size, draft.model.vocab_size
    if count == vocab:
        return None
    if name is None:
        raise UserError(f"{load.source.path}: tensor d2t is missing; a head of {count} ids among {vocab} needs it")
    import torch

    offsets = load.integers(name, count).long()
    ids = offsets + torch.arange(count, device=offsets.device)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise UserError(f"{load.source.path}: {name} points outside the vocabulary of {vocab}; the file is damaged")
    return ids


# ---- how it is found


def like(num_layers: int, name: str, target: ModelConfig) -> DFlashConfig:
    """The shape of this name: layers like the target's, with the target's embedding and head."""
    layer = target.layers[0]
    attention, mlp = layer.mixer, layer.mlp
    is_alike = all(each == layer for each in target.layers)
    if not (is_alike and isinstance(attention, AttentionSpec) and isinstance(mlp, DenseSpec)):
        raise UserError(
            f"drafter shape '{name}' copies the target's layers, which must be dense and all alike; this "
            f"{target.model_type} model's are not: use the shape of a published drafter"
        )
    layer = LayerSpec(replace(attention, qk_norm=True, causal=False), mlp)
    return DFlashConfig(
        model=replace(target, model_type="qwen3", layers=(layer,) * num_layers, tie_embeddings=True),
        aux_layers=spread_aux_layers(target.num_layers),
        block_size=16,
        mask_token_id=target.vocab_size - 1,
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
    )


KIND = DrafterKind(
    "dflash",
    recognises=lambda config: True,
    read=lambda config, names, path: DFlashConfig.read(config),
    asked_last=True,
    shapes={name: partial(like, layers, name) for name, layers in (("dflash-5x", 5), ("dflash-3x", 3))},
)
