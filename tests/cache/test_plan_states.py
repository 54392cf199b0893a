"""States of recurrent layers in the plan: slots of requests, pages of prefixes, and what is left for K/V."""

from __future__ import annotations

import pytest

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.drafters.base import DrafterCaps
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.resolve import Plan, resolve
from tests.operate.forecast.described import DESCRIBED

QWEN = DESCRIBED["qwen3.5-27b"]


def planned(gib: int, drafter: DrafterCaps | None = None, **options: object) -> Plan:
    hardware = Hardware("cuda", "a GPU", 8, gib << 30, (9, 0))
    return resolve(EngineConfig(**options), QWEN, hardware, drafter=drafter)  # type: ignore[arg-type]


def test_qwen35_27b_on_an_h200() -> None:
    """48 layers of 48 states of 128 x 128 in float32 are 144 MiB; 47 records and 34 inputs of the convolution more."""
    plan = planned(139, max_seqs=16)
    states = plan.states
    assert states and states.most_rows == 16
    records = 47 * 48 * (16 * 128 + 48 * 129) * 4
    assert states.slot_bytes == (144 << 20) + records + 34 * 48 * 10240 * 2
    assert states.page_bytes == (144 << 20) + 3 * 48 * 10240 * 2
    assert plan.memory.states == 16 * states.slot_bytes + states.pages * states.page_bytes
    assert plan.memory.total <= 0.85 * (139 << 30) and plan.memory.states < 0.1 * (139 << 30)
    assert plan.memory.kv == plan.num_blocks * 16 * 64 * 1024  # 16 layers of 2 x 4 x 256 in bfloat16
    assert not plan.fallbacks


def test_pages_are_a_part_of_what_all_caches_get() -> None:
    sizes = [(139, 64), (139, 8), (80, 8)]
    pages = [planned(gib, max_seqs=seqs).states.pages for gib, seqs in sizes]  # type: ignore[union-attr]
    assert pages[0] > 40 and pages[1] == 32 and 2 <= pages[2] < 32
    assert planned(139, max_seqs=8, prefix_cache=False).states.pages == 0  # type: ignore[union-attr]


def test_fewer_requests_run_where_nobody_asked_for_a_number() -> None:
    tight = planned(72)
    assert tight.max_seqs < 64 and tight.states and tight.states.slots == tight.max_seqs
    (told,) = (each for each in tight.fallbacks if "at once instead of 64" in each.name)
    assert "half of the caches' memory" in told.reason
    assert planned(139).max_seqs == 64
    with pytest.raises(UserError, match=r"states of 64 requests take 15\.4 GiB.*: ask for max_seqs \d+ or fewer"):
        planned(72, max_seqs=64)


def test_deeper_drafts_need_more_records() -> None:
    deep = DrafterCaps("deep", (0,), 31, (), 0)
    plain, drafted = planned(139, max_seqs=4).states, planned(139, deep, max_seqs=4).states
    assert plain and drafted and drafted.most_rows == 32
    assert drafted.page_bytes == plain.page_bytes and drafted.slot_bytes > plain.slot_bytes


def test_models_without_recurrent_layers_have_none() -> None:
    plan = resolve(EngineConfig(), DESCRIBED["qwen3-30b-a3b"], Hardware("cuda", "a GPU", 8, 139 << 30, (9, 0)))
    assert plan.states is None and plan.memory.states == 0 and "recurrent" not in plan.describe()
