"""What a user may choose about the engine, in one frozen record. 0 and "auto" leave the choice to plan/resolve.py.

The flags, environment variables, TOML keys, keywords of `LLM` and the table in docs/api.md are all made from these
fields and their help texts. An unknown name is an error. No torch.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from pathlib import PurePath
from typing import Any, TypeVar, cast

from sparkdraft.core import UserError, number, whole
from sparkdraft.kernels.turboquant.layout import check_bits

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "quantised", "float32", "bfloat16")
WEIGHTS = ("auto", "fp8", "int4", "nvfp4")
KV_FORMATS = ("exact", "fp8", "turboquant")
NO_PROFILE = "none"
CUTS = ("auto", "on", "off")
TQ_MODES = ("off", "hybrid", "full_tq", "capture_only")


T = TypeVar("T")


def option(default: T, text: str, secret: bool = False, off: str = "") -> T:
    """A field of a config: its default, and the help text of its flag. A secret is left out of what is printed. off:
    the value that the flag `--no-...` stands for, if there is such a flag."""
    return cast(T, field(default=default, repr=not secret, metadata={"help": text, "off": off}))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str = option("smollm2", "a known name, a folder, a .gguf file or a hub id")
    device: str = option("auto", "auto, cpu or cuda")
    dtype: str = option("auto", "auto, quantised, float32 or bfloat16 (auto: quantised on a CPU, bfloat16 on a GPU)")
    weights: str = option(
        "auto",
        "quantise matrices of floats when they are loaded: fp8, int4 or nvfp4; the head, the embedding, routers, norms "
        "and what is quantised already stay as they are (auto: all of them do)",
    )
    weights_cache: bool = option(
        True, "keep what was quantised at load on disk, so that the next load is fast; `sparkdraft models` says where"
    )
    max_model_len: int = option(
        0,
        "longest prompt and output together, in tokens (0: the model's own, or less if the cache is less)",
    )
    max_seqs: int = option(0, "requests that run at once (0: automatic)")
    max_rows: int = option(0, "rows per step, prompt chunks and decode rows together (0: automatic)")
    max_step_ms: int = option(
        0,
        "longest step in milliseconds while requests decode beside a prompt, whose chunks are cut to fit (0: 200, on a "
        "GPU 50)",
    )
    kv: str = option("exact", "how keys and values are kept: exact, fp8 (half the memory) or turboquant (a quarter)")
    tq_mode: str = option(
        "hybrid",
        "turboquant: hybrid (the last tokens uncoded), full_tq (all coded), capture_only (all exact, and the errors "
        "of coding measured) or off",
    )
    tq_key_bits: int = option(4, "turboquant: bits per number of a key, 2 to 5")
    tq_value_bits: int = option(3, "turboquant: bits per number of a value, 2 to 5")
    tq_ring_capacity: int = option(128, "turboquant, hybrid mode: number of last tokens that stay uncoded")
    tq_initial_layers: int = option(0, "turboquant: number of first layers that get one more bit per number of a key")
    tq_centre: bool = option(True, "turboquant: subtract each layer's mean key before coding")
    kv_tokens: int = option(
        0,
        "size of the KV cache in tokens, which one request cannot exceed (0: on a GPU what fits; on a CPU what fits "
        "into a quarter of the free memory; never more than a full context for each of max_seqs requests)",
    )
    memory_fraction: float = option(0.85, "share of the free memory for weights and KV cache together")
    block_size: int = option(16, "tokens per block of the KV cache, a power of two")
    prefix_cache: bool = option(True, "keep the keys and values of prompts, for later prompts with the same beginning")
    graphs: bool = option(True, "replay recorded decode steps")
    threads: int = option(0, "CPU threads (0: the cores this process may use)")
    spec: str = option("auto", "drafts per step: auto chooses for every step, off never drafts, a number is fixed")
    spec_depths: str = option(
        "auto",
        "drafts per step that spec auto chooses from, such as 0,3,7, where 0 is plain decoding (auto: 0, 1, 3, 7 and "
        "so on up to the draft block)",
    )
    cut: str = option(
        "auto",
        "whether blocks of drafts are cut where their own confidence no longer pays: auto, on or off (auto: on a CPU, "
        "and on a GPU for models with experts; a depth that is fixed is never cut)",
    )
    drafter: str = option(
        "auto",
        "a drafter's folder or hub id, mtp (the model's own head), none, or race (the known drafter and the model's "
        "own head draft in turns, and the faster one stays; race:NAME names the first) (auto: the known one)",
    )
    drafter_weights: str = option(
        "auto",
        "quantise the drafter's matrices of floats when they are loaded, its head too if that is its own: fp8, int4 or "
        "nvfp4 (auto: they stay as its file has them, whatever `weights` is)",
    )
    draft_vocab: str = option(
        "",
        "a file of the only ids that are drafted, one per line or a JSON list, such as the first lines of a file of "
        "`count_ids`; the text stays the same (empty: those of the drafter)",
    )
    count_ids: str = option("", "a file that counts how often each id is written by requests, over all runs")
    ngram: bool = option(True, "also draft from the request's own text")
    profile: str = option(
        "auto",
        "what `sparkdraft tune` measured, for settings that are named nowhere else: auto (its profile of this machine "
        "and model, if there is one), none, or a profile's file",
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
        """Whether a profile may set this field: nobody has named it."""
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
        choices = {"device": DEVICES, "dtype": DTYPES, "weights": WEIGHTS, "kv": KV_FORMATS, "tq_mode": TQ_MODES}
        choices |= {"drafter_weights": WEIGHTS, "cut": CUTS}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UserError(f"{name} is '{value}'; it must be one of {', '.join(allowed)}")
        for name in ("max_model_len", "max_seqs", "max_rows", "max_step_ms", "kv_tokens", "threads"):
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
        self._check_turboquant()

    def _check_turboquant(self) -> None:
        check_bits(self.tq_key_bits, "tq_key_bits")
        check_bits(self.tq_value_bits, "tq_value_bits")
        if self.tq_ring_capacity < 1:
            raise UserError(f"tq_ring_capacity is {self.tq_ring_capacity}; it must be 1 or more, or the mode full_tq")
        if self.tq_initial_layers < 0:
            raise UserError(f"tq_initial_layers is {self.tq_initial_layers}; it must be 0 or more")
        for each in fields(self):
            value = getattr(self, each.name)
            if self.kv != "turboquant" and each.name.startswith("tq_") and value != each.default:
                raise UserError(
                    f"{each.name} is {value}, but kv is {self.kv} and only turboquant reads it: "
                    f"set kv to turboquant, or leave {each.name} out"
                )


def _typed(name: str, kind: str, value: Any) -> Any:
    """A value as the config keeps it. From Python, a folder may be a Path, and drafts may be numbers: spec=7,
    spec_depths=[0, 3, 7]."""
    if kind == "int":
        return whole(name, value)
    if kind == "float":
        return number(name, value)
    if kind == "bool" and not isinstance(value, bool):
        raise UserError(f"{name} is {value!r}; it must be true or false")
    if kind == "str" and isinstance(value, PurePath | int):
        return str(value)
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
