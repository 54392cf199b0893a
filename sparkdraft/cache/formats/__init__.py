"""The formats of a KV cache. A format is one file of this folder, or one object handed to `register`.

A `KVFormat` says what the format is called, what it takes, where it runs, and builds it. Config, plan and forecast ask
it without torch; only `build` imports the tensors. Nothing else in the engine asks for a format by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sparkdraft.core import UserError
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import AttentionSpec
from sparkdraft.util.discover import found_in

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sparkdraft.cache.groups import CacheGroup
    from sparkdraft.kernels.ops import AttentionParams, AttentionView, Ops, RopeArgs
    from sparkdraft.models.common.layers import LayerKV, LayerState

EXACT = "exact"  # the default: every other format is compared with it
CALIBRATION = Path(__file__).parent.parent.parent / "assets" / "calibration.txt"  # any text, for formats that learn
LEARNT_IDS = 1024  # of it that are read, at most: RoPE's tables have as many positions, however short the context is


# ---- what is built


class Meter(Protocol):
    """What a cache measures about itself while it serves."""

    def errors(self) -> dict[str, Any]:
        """Waits for the device."""

    def forget(self) -> None:
        """Starts anew: the requests so far were warm-up."""


class KVCache:
    """A whole cache: the layers' parts, and what they share.

    A cache is never told which tokens were committed. K/V depend on their own token alone: those of rejected drafts lie
    behind the sequence's length, and the next step overwrites them. States of recurrent layers lag behind and replay.
    """

    layers: Sequence[LayerKV | LayerState]
    bytes_per_token: int  # of the layers that keep every position

    # Runs before a step's layers, within the captured step: gets the slots of its tokens, int32 [tokens], and its view.
    begin: Callable[[Tensor, AttentionView], None] | None = None

    meter: Meter | None = None

    def bytes_read(self, context: int) -> int:
        """Bytes that a token reads if it sees so many positions."""
        return context * self.bytes_per_token


class KeptLayer:
    """A layer's own keys and values in some format."""

    __slots__ = ()

    @property
    def bytes_per_token(self) -> int:
        raise NotImplementedError

    @property
    def lossy(self) -> KeptLayer | None:
        """The part that does not give back exactly what was written, if there is one."""
        return None

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        raise NotImplementedError

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        raise NotImplementedError

    def reader(self) -> LayerKV:
        """A layer that attends to these keys and values and writes none."""
        raise NotImplementedError

    def deviations(self, k: Tensor, v: Tensor, slots: Tensor) -> list[tuple[float, float]]:
        """The relative errors of a lossy layer's keys and values at these slots, each with the limit of a sound cache.
        k, v: what was written there, float32 [tokens, kv_heads, head_dim]."""
        raise NotImplementedError


# ---- what is planned


class Machine(Protocol):
    @property
    def device(self) -> str: ...  # "cpu" or "cuda"

    @property
    def name(self) -> str: ...

    @property
    def capability(self) -> tuple[int, int]: ...  # of a GPU


