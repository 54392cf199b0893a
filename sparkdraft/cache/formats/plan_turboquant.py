"""The layout of a TurboQuant cache: bits per layer, rows that stay uncoded, pages for them, and their bytes. No
torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkdraft.cache.recent_rows import pages_of_a_request
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.kernels.turboquant.layout import PLANES, block_width, token_bytes
from sparkdraft.models.common.layers import AttentionSpec
from sparkdraft.models.common.sizes import kv_bytes_per_token

FIRST = 4  # first positions of a context that stay uncoded beside the recent ones: they get much of the attention
LEAST_SPARE = 64  # pages beyond what decoding needs, for prompts and for prefixes to be found again
SPARE_SHARE = 80  # such pages take at most one part in this many of the room
PAGE_ITEMSIZE = {"cuda": 2, "cpu": 4}  # float16; on a CPU float32


@dataclass(frozen=True, slots=True)
class CodedPlan:
    key_bits: tuple[int, ...]  # per layer
    value_bits: int
    first: int
    recent: int
    pages: int  # of uncoded rows; 0 if everything is coded
    page_bytes: int
    captured: bool = False  # whether an exact cache is read, with codes beside it to be measured

    @property
    def is_hybrid(self) -> bool:
        return self.recent > 0

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


def plan_coded(
    config: EngineConfig,
    layers: Sequence[AttentionSpec],  # the layers that are coded
    device: str,
    max_seqs: int,
    max_rows: int,
    room: int,
    most_ahead: int,
) -> CodedPlan:
    """room: bytes for codes and pages together. most_ahead: rows past the committed ones that a request may write
    to."""
    if not layers:
        raise UserError(
            "this model has no layers whose K/V grow with the context: TurboQuant has nothing to code, keep kv exact"
        )
    for spec in layers:
        block_width(spec.head_dim)  # refuses head sizes that cannot be rotated
    more, most = config.tq_initial_layers, max(PLANES)
    if more > len(layers):
        raise UserError(f"tq_initial_layers is {more}; {len(layers)} layers have a KV cache: ask for fewer")
    if more and config.tq_key_bits == most:
        raise UserError(f"tq_initial_layers asks for {most + 1} bits per key number; {most} is the most: leave it at 0")
    bits = tuple(config.tq_key_bits + (layer < more) for layer in range(len(layers)))
    size = config.block_size
    page = kv_bytes_per_token(layers, PAGE_ITEMSIZE[device]) * size
    if config.tq_mode in ("full_tq", "capture_only"):
        return CodedPlan(bits, config.tq_value_bits, 0, 0, 0, page, captured=config.tq_mode == "capture_only")
    recent = config.tq_ring_capacity
    need = max_seqs * pages_of_a_request(size, FIRST, recent, most_ahead)
    spare = max(LEAST_SPARE, min(max_rows // size, room // SPARE_SHARE // page))
    return CodedPlan(bits, config.tq_value_bits, FIRST, recent, need + spare, page)
