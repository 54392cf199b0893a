"""How much memory a GPU has to give, on cards of its own memory and on machines where it shares the CPU's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sparkdraft.engine.devices import free_gpu_memory
from sparkdraft.plan import hardware


def test_a_gpu_that_shares_the_cpus_memory_counts_what_the_page_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    available = {"MemAvailable": 110 << 30}
    monkeypatch.setattr(hardware, "_meminfo", available.get)
    assert free_gpu_memory(SimpleNamespace(is_integrated=1), 20 << 30) == 110 << 30
    assert free_gpu_memory(SimpleNamespace(is_integrated=0), 20 << 30) == 20 << 30
    available.clear()
    assert free_gpu_memory(SimpleNamespace(is_integrated=1), 20 << 30) == 20 << 30, "no /proc/meminfo here"