class KVPlan(Protocol):
    """What a format decided for a model where its name does not say everything."""

    @property
    def pages(self) -> int: ...  # beside the blocks

    @property
    def page_bytes(self) -> int: ...

    @property
    def is_read(self) -> bool: ...  # whether attention reads this format, rather than an exact cache beside it

    def describe(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Room:
    """What the caches of a plan are made for."""

    kernels: str
    max_seqs: int
    max_step_tokens: int
    nbytes: int  # for all keys and values
    most_ahead: int  # tokens past the committed ones that a request may write to


@dataclass(frozen=True, slots=True)
class Build:
    """What a cache is built of. Layers are those that keep every position; windows have pages (cache/windows.py)."""

    layers: Sequence[AttentionSpec]
    numbers: Sequence[int]  # of these layers in the model
    num_blocks: int
    block_size: int
    coded: KVPlan | None
    reads_back: int  # positions further back that a drafter reads
    most_ahead: int
    dtype: torch.dtype  # of exact keys and values
    device: torch.device
    ops: Ops
    same_bits_up_to: int  # a token has the same bits in batches of up to this many tokens per sequence
    learned: Any = None  # what `learn` returned


# ---- the contract


class KVFormat:
    """One format. Subclasses override what differs from a cache that keeps numbers as they are."""

    name: str
    help: str  # for the help of --kv
    share: float  # of an exact cache's memory, about
    options: str = ""  # prefix of the config's fields that only this format reads
    in_windows: str  # the format of layers with a sliding window: itself, or another
    losses: str = ""  # suffix of the forecast's measured efficiencies: kv_fp8, rows_coded; empty: those of exact
    title: str  # in headings
    notation: str  # of `bench kv --formats`

    def check_options(self, config: Any) -> None:
        """Raises UserError if the config's fields for this format are wrong. Called whatever format is chosen."""

    def chosen(self, config: Any) -> KVFormat:
        """The format that runs for such a config: an option may turn this one off."""
        return self

    def check_machine(self, machine: Machine, weights: str) -> None:
        """Raises UserError if the format does not run on this machine, or beside weights that are kept so."""

    def check_layers(self, model: ModelConfig, layers: Sequence[AttentionSpec], kernels: str, block_size: int) -> None:
        """Raises UserError if the format cannot keep these layers."""

    def check_kernels(self, kernels: str) -> None:
        """Raises UserError if the format's kernels cannot be imported."""

    def scratch_bytes(self, config: Any, model: ModelConfig, max_step_tokens: int, itemsize: int) -> int:
        """Scratch memory of a step beyond that of an exact cache."""
        return 0

    def plan(self, config: Any, layers: Sequence[AttentionSpec], room: Room) -> KVPlan | None:
        return None

    def bytes_per_token(self, layers: Sequence[AttentionSpec], itemsize: int, plan: KVPlan | None) -> int:
        """itemsize: of an exact number."""
        raise NotImplementedError

    def usual_bytes_per_token(self, spec: AttentionSpec, itemsize: int, config: Any) -> float:
        """One layer's, before there is a plan. config: with the usual options."""
        return self.bytes_per_token([spec], itemsize, None)

    def learns(self, config: Any) -> bool:
        """Return whether `learn` must run before the cache is built."""
        return False

    def learn(
        self,
        forward: Callable[..., object],
        ids: Sequence[int],
        scratch: KVCache,
        block_size: int,
        positions: int,
        device: torch.device,
    ) -> Any:
        """Learns from a run of the model over these ids. forward: takes the fields of a step. scratch: an exact
        cache. positions: those that the model was made for. The context that is served must change nothing."""
        return None

    def build(self, job: Build) -> tuple[KVCache, list[CacheGroup]]:
        """The cache, and what requests hold of it beside their blocks."""
        raise NotImplementedError

    def parse(self, text: str) -> dict[str, Any] | None:
        """Engine options of a format in the notation of `bench kv`; None if it is another format's."""
        return {"kv": self.name} if text == self.name else None


# ---- the registry


_formats: dict[str, KVFormat] = {}


def kv_formats() -> tuple[KVFormat, ...]:
    """The exact one first, then by memory."""
    if EXACT not in _formats:
        _formats.update({each.name: each for _, each in found_in(__name__, "FORMAT")})
    return tuple(sorted(_formats.values(), key=lambda each: (each.name != EXACT, -each.share)))


def smallest_format() -> KVFormat:
    return kv_formats()[-1]


def kv_names() -> tuple[str, ...]:
    return tuple(each.name for each in kv_formats())


def kv_format(name: str) -> KVFormat:
    return next(each for each in kv_formats() if each.name == name)


def register(made: KVFormat) -> None:
    """Adds a format that is not a file of this folder, before a config names it."""
    if made.name in kv_names():
        raise UserError(f"there is a KV format {made.name} already")
    _formats[made.name] = made


def smaller_formats(
    model: ModelConfig, kv: KVFormat, machine: Machine, weights: str, kernels: str, block_size: int
) -> list[str]:
    """The formats that hold more tokens than this one and run here."""
    found = []
    for each in kv_formats():
        try:
            each.check_machine(machine, weights)
            each.check_layers(model, model.cached_attention, kernels, block_size)
        except UserError:
            continue
        if each.share < kv.share:
            found.append(each.name)
    return found


def only_for(kv: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Engine options without those that only other formats read."""
    prefixes = tuple(each.options for each in kv_formats() if each.options and each.name != kv)
    return {name: value for name, value in options.items() if not name.startswith(prefixes)}


def as_exact(options: Mapping[str, Any]) -> dict[str, Any]:
    """Engine options with an exact cache in place of theirs."""
    return only_for(EXACT, options) | {"kv": EXACT}


def listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
