"""What is asked of the machine: a GPU's memory, own or shared with the CPU, and kernels that cannot be imported."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from sparkdraft import kernels
from sparkdraft.cache.formats import kv_format
from sparkdraft.core import UserError
from sparkdraft.engine.machine import free_gpu_memory
from sparkdraft.plan import hardware


def test_a_gpu_that_shares_the_cpus_memory_counts_what_the_page_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    available = {"MemAvailable": 110 << 30}
    monkeypatch.setattr(hardware, "meminfo", available.copy)
    assert free_gpu_memory(True, 20 << 30) == 110 << 30
    assert free_gpu_memory(False, 20 << 30) == 20 << 30
    available.clear()
    assert free_gpu_memory(True, 20 << 30) == 20 << 30, "no /proc/meminfo here"


def test_a_triton_without_our_gluon_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Young(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ImportError("cannot import name 'mma_v2'")

    coded = kv_format("turboquant")
    coded.check_kernels("reference")
    monkeypatch.setattr(kernels, "load", Young)
    with pytest.raises(UserError, match=r"needs the Gluon of Triton 3.6 .cannot import name 'mma_v2'"):
        coded.check_kernels("cuda")
