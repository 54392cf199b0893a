"""The MTP head that Qwen3-Next, Qwen3.5 and Qwen3.6 have in their own file: its dimensions, tensors and caps. No torch.

A head is one decoder layer of the target's kind with full attention, whatever the target's layers are in their place.
What it needs follows from the target's config.json; which tables are its own, the names of its tensors say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.drafters.caps import DrafterCaps
from sparkdraft.models.common.config import FINAL, ModelConfig
from sparkdraft.models.common.layers import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec
from sparkdraft.models.common.sizes import Matrices, layer_matrices, model_sizes
from sparkdraft.util.fields import listed

MTP = "mtp"  # what a user calls it, and statistics too
PREFIXES = ("mtp.", "model.mtp.")  # of its tensors; the second in files of a text model alone
HEADS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # model types whose head has these tensors
MAX_DEPTH = 6  # drafts per step: the deepest that is reported to pay (drafters/pairs.json)
EXPERTS = "mlp.experts"
Shapes = dict[str, tuple[int, ...]]


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
        """As a block drafter's: the anchor counts."""
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


def is_target(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model which may hold a head, not that of a drafter made for one."""
    kind = str(config.get("model_type", "")).removesuffix("_text")
    drafts = any("Draft" in name or "Specul" in name for name in listed(config, "architectures", str) or ())
    return kind in HEADS and not drafts and "dflash_config" not in config


def has_head(names: Collection[str]) -> bool:
    return any(name.startswith(PREFIXES) for name in names)


def check_fits(head: MtpConfig, target: ModelConfig) -> None:
    """Raises UserError if a head of another file was not made for a target of this shape."""
    has, wants = ((each.hidden_size, each.vocab_size) for each in (head.model, target))
    if has != wants:
        raise UserError(
            f"The MTP head does not fit the model: it has hidden size {has[0]} and {has[1]} ids, the model {wants[0]} "
            f"and {wants[1]}; use the head of this model."
        )


def check_names(head: MtpConfig, names: Collection[str], path: Path) -> None:
    """Raises UserError where tensors of the head are missing, before any is read. Their shapes are the loader's."""
    without = "use the model's original file, or --drafter none"
    if not has_head(names):
        raise UserError(f"{path} has no MTP head (no tensors {PREFIXES[0]}*): {without}.")
    layers = {name.split("layers.")[1].split(".")[0] for name in names if name.startswith(f"{head.prefix}layers.")}
    if len(layers) > 1:
        raise UserError(f"The MTP head in {path} has {len(layers)} layers, and heads of one layer are read: {without}.")
    missing = [name for name in tensor_shapes(head) if not _has(name, names)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"The MTP head in {path} is incomplete, {missing[0]} is missing{more}: {without}.")


def _has(name: str, names: Collection[str]) -> bool:
    """Experts may be in one tensor, with '.weight' or without, or one by one; the loader checks that all are there."""
    if name in names:
        return True
    before, experts, part = name.partition(f"{EXPERTS}.")
    single = "gate" if part.startswith("gate") else "down"
    return bool(experts) and (f"{name}.weight" in names or f"{before}{experts}0.{single}_proj.weight" in names)


def tensor_shapes(head: MtpConfig) -> Shapes:
    """Of the head's tensors by name, as published files have them: experts in one tensor."""
    model, attention, mlp, hidden = head.model, head.attention, head.layer.mlp, head.model.hidden_size
    sizes: Shapes = {"fc": (hidden, 2 * hidden)}
    sizes |= dict.fromkeys(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), (hidden,))
    layer: Shapes = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
    rows = {"q": 2 * attention.query_width, "k": attention.kv_width, "v": attention.kv_width}  # queries with gates
    layer |= {f"self_attn.{part}_proj": (count, hidden) for part, count in rows.items()}
    layer["self_attn.o_proj"] = (hidden, attention.query_width)
    layer |= {f"self_attn.{part}_norm": (attention.head_dim,) for part in "qk"}
    fused: Shapes = {}
    if isinstance(mlp, DenseSpec):
        layer |= _gated("mlp", hidden, mlp.intermediate_size)
    else:
        count, inter = mlp.num_experts, mlp.intermediate_size
        layer |= {"mlp.gate": (count, hidden), "mlp.shared_expert_gate": (1, hidden)}
        layer |= _gated("mlp.shared_expert", hidden, mlp.shared_size)
        fused = {f"{EXPERTS}.gate_up_proj": (count, 2 * inter, hidden), f"{EXPERTS}.down_proj": (count, hidden, inter)}
    tables = {"embed_tokens": head.own_embedding, "lm_head": head.own_head}
    sizes |= {name: (model.vocab_size, hidden) for name, is_own in tables.items() if is_own}
    named = {f"{name}.weight": size for name, size in sizes.items()}
    named |= {f"layers.0.{name}.weight": size for name, size in layer.items()}
    named |= {f"layers.0.{name}": size for name, size in fused.items()}
    return {f"{head.prefix}{name}": size for name, size in named.items()}


def _gated(name: str, hidden: int, inter: int) -> Shapes:
    rows: Shapes = {f"{name}.{part}_proj": (inter, hidden) for part in ("gate", "up")}
    return rows | {f"{name}.down_proj": (hidden, inter)}


def caps_of(head: MtpConfig) -> DrafterCaps:
    sizes, hidden = model_sizes(head.model), head.model.hidden_size
    (layer,) = sizes.layers
    vocab, number = head.model.vocab_size, head.draft_vocab_size
    own_head = head.own_head or bool(number)
    rows, table = (number or vocab) * hidden * own_head, head.own_embedding * vocab * hidden
    joined = 2 * hidden * hidden
    again = hidden * layer.kv  # keys and values a second time, as one matrix: committed rows need no more
    own = joined + layer.held + again + rows + table
    # Keys and values a second time are in no file, and rows of a head are made at load; a whole one is in the file.
    stored = joined + layer.held + table + head.own_head * vocab * hidden
    return DrafterCaps(
        name=MTP,
        taps=(FINAL,),
        max_depth=MAX_DEPTH,
        kv=(head.attention,),
        num_weights=own,
        chain=True,
        own_head=own_head,
        num_read=joined + layer.active + rows,
        num_in_target=stored if head.in_target else 0,
        num_ids=number,
        matrices=_matrices(head, own_head),
    )


def _matrices(head: MtpConfig, own_head: bool) -> Matrices:
    """Those that can be quantised at load: not the router, and not queries, keys and values that are picked by row."""
    hidden, groups = head.model.hidden_size, layer_matrices(head.layer, head.model.hidden_size)
    made, out = groups["attention"]
    inside = [each for name in ("mlp", "experts") for each in groups.get(name, ())]
    rows = ((head.draft_vocab_size or head.model.vocab_size, hidden),) if own_head else ()
    attention = (out,) if head.attention.gated else (made, out)
    return (hidden, 2 * hidden), *attention, *inside, (2 * head.attention.kv_width, hidden), *rows
