"""The statements of a checkpoint's config about its quantised matrices, in the dialects of the tools that write it.

The tensors decide how a matrix is read. The config adds what bytes cannot say (whether zero points are stored minus
one, how large blocks are) and must agree with the tensors. It is in config.json, in its text_config, or in a file of
its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.util.fields import MAX_SIZE, flag, listed, mapping, text, whole, wrong

# Files beside config.json -> the key of their quantisation; "": the whole file.
FILES = {
    "hf_quant_config.json": "quantization",
    "quantize_config.json": "",
    "quant_config.json": "",
    "quantization_config.json": "",
}
COMPRESSED = {
    *("float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense"),
}
# ModelOpt's algorithms -> bits; all of them are floats.
MODELOPT = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES", "MXFP8"), 8),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "MXFP4"), 4),
}
NESTED = ("config_groups", "quantized_layers", "extra_config", "dynamic")  # keys about single modules
ZERO_LESS_ONE = {"gptq": True, "gptq_v2": False}
AUTO_ROUND = {"auto_round:auto_gptq": True, "auto_round": False, "auto_round:gptqmodel": False}


@dataclass(frozen=True, slots=True)
class Said:
    """The config's statements about one matrix; None: it has none."""

    by: str = "no config"  # who says it, for errors
    bits: int | None = None
    group: int | None = None  # columns that share a scale; -1: all
    is_float: bool | None = None
    symmetric: bool | None = None
    zero_less_one: bool | None = None  # qzeros hold the zero point minus one
    block: tuple[int, int] | None = None  # rows and columns that share a scale
    is_dense: bool = False  # it is listed as not quantised


NOTHING = Said()


class Stated:
    """The whole config. Its lists are indexed once: a config may name each of tens of thousands of matrices."""

    def __init__(self, said: Mapping[str, Any], where: str) -> None:
        self.said, self.where = said, where
        self.method = str(said.get("quant_method") or "").lower()
        self._lists: dict[str, Names] = {}

    def of(self, name: str) -> Said:
        """The statements about one module. name: without .weight."""
        for method, read in _DIALECTS.items():
            if self.method.startswith(method):
                return replace(read(self, name), by=f"{self.where}: {self.method}")
        return replace(NOTHING, by=self.where)

    def lists(self, key: str, name: str, pattern: Pattern | None) -> bool:
        """True if the list under this key names the module."""
        if key not in self._lists:
            self._lists[key] = Names(_list(self.said.get(key)), pattern)
        return name in self._lists[key]

    @cached_property
    def targets(self) -> list[tuple[Names, dict[str, Any]]]:
        """compressed-tensors: the groups, and the modules of each."""
        return [(Names(_list(g.get("targets")), _compressed_pattern), g) for g in groups_of(self.said).values()]

    @cached_property
    def layers(self) -> dict[str, dict[str, Any]]:
        """ModelOpt: what is said about single modules."""
        return layers_of(self.said)

    @cached_property
    def overrides(self) -> tuple[dict[str, Any], list[tuple[re.Pattern[str], Any]]]:
        """AutoRound: what is said about single modules, by (ends of) names and by patterns."""
        extra = self.said.get("extra_config")
        plain = extra if isinstance(extra, dict) else {}
        return plain, [(pattern_of(k), v) for k, v in plain.items() if re.search(r"[*+?\\^$(\[|]", k)]

    @cached_property
    def dynamic(self) -> list[tuple[re.Pattern[str], bool, Any]]:
        """GPTQ: patterns of modules, whether they are left as floats, and what else is said about them."""
        found = mapping(self.said, "dynamic").items()
        signs = ("+:", "-:")
        return [(pattern_of(k[2:] if k[:2] in signs else k), k.startswith("-:"), v) for k, v in found]


Pattern = Callable[[str], str | None]  # an entry as a regular expression; None: it is a plain name


class Names:
    """Entries of a list: plain names, and patterns that a name must match from its start."""

    def __init__(self, entries: list[str], pattern: Pattern | None) -> None:
        patterns = {entry: pattern(entry) if pattern else None for entry in entries}
        self._plain = frozenset(entry for entry, found in patterns.items() if found is None)
        self._patterns = [pattern_of(found) for found in patterns.values() if found is not None]

    def __contains__(self, name: str) -> bool:
        return name in self._plain or any(pattern.match(name) for pattern in self._patterns)


