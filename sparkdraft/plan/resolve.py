"""Fills in every "auto" of the configuration.

Where `auto` settles for less, it leaves a `Fallback` with its reason. What was asked for by name and cannot run is an
error that says what to change. No torch: facts about the machine come in as numbers, so a plan can be made for any
machine; engine/machine.py makes it for this one. A plan never changes; what loading and running add is in
`Engine.fallbacks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sparkdraft.cache.formats import LEARNT_IDS, KVFormat, KVPlan, Room, kv_format, smaller_formats
from sparkdraft.cache.formats.dense import in_windows
from sparkdraft.cache.states import StatePlan, fewer_requests, plan_states
from sparkdraft.cache.windows import WindowPlan, plan_windows, window_layers
from sparkdraft.config import EngineConfig
from sparkdraft.core import Fallback, UserError
from sparkdraft.drafters.base import DrafterCaps
from sparkdraft.drafters.ngram import NGRAM_DEPTH
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.sizes import kv_bytes_per_token
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.memory import MemoryPlan, graph_bytes, request_bytes, rope_bytes, scratch_bytes, weight_bytes
from sparkdraft.weights.plane_layout import ROWS, StoredBytes

MAX_SEQS = {"cpu": 16, "cuda": 64}  # requests at once, if nobody says otherwise
MAX_TOKENS = {"cpu": 512, "cuda": 8192}  # per step, likewise
CPU_KV_SHARE = 0.25  # share of the free memory for a CPU's KV cache: other programs want that memory too
LEAST_CONTEXT = 64  # tokens: the warm-up requests need no more, and a shorter context is of no use
# Quantised matrices are decoded if bfloat16 is faster by this factor, and takes this share of the free memory at most
DECODED_GAIN, DECODED_SHARE = 1.05, 0.1
ITEMSIZE = {"float32": 4, "bfloat16": 2}  # of activations, and of exact keys and values
# tokens past the committed ones that a request may write: drafts, and launched steps that are not read yet
MOST_AHEAD = 64
# bytes per weight that is not kept as it is stored; "quantised": the CPU kernels', at most 8 bits and a scale
WEIGHT_ITEMSIZE = {"quantised": 1.07, "float32": 4.0, "bfloat16": 2.0}


@dataclass(frozen=True, slots=True)
class Plan:
    device: str  # "cpu" or "cuda"
    dtype: str  # of activations: "float32" or "bfloat16"
    weights: str  # how matrices are kept: "quantised", or floats, "float32" or "bfloat16"
    kernels: str  # "native", "reference" or "cuda"
    threads: int
    max_model_len: int
    max_seqs: int
    max_step_tokens: int
    max_step_ms: int  # time limit of a step in which requests decode beside a prompt
    kv: str  # a format of cache/formats
    block_size: int
    num_blocks: int
    prefix_cache: bool
    graphs: bool
    memory: MemoryPlan
    coded: KVPlan | None = None  # what the format decided, if its name does not say everything
    windows: tuple[WindowPlan, ...] = ()  # for layers that keep the K/V of their window alone
    states: StatePlan | None = None  # for recurrent layers
    decoded: bool = False  # whether a GPU's quantised matrices are decoded to bfloat16 when they are loaded
    reads_back: int = 0  # positions before a window that pages are kept for too, because the drafter reads them
    fallbacks: tuple[Fallback, ...] = ()

    def describe(self, fallbacks: Sequence[Fallback] | None = None) -> str:
        """fallbacks: those of the engine that runs this plan. Without them, the plan's own are shown."""
        lines = [
            f"{self.device}, {self.weights} weights, {self.kernels} kernels, {self.threads} threads",
            f"context {self.max_model_len} tokens, {self.max_seqs} requests at once, "
            f"{self.max_step_tokens} tokens per step",
            f"KV cache {self.num_blocks * self.block_size} tokens in blocks of {self.block_size}, {self._kv()}",
            self.memory.table(),
        ]
        shown = self.fallbacks if fallbacks is None else fallbacks
        return "\n".join(lines + [f"fallback {f.name}: {f.reason}" for f in shown])

    def _kv(self) -> str:
        kept = self.coded.describe() if self.coded else self.kv
        kept += "".join(f"; {w.pages * self.block_size} tokens of window {w.window}" for w in self.windows)
        return f"{kept}; {self.states.describe()}" if self.states else kept


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    hardware: Hardware,
    native_problem: str | None = None,
    drafter: DrafterCaps | None = None,
    stored: StoredBytes | None = None,
) -> Plan:
    """native_problem: why the CPU kernels cannot run. drafter: counted too. stored: what the file holds, if that is
    known; a GPU's kernels keep quantised matrices as they are stored."""
    on_cpu, fallbacks = hardware.device == "cpu", _unknown_keys(model.unknown_keys)
    weights = _weights(config, hardware, native_problem, fallbacks)
    dtype = "float32" if weights == "quantised" else weights
    itemsize, max_model_len = ITEMSIZE[dtype], _max_model_len(config, model)
    max_seqs, max_step_tokens = _step_limits(config, hardware)
    kv = kv_format(config.kv).chosen(config)
    kv.check_machine(hardware, weights)
    kernels = "cuda" if not on_cpu else ("native" if weights == "quantised" else "reference")
    graphs = config.graphs and kernels != "reference"
    graph_memory = graph_bytes(kernels, model, max_step_tokens, max_seqs, drafter) if graphs else 0
    decoded = _decoded(config, model, hardware, drafter, stored)
    fallbacks += decoded
    as_floats = on_cpu or bool(decoded)
    held = _held(model, _positions(config, model), WEIGHT_ITEMSIZE[weights], drafter, stored, as_floats)
    scratch = scratch_bytes(model, max_step_tokens, itemsize, drafter)
    scratch += kv.scratch_bytes(config, model, max_step_tokens, itemsize)
    each = request_bytes(model, max_model_len, config.block_size, itemsize, kernels, drafter)
    room = int(hardware.free_bytes * config.memory_fraction) - held - scratch - graph_memory
    states = _states(config, model, drafter, max_seqs, itemsize, room, each, fallbacks)
    max_seqs, state_bytes = (states.slots, states.nbytes) if states else (max_seqs, 0)
    scratch += max_seqs * each
    room, quarter = room - max_seqs * each - state_bytes, int(hardware.free_bytes * CPU_KV_SHARE)
    step = StepSize(max_model_len, max_seqs, max_step_tokens)
    caches = _caches(config, model, drafter, kv, kernels, itemsize, step, min(room, quarter) if on_cpu else room)
    fallbacks += _fewer_requests(caches.requests, max_seqs, caches.page_bytes)
    max_seqs = min(max_seqs, caches.requests)
    memory = MemoryPlan(held, 0, scratch, hardware.free_bytes, caches.page_bytes, graph_memory, state_bytes)
    per_block = max(caches.block_bytes, 1)  # no blocks, if all layers slide
    num_blocks = _num_blocks(config, memory, on_cpu, room, per_block, max_model_len, max_seqs)
    context = min(max_model_len, num_blocks * config.block_size)
    if context < max_model_len and not config.kv_tokens:  # a context that follows from kv_tokens was asked for
        smaller = smaller_formats(model, kv, hardware, weights, kernels, config.block_size)
        fallbacks.append(_shorter_context(context, max_model_len, smaller))
    return Plan(
        device=hardware.device,
        dtype=dtype,
        weights=weights,
        kernels=kernels,
        threads=config.threads or hardware.cores,
        max_model_len=context,
        max_seqs=max_seqs,
        max_step_tokens=max_step_tokens,
        max_step_ms=config.max_step_ms or (200 if on_cpu else 50),
        kv=kv.name,
        block_size=config.block_size,
        num_blocks=num_blocks,
        prefix_cache=config.prefix_cache,
        graphs=graphs,
        memory=replace(memory, kv=num_blocks * per_block),
        coded=caches.coded,
        windows=caches.windows,
        states=states,
        decoded=bool(decoded),
        reads_back=drafter.reads_back if drafter else 0,
        fallbacks=tuple(fallbacks),
    )


