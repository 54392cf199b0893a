"""Predicts the seconds of a decode step from a model's dimensions, a machine's rates and an engine's losses. No torch.

    weights  what every step reads, and the experts that its tokens reach; or the arithmetic, where that takes longer
    kv       keys and values of every stream's context, in the format of the cache
    states   of recurrent layers: read and written once per step
    drafter  its own pass over the drafted tokens, with the head that it shares with the target
    fixed    launches and small operators per layer, sampling and scheduling per step

docs/plan.md compares predictions with published figures and with this repository's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sparkdraft.cache.formats import EXACT, kv_format
from sparkdraft.cache.formats.dense import in_windows
from sparkdraft.config import EngineConfig
from sparkdraft.drafters.base import DrafterCaps
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import AttentionSpec, ExpertsSpec
from sparkdraft.models.common.sizes import count, layer_sizes
from sparkdraft.plan.weight_formats import BYTES, FLOATS, WeightFormats, parts_of

OVERLAP = 1.6  # reading and arithmetic overlap partly: (a^p + b^p)^(1/p); infinity would be wholly, 1 not at all
STATE_ITEMSIZE = 4  # recurrent states are float32
# n tokens choose experts as n^s tokens would that choose independently: a habit of a model's router, the same in every
# weight format. Fitted on plain batches of 5 and 10 streams (docs/plan.md).
SPREAD = {"qwen3_5_moe": 0.92, "qwen3_next": 0.92, "gemma4": 0.62, "gpt_oss": 0.66}
USUAL_SPREAD = 0.8


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses of an engine against the machine. Shares are of its bandwidth or arithmetic."""

    floats: float  # share at which matrices of floats are read
    coded: float  # quantised matrices
    experts: float  # experts, on top of either
    kv: float  # keys and values by one token
    layer: float  # seconds per layer: launches, norms, gaps; a drafter's layers too
    step: float  # seconds per step: scheduling, sampling
    kv_fp8: float = 0.0  # as kv, in fp8; 0: as kv
    kv_coded: float = 0.0  # as kv, in TurboQuant's codes; 0: as kv
    rows: float = 1.0  # of kv, where several tokens of a stream read a whole context
    rows_coded: float = 0.0  # as rows, in codes; 0: as rows
    draft: float = 0.0  # seconds per step that drafts: acceptance, what the drafter observes, more tokens to sample
    experts_layer: float = 0.0  # seconds per layer with experts: the choice, and smaller kernels
    compute: float = 1.0  # share of the machine's arithmetic
    formats: Mapping[str, float] = field(default_factory=dict)  # as coded, by format, where decoding takes longer
    own_arithmetic: bool = False  # quantised matrices are multiplied in their own format, not in bfloat16
    snapshots: bool = False  # recurrent states are written for every token of a step, not once

    def share(self, fmt: str) -> float:
        """The share at which matrices of a format are read; int4 is alike in groups of any size."""
        return self.floats if fmt in FLOATS else self.formats.get(fmt.partition("-")[0], self.coded)

    def kv_share(self, kv: str, several_rows: bool) -> float:
        suffix = kv_format(kv).losses
        share = getattr(self, f"kv_{suffix}", 0.0) or self.kv
        rows = getattr(self, f"rows_{suffix}", 0.0) or self.rows
        return share * rows if several_rows else share


class Rates(NamedTuple):
    """A machine's ceilings."""

    bandwidth: float  # bytes per second that a kernel reaches which only reads
    arithmetic: Mapping[str, float]  # operations per second, by format


