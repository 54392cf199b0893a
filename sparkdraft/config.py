"""The engine's configuration, in one frozen record. 0 and "auto" leave the choice to plan/resolve.py.

The flags, environment variables, TOML keys, keywords of `LLM` and the table in docs/api.md are all made from these
fields and their help texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import PurePath
from typing import Any, TypeVar, cast

from sparkdraft.cache.formats import EXACT, kv_formats, kv_names, listed
from sparkdraft.core import SamplingParams, UserError, number, whole

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "quantised", "float32", "bfloat16")
WEIGHTS = ("auto", "fp8", "int4", "nvfp4")
NO_PROFILE = "none"
CUTS = ("auto", "on", "off")

T = TypeVar("T")


def option(default: T, text: str, secret: bool = False, off: str = "", also: str = "") -> T:
    """A field of a config: its default, and the help text of its flag.

    secret: leave it out of what is printed. off: the value that the flag `--no-...` stands for, if there is such a
    flag. also: another spelling of the flag, as other engines have it.
    """
    return cast(T, field(default=default, repr=not secret, metadata={"help": text, "off": off, "also": also}))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str = option("smollm2", "a known name, a folder, a .gguf file or a hub id")
    device: str = option("auto", "auto, cpu or cuda")
    dtype: str = option("auto", "quantised, float32 or bfloat16 (auto: quantised on a CPU, bfloat16 on a GPU)")
    weights: str = option(
        "auto",
        "quantise floating-point matrices at load: fp8, int4 or nvfp4; the head, embedding, routers, norms and "
        "matrices that are already quantised stay as they are (auto: quantise nothing)",
    )
    weights_cache: bool = option(
        True,
        "cache matrices that were quantised at load on disk, for a faster next load; `sparkdraft models` says where",
    )
    max_model_len: int = option(
        0, "most tokens of a prompt and its output together (0: the model's own, or what the KV cache holds)"
    )
    max_seqs: int = option(0, "maximum number of requests that run at once (0: automatic)", also="--max-num-seqs")
    max_step_tokens: int = option(
        0, "maximum number of tokens per step, prompt chunks and decoded tokens together (0: automatic)"
    )
    max_step_ms: int = option(
        0,
        "longest step in milliseconds while a prompt is read beside requests that decode; its chunks are cut to fit "
        "(0: 200, on a GPU 50)",
    )
    kv: str = option(
        EXACT, f"format of the KV cache: {listed([each.help for each in kv_formats()])}", also="--kv-cache-dtype"
    )
    tq_mode: str = option(
        "hybrid",
        "turboquant: hybrid (the last tokens stay exact), full_tq (all are coded), capture_only (all stay exact, and "
        "the errors of coding are measured) or off",
    )
    tq_key_bits: int = option(4, "turboquant: bits per number of a key, from 2 to 5")
    tq_value_bits: int = option(3, "turboquant: bits per number of a value, from 2 to 5")
    tq_ring_capacity: int = option(128, "turboquant, hybrid mode: how many of the last tokens stay exact")
    tq_initial_layers: int = option(0, "turboquant: how many of the first layers get one more bit per number of a key")
    tq_centre: bool = option(True, "turboquant: subtract each layer's mean key before coding")
    kv_tokens: int = option(
        0,
        "size of the KV cache in tokens; one request cannot exceed it (0: what fits on a GPU, or into a quarter of the "
        "free memory on a CPU, up to a full context for each of max_seqs requests)",
    )
    memory_fraction: float = option(0.85, "fraction of the free memory that weights and KV cache may use together")
    block_size: int = option(16, "tokens per block of the KV cache, a power of two")
    prefix_cache: bool = option(True, "reuse the KV cache of earlier prompts with the same beginning")
    graphs: bool = option(True, "capture decode steps (as CUDA graphs on a GPU) and replay them")
    threads: int = option(0, "number of CPU threads (0: one per core that this process may use)")
    spec: str = option("auto", "drafts per step: auto (chosen every step), off, or a fixed number")
    spec_depths: str = option(
        "auto",
        "the numbers of drafts that `spec` auto chooses from, such as 0,3,7; 0 is plain decoding (auto: 0, 1, 3, 7 and "
        "so on, up to what the drafter makes)",
    )
    cut: str = option(
        "auto",
        "verify fewer drafts of a block where the drafter is not confident: on or off; a fixed depth is never cut "
        "(auto: on with a CPU, and with a GPU for models with experts)",
    )
    drafter: str = option(
        "auto",
        "a drafter's folder or hub id, mtp (the model's own MTP head), or none (auto: the drafter known for the model)",
    )
    drafter_weights: str = option(
        "auto",
        "quantise the drafter's floating-point matrices at load, and its head if it has one of its own: fp8, int4 or "
        "nvfp4 (auto: quantise nothing, whatever `weights` is)",
    )
    draft_vocab: str = option(
        "",
        "a file with the token ids that may be drafted, one per line or as a JSON list, such as the first lines of a "
        "file of `count_ids`; the text stays the same (empty: all ids of the drafter)",
    )
    count_ids: str = option("", "a file in which to count how often requests write each token id, over all runs")
    ngram: bool = option(True, "also draft from the request's own text, where it repeats itself")
    profile: str = option(
        "auto",
        "settings that `sparkdraft tune` found, for what is not set elsewhere: auto (the profile of this machine and "
        "model, if there is one), none, or a profile's file",
        off=NO_PROFILE,
    )
    given: frozenset[str] = field(default=frozenset(), repr=False, compare=False)  # fields that the user has named

    @classmethod
    def of(cls, **options: Any) -> EngineConfig:
        """A config from options that the user has named; an unknown name is refused with the list of known names."""
        if unknown := sorted(options.keys() - ENGINE_FIELDS.keys()):
            raise UserError(f"unknown option {unknown[0]}; known are {', '.join(sorted(ENGINE_FIELDS))}")
        typed = {name: _typed(name, str(ENGINE_FIELDS[name].type), value) for name, value in options.items()}
        return cls(**typed, given=frozenset(options))

    def is_open(self, name: str) -> bool:
        """True if a profile may set this field: nobody has named it."""
        return name not in self.given and getattr(self, name) == ENGINE_FIELDS[name].default

    def chosen(self) -> dict[str, Any]:
        """The fields that are not open: `of` makes the same config of them."""
        return {name: getattr(self, name) for name in ENGINE_FIELDS if not self.is_open(name)}

    @property
    def depths(self) -> list[int] | None:
        """The depths to choose from; None: automatic."""
        return None if self.spec_depths == "auto" else [int(part) for part in self.spec_depths.split(",")]

    @property
    def num_draft(self) -> int | None:
        """Drafts per step for requests that name none. None: chosen every step; 0: off."""
        return {"auto": None, "off": 0}[self.spec] if self.spec in ("auto", "off") else int(self.spec)

    def __post_init__(self) -> None:
        choices = {"device": DEVICES, "dtype": DTYPES, "weights": WEIGHTS, "drafter_weights": WEIGHTS}
        choices |= {"kv": kv_names(), "cut": CUTS}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UserError(f"{name} is '{value}'; it must be one of {', '.join(allowed)}")
        for name in ("max_model_len", "max_seqs", "max_step_tokens", "max_step_ms", "kv_tokens", "threads"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 0 (automatic) or positive")
        if not 0 < self.memory_fraction <= 1:
            raise UserError(f"memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1")
        if self.spec not in ("auto", "off") and not self.spec.isdecimal():
            raise UserError(f"spec is '{self.spec}'; it must be auto, off or a number of drafts")
        if self.spec_depths != "auto" and not _are_depths(self.spec_depths):
            raise UserError(
                f"spec_depths is '{self.spec_depths}'; it must be auto, or growing numbers of drafts with 0 first: "
                "0,3,7"
            )
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise UserError(f"block_size is {self.block_size}; it must be a power of two")
        self._check_kv_options()

    def _check_kv_options(self) -> None:
        for fmt in kv_formats():
            fmt.check_options(self)
            own = [each for each in fields(self) if fmt.options and each.name.startswith(fmt.options)]
            for each in own if fmt.name != self.kv else ():
                if (value := getattr(self, each.name)) != each.default:
                    raise UserError(
                        f"{each.name} is {value}, but kv is {self.kv} and only {fmt.name} reads it: "
                        f"set kv to {fmt.name}, or leave {each.name} out"
                    )


def _typed(name: str, kind: str, value: Any) -> Any:
    """A value as the config keeps it. From Python, a folder may be a Path, and depths a list of numbers."""
    if kind == "int":
        return whole(name, value)
    if kind == "float":
        return number(name, value)
    if kind == "bool" and not isinstance(value, bool):
        raise UserError(f"{name} is {value!r}; it must be true or false")
    if kind == "str" and isinstance(value, PurePath | int):
        return str(value)
    if name == "kv" and value == "auto":  # vLLM's word for a cache in the model's own type
        return EXACT
    if name == "spec_depths" and isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if kind == "str" and not isinstance(value, str):
        raise UserError(f"{name} is {value!r}; it must be a text")
    return value


def _are_depths(text: str) -> bool:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        return False
    depths = [int(part) for part in parts]
    return len(depths) > 1 and depths[0] == 0 and depths == sorted(set(depths))


ENGINE_FIELDS: dict[str, Field[Any]] = {each.name: each for each in fields(EngineConfig) if each.metadata}


# ---- sampling of requests that name nothing: the model's own values, or what the user sets instead

SAMPLING_KINDS: dict[str, Callable[[Any], float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}
OPENAI_SAMPLING: dict[str, float] = {"temperature": 1.0}
SAMPLING_BASES = ("model", "openai")


def model_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """The values of generation_config.json. As in Hugging Face, do_sample = false is greedy decoding."""
    named = {name: generation[name] for name in SAMPLING_KINDS if generation.get(name) is not None}
    if named.get("top_k") == -1:
        named["top_k"] = 0
    if generation.get("do_sample") is False:
        named = {"temperature": 0.0} | {k: v for k, v in named.items() if k == "repetition_penalty"}
    return _checked_sampling(named, "the model's generation_config.json")


def usable_defaults(generation: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """The values that can be used, and for each of the others, by name, the problem."""
    problems: dict[str, str] = {}
    for name in SAMPLING_KINDS:
        try:
            model_defaults({key: generation.get(key) for key in ("do_sample", name)})
        except UserError as error:
            problems[name] = str(error)
    return model_defaults({key: value for key, value in generation.items() if key not in problems}), problems


def sampling_in_effect(setting: str, model: Mapping[str, float]) -> dict[str, float]:
    """The values in effect. setting: model, openai, or values over the model's such as temperature=0.7,top_p=0.9."""
    base, values = parse_sampling(setting)
    return OPENAI_SAMPLING | (dict(model) if base == "model" else {}) | values