def _step_limits(config: EngineConfig, hardware: Hardware) -> tuple[int, int]:
    """Requests at once, and tokens per step."""
    max_seqs = config.max_seqs or MAX_SEQS[hardware.device]
    max_step_tokens = config.max_step_tokens or max(MAX_TOKENS[hardware.device], max_seqs)
    if max_step_tokens < max_seqs:
        raise UserError(
            f"max_step_tokens is {max_step_tokens}, below max_seqs ({max_seqs}); every request needs one token per step"
        )
    return max_seqs, max_step_tokens


def _held(
    model: ModelConfig,
    positions: int,
    itemsize: float,
    drafter: DrafterCaps | None,
    stored: StoredBytes | None,
    as_floats: bool,
) -> int:
    """Bytes of all weights, and of RoPE's tables. as_floats: whatever the file holds; on a CPU, as its kernels keep
    them."""
    stored, own = None if as_floats else stored, drafter.num_in_target if drafter else 0
    beside = drafter.held(itemsize, not as_floats) - int(own * itemsize) if drafter else 0  # own: stored has counted it
    return beside + weight_bytes(model, itemsize, stored, own) + rope_bytes(model, positions)


def model_bytes(
    config: EngineConfig,
    model: ModelConfig,
    hardware: Hardware,
    native_problem: str | None,
    drafter: DrafterCaps | None,
    stored: StoredBytes | None,
) -> int:
    """Bytes that a plan counts for the model without its drafter."""
    itemsize = WEIGHT_ITEMSIZE[_weights(config, hardware, native_problem, [])]
    as_floats = hardware.device == "cpu" or bool(_decoded(config, model, hardware, drafter, stored))
    held = _held(model, _positions(config, model), itemsize, drafter, stored, as_floats)
    return held - drafter.held(itemsize, not as_floats) if drafter else held