class Load(NamedTuple):
    streams: int = 1
    context: int = 512
    depth: int = 0  # drafts per step and stream


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of one step, by use."""

    weights: float
    kv: float
    states: float
    drafter: float
    fixed: float

    @property
    def total(self) -> float:
        return self.weights + self.kv + self.states + self.drafter + self.fixed


class Context(NamedTuple):
    """Equal layers, by what a token reads of their K/V."""

    window: int  # 0: all
    token_bytes: float
    queries: int  # numbers of a token that are multiplied with each key
    layers: int

    def keys(self, context: int) -> int:
        return min(context, self.window) if self.window else context


class Experts(NamedTuple):
    format: str
    spec: ExpertsSpec
    weights: int  # of one expert
    layers: int


@dataclass(frozen=True, slots=True)
class Target:
    """Sums over a model's layers of all that a step reads and multiplies."""

    dense: tuple[tuple[str, int], ...]  # format, and weights that every step reads, with the head
    experts: tuple[Experts, ...]
    contexts: tuple[Context, ...]
    kv: str  # format of the cache
    state: int  # numbers of all recurrent layers, per stream
    layers: int
    spread: float

    @property
    def expert_layers(self) -> int:
        return sum(each.layers for each in self.experts)

    @staticmethod
    def of(
        model: ModelConfig, formats: WeightFormats, kv: str = EXACT, itemsize: int = 2, spread: float | None = None
    ) -> Target:
        """itemsize: of exact keys and values. spread: where the model type's own does not hold, as of random
        weights."""
        dense: Counter[str] = Counter()
        experts: Counter[tuple[str, ExpertsSpec, int]] = Counter()
        for part in parts_of(model, formats):
            if part.group == "experts":
                spec = model.layers[part.layer].mlp
                assert isinstance(spec, ExpertsSpec), spec
                experts[part.format, spec, part.weights // spec.num_experts] += 1
            elif part.group != "embedding":  # a row of it is looked up
                dense[part.format] += part.weights
        return Target(
            dense=tuple(dense.items()),
            experts=tuple(Experts(*kind, layers) for kind, layers in experts.items()),
            contexts=contexts_of(model.attention, kv, itemsize),
            kv=kv,
            state=sum(layer_sizes(spec, model.hidden_size).state for spec in model.layers),
            layers=model.num_layers,
            spread=SPREAD.get(model.model_type.removesuffix("_text"), USUAL_SPREAD) if spread is None else spread,
        )


class DraftPass(NamedTuple):
    """Sums of all that a drafter's pass reads. Its matrices are kept as the engine keeps matrices on this machine,
    whatever the target's format."""

    weights: int  # of its own matrices, without experts that a token does not choose
    head: int  # of the target's head, if it has none of its own
    contexts: tuple[Context, ...]
    layers: int
    chain: bool = False  # a pass per draft, over one token of each stream
    format: str = "bfloat16"
    borrowed: tuple[Context, ...] = ()  # of the target's K/V, in the target's format
    kv: str = EXACT
    coded: int = 0  # of the weights, those that drafter_weights quantises
    coded_format: str = "bfloat16"

    @staticmethod
    def of(
        caps: DrafterCaps,
        target_head: int,
        own_head: bool = False,
        itemsize: int = 2,
        fmt: str = "bfloat16",
        kv: str = EXACT,
        coded_fmt: str = "",
    ) -> DraftPass:
        """kv: of the target. coded_fmt: of the matrices that are quantised at load, if any are."""
        contexts, borrowed = contexts_of(caps.kv, EXACT, itemsize), contexts_of(caps.borrowed, kv, itemsize)
        head, layers = 0 if own_head else target_head, len(caps.kv) + len(caps.borrowed)
        weights = caps.num_read or caps.num_weights
        share = count(caps.matrices) / caps.num_weights if coded_fmt else 0.0  # the same of the experts that are read
        coded = int(weights * share)
        return DraftPass(weights, head, contexts, layers, caps.chain, fmt, borrowed, kv, coded, coded_fmt or fmt)


def contexts_of(layers: tuple[AttentionSpec, ...], kv: str, itemsize: int) -> tuple[Context, ...]:
    """Layers that read another layer's K/V read them again, so they count."""
    found: Counter[tuple[int, float, int]] = Counter()
    full, config = kv_format(kv), EngineConfig(kv=kv)
    for spec in layers:
        kept = in_windows(full) if spec.window else full
        size = kept.usual_bytes_per_token(replace(spec, kv_from=None), itemsize, config)
        found[spec.window, size, spec.query_width] += 1
    return tuple(Context(*kind, count) for kind, count in found.items())


def step(rates: Rates, losses: Losses, target: Target, load: Load, drafter: DraftPass | None = None) -> Seconds:
    """Predict one decode step of such a load. A depth above 0 needs a drafter."""
    rows = load.streams * (1 + load.depth)
    floor = rates.bandwidth
    read, work = 0.0, 0.0
    for fmt, weights in target.dense:
        read += weights * BYTES[fmt] / (losses.share(fmt) * floor)
        work += 2 * rows * weights / _arithmetic(rates, losses, fmt)
    for fmt, spec, one, layers in target.experts:
        reached = layers * spec.reached(rows**target.spread)
        read += reached * one * BYTES[fmt] / (losses.share(fmt) * losses.experts * floor)
        work += 2 * rows * layers * spec.top_k * one / _arithmetic(rates, losses, fmt)
    keys = _keys(losses, target.contexts, target.kv, load) / floor
    scores = sum(4 * rows * each.queries * each.keys(load.context) * each.layers for each in target.contexts)
    writes = 1 + load.depth if losses.snapshots else 1
    return Seconds(
        weights=overlap(read, work),
        kv=overlap(keys, scores / _arithmetic(rates, losses, "bfloat16")),
        states=load.streams * target.state * STATE_ITEMSIZE * (1 + writes) / floor,
        drafter=_draft(rates, losses, drafter, load) if drafter and load.depth else 0.0,
        fixed=losses.step + target.layers * losses.layer + target.expert_layers * losses.experts_layer,
    )


def overlap(a: float, b: float) -> float:
    return float((a**OVERLAP + b**OVERLAP) ** (1 / OVERLAP))


def _draft(rates: Rates, losses: Losses, drafter: DraftPass, load: Load) -> float:
    passes, rows = (load.depth, load.streams) if drafter.chain else (1, load.streams * (1 + load.depth))
    floats, read, work = drafter.weights + drafter.head - drafter.coded, 0.0, 0.0
    for weights, fmt in ((floats, drafter.format), (drafter.coded, drafter.coded_format)):
        read += weights * BYTES[fmt] / (losses.share(fmt) * rates.bandwidth)
        work += 2 * rows * weights / _arithmetic(rates, losses, fmt)
    body = overlap(read, work)
    keys = _keys(losses, drafter.contexts, EXACT, load) + _keys(losses, drafter.borrowed, drafter.kv, load)
    keys /= rates.bandwidth
    return losses.draft + passes * (body + keys + drafter.layers * losses.layer)


def _keys(losses: Losses, contexts: tuple[Context, ...], kv: str, load: Load) -> float:
    """Bytes of K/V, each divided by the share of the bandwidth at which it is read. A window is read as fast by many
    tokens as by one."""
    total = 0.0
    for each in contexts:
        kept = kv_format(kv).in_windows if each.window else kv
        share = losses.kv_share(kept, several_rows=bool(load.depth) and not each.window)
        total += load.streams * each.layers * each.token_bytes * each.keys(load.context) / share
    return total


def _arithmetic(rates: Rates, losses: Losses, fmt: str) -> float:
    known = rates.arithmetic
    usual = known.get("bfloat16") or next(iter(known.values()))
    fmt = fmt.partition("-")[0]  # int4 in groups of any size is multiplied alike
    return (known.get(fmt, usual) if losses.own_arithmetic or "bfloat16" not in known else usual) * losses.compute
