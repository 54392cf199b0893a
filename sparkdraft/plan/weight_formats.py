"""Which part of a model is kept in which weight format, and how many bytes that is. No torch.

A checkpoint rarely has one format: heads, embeddings and routers mostly stay in 16 bits, and so does whatever its
`quantization_config` ignores. Parts are groups of matrices within a layer. What the config states is believed here,
before anything is loaded; the loader goes by the tensors themselves (weights/quant/formats.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.models.config import ModelConfig
from sparkdraft.models.layers import DenseSpec, ExpertsSpec, LayerSpec, RecurrentSpec
from sparkdraft.plan.resolve import WEIGHT_ITEMSIZE
from sparkdraft.plan.sizes import layer_sizes, model_sizes

FLOATS = ("bfloat16", "float32")
# Formats that a GPU's matrices stay in. Others are decoded to bfloat16 at load, and `plan` says so.
KEPT_ON_GPU = (*FLOATS, "fp8", "nvfp4", "mxfp4", "int4")
# Bytes per weight, with the scales of its group: of 16 (NVFP4), of 32 (MXFP4), of 128 (INT4); FP8 has one per row.
BYTES: dict[str, float] = {**WEIGHT_ITEMSIZE, "fp8": 1.0, "nvfp4": 0.5625, "mxfp4": 0.53125, "int4": 0.5156}
# The parts of a model, and names of one of their modules, by which the patterns of a quantization_config find them.
GROUPS: dict[str, tuple[str, ...]] = {
    "attention": ("self_attn.q_proj",),
    "recurrent": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_qkvz"),
    "mlp": ("mlp.gate_proj", "mlp.shared_expert.gate_proj"),  # dense, or the expert that all rows pass through
    "experts": ("mlp.experts.0.gate_proj", "mlp.experts.gate_up_proj", "experts.0.gate_proj"),
    "router": ("mlp.gate", "mlp.router", "router.proj"),
    "head": ("lm_head",),
    "embedding": ("embed_tokens",),
}
USUALLY_FLOAT = ("router", "head", "embedding")
METHODS = {"mxfp4": "mxfp4", "fp8": "fp8", "fbgemm_fp8": "fp8"}  # that name their format
BY_BITS = ("gptq", "awq", "auto-round", "bitsandbytes")
NONE = DenseSpec(0)


@dataclass(frozen=True, slots=True)
class WeightFormats:
    default: str  # of all groups that are not named
    groups: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[tuple[int, str], str] = field(default_factory=dict)  # (layer, group) where layers differ

    def of(self, group: str, layer: int = -1) -> str:
        return self.layers.get((layer, group)) or self.groups.get(group, self.default)

    @staticmethod
    def parse(text: str) -> WeightFormats:
        """'nvfp4', or 'nvfp4,attention=fp8,head=fp8'. Heads, embeddings and routers stay in bfloat16 unless named."""
        default, *rest = text.split(",")
        special = [part.partition("=") for part in rest]
        for name in (default, *(fmt for _, _, fmt in special)):
            if name not in BYTES:
                raise UserError(f"weights: '{name}' is no format; formats are {', '.join(BYTES)}")
        for group, _, _ in special:
            if group not in GROUPS:
                raise UserError(f"weights: '{group}' is no part of a model; parts are {', '.join(GROUPS)}")
        is_coded = default not in WEIGHT_ITEMSIZE  # the others are how an engine keeps every matrix
        usual = dict.fromkeys(USUALLY_FLOAT, "bfloat16") if is_coded else {}
        return WeightFormats(default, usual | {group: fmt for group, _, fmt in special})


def kept(formats: WeightFormats) -> WeightFormats:
    """What a GPU's memory holds of them."""

    def one(fmt: str) -> str:
        return fmt if fmt in KEPT_ON_GPU else "bfloat16"

    groups = {group: one(fmt) for group, fmt in formats.groups.items()}
    return WeightFormats(one(formats.default), groups, {place: one(fmt) for place, fmt in formats.layers.items()})


def names_of(formats: WeightFormats) -> list[str]:
    return sorted({formats.default, *formats.groups.values(), *formats.layers.values()})


@dataclass(frozen=True, slots=True)
class Part:
    group: str
    format: str
    weights: int  # of an expert group, those of all experts
    layer: int = -1

    @property
    def nbytes(self) -> float:
        return self.weights * BYTES[self.format]


def parts_of(model: ModelConfig, formats: WeightFormats) -> Iterator[Part]:
    """The whole model, part by part."""
    sizes = model_sizes(model)
    for i, spec in enumerate(model.layers):
        for group, weights in _layer_groups(spec, model.hidden_size).items():
            yield Part(group, formats.of(group, i), weights, i)
    yield Part("head", formats.of("head"), sizes.head)
    if sizes.embedding:
        yield Part("embedding", formats.of("embedding"), sizes.embedding)


def bytes_by_format(model: ModelConfig, formats: WeightFormats) -> dict[str, int]:
    """Of all matrices. Together they are the `held` of plan/resolve.py."""
    found: dict[str, float] = {}
    for part in parts_of(model, formats):
        found[part.format] = found.get(part.format, 0.0) + part.nbytes
    return {name: int(size) for name, size in found.items()}


