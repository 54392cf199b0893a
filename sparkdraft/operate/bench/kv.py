"""Measures what a KV format costs and brings: memory, distance from the exact cache (nearness.py), decode speed.

cli/bench_kv.py loads models and prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sparkdraft.cache.formats import EXACT, kv_formats, listed
from sparkdraft.core import UserError
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.sizes import kv_bytes_per_token
from sparkdraft.operate.bench.nearness import Measured
from sparkdraft.plan.resolve import Plan

NOTATION = listed([each.notation for each in kv_formats()])


# ---- formats


@dataclass(frozen=True, slots=True)
class Format:
    name: str  # in the notation above
    options: dict[str, Any]  # fields of EngineConfig

    @property
    def is_centred(self) -> bool:
        return bool(self.options.get("tq_centre", True))


def parse_formats(text: str) -> list[Format]:
    """Parse a comma-separated list. The exact cache comes first, asked for or not: all others are compared with it."""
    names = dict.fromkeys([EXACT, *(part.strip() for part in text.split(","))])
    return [_parse_format(name) for name in names]


def _parse_format(name: str) -> Format:
    for each in kv_formats():
        if (options := each.parse(name)) is not None:
            return Format(name, options)
    raise UserError(f"--formats names '{name}'; a format is {NOTATION}")


# ---- memory


@dataclass(frozen=True, slots=True)
class Memory:
    bytes_per_token: int
    bits_per_value: float
    tokens_per_gib: int  # of cache, without uncoded pages, which do not grow with it
    tokens_that_fit: int  # in what a plan may use, less weights, scratch and uncoded pages
    of_exact: float  # ratio to the exact cache's tokens


def memories(plans: Mapping[str, Plan], model: ModelConfig, fraction: float) -> dict[str, Memory]:
    """Memory by name of format. fraction: share of the free memory that may be used; the exact plan's free memory is
    used for all.

    The limits that a plan puts on its cache do not apply: they would hide what a smaller format brings.
    """
    exact, values = plans[EXACT].memory, kv_bytes_per_token(model.attention, itemsize=1)
    room = int(exact.free * fraction)
    sizes = {name: plan.memory.kv // (plan.num_blocks * plan.block_size) for name, plan in plans.items()}
    taken = {name: plan.memory.total - plan.memory.kv for name, plan in plans.items()}
    fit = {name: max(room - taken[name], 0) // size for name, size in sizes.items()}
    return {
        name: Memory(size, 8 * size / values, (1 << 30) // size, fit[name], fit[name] / max(fit[EXACT], 1))
        for name, size in sizes.items()
    }


# ---- together


@dataclass(slots=True)
class Found(Measured):
    """Everything measured about one format."""

    memory: Memory

    def as_dict(self, base: Measured) -> dict[str, Any]:
        memory = {name: round(value, 4) for name, value in asdict(self.memory).items()}
        return memory | Measured.as_dict(self, base)
