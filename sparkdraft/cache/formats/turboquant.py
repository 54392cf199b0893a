"""TurboQuant: keys and values as codes of 2 to 5 bits, with the first and the most recent tokens uncoded beside them.

Codes are in the engine's blocks, uncoded tokens in a small number of pages (cache/pages.py). A token's codes depend on
that token alone, so rollback is a shorter length and a prefix block is complete by itself. In the mode capture_only the
model reads an exact cache, and codes are written beside it to measure their error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

from sparkdraft.cache.formats import EXACT, Build, KeptLayer, KVCache, KVFormat, KVPlan, Room, kv_format
from sparkdraft.cache.formats.dense import DenseKV, DenseLayer, relative_error, rows_at, whole_text
from sparkdraft.cache.groups import CacheGroup, send_map
from sparkdraft.cache.pages import PagePool, RecentRows, pages_of_a_request
from sparkdraft.core import UserError
from sparkdraft.kernels.turboquant.layout import KERNEL_LIMITS, PLANES, block_width, check_bits, token_bytes
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import AttentionSpec
from sparkdraft.models.common.sizes import kv_bytes_per_token

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sparkdraft.kernels.ops import AttentionParams, AttentionView, Ops, RopeArgs
    from sparkdraft.kernels.turboquant.store import CodedLayer
    from sparkdraft.kernels.turboquant.vectors import VectorFormat
    from sparkdraft.models.common.layers import LayerKV

MODES = ("off", "hybrid", "full_tq", "capture_only")
SLACK = 1.4  # a sound cache's error is below this times that of random vectors; 64 tokens are off it by up to a tenth
FIRST = 4  # first positions of a context that stay uncoded beside the recent ones: they get much of the attention
LEAST_SPARE = 64  # pages beyond what decoding needs, for prompts and for prefixes to be found again
SPARE_SHARE = 80  # such pages take at most one part in this many of the room
PAGE_ITEMSIZE = {"cuda": 2, "cpu": 4}  # float16; on a CPU float32
NOTATION = re.compile(r"k([2-5])v([2-5])(-full)?(-uncentred)?")


# ---- the plan


@dataclass(frozen=True, slots=True)
class CodedPlan:
    key_bits: tuple[int, ...]  # per layer
    value_bits: int
    first: int
    recent: int
    pages: int  # of uncoded tokens; 0 if everything is coded
    page_bytes: int
    captured: bool = False  # whether an exact cache is read, with codes beside it to be measured

    @property
    def is_hybrid(self) -> bool:
        return self.recent > 0

    @property
    def is_read(self) -> bool:
        return not self.captured

    def bytes_per_token(self, layers: Sequence[AttentionSpec]) -> int:
        parts = zip(layers, self.key_bits, strict=True)
        return sum(spec.num_kv_heads * token_bytes(spec.head_dim, bits, self.value_bits) for spec, bits in parts)

    def describe(self) -> str:
        bits = f"K{min(self.key_bits)}/V{self.value_bits}"
        if max(self.key_bits) > min(self.key_bits):
            bits += f", {self.key_bits.count(max(self.key_bits))} layers K{max(self.key_bits)}"
        if self.captured:
            return f"exact, TurboQuant {bits} captured beside it"
        if not self.is_hybrid:
            return f"turboquant {bits}, all coded"
        return f"turboquant {bits}, the first {self.first} and last {self.recent} tokens uncoded in {self.pages} pages"


class TurboQuant(KVFormat):
    name = "turboquant"
    help = "turboquant (a quarter)"
    share = 0.25
    options = "tq_"
    in_windows = EXACT  # a window is small, and its end would be uncoded anyway
    losses = "coded"
    title = "TurboQuant"
    notation = (
        "k<key bits>v<value bits>, 2 to 5 of each, such as k4v3; then -full, which codes all rows, "
        "and -uncentred, which leaves mean keys in: k4v3-full-uncentred"
    )

    def check_options(self, config: Any) -> None:
        if config.tq_mode not in MODES:
            raise UserError(f"tq_mode is '{config.tq_mode}'; it must be one of {', '.join(MODES)}")
        check_bits(config.tq_key_bits, "tq_key_bits")
        check_bits(config.tq_value_bits, "tq_value_bits")
        if config.tq_ring_capacity < 1:
            raise UserError(f"tq_ring_capacity is {config.tq_ring_capacity}; it must be 1 or more, or the mode full_tq")
        if config.tq_initial_layers < 0:
            raise UserError(f"tq_initial_layers is {config.tq_initial_layers}; it must be 0 or more")

    def chosen(self, config: Any) -> KVFormat:
        return kv_format(EXACT) if config.tq_mode == "off" else self

    def check_layers(self, model: ModelConfig, layers: Sequence[AttentionSpec], kernels: str, block_size: int) -> None:
        """Borrowed layers are refused: queries must be rotated as the codes are, which only the layer that writes them
        does."""
        owners = [model.layers[spec.kv_from].mixer for spec in model.attention if spec.kv_from is not None]
        if any(owner in layers for owner in owners):
            raise UserError(
                "kv turboquant does not support layers that read another layer's K/V: ask for kv fp8 or exact"
            )
        limits = KERNEL_LIMITS.get(kernels)
        for spec in layers if limits else ():
            if limits and spec.head_dim not in limits.dims:
                dims = ", ".join(map(str, limits.dims))
                raise UserError(
                    f"kv turboquant runs at head dims {dims} on the {kernels} kernels; this model's is "
                    f"{spec.head_dim}: ask for kv fp8"
                )
            if limits and block_size != limits.block_size:
                raise UserError(
                    f"block_size is {block_size}; kv turboquant on the {kernels} kernels has blocks of "
                    f"{limits.block_size}: leave it"
                )

    def check_kernels(self, kernels: str) -> None:
        from sparkdraft.kernels import load

        try:
            load(kernels).tq_attention  # noqa: B018
        except ImportError as error:
            raise UserError(
                f"kv turboquant needs the Gluon of Triton 3.6 ({error}); ask for kv fp8 or exact"
            ) from error

    def scratch_bytes(self, config: Any, model: ModelConfig, max_step_tokens: int, itemsize: int) -> int:
        """Capturing takes a second copy of what attention reads and returns, its error in float32, and several float32
        copies of the decoded keys and values."""
        if config.tq_mode != "capture_only":
            return 0
        queries = max((spec.query_width for spec in model.attention), default=0)
        keys = max((spec.kv_width for spec in model.attention), default=0)
        return max_step_tokens * ((2 * queries + 3 * keys) * itemsize + (queries + 6 * keys) * 4)

    def plan(self, config: Any, layers: Sequence[AttentionSpec], room: Room) -> CodedPlan:
        if not layers:
            raise UserError(
                "this model has no layers whose K/V grow with the context: TurboQuant has nothing to code, "
                "keep kv exact"
            )
        for spec in layers:
            block_width(spec.head_dim)  # refuses head sizes that cannot be rotated
        more, most_bits, size = config.tq_initial_layers, max(PLANES), config.block_size
        if more > len(layers):
            raise UserError(f"tq_initial_layers is {more}; {len(layers)} layers have a KV cache: ask for fewer")
        if more and config.tq_key_bits == most_bits:
            raise UserError(
                f"tq_initial_layers asks for {most_bits + 1} bits per key number; {most_bits} is the most: "
                "leave it at 0"
            )
        bits = tuple(config.tq_key_bits + (layer < more) for layer in range(len(layers)))
        page = kv_bytes_per_token(layers, PAGE_ITEMSIZE["cuda" if room.kernels == "cuda" else "cpu"]) * size
        if config.tq_mode in ("full_tq", "capture_only"):
            return CodedPlan(bits, config.tq_value_bits, 0, 0, 0, page, captured=config.tq_mode == "capture_only")
        recent = config.tq_ring_capacity
        need = room.max_seqs * pages_of_a_request(size, FIRST, recent, room.most_ahead)
        spare = max(LEAST_SPARE, min(room.max_step_tokens // size, room.nbytes // SPARE_SHARE // page))
        return CodedPlan(bits, config.tq_value_bits, FIRST, recent, need + spare, page)

    def bytes_per_token(self, layers: Sequence[AttentionSpec], itemsize: int, plan: KVPlan | None) -> int:
        assert isinstance(plan, CodedPlan)
        exact = kv_bytes_per_token(layers, itemsize) if plan.captured else 0
        return plan.bytes_per_token(layers) + exact

    def usual_bytes_per_token(self, spec: AttentionSpec, itemsize: int, config: Any) -> float:
        return CodedPlan((config.tq_key_bits,), config.tq_value_bits, 0, 0, 0, 0).bytes_per_token([spec])

    def learns(self, config: Any) -> bool:
        return bool(config.tq_centre)

    def learn(
        self,
        forward: Callable[..., object],
        ids: Sequence[int],
        scratch: KVCache,
        block_size: int,
        positions: int,
        device: torch.device,
    ) -> dict[int, Tensor] | None:
        """The mean key of each layer with attention; nothing is centred if there are too few ids to average."""
        return key_centres(forward, ids, scratch, block_size, positions, device) if len(ids) > SKIPPED else None

    def build(self, job: Build) -> tuple[KVCache, list[CacheGroup]]:
        """job.learned: the centres of all layers with attention, by number, or None."""
        plan, blocks = job.coded, (job.num_blocks, job.block_size)
        assert isinstance(plan, CodedPlan)
        centres = job.learned and [job.learned[number] for number in job.numbers]
        uncoded, same_bits = (plan.first, plan.recent, plan.pages), job.same_bits_up_to
        codes = TurboQuantKV(
            plan.key_bits, plan.value_bits, job.layers, *blocks, uncoded, centres, job.device, job.ops, same_bits
        )
        if plan.captured:
            exact = DenseKV(job.layers, *blocks, job.dtype, job.device, job.ops, same_bits)
            return CaptureKV(exact, codes, job.numbers, job.device), []
        if not plan.is_hybrid:
            return codes, []
        recent = plan.recent + job.reads_back
        return codes, [RecentRows(PagePool(plan.pages), job.block_size, plan.first, recent, job.most_ahead, codes.send)]

    def parse(self, text: str) -> dict[str, Any] | None:
        found = NOTATION.fullmatch(text)
        if not found:
            return None
        key_bits, value_bits, full, uncentred = found.groups()
        bits = {"tq_key_bits": int(key_bits), "tq_value_bits": int(value_bits)}
        mode = {"tq_mode": "full_tq" if full else "hybrid", "tq_centre": not uncentred}
        return {"kv": self.name} | bits | mode


FORMAT = TurboQuant()


# ---- the coded cache


@dataclass(frozen=True, slots=True)
class CodedLayerKV(KeptLayer):
    store: CodedLayer
    ops: Ops
    same_bits_up_to: int

    @property
    def bytes_per_token(self) -> int:
        layout = self.store.layout
        return int(self.store.records.shape[1] * layout.nbytes // layout.block_size)

    @property
    def lossy(self) -> KeptLayer | None:
        return self

    def reader(self) -> LayerKV:
        return self  # queries are rotated as codes are, by the operator that writes: it is handed no keys

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        self.ops.tq_rope_write(self.store, qkv, rope_args, slots)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        return self.ops.tq_attention(self.store, q, view, params, self.same_bits_up_to)

    def decoded(self, k: Tensor, v: Tensor, slots: Tensor) -> list[tuple[VectorFormat, Tensor, Tensor]]:
        """For keys and values: their format, what is read back at these slots, and what was written, in float32."""
        from sparkdraft.kernels.turboquant.store import planes
        from sparkdraft.kernels.turboquant.vectors import Encoded

        store, found = self.store, []
        centred = k if store.centre is None else k.float() - store.centre
        for form, part, wanted in zip((store.keys, store.values), planes(store), (centred, v), strict=True):
            rows = Encoded(tuple(rows_at(p, slots, p.dtype) for p in part.planes), rows_at(part.scale, slots))
            found.append((form, form.decode(rows), wanted))
        return found

    def deviations(self, k: Tensor, v: Tensor, slots: Tensor) -> list[tuple[float, float]]:
        return [
            (relative_error(got, wanted), SLACK * sqrt(form.codebook.distortion))
            for form, got, wanted in self.decoded(k, v, slots)
        ]


class TurboQuantKV(KVCache):
    def __init__(
        self,
        key_bits: Sequence[int],  # per layer
        value_bits: int,
        attention: Sequence[AttentionSpec],  # per layer
        num_blocks: int,
        block_size: int,
        uncoded: tuple[int, int, int],  # first and recent positions that stay uncoded, and the number of pages for them
        centres: Sequence[Tensor] | None,  # per layer, float32 [kv_heads, head_dim], subtracted from its keys
        device: torch.device,
        ops: Ops,
        same_bits_up_to: int = 0,
    ) -> None:
        import torch

        from sparkdraft.kernels.turboquant.store import CodedLayer
        from sparkdraft.kernels.turboquant.vectors import VectorFormat

        first, recent, num_pages = uncoded
        taken: Sequence[Tensor | None] = centres or [None] * len(key_bits)
        # A centre shifts all scores of a query alike, which a softmax ignores. A sink is no key and would not shift.
        taken = [None if spec.sinks else centre for spec, centre in zip(attention, taken, strict=True)]
        formats = {
            (spec.head_dim, bits): VectorFormat(spec.head_dim, bits, device=device)
            for spec, own in zip(attention, key_bits, strict=True)
            for bits in (own, value_bits)
        }
        self.page_of = torch.full((num_blocks,), -1, dtype=torch.int32, device=device) if recent else None
        page_dtype = torch.float16 if device.type == "cuda" else torch.float32
        stores = [
            CodedLayer.make(
                num_blocks, spec.num_kv_heads, block_size,
                formats[spec.head_dim, bits], formats[spec.head_dim, value_bits], centre,
                num_pages=num_pages, page_dtype=page_dtype, page_of=self.page_of, first=first, recent=recent,
            )
            for spec, bits, centre in zip(attention, key_bits, taken, strict=True)
        ]  # fmt: skip
        self.layers: list[CodedLayerKV] = [CodedLayerKV(store, ops, same_bits_up_to) for store in stores]
        sizes = (spec.num_kv_heads * store.layout.nbytes for spec, store in zip(attention, stores, strict=True))
        self.bytes_per_token = sum(size // block_size for size in sizes)

    def send(self, changes: list[tuple[int, int]]) -> None:
        """(block, its page or -1) of blocks that got or lost a page, before the next step."""
        assert self.page_of is not None
        send_map(self.page_of, changes)


# ---- capture_only: measuring the error of coding on real requests


ERRORS = ("key_error", "value_error", "attention_error")
KEYS, VALUES, ATTENTION = range(len(ERRORS))


class CaptureLayer(KeptLayer):
    """The model reads the exact cache, so its text is that of an exact cache. Every token is also coded, as in the mode
    full_tq, and errors are summed on the device: of keys (less their centre), of values, and of the attention's result
    over codes. The mode hybrid reads some tokens uncoded, so its errors are smaller."""

    def __init__(self, exact: DenseLayer, coded: CodedLayerKV, sums: Tensor, rows: Tensor | None) -> None:
        """sums: float64 [errors, 2] of this layer. rows: counts tokens; None in all layers but the first."""
        self.exact, self.coded, self._sums, self._rows = exact, coded, sums, rows
        # Kept from the write to the attention of one step: which tokens are not padding, bool [tokens, 1], and the
        # queries as the coded cache left them, [tokens, heads, dim].
        self._is_row = self._queries = sums.new_empty(0)

    @property
    def bytes_per_token(self) -> int:
        return self.exact.bytes_per_token  # of what is read

    @property
    def lossy(self) -> KeptLayer | None:
        return self.coded

    def reader(self) -> LayerKV:
        return self.exact.reader()  # a drafter's reads are not measured

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        other = qkv.clone()  # each cache changes its own copy
        self.exact.write(qkv, rope_args, slots)
        self.coded.write(other, rope_args, slots)
        self._queries = other.view(len(other), rope_args.projected_heads, -1)[:, : rope_args.num_heads]
        self._is_row = (slots >= 0).unsqueeze(1)
        if self._rows is not None:
            self._rows += self._is_row.sum()
        self._compare(slots)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        out = self.exact.attend(q, view, params)
        self._add(ATTENTION, self.coded.attend(self._queries, view, params), out)
        return out

    def _compare(self, slots: Tensor) -> None:
        """Compares what the kernels wrote to the two caches. For a token without a slot another slot is compared."""
        slots = slots.clamp(min=0)
        k, v = (rows_at(cache, slots, cache.dtype) for cache in (self.exact.k, self.exact.v))  # [rows, kv_heads, dim]
        for error, (_, got, wanted) in zip((KEYS, VALUES), self.coded.decoded(k, v, slots), strict=True):
            self._add(error, got.flatten(1), wanted.flatten(1))

    def _add(self, error: int, got: Tensor, wanted: Tensor) -> None:  # [rows, n]; 'got' is overwritten
        """Adds squared errors. Padding, which may hold anything, counts as zero."""
        import torch

        squares = [
            torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32).square().where(self._is_row, 0)
            for x in (got.float().sub_(wanted), wanted)
        ]
        self._sums[error].add_(torch.cat(squares, dim=1).sum(0, dtype=torch.float64))


class CaptureKV(KVCache):
    def __init__(self, exact: DenseKV, coded: TurboQuantKV, numbers: Sequence[int], device: torch.device) -> None:
        """numbers: which layers of the model these are."""
        self.exact = exact
        self.bytes_per_token = exact.bytes_per_token + coded.bytes_per_token
        self.meter: CodingErrors = CodingErrors(numbers, device)
        self.layers: list[CaptureLayer] = []
        for i, (dense, codes) in enumerate(zip(exact.layers, coded.layers, strict=True)):
            assert isinstance(dense, DenseLayer), "a layer that borrows its keys has no codes of its own"
            self.layers.append(CaptureLayer(dense, codes, self.meter.sums[i], None if i else self.meter.rows))


class CodingErrors:
    """Sums over all tokens, at fixed addresses for captured steps. float64: a day's sum in float32 would stop
    growing."""

    def __init__(self, numbers: Sequence[int], device: torch.device) -> None:
        import torch

        self.numbers = tuple(numbers)
        # Squares of the error and of the exact numbers: [layers, errors, 2]
        self.sums = torch.zeros((len(self.numbers), len(ERRORS), 2), dtype=torch.float64, device=device)
        self.rows = torch.zeros((), dtype=torch.int64, device=device)

    def errors(self) -> dict[str, Any]:
        """Relative errors of the codes over all tokens since `forget`: each of ERRORS overall, which is the root of the
        layers' mean square, and per coded layer, by its number in the model. Waits for the device."""
        wrong, there = self.sums.cpu().unbind(-1)  # [layers, errors] each
        relative = (wrong / there.where(there > 0, 1)).sqrt()
        overall = relative.square().mean(0).sqrt()
        layers = [
            {"layer": number, **dict(zip(ERRORS, row, strict=True))}
            for number, row in zip(self.numbers, relative.tolist(), strict=True)
        ]
        return {"rows": int(self.rows), **dict(zip(ERRORS, overall.tolist(), strict=True)), "layers": layers}

    def forget(self) -> None:
        import torch

        with torch.inference_mode():
            self.sums.zero_()
            self.rows.zero_()