def may_decode(
    config: EngineConfig,
    model: ModelConfig,
    hardware: Hardware,
    drafter: DrafterCaps | None,
    stored: StoredBytes | None,
) -> bool:
    """Return whether a GPU has memory enough to keep quantised matrices in bfloat16, if that is faster. Where the user
    names a format of weights, they stay."""
    named = config.weights != "auto" or config.drafter_weights != "auto" or config.dtype == "float32"
    if hardware.device == "cpu" or named or not stored or not stored.quantised:
        return False
    return _held(model, 0, ITEMSIZE["bfloat16"], drafter, None, True) <= DECODED_SHARE * hardware.free_bytes


def _decoded(
    config: EngineConfig,
    model: ModelConfig,
    hardware: Hardware,
    drafter: DrafterCaps | None,
    stored: StoredBytes | None,
) -> list[Fallback]:
    """Says that quantised matrices are decoded, where that was measured faster on this GPU at every number of tokens
    and memory is not short; else []. A small matrix takes as long to decode in every step as its bytes to read."""
    times = stored.times if stored else None
    if not times or not may_decode(config, model, hardware, drafter, stored):
        return []
    if any(DECODED_GAIN * floats > codes for codes, floats in zip(*times, strict=True)):
        return []
    size = _held(model, 0, ITEMSIZE["bfloat16"], drafter, None, True) / 2**30
    rows, floats, codes = (_listed(each) for each in (ROWS, *(_millis(part) for part in reversed(times))))
    reason = (
        f"on this GPU the products of {rows} tokens take {floats} ms, and {codes} ms with the file's codes; "
        f"bfloat16 takes {size:.1f} GiB of {hardware.free_bytes / 2**30:.0f} free"
    )
    return [Fallback("quantised weights are decoded and rounded to bfloat16", reason, is_choice=True)]


