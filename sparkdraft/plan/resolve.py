"""From what was asked to what will run: one function fills every "auto", and says why, in words.

`auto` may settle for less and leaves a `Fallback` with its reason, which every front end shows; what was asked for by
name and can not run is an error that says what to change. No torch: facts about the machine come in as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.models.config import ModelConfig
from sparkdraft.plan.coded import CodedPlan, plan_coded
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.memory import (
    MemoryPlan,
    capture_bytes,
    drafter_bytes,
    kv_bytes_per_token,
    recording_bytes,
    scratch_bytes,
    weight_bytes,
)
from sparkdraft.spec.config import DraftConfig

CPU_KV_SHARE = 0.25  # of the free memory, for a CPU's KV cache: other programs want that memory too
LEAST_CONTEXT = 64  # tokens: the requests that are tried at start need no more, and a shorter context serves nobody
ITEMSIZE = {"float32": 4, "bfloat16": 2}  # of activations, and of keys and values as they are computed
MOST_AHEAD = 64  # rows past the committed ones that a request may write to: drafts, and steps that are not read yet
FLOAT_MATRIX = "a float32 matrix among quantised ones"  # the fallback for what does not divide into groups
FP8_CAPABILITY = (8, 9)  # of the first GPUs that convert to it and back
WEIGHT_ITEMSIZE = {"quantised": 1.07, "float32": 4.0, "bfloat16": 2.0}  # quantised: at most 8 bits and a scale


@dataclass(frozen=True, slots=True)
class Fallback:
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    device: str  # "cpu" or "cuda"
    dtype: str  # of activations: "float32" or "bfloat16"
    weights: str  # how matrices are kept: "quantised", or floats, "float32" or "bfloat16"
    kernels: str  # "native", "reference" or "cuda"
    threads: int
    max_model_len: int
    max_seqs: int
    max_rows: int
    max_step_ms: int  # of a step in which requests decode beside a prompt
    kv: str  # "exact", "fp8" or "turboquant"
    block_size: int
    num_blocks: int
    prefix_cache: bool
    graphs: bool
    memory: MemoryPlan
    coded: CodedPlan | None = None  # of a turboquant cache
    fallbacks: list[Fallback] = field(default_factory=list)

    @property
    def decodes_exactly(self) -> bool:
        """Whether the rows of one request have the same bits alone and beside its drafts.

        Torch's float32 products on a CPU sum in an order that depends on the number of rows. On a GPU this is so for
        up to 16 rows, which is one request with its drafts.
        """
        return self.kernels != "reference" and all(f.name != FLOAT_MATRIX for f in self.fallbacks)

    def describe(self) -> str:
        lines = [
            f"{self.device}, {self.weights} weights, {self.kernels} kernels, {self.threads} threads",
            f"context {self.max_model_len} tokens, {self.max_seqs} requests at once, {self.max_rows} rows a step",
            f"KV cache {self.num_blocks * self.block_size} tokens in blocks of {self.block_size}, {self._kv()}",
            self.memory.table(),
        ]
        return "\n".join(lines + [f"fallback {f.name}: {f.reason}" for f in self.fallbacks])

    def _kv(self) -> str:
        return self.coded.describe() if self.coded else self.kv


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    hardware: Hardware,
    native_problem: str | None = None,
    drafter: DraftConfig | None = None,
) -> Plan:
    """native_problem: why the CPU kernels can not be had, or None. drafter: what drafts, counted in."""
    on_cpu = hardware.device == "cpu"
    fallbacks = [_unknown_keys(model.unknown_keys)] if model.unknown_keys else []
    weights = _weights(config, hardware, native_problem, fallbacks)
    dtype = "float32" if weights == "quantised" else weights
    max_model_len = _max_model_len(config, model)
    max_seqs = config.max_seqs or (16 if on_cpu else 64)
    max_rows = config.max_rows or (512 if on_cpu else 8192)
    if max_rows < max_seqs:
        raise UserError(f"max_rows is {max_rows}, below max_seqs ({max_seqs}); every request needs a row a step")
    itemsize = ITEMSIZE[dtype]
    kv = "exact" if config.kv == "turboquant" and config.tq_mode == "off" else config.kv
    _check_kv(kv, hardware, weights)
    kernels = "cuda" if not on_cpu else ("native" if weights == "quantised" else "reference")
    graphs = config.graphs and kernels != "reference"
    if graphs and on_cpu and kv == "turboquant":
        graphs = False
        reason = "torch runs a CPU's turboquant cache, and its operators are not recorded: memory is saved, not time"
        fallbacks.append(Fallback("decode steps are launched one operator at a time", reason))
    recordings = recording_bytes(kernels, drafter is not None) if graphs else 0
    held = _held(model, drafter, WEIGHT_ITEMSIZE[weights])
    scratch = scratch_bytes(model, max_rows, max_seqs, itemsize, drafter)
    coded, usable = None, int(hardware.free_bytes * config.memory_fraction)
    if kv == "turboquant":
        room = max(usable - held - scratch - recordings, 0)
        coded = plan_coded(config, model, hardware.device, max_seqs, max_rows, room, MOST_AHEAD)
        scratch += capture_bytes(model, max_rows, itemsize) if coded.captured else 0
    pages = coded.pages * coded.page_bytes if coded else 0
    per_block = _token_bytes(model, kv, itemsize, coded, drafter) * config.block_size
    room = usable - held - scratch - recordings - pages
    num_blocks = _num_blocks(config, hardware, room, per_block, max_model_len, max_seqs)
    context = min(max_model_len, num_blocks * config.block_size)
    if context < max_model_len and not config.kv_tokens:  # else it is what was asked for
        fallbacks.append(_shorter_context(context, max_model_len))
    return Plan(
        device=hardware.device,
        dtype=dtype,
        weights=weights,
        kernels=kernels,
        threads=config.threads or hardware.cores,
        max_model_len=context,
        max_seqs=max_seqs,
        max_rows=max_rows,
        max_step_ms=config.max_step_ms or (200 if on_cpu else 50),
        kv=kv,
        block_size=config.block_size,
        num_blocks=num_blocks,
        prefix_cache=config.prefix_cache,
        graphs=graphs,
        memory=MemoryPlan(held, num_blocks * per_block, scratch, hardware.free_bytes, pages, recordings),
        coded=coded,
        fallbacks=fallbacks,
    )


def _held(model: ModelConfig, drafter: DraftConfig | None, itemsize: float) -> int:
    """Bytes of weights."""
    return weight_bytes(model, itemsize) + (drafter_bytes(drafter, itemsize) if drafter else 0)


def _unknown_keys(keys: tuple[str, ...]) -> Fallback:
    reason = "if one of them changes what the model computes, its text is not the model's"
    return Fallback("keys of config.json that are not known here are ignored", f"{', '.join(keys)}; {reason}")


def _weights(config: EngineConfig, hardware: Hardware, native_problem: str | None, fallbacks: list[Fallback]) -> str:
    """How matrices are kept, which is what a user's dtype says; activations follow from it."""
    if hardware.device == "cuda":
        if config.dtype == "quantised":
            raise UserError("dtype quantised runs on a CPU only; on a GPU ask for bfloat16 or leave it on auto")
        return "bfloat16" if config.dtype == "auto" else config.dtype
    if config.dtype == "bfloat16":
        raise UserError("dtype bfloat16 needs a GPU; on a CPU ask for quantised or float32, or leave it on auto")
    if config.dtype == "quantised" and native_problem:
        raise UserError(f"dtype quantised needs the CPU kernels, and there are none: {native_problem}")
    if config.dtype == "auto" and native_problem:
        fallbacks.append(Fallback("float32 instead of quantised weights", native_problem))
        return "float32"
    return "quantised" if config.dtype == "auto" else config.dtype