# ---- the mean key of each layer, which is subtracted from every key before it is coded
#
# A softmax does not see a centre, so the codes' bits describe only what differs between keys. It is learned from a
# fixed text before the first request, so that no text depends on which request came first. Keys are averaged before
# RoPE, and the mean is then rotated by the average over all positions of the model: pairs that RoPE turns fast average
# to nearly zero, the slow ones remain, and none depends on the length of the fixed text or of the context served.


SKIPPED = 16  # tokens at the beginning, whose keys differ from all others


class KeyMean:
    """One layer's cache that averages the keys written to it and passes every call on."""

    def __init__(self, inner: LayerKV, positions: int) -> None:
        self.inner, self.positions = inner, positions
        self.centre: Tensor | None = None  # float32 [kv_heads, head_dim]

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        from sparkdraft.kernels.reference import rms_norm

        heads, kv_heads = rope_args.num_heads, rope_args.num_kv_heads
        keys = qkv.view(qkv.shape[0], rope_args.projected_heads, -1)[SKIPPED:, heads : heads + kv_heads]
        normed = keys if rope_args.k_norm is None else rms_norm(keys, rope_args.k_norm, rope_args.eps)
        self.centre = _rotated(normed.float().mean(0), rope_args.table, self.positions)
        self.inner.write(qkv, rope_args, slots)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        return self.inner.attend(q, view, params)