def _layer_groups(spec: LayerSpec, hidden: int) -> dict[str, int]:
    """Weights of a layer's groups: differences between sizes of layers that have and lack a part."""
    whole, mixer = layer_sizes(spec, hidden), layer_sizes(replace(spec, mlp=NONE), hidden).held
    groups = {"recurrent" if isinstance(spec.mixer, RecurrentSpec) else "attention": mixer}
    if isinstance(spec.mlp, ExpertsSpec):
        groups["experts"] = spec.mlp.num_experts * whole.expert
        groups["mlp"] = layer_sizes(replace(spec, mlp=DenseSpec(spec.mlp.shared_size)), hidden).held - mixer
        groups["router"] = whole.held - sum(groups.values())
    else:
        groups["mlp"] = whole.held - mixer
    return {group: weights for group, weights in groups.items() if weights}


# ---- what a config.json states


def stated(config: Mapping[str, Any], num_layers: int) -> WeightFormats | None:
    """The formats that a config.json describes, or None if it describes none. Raises UserError for those not known."""
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not found:
        return None
    method = str(found.get("quant_method", "")).lower()
    rules = _rules(method, found)
    # The others say "all linear layers", mean those of the layers, and leave the head out without a word.
    names_head = method.startswith(("modelopt", "compressed-tensors"))
    head = _matched(rules, found, GROUPS["head"]) if names_head else "bfloat16"
    groups = {"head": head, "embedding": "bfloat16"}
    layers: dict[tuple[int, str], str] = {}
    for group, names in GROUPS.items():
        if group not in USUALLY_FLOAT:
            by_layer = [_matched(rules, found, [f"layers.{i}.{name}" for name in names]) for i in range(num_layers)]
            layers |= {(i, group): fmt for i, fmt in enumerate(by_layer)}
    return WeightFormats("bfloat16", groups, layers)


Rules = list[tuple[tuple[str, ...], str]]  # patterns of names, and the format of what they match; the first counts


def _rules(method: str, found: Mapping[str, Any]) -> Rules:
    if method in METHODS:
        return [(("*",), METHODS[method])]
    if method in BY_BITS:
        bits = found.get("bits") or found.get("w_bit") or (4 if found.get("load_in_4bit") else 8)
        return [(("*",), _format_of_bits(int(bits), "int"))]
    if method == "compressed-tensors":
        return [_compressed(group, found) for group in (found.get("config_groups") or {}).values()]
    if method.startswith("modelopt"):
        mixed = found.get("quantized_layers") or {}
        rules: Rules = [((str(name),), _algorithm(str(each.get("quant_algo")))) for name, each in mixed.items()]
        return rules or [(("*",), _algorithm(str(found.get("quant_algo"))))]
    raise UserError(
        f"config.json states weights of the kind '{method}', whose bytes are not known here: name the format with "
        f"--weights, one of {', '.join(BYTES)}"
    )


def _compressed(group: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    weights, spelled = group.get("weights") or {}, str(group.get("format") or found.get("format") or "")
    fmt = next((name for name in ("nvfp4", "mxfp4") if name in spelled), "")
    fmt = fmt or _format_of_bits(int(weights.get("num_bits", 8)), str(weights.get("type", "int")))
    targets = tuple(str(target) for target in group.get("targets") or ())
    return tuple("*" if "." not in target and ":" not in target else target for target in targets), fmt


def _algorithm(name: str) -> str:
    for part, fmt in (("NVFP4", "nvfp4"), ("MXFP4", "mxfp4"), ("FP8", "fp8"), ("W4A16", "int4")):
        if part in name.upper():
            return fmt
    raise UserError(f"config.json states quant_algo {name}, whose bytes are not known here: name the format --weights")


def _format_of_bits(bits: int, kind: str) -> str:
    if bits == 4:
        return "nvfp4" if kind == "float" else "int4"
    if bits == 8:
        return "fp8"  # a byte per weight, whatever its code
    raise UserError(f"config.json states weights of {bits} bits; 4 and 8 are known: name a format with --weights")


def _matched(rules: Rules, found: Mapping[str, Any], names: list[str] | tuple[str, ...]) -> str:
    """The format of a group: bfloat16 if one of its modules' names is ignored, or matched by no rule."""
    ignored = [
        str(each)
        for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
        for each in found.get(key) or ()
    ]
    if any(_matches(pattern, name) for pattern in ignored for name in names):
        return "bfloat16"
    for patterns, fmt in rules:
        if any(_matches(pattern, name) for pattern in patterns for name in names):
            return fmt
    return "bfloat16"


def _matches(pattern: str, name: str) -> bool:
    """Each kind of file spells names in its own way: as a regular expression, with stars, in full, or as a part of the
    full name; and what comes before 'layers' differs."""
    wholes = [f"{prefix}{name}" for prefix in ("", "model.", "model.language_model.", "language_model.model.")]
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], whole) for whole in wholes)
    if "*" in pattern:
        return any(fnmatch(whole, each) for whole in wholes for each in (pattern, f"{pattern}.*"))
    return any(f".{pattern}." in f".{whole}." for whole in wholes)