def _check_kv(kv: str, hardware: Hardware, weights: str) -> None:
    if kv != "fp8":
        return
    if weights == "quantised":
        raise UserError("kv fp8 is not for the CPU kernels; on a CPU ask for kv exact or turboquant, or dtype float32")
    if hardware.device == "cuda" and hardware.capability < FP8_CAPABILITY:
        has, needs = (".".join(map(str, c)) for c in (hardware.capability, FP8_CAPABILITY))
        raise UserError(f"kv fp8 needs a GPU of compute capability {needs}; {hardware.name} has {has}: keep it exact")


def _token_bytes(
    model: ModelConfig, kv: str, itemsize: int, coded: CodedPlan | None, drafter: DraftConfig | None
) -> int:
    """Of the KV cache: the target's, exact, coded or both, and the drafter's, which is always exact."""
    size = kv_bytes_per_token(drafter.model, itemsize) if drafter else 0
    if coded:
        size += coded.bytes_per_token(model)
    if not coded or coded.captured:
        size += kv_bytes_per_token(model, 1 if kv == "fp8" else itemsize)
    return size


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
            f"max_model_len is {config.max_model_len}; the model was made for {model.max_position} tokens, "
            "ask for no more"
        )
    return config.max_model_len or model.max_position


def _num_blocks(
    config: EngineConfig, hardware: Hardware, room: int, per_block: int, max_model_len: int, max_seqs: int
) -> int:
    """Blocks of KV cache. room: bytes that may be used and that nothing else takes."""
    size, fits = config.block_size, max(room // per_block, 0)
    context = -(-max_model_len // size)  # blocks
    wanted = -(-config.kv_tokens // size)
    if fits * size < min(LEAST_CONTEXT, max_model_len):
        taken = int(hardware.free_bytes * config.memory_fraction) - room
        raise UserError(
            f"the model does not fit: weights and scratch take {taken / 2**30:.1f} GiB, "
            f"{hardware.free_bytes / 2**30:.1f} GiB are free and {config.memory_fraction:.0%} of that may be used"
        )
    if wanted > fits:
        raise UserError(
            f"kv_tokens is {config.kv_tokens}, {wanted * per_block / 2**30:.1f} GiB; after weights and scratch "
            f"{room / 2**30:.1f} GiB are left: ask for {fits * size} or fewer"
        )
    if hardware.device == "cpu":
        fits = min(fits, max(int(hardware.free_bytes * CPU_KV_SHARE) // per_block, context))
    fits = min(wanted or fits, max_seqs * context)
    if config.max_model_len and fits < context:
        raise UserError(
            f"max_model_len is {max_model_len}, but the KV cache holds {fits * size} tokens; "
            "lower max_model_len or raise kv_tokens"
        )
    return fits


def _shorter_context(tokens: int, wanted: int) -> Fallback:
    return Fallback(
        f"a context of {tokens:,} tokens instead of the model's {wanted:,}",
        "the KV cache gets the memory that weights and scratch leave; kv fp8 or turboquant holds more",
    )
