"""The weight format of each part of a model, and its bytes. No torch.

A checkpoint rarely has one format: heads, embeddings and routers mostly stay in 16 bits, as does whatever its
`quantization_config` ignores. Parts are groups of matrices within a layer. What the config states is believed here,
before anything is loaded; the loader goes by the tensors themselves (weights/quant/formats.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from itertools import accumulate
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.drafters.base import DrafterCaps
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import RecurrentSpec
from sparkdraft.models.common.sizes import Matrices, count, layer_matrices
from sparkdraft.plan.resolve import WEIGHT_ITEMSIZE
from sparkdraft.util.fields import mapping
from sparkdraft.weights.plane_layout import GGUF_FORMS, CodeForm, StoredBytes
from sparkdraft.weights.quant.stated import check_values, groups_of, layers_of, pattern_of

FLOATS = ("bfloat16", "float32")
# How quantised matrices lie in a GPU's memory. int4 and int8 without a number have groups of 128 columns; -asym: with
# zero points, which become offsets in float32. fp8 has a scale per row, -block one per row and 128 columns.
CODES: dict[str, CodeForm] = {
    "fp8": CodeForm("e4m3", 8, 0, row_scale=True),
    "fp8-block": CodeForm("e4m3", 8, 128, "f32"),
    "nvfp4": CodeForm("e2m1", 4, 16, "e5m3", row_scale=True),
    "mxfp4": CodeForm("e2m1", 4, 32, "e8m0"),
    "mxfp8": CodeForm("e4m3", 8, 32, "e8m0"),
    "int8-row": CodeForm("int8", 8, 0, row_scale=True),
    **{
        f"{kind}{'' if group == 128 else f'-g{group}'}{'-asym' if offset else ''}": CodeForm(
            kind, bits, group, "f16", offset
        )
        for kind, bits in (("int4", 4), ("int8", 8))
        for group in (128, 64, 32)
        for offset in ("", "f32")
    },
    **{f"int{form.bits}-{name}": form for name, form in GGUF_FORMS.items()},
}
# Formats that a GPU's matrices stay in. Others are decoded to bfloat16 at load, and `plan` says so.
KEPT_ON_GPU = (*FLOATS, *CODES)
DESC_ACT = "int4-desc-act"  # groups of columns that are not neighbours
# Bytes per weight, with the scales of its group
BYTES: dict[str, float] = {**WEIGHT_ITEMSIZE, **{name: form.per_weight for name, form in CODES.items()}}
BYTES[DESC_ACT] = BYTES["int4"]
# What CPU kernels keep: codes of 4 bits as such, all else in 8 ("quantised").
NAMED = tuple(BYTES)  # formats that a user may name
EIGHT_BITS, FOUR_BITS = "quantised", "quantised4"
BYTES[FOUR_BITS] = 0.625  # a group of 32, with scale and offset
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
# Keys under which a quantization_config lists modules that stay floats, and what may come before a module's name.
IGNORED = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")
STATED = ("quantization_config", "compression_config")  # keys of config.json; the second is of older files
USUALLY_FLOAT = ("router", "head", "embedding")
METHODS = {"mxfp4": "mxfp4", "fp8": "fp8"}  # that name their format
# Parts of ModelOpt's names of algorithms; the first that is found counts.
ALGORITHMS = {
    "NVFP4": "nvfp4", "MXFP4": "mxfp4", "MXFP8": "mxfp8", "FP8_PB": "fp8-block", "FP8_BLOCK": "fp8-block",
    "FP8": "fp8", "W4A16": "int4",
}  # fmt: skip
BY_BITS = ("gptq", "awq", "auto-round")


@dataclass(frozen=True, slots=True)
class WeightFormats:
    default: str  # of all groups that are not named
    groups: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[tuple[int, str], str] = field(default_factory=dict)  # (layer, group) where layers differ

    def of(self, group: str, layer: int = -1) -> str:
        return self.layers.get((layer, group)) or self.groups.get(group, self.default)

    def changed(self, change: Callable[[str], str]) -> WeightFormats:
        groups = {group: change(fmt) for group, fmt in self.groups.items()}
        return WeightFormats(change(self.default), groups, {at: change(fmt) for at, fmt in self.layers.items()})

    @staticmethod
    def parse(text: str) -> WeightFormats:
        """'nvfp4', or 'nvfp4,attention=fp8,head=fp8'. Heads, embeddings and routers stay in bfloat16 unless named."""
        default, *rest = text.split(",")
        special = [part.partition("=") for part in rest]
        for name in (default, *(fmt for _, _, fmt in special)):
            if name not in NAMED:
                raise UserError(f"weights: '{name}' is no format; formats are {', '.join(NAMED)}")
        for group, _, _ in special:
            if group not in GROUPS:
                raise UserError(f"weights: '{group}' is no part of a model; parts are {', '.join(GROUPS)}")
        is_coded = default not in WEIGHT_ITEMSIZE  # the others are how an engine keeps every matrix
        usual = dict.fromkeys(USUALLY_FLOAT, "bfloat16") if is_coded else {}
        return WeightFormats(default, usual | {group: fmt for group, _, fmt in special})


def kept(formats: WeightFormats) -> WeightFormats:
    """Formats in which a GPU keeps them."""
    return formats.changed(lambda fmt: fmt if fmt in KEPT_ON_GPU else "bfloat16")


def kept_on_cpu(formats: WeightFormats) -> WeightFormats:
    """Formats in which the CPU kernels keep them."""
    return formats.changed(lambda fmt: FOUR_BITS if fmt in CODES and CODES[fmt].bits == 4 else EIGHT_BITS)


def names_of(formats: WeightFormats) -> list[str]:
    return sorted({formats.default, *formats.groups.values(), *formats.layers.values()})


@dataclass(frozen=True, slots=True)
class Part:
    group: str
    format: str
    matrices: Matrices
    layer: int = -1

    @property
    def weights(self) -> int:
        return count(self.matrices)

    @property
    def nbytes(self) -> float:
        """Bytes of its planes with padding, or of its floats."""
        form = CODES.get(self.format)
        if form is None:
            return self.weights * BYTES[self.format]
        sizes = ((form.nbytes(rows, width), 2 * rows * width) for rows, width in self.matrices)
        return sum(floats if planes is None else planes for planes, floats in sizes)


def parts_of(model: ModelConfig, formats: WeightFormats) -> Iterator[Part]:
    table = ((model.vocab_size, model.hidden_size),)
    for i, spec in enumerate(model.layers):
        for group, matrices in layer_matrices(spec, model.hidden_size).items():
            yield Part(group, formats.of(group, i), matrices, i)
        if isinstance(spec.mixer, RecurrentSpec):
            own = formats.of("recurrent", i)
            shape = ((spec.mixer.conv_channels, spec.mixer.conv_width),)
            yield Part("convolution", own if own in WEIGHT_ITEMSIZE else "bfloat16", shape, i)
    yield Part("head", formats.of("head"), table)
    if not model.tie_embeddings or formats.of("embedding") in CODES:  # codes of both are kept in two orders
        yield Part("embedding", formats.of("embedding"), table)


def coded_matrices(model: ModelConfig, formats: WeightFormats) -> list[tuple[int, int, CodeForm]]:
    """The matrices that a pass multiplies with as codes, in order: rows, width and form."""
    parts = [part for part in parts_of(model, kept(formats)) if part.format in CODES and part.group != "embedding"]
    found = [(rows, width, CODES[part.format]) for part in parts for rows, width in part.matrices]
    return [each for each in found if not isinstance(each[2].layout(each[1]), str)]


def bytes_by_format(model: ModelConfig, formats: WeightFormats) -> dict[str, int]:
    """Bytes of all matrices. Their sum is the `held` of plan/resolve.py."""
    found: dict[str, float] = {}
    for part in parts_of(model, formats):
        found[part.format] = found.get(part.format, 0.0) + part.nbytes
    return {name: int(size) for name, size in found.items()}


# The formats that --weights makes of floats (weights/quant/quantise.py). Matrices stacked of chosen rows stay floats.
AT_LOAD = {"fp8": "fp8", "int4": "int4-g32", "nvfp4": "nvfp4"}


def quantised_at_load(model: ModelConfig, weights: str) -> StoredBytes:
    """Bytes that a GPU keeps of a model of floats that --weights quantises."""
    layers = {
        (i, group): "bfloat16"
        for i, spec in enumerate(model.layers)
        for group in ("recurrent", "attention")
        if isinstance(spec.mixer, RecurrentSpec) or spec.mixer.gated
    }
    formats = WeightFormats(AT_LOAD[weights], dict.fromkeys(USUALLY_FLOAT, "bfloat16"), layers)
    return stored_bytes(model, formats)


def drafter_at_load(caps: DrafterCaps, weights: str) -> DrafterCaps:
    """Adds what a GPU keeps of a drafter of floats that --drafter-weights quantises."""
    if weights == "auto":
        return caps
    part = Part("drafter", AT_LOAD[weights], caps.matrices)
    return replace(caps, stored=StoredBytes(int(part.nbytes), caps.num_weights - part.weights))


def stored_bytes(model: ModelConfig, formats: WeightFormats) -> StoredBytes:
    found = bytes_by_format(model, formats)
    coded = sum(size for fmt, size in found.items() if fmt not in FLOATS)
    return StoredBytes(coded, found.get("bfloat16", 0) // 2)


# ---- what a config.json states


def of_gguf(types: Mapping[str, tuple[str, int]]) -> WeightFormats:
    """types: GGUF's type of each matrix, or "", and its number of weights. A part of a layer with several types counts
    as the most frequent one."""
    found: dict[tuple[int, str], Counter[str]] = {}
    for name, (kind, weights) in types.items():
        layer = re.match(r"model\.layers\.(\d+)\.(\w+)", name)
        group = {"self_attn": "attention", "mlp": "mlp"}.get(layer[2], "") if layer else ""
        group = group or ("head" if name.startswith("lm_head") else "embedding" if "embed_tokens" in name else "")
        if group:
            fmt = f"int{GGUF_FORMS[kind].bits}-{kind}" if kind else "bfloat16"
            found.setdefault((int(layer[1]) if layer else -1, group), Counter())[fmt] += weights
    most = {place: kinds.most_common(1)[0][0] for place, kinds in found.items()}
    ends = {group: fmt for (layer, group), fmt in most.items() if layer < 0}
    return WeightFormats("bfloat16", {"head": ends.get("embedding", "bfloat16")} | ends, most)


def stated(config: Mapping[str, Any], num_layers: int) -> WeightFormats | None:
    """The formats that a config.json describes, or None if it describes none. Raises UserError for those not known."""
    found = next((c[name] for c in (config, mapping(config, "text_config")) for name in STATED if c.get(name)), None)
    if not found:
        return None
    if not isinstance(found, Mapping):
        found = {"quant_method": found}
    check_values(found, "config.json")
    method = str(found.get("quant_method", "")).lower()
    rules, ignored = _rules(method, found), Patterns(each for key in IGNORED for each in found.get(key) or ())
    # The others say "all linear layers", mean those of the layers, and leave the head out without a word.
    names_head = method.startswith(("modelopt", "compressed-tensors"))
    head = _matched(rules, ignored, GROUPS["head"]) if names_head else "bfloat16"
    groups = {"head": head, "embedding": "bfloat16"}
    layers: dict[tuple[int, str], str] = {}
    for group, names in GROUPS.items():
        if group not in USUALLY_FLOAT:
            by_layer = [_matched(rules, ignored, [f"layers.{i}.{name}" for name in names]) for i in range(num_layers)]
            layers |= {(i, group): fmt for i, fmt in enumerate(by_layer)}
    return WeightFormats("bfloat16", groups, layers)


class Patterns:
    """Names of modules as files spell them: regular expressions, names with stars, full names or parts of them, with
    different prefixes. A file may list every expert of a model, so plain names are not tried one by one."""

    def __init__(self, entries: Iterable[Any]) -> None:
        names = {str(each) for each in entries}
        regular = [name for name in names if name.startswith("re:")]
        starred = [name for name in names if "*" in name and not name.startswith("re:")]
        self._plain = names.difference(regular, starred)
        self._regular = [pattern_of(name[3:]) for name in regular]
        self._regular += [re.compile(translate(each)) for name in starred for each in (name, f"{name}.*")]

    def match(self, names: Iterable[str]) -> bool:
        wholes = [f"{prefix}{name}" for name in names for prefix in PREFIXES]
        if any(pattern.match(whole) for whole in wholes for pattern in self._regular):
            return True
        return not self._plain.isdisjoint(run for whole in wholes for run in _runs(whole.split(".")))


def _runs(parts: list[str]) -> Iterator[str]:
    """All runs of neighbouring parts, joined by dots."""
    for start in range(len(parts)):
        yield from accumulate(parts[start:], "{}.{}".format)


Rules = list[tuple[Patterns, str]]  # names, and the format of what they match; the first counts


EVERYTHING = Patterns(["*"])


def _rules(method: str, found: Mapping[str, Any]) -> Rules:
    if method in METHODS:
        block = "-block" if METHODS[method] == "fp8" and found.get("weight_block_size") else ""
        return [(EVERYTHING, METHODS[method] + block)]
    if method in BY_BITS:
        bits = found.get("bits") or found.get("w_bit") or (4 if found.get("load_in_4bit") else 8)
        group = int(found.get("group_size") or found.get("q_group_size") or 128)
        asym = found.get("sym") is False or (method == "awq" and found.get("zero_point", True))
        return [(EVERYTHING, _integers(_bits(bits), group, bool(asym), bool(found.get("desc_act"))))]
    if method == "compressed-tensors":
        return [_compressed(group, found) for group in groups_of(found).values()]
    if method.startswith("modelopt"):
        mixed: dict[str, list[str]] = {}
        for name, each in layers_of(found).items():
            mixed.setdefault(_algorithm(str(each.get("quant_algo"))), []).append(name)
        rules = [(Patterns(names), fmt) for fmt, names in mixed.items()]
        return rules or [(EVERYTHING, _algorithm(str(found.get("quant_algo"))))]
    raise UserError(
        f"config.json states weights of the kind '{method}', whose bytes are not known here: name the format with "
        f"--weights, one of {', '.join(BYTES)}"
    )


def _compressed(group: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[Patterns, str]:
    weights, spelled = group.get("weights") or {}, str(group.get("format") or found.get("format") or "")
    fmt = next((name for name in ("nvfp4", "mxfp4") if name in spelled), "")
    bits = _bits(weights.get("num_bits") or 8) if not fmt else 0
    if bits and weights.get("type") == "float":
        fmt = "nvfp4" if bits == 4 else "fp8-block" if weights.get("strategy") == "block" else "fp8"
    elif bits:
        size = -1 if weights.get("strategy") in ("channel", "tensor") else int(weights.get("group_size") or 128)
        fmt = _integers(bits, size, weights.get("symmetric") is False, weights.get("actorder") in ("group", True))
    targets = tuple(str(target) for target in group.get("targets") or ())
    return Patterns("*" if "." not in target and ":" not in target else target for target in targets), fmt


def _algorithm(name: str) -> str:
    for part, fmt in ALGORITHMS.items():
        if part in name.upper():
            return fmt
    raise UserError(f"config.json states quant_algo {name}, whose bytes are not known here: name the format --weights")


def _bits(stated: Any) -> int:
    if (bits := int(stated)) not in (4, 8):
        raise UserError(f"config.json states weights of {bits} bits; 4 and 8 are known: name a format with --weights")
    return bits


def _integers(bits: int, group: int, asym: bool, desc_act: bool) -> str:
    """group: columns that share a scale; -1: all."""
    if desc_act and group > 0:
        return DESC_ACT
    if group <= 0 and bits == 8 and not asym:
        return "int8-row"
    sized = next((size for size in (32, 64) if 0 < group <= size), 128)  # a larger group takes a little less
    return f"int{bits}{'' if sized == 128 else f'-g{sized}'}{'-asym' if asym else ''}"


def _matched(rules: Rules, ignored: Patterns, names: Sequence[str]) -> str:
    """The format of a group: bfloat16 if one of its modules' names is ignored, or matched by no rule."""
    if ignored.match(names):
        return "bfloat16"
    return next((fmt for patterns, fmt in rules if patterns.match(names)), "bfloat16")