def read_stated(path: Path, config: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> Stated | None:
    """Read and check the config. files: those of FILES that exist; they must not contradict config.json."""
    places = [("config.json", config), ("config.json", mapping(config, "text_config"))]
    found = [(where, c.get("quantization_config") or c.get("compression_config")) for where, c in places]
    for file, content in files.items():
        said = content.get(FILES[file]) if FILES[file] else content
        if file == "hf_quant_config.json" and isinstance(said, dict):
            said = {"quant_method": "modelopt", **said}
        found.append((file, said))
    stated = [(where, said if isinstance(said, dict) else {"quant_method": said}) for where, said in found if said]
    if not stated:
        return None
    where, first = stated[0]
    for other, said in stated[1:]:
        for key in ("quant_method", "quant_algo", "bits", "group_size", "sym", "checkpoint_format", "zero_point"):
            a, b = first.get(key), said.get(key)
            if a is not None and b is not None and a != b and not _same_maker(a, b):
                raise UserError(f"The checkpoint {path}: {where} says {key} {a!r} and {other} says {b!r}: fetch both.")
    for place, said in stated:
        check_values(said, place)
    merged = {k: v for _, said in reversed(stated) for k, v in said.items() if v is not None}
    if not merged.get("quant_method") and {"bits", "w_bit"} & merged.keys():
        merged["quant_method"] = "awq" if {"w_bit", "zero_point", "version"} & merged.keys() else "gptq"
    _refuse_unread(path, Stated(merged, where))
    return Stated(merged, where)


def check_values(said: Mapping[str, Any], where: str) -> None:
    """Raise UserError for values of a wrong type or size. Unknown methods are skipped: they are refused by name later,
    and may use keys otherwise."""
    method = text(said, "quant_method", where).lower()
    if method and not method.startswith(tuple(_DIALECTS)):
        return
    groups = [(f"{where} ({key})", mapping(said, key, where)) for key in NESTED]
    modules = [(place, mapping(group, name, place)) for place, group in groups for name in group]
    weights = [(place, mapping(module, "weights", place)) for place, module in modules if "weights" in module]
    for place, each in [(where, said), *modules, *weights]:
        for key in CHECKS.keys() & each.keys():
            CHECKS[key](each, key, where=place)


def _check_pair(said: Mapping[str, Any], key: str, where: str) -> None:
    """Check a pair of rows and columns; old files have strings such as "128x128"."""
    pair = said[key]
    if isinstance(pair, list) and (len(pair) != 2 or not all(type(n) is int and 1 <= n <= MAX_SIZE for n in pair)):
        raise wrong(key, pair, f"two whole numbers from 1 to {MAX_SIZE:,}", where)


_NUMBERS = {"bits": 1, "num_bits": 1, "w_bit": 1, "group_size": -1, "q_group_size": -1}  # key -> least value
_TEXTS = ("quant_method", "quant_algo", "format", "checkpoint_format", "packing_format")
_LISTS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "targets")
CHECKS: dict[str, Callable[..., object]] = {
    **{key: partial(whole, low=low) for key, low in _NUMBERS.items()},
    **dict.fromkeys(("sym", "symmetric", "desc_act"), flag),
    **dict.fromkeys(_TEXTS, text),
    **dict.fromkeys(_LISTS, partial(listed, kind=str)),
    **dict.fromkeys(("weight_block_size", "block_structure"), _check_pair),
}