def key_centres(
    forward: Callable[..., object],
    ids: Sequence[int],
    kv: KVCache,
    block_size: int,
    positions: int,
    device: torch.device,
) -> dict[int, Tensor]:
    """The centre of each layer with attention, by its number: float32 [kv_heads, head_dim].

    kv: an exact cache for these ids, not needed afterwards. forward: runs the model over the fields of a step.
    positions: of the model, over which the centres are averaged.
    """
    parts: list[Any] = list(kv.layers)
    means = {i: KeyMean(part, positions) for i, part in enumerate(parts) if hasattr(part, "attend")}
    assert len(ids) > SKIPPED, f"{len(ids)} ids are too few to average"
    tokens, places, view = whole_text(ids, kv, block_size, device)
    forward(tokens, places, places, view, [means.get(i, part) for i, part in enumerate(parts)])
    return {i: layer.centre for i, layer in means.items() if layer.centre is not None}


def _rotated(mean: Tensor, rope: Tensor, positions: int) -> Tensor:
    """The average of the rotated mean over this many positions."""
    import torch

    cos, sin = mean_turn(rope, positions).float().chunk(2)
    half = len(cos)
    a, b, rest = mean[:, :half], mean[:, half : 2 * half], mean[:, 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=1)


def mean_turn(rope: Tensor, positions: int) -> Tensor:
    """float64 [width]: the mean of the first rows of a RoPE table, which may have fewer, as a geometric sum: row p is
    row 0 turned by p times the angle of row 1."""
    import torch

    start, step = (torch.complex(*row.double().chunk(2)) for row in rope[:2])
    angle = (step / start).angle()
    turns = angle.abs() > 1e-12  # a pair that RoPE does not turn stays where it is
    half = (angle / 2).where(turns, 1.0)
    shrunk = ((half * positions).sin() / half.sin() / positions).where(turns, 1.0)
    mean = start * torch.polar(shrunk.abs(), angle * (positions - 1) / 2) * shrunk.sign()
    return torch.cat((mean.real, mean.imag))
