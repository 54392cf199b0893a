"""The config of a Gemma 4 assistant (`gemma4_assistant`), and what the drafter declares from it alone. No torch.

An assistant is a few Gemma 4 layers without keys and values: its queries read those of the target, each layer the last
target layer of its own type (sliding or full). A key that is not known, or asks for another computation, is refused by
name. assistant.py reads the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.drafters.caps import DrafterCaps
from sparkdraft.drafters.dflash_config import must_fit
from sparkdraft.models import gemma4
from sparkdraft.models.common.config import FINAL, ModelConfig, need
from sparkdraft.models.common.keys import check_keys, only_values, refused
from sparkdraft.models.common.layers import AttentionSpec
from sparkdraft.models.common.nested import OUTER
from sparkdraft.models.common.sizes import Matrices, count, layer_matrices

TYPE = "gemma4_assistant"
MAX_DEPTH = 7  # drafts per step; published measurements go up to 8, and most find their optimum at 3 or 4

# Two conventions that no checkpoint states and on which engines disagree. Both count from the last row that has K/V,
# the row before the anchor. Ours are those of transformers, where the published assistants come from.
POSITION = 1  # where all queries of a draft are rotated to: 1, the anchor (llama.cpp too); 0, that row (vLLM, SGLang)
WINDOW_BEYOND = 1  # keys that a sliding layer sees beyond the config's window: 1; 0 in vLLM

READ = f"""
    {OUTER} backbone_hidden_size use_ordered_embeddings num_centroids centroid_intermediate_top_k
"""
ONLY = only_values("tie_word_embeddings", True)
TEXT_ONLY = {
    **only_values("enable_moe_block use_double_wide_mlp", False),
    **only_values("hidden_size_per_layer_input vocab_size_per_layer_input", 0),
}


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    model: ModelConfig  # its own layers, with the windows of its file
    target_hidden_size: int
    num_clusters: int = 0  # of an ordered head, which scores the ids of a few clusters only; 0: the head is a plain one
    top_clusters: int = 0
    draft_vocab_size: int = 0  # ids that it drafts among, by rows of a plain head; 0: all

    @property
    def block_size(self) -> int:
        """Tokens that a step commits at most."""
        return 1 + MAX_DEPTH

    @staticmethod
    def read(config: Mapping[str, Any]) -> AssistantConfig:
        """Raises UserError."""
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
        clusters, top = 0, 0
        if config.get("use_ordered_embeddings"):
            clusters, top = need(config, "num_centroids"), need(config, "centroid_intermediate_top_k")
            if model.vocab_size % clusters or top > clusters:
                raise UserError(
                    f"The assistant's config.json has {clusters} centroids, of which {top} are chosen, for "
                    f"{model.vocab_size} ids; they must divide the ids evenly: fetch it again."
                )
        return AssistantConfig(model, need(config, "backbone_hidden_size"), clusters, top)


def borrowing(draft: AssistantConfig, target: ModelConfig | None = None) -> tuple[AttentionSpec, ...]:
    """The attention of its layers, as it runs: each reads a layer of the target, and a window is one key wider."""
    layers = source_layers(draft, target) if target else range(draft.model.num_layers)
    return tuple(
        replace(spec, kv_from=layer, window=spec.window + WINDOW_BEYOND if spec.window else 0)
        for spec, layer in zip(draft.model.attention, layers, strict=True)
    )


def source_layers(draft: AssistantConfig, target: ModelConfig) -> tuple[int, ...]:
    """The target layers that its layers read: of the same type, the last that keeps keys and values of its own."""
    last = {
        bool(layer.mixer.window): number
        for number, layer in enumerate(target.layers)
        if isinstance(layer.mixer, AttentionSpec) and layer.mixer.kv_from is None
    }
    kinds = {False: "layers over the whole context", True: "sliding layers"}
    for spec in draft.model.attention:
        kind = bool(spec.window)
        must_fit(kind in last, f"it reads {kinds[kind]}, and the model has none")
    return tuple(last[bool(spec.window)] for spec in draft.model.attention)


def check_fits(draft: AssistantConfig, target: ModelConfig) -> None:
    """Raises UserError if the assistant was not made for a target of this shape."""
    own, hidden, vocab = draft.model.vocab_size, target.hidden_size, target.vocab_size
    must_fit(
        draft.target_hidden_size == hidden,
        f"it was made for a hidden size of {draft.target_hidden_size}, the model has {hidden}",
    )
    must_fit(own == vocab, f"it has a vocabulary of {own}, the model one of {vocab}")
    for spec, layer in zip(draft.model.attention, source_layers(draft, target), strict=True):
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


def caps_of(draft: AssistantConfig) -> DrafterCaps:
    borrowed = borrowing(draft)
    matrices, model = _matrices(draft, borrowed), draft.model
    # an ordered head's rows are looked up by number, and its centroids choose them: both stay floats
    floats = model.hidden_size * (model.vocab_size + draft.num_clusters) if draft.num_clusters else 0
    return DrafterCaps(
        "assistant",
        taps=(FINAL,),
        max_depth=MAX_DEPTH,
        kv=(),
        num_weights=count(matrices) + floats,
        chain=True,
        own_head=True,
        borrowed=borrowed,
        reads_back=WINDOW_BEYOND + 1,  # the target's next row reads nothing before its own window
        num_ids=draft.draft_vocab_size,
        matrices=matrices,
    )


def _matrices(draft: AssistantConfig, borrowed: tuple[AttentionSpec, ...]) -> Matrices:
    """Two states of the target come in and one goes out; the layers; and a plain head."""
    model, wide, hidden = draft.model, draft.target_hidden_size, draft.model.hidden_size
    layers = [replace(layer, mixer=spec) for layer, spec in zip(model.layers, borrowed, strict=True)]
    inside = [each for spec in layers for part in layer_matrices(spec, hidden).values() for each in part]
    head = () if draft.num_clusters else ((draft.draft_vocab_size or model.vocab_size, hidden),)
    return (hidden, 2 * wide), (wide, hidden), *inside, *head


def _own_layers(text: Mapping[str, Any]) -> dict[str, Any]:
    """The layers' config as gemma4.py reads it. That they have no keys and values is what an assistant is."""
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
