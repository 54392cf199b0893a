"""What `sparkdraft tune` may set, to which values, and by which loads each setting is judged. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparkdraft.config import EngineConfig
from sparkdraft.plan.resolve import Plan

ONE, SEVERAL, BURST, LONG = "one stream", "several streams", "a burst", "a long prompt"
LOADS = (ONE, SEVERAL, BURST, LONG)
TILES = "tiles"  # not a field of EngineConfig: whether the tiles that were found are used


@dataclass(frozen=True, slots=True)
class Knob:
    name: str
    now: Any
    values: tuple[Any, ...]  # to be tried, the likeliest first
    loads: tuple[str, ...]  # that show its effect


def knobs(config: EngineConfig, plan: Plan, depths: Sequence[int], cores: int, kv_formats: Sequence[str]) -> list[Knob]:
    """The knobs of a machine, without those that the user has named. depths: those that are chosen from now, of which
    the last is the deepest possible; [0] if nothing drafts. kv_formats: those that the user allows."""
    rows, seqs = plan.max_rows, plan.max_seqs
    found = [
        Knob("max_rows", rows, (2 * rows, rows // 2, 4 * rows, rows // 4), (LONG, BURST)),
        Knob("max_seqs", seqs, (2 * seqs, seqs // 2, 4 * seqs), (BURST,)),
        Knob("kv", plan.kv, tuple(kv_formats), (SEVERAL, LONG)),
    ]
    if plan.device == "cpu":
        found.insert(0, Knob("threads", plan.threads, (cores, cores - 1, cores // 2), (ONE, BURST)))
    if len(depths) > 1 and config.spec == "auto":
        named = ",".join(map(str, depths))
        found.append(Knob("spec_depths", named, tuple(depth_lists(depths[-1])), (ONE, SEVERAL)))
    return [k for each in found if config.is_open(each.name) and (k := _useful(each)).values]


def depth_lists(deepest: int) -> list[str]:
    """Few depths are soon learnt and recorded; many come nearer to the best one."""
    few = {0, min(3, deepest), deepest}
    shallow = {d for d in (0, 1, 2, 3, 4) if d <= deepest}
    many = {d for d in (0, 1, 2, 3, 5, 7, 10, 15, 23, 31) if d <= deepest} | {deepest}
    return list(dict.fromkeys(",".join(map(str, sorted(depths))) for depths in (many, few, shallow)))


def _useful(knob: Knob) -> Knob:
    values = [v for v in dict.fromkeys(knob.values) if v != knob.now and (not isinstance(v, int) or v > 0)]
    return Knob(knob.name, knob.now, tuple(values), knob.loads)