def _millis(seconds: Sequence[float]) -> list[str]:
    return [f"{each * 1e3:.2f}" for each in seconds]


def _listed(values: Sequence[object]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}"


class StepSize(NamedTuple):
    context: int
    max_seqs: int
    max_step_tokens: int


class Caches(NamedTuple):
    coded: KVPlan | None
    windows: tuple[WindowPlan, ...]
    block_bytes: int  # one block in all layers that keep blocks, including the drafter's
    page_bytes: int  # all pages together
    requests: int  # that the pages are enough for


def _caches(
    config: EngineConfig,
    model: ModelConfig,
    drafter: DrafterCaps | None,
    kv: KVFormat,
    kernels: str,
    itemsize: int,
    step: StepSize,
    room: int,  # bytes for all K/V
) -> Caches:
    """Decide which layers keep blocks and which keep pages, and how many bytes both take."""
    slid = window_layers(model, step.context)  # per window
    full = [spec for spec in model.cached_attention if spec.window not in slid]
    size = config.block_size
    ahead = MOST_AHEAD + (drafter.reads_back if drafter else 0)  # a page for a token behind costs what one ahead does
    coded = kv.plan(config, full, Room(kernels, step.max_seqs, step.max_step_tokens, max(room, 0), ahead))
    kv.check_layers(model, full, kernels, size)
    pages = coded.pages * coded.page_bytes if coded else 0
    drafted = kv_bytes_per_token(drafter.kv, itemsize) if drafter else 0  # always exact
    per_block = (kv.bytes_per_token(full, itemsize, coded) + drafted) * size
    wanted = config.kv_tokens or step.max_seqs * step.context
    asked = config.kv_tokens or config.max_model_len
    kept = in_windows(kv).itemsize(itemsize)
    left, most = room - pages, -(-wanted // size)
    windows, requests = plan_windows(slid, size, *step, ahead, kept, left, per_block, most, asked)
    return Caches(coded, windows, per_block, pages + sum(window.nbytes for window in windows), requests)


def _states(
    config: EngineConfig,
    model: ModelConfig,
    drafter: DrafterCaps | None,
    max_seqs: int,
    itemsize: int,
    room: int,  # bytes for all caches and for what requests take beside them
    each: int,  # bytes that a request takes beside the caches
    fallbacks: list[Fallback],
) -> StatePlan | None:
    """Plans the states of recurrent layers: for fewer requests if they are large and nobody asked for a number."""
    own = NGRAM_DEPTH if config.ngram and config.spec != "off" else 0
    deepest = drafter.max_depth if drafter else own
    number = max_seqs if config.max_seqs else fewer_requests(model, max_seqs, deepest, itemsize, room, each)
    if number < max_seqs:
        reason = "the states of recurrent layers would leave less than half of the caches' memory to keys and values"
        fallbacks.append(Fallback(_at_once(number, max_seqs), reason))
    return plan_states(model, number, deepest, itemsize, room - number * each, config.prefix_cache)


def _unknown_keys(keys: tuple[str, ...]) -> list[Fallback]:
    reason = "if one of them changes what the model computes, its text is not the model's"
    name = "keys of config.json that are not known here are ignored"
    return [Fallback(name, f"{', '.join(keys)}; {reason}")] if keys else []


def _weights(config: EngineConfig, hardware: Hardware, native_problem: str | None, fallbacks: list[Fallback]) -> str:
    """How matrices are kept. The type of activations follows from it."""
    if hardware.device == "cuda":
        if config.dtype == "quantised":
            raise UserError("dtype quantised runs on a CPU only; on a GPU ask for bfloat16 or leave it on auto")
        return "bfloat16" if config.dtype == "auto" else config.dtype
    if config.dtype == "bfloat16":
        raise UserError("dtype bfloat16 needs a GPU; on a CPU ask for quantised or float32, or leave it on auto")
    if config.dtype == "quantised" and native_problem:
        raise UserError(f"dtype quantised needs the CPU kernels, which are not available: {native_problem}")
    if config.dtype == "auto" and native_problem:
        fallbacks.append(Fallback("float32 instead of quantised weights", native_problem))
        return "float32"
    return "quantised" if config.dtype == "auto" else config.dtype


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The context that is wanted: the model's own, or the one that was asked for."""
    least = min(LEAST_CONTEXT, model.max_position)
    for name, asked in (("max_model_len", config.max_model_len), ("kv_tokens", config.kv_tokens)):
        if asked and asked < least:
            raise UserError(
                f"{name} is {asked}, and a request needs room for {least} tokens: ask for that many or more"
            )
    if config.max_model_len > model.max_position:
        raise UserError(
            f"max_model_len is {config.max_model_len}; the model was made for {model.max_position} tokens: "
            "ask for fewer"
        )
    return config.max_model_len or model.max_position


def _positions(config: EngineConfig, model: ModelConfig) -> int:
    """Positions of RoPE's tables: those of the context, or more where the cache's format learns from a text."""
    learns = kv_format(config.kv).chosen(config).learns(config)
    return max(_max_model_len(config, model), min(LEARNT_IDS, model.max_position) if learns else 0)


def _num_blocks(
    config: EngineConfig,
    memory: MemoryPlan,  # without blocks
    on_cpu: bool,
    room: int,  # bytes for blocks and pages
    per_block: int,
    max_model_len: int,
    max_seqs: int,
) -> int:
    """Blocks of the KV cache. Raises UserError if too few fit, with the sums."""
    pages = memory.pages
    room -= pages
    size, fits = config.block_size, max(room // per_block, 0)
    context = -(-max_model_len // size)  # in blocks
    wanted = -(-config.kv_tokens // size)
    if fits * size < min(LEAST_CONTEXT, max_model_len):
        raise UserError(memory.refusal(config.memory_fraction))
    if wanted > fits:
        raise UserError(
            f"kv_tokens is {config.kv_tokens}, {wanted * per_block / 2**30:.1f} GiB; weights, scratch and "
            f"{pages / 2**30:.1f} GiB of pages leave {room / 2**30:.1f} GiB: ask for {fits * size} or fewer"
        )
    if on_cpu:
        fits = min(fits, max((int(memory.free * CPU_KV_SHARE) - pages) // per_block, context))
    fits = min(wanted or fits, max_seqs * context)
    if config.max_model_len and fits < context:
        holds = f"max_model_len is {max_model_len}, but the KV cache holds {fits * size} tokens"
        if wanted:
            raise UserError(f"{holds}; lower max_model_len or raise kv_tokens")
        raise UserError(
            f"{holds}: weights, scratch and {pages / 2**30:.1f} GiB of pages leave {room / 2**30:.1f} GiB for it; "
            f"lower max_model_len to {fits * size} or less"
        )
    return fits


def _fewer_requests(fits: int, wanted: int, pages: int) -> list[Fallback]:
    if fits >= wanted:
        return []
    reason = (
        f"layers with a sliding window keep pages for every request, {pages / 2**30:.1f} GiB in all; the other layers' "
        "context comes first, so a smaller max_model_len or kv_tokens leaves more to pages"
    )
    return [Fallback(f"at most {_at_once(fits, wanted)}", reason)]


def _at_once(requests: int, wanted: int) -> str:
    return f"{requests} request{'s' * (requests != 1)} at once instead of {wanted}"


def _shorter_context(tokens: int, wanted: int, smaller: Sequence[str]) -> Fallback:
    more = f"; kv {' or '.join(smaller)} holds more" if smaller else ""
    return Fallback(
        f"a context of {tokens:,} tokens instead of the model's {wanted:,}",
        f"the KV cache gets the memory that weights and scratch leave{more}",
    )