def parse_sampling(setting: str) -> tuple[str, dict[str, float]]:
    base, values = "model", {}
    for i, part in enumerate(piece.strip() for piece in setting.split(",")):
        name, equals, value = (text.strip() for text in part.partition("="))
        if i == 0 and name in SAMPLING_BASES and not equals:
            base = name
        elif name in SAMPLING_KINDS and equals:
            values[name] = value
        else:
            raise UserError(
                f"sampling_defaults has '{part}'; it must be model, openai, or values of {', '.join(SAMPLING_KINDS)} "
                "such as temperature=0.7,top_p=0.9"
            )
    return base, _checked_sampling(values, "sampling_defaults")


def describe_sampling(values: Mapping[str, float]) -> str:
    """For people: 'temperature 0.2, top_p 0.9'."""
    if values["temperature"] == 0:
        values = {name: value for name, value in values.items() if name == "repetition_penalty"}
        return ", ".join(["greedy", *(f"{name} {value:g}" for name, value in values.items())])
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def _checked_sampling(named: Mapping[str, Any], source: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in named.items():
        try:
            found[name] = SAMPLING_KINDS[name](value)
            SamplingParams(**{name: found[name]})  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            raise UserError(f"{source} has {name} '{value}'; it must be a number") from None
        except UserError as error:
            raise UserError(f"{source} is wrong: {error}") from None
    return found