def pattern_of(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(
            f"The quantization config names modules by {expression!r}, which is no regular expression ({error}): "
            "correct it, or fetch it again."
        ) from error


def _same_maker(a: Any, b: Any) -> bool:
    """Compare values as ModelOpt writes them: several names for itself, algorithms in both cases."""
    a, b = str(a).lower(), str(b).lower()
    return a == b or (a.startswith("modelopt") and b.startswith("modelopt"))


def _refuse_unread(path: Path, stated: Stated) -> None:
    """Raise UserError for what would change the meaning of weights and is not supported."""
    said, method = stated.said, stated.method
    reason = None
    transforms = said.get("transform_config") or {}
    sparsity = said.get("sparsity_config") or {}
    if method == "compressed-tensors":
        forms = [said.get("format"), *(g.get("format") for g in groups_of(said).values())]
        unknown = [form for form in forms if form and form not in COMPRESSED]
        static = [g for g in groups_of(said).values() if _is_static_int(g.get("input_activations"))]
        if isinstance(transforms, dict) and transforms.get("config_groups"):
            reason = "transform_config, which rotates the inputs,"
        elif isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
            reason = f"sparsity_config of format {sparsity.get('format')}"
        elif unknown:
            reason = f"format {unknown[0]}"
        elif static:
            reason = "input_activations of static integers"
    elif method.startswith("modelopt"):
        algorithms = {said.get("quant_algo"), *(v.get("quant_algo") for v in layers_of(said).values())}
        unknown = [a for a in algorithms if a and str(a).upper() not in {*MODELOPT, "MIXED_PRECISION"}]
        reason = f"quant_algo {unknown[0]}" if unknown else None
    elif method == "awq" and str(said.get("version", "gemm")).lower() != "gemm":
        reason = f"version {said['version']} of AWQ"
    elif method == "gptq" and _form(said) not in ZERO_LESS_ONE:
        reason = f"checkpoint_format {_form(said)}"
    elif method == "auto-round" and not _known_packing(str(said.get("packing_format", "auto_round"))):
        reason = f"packing_format {said['packing_format']}"
    if reason:
        raise UserError(
            f"The checkpoint {path} is quantised ({method}) with {reason} which is not read: use the same model in "
            "another form, or in 16 bits."
        )


def _is_static_int(inputs: Any) -> bool:
    return isinstance(inputs, dict) and inputs.get("type") == "int" and inputs.get("dynamic") is False


def _known_packing(form: str) -> bool:
    return form in AUTO_ROUND or form in ("auto_round:auto_awq", "auto_round:llm_compressor", "llm_compressor")


def _form(said: Mapping[str, Any]) -> str:
    return str(said.get("checkpoint_format") or said.get("format") or "gptq").lower()


def groups_of(said: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    groups = said.get("config_groups")
    return {k: v for k, v in groups.items() if isinstance(v, dict)} if isinstance(groups, dict) else {}


def layers_of(said: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    layers = said.get("quantized_layers")
    return {k: v for k, v in layers.items() if isinstance(v, dict)} if isinstance(layers, dict) else {}


def _list(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


# The dialects: each has its own way to name modules.


def _compressed_pattern(entry: str) -> str | None:
    return entry[3:] if entry.startswith("re:") else None


def _compressed(stated: Stated, name: str) -> Said:
    is_dense = stated.lists("ignore", name, _compressed_pattern)
    own = [group for names, group in stated.targets if name in names]
    own = own or [group for names, group in stated.targets if "Linear" in names]
    weights = own[0].get("weights") if len(own) == 1 else None
    if not isinstance(weights, dict):
        return Said(is_dense=is_dense)
    group, block = weights.get("group_size"), weights.get("block_structure")
    return Said(
        bits=weights.get("num_bits"),
        group=group if weights.get("strategy") in ("group", "tensor_group") else None,
        is_float=weights.get("type") == "float" if "type" in weights else None,
        symmetric=weights.get("symmetric"),
        block=_pair(block),
        is_dense=is_dense,
    )


def _modelopt(stated: Stated, name: str) -> Said:
    def pattern(entry: str) -> str | None:
        return translate(entry) if set(entry) & set("*?[") else None

    own = stated.layers.get(name, stated.said)
    algorithm = str(own.get("quant_algo")).upper()
    return Said(
        bits=MODELOPT.get(algorithm),
        group=own.get("group_size") if MODELOPT.get(algorithm) == 4 else None,
        is_float=True if algorithm in MODELOPT else None,
        is_dense=any(stated.lists(key, name, pattern) for key in ("ignore", "exclude_modules")),
    )


def _fp8(stated: Stated, name: str) -> Said:
    is_dense = any(stated.lists(key, name, None) for key in ("modules_to_not_convert", "ignored_layers"))
    return Said(bits=8, is_float=True, block=_pair(stated.said.get("weight_block_size")), is_dense=is_dense)


def _auto_round(stated: Stated, name: str) -> Said:
    said = stated.said
    own = {**said, **_override(stated, name)}
    bits = own.get("bits")
    return Said(
        bits=bits,
        group=own.get("group_size"),
        is_float=None if "data_type" not in own else "fp" in str(own["data_type"]),
        symmetric=own.get("sym"),
        zero_less_one=AUTO_ROUND.get(str(said.get("packing_format", "auto_round"))),
        is_dense=isinstance(bits, int) and bits >= 16,
    )


def _override(stated: Stated, name: str) -> dict[str, Any]:
    """AutoRound looks for the exact name, then its longest listed end, then a regular expression."""
    plain, patterns = stated.overrides
    parts = name.split(".")
    ends = (".".join(parts[i:]) for i in range(len(parts)))
    found = next((plain[end] for end in ends if end in plain), None)
    if found is None:
        found = next((said for pattern, said in patterns if pattern.search(name)), None)
    return found if isinstance(found, dict) else {}


def _gptq(stated: Stated, name: str) -> Said:
    said = stated.said
    own, is_dense = dict(said), False
    for pattern, leaves, change in stated.dynamic:
        if pattern.match(name):
            is_dense = leaves
            own |= change if isinstance(change, dict) else {}
            break
    return Said(
        bits=own.get("bits"),
        group=own.get("group_size"),
        is_float=False,
        symmetric=own.get("sym"),
        zero_less_one=ZERO_LESS_ONE[_form(said)],
        is_dense=is_dense,
    )


def _awq(stated: Stated, name: str) -> Said:
    said = stated.said
    bits, group = said.get("bits", said.get("w_bit")), said.get("group_size", said.get("q_group_size"))
    return Said(bits=bits, group=group, is_float=False)


def _mxfp4(stated: Stated, name: str) -> Said:
    return Said(bits=4, group=32, is_float=True)


def _pair(value: Any) -> tuple[int, int] | None:
    return (value[0], value[1]) if isinstance(value, list) else None


_DIALECTS = {
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "fp8": _fp8,
    "auto-round": _auto_round,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}
